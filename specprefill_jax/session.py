"""A conversation: what draft and target have read lives on from turn to turn.

A recurrent state cannot be cut back, and chat templates render history anew: the opening and the thinking of
one answer are not in the next prompt. So both models keep snapshots where prompts branch: after system and
tools, after the last message before the opening of the answer, and at the prompt's end. The next turn goes on
from the deepest of them whose tokens it begins with, be that a new message or an edited old one.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Unpack
from weakref import WeakValueDictionary

from specprefill_jax.engine import Caches, Engine, Prompt, PromptOptions, Readings, Result, Track, Watch, last
from specprefill_jax.errors import MemoryTooSmall, SessionBusy
from specprefill_jax.settings import Settings

logger = logging.getLogger(__name__)

_DEFAULTS = Settings()

MOST_SESSIONS = 256
"""Conversations that `Sessions` knows by name; the one that was not used the longest is forgotten."""


class Session:
    """One conversation on an engine. One turn at a time.

    Each turn is given the whole conversation, as a server gets it; only what follows the longest known
    beginning is read. Cancelling a turn keeps what was read of it, so that trying again goes on from there.

    Args:
        engine: What answers.
        room: Called before it takes memory of the device: with bytes, and whether it must have them.
    """

    def __init__(self, engine: Engine, room: Callable[[int, bool], None] | None = None) -> None:
        self.engine = engine
        draft = None if engine.draft is None else Track(engine.draft, room)
        self._caches = Caches(draft, Track(engine.target, room), Readings(), lasting=True)
        self._turn = threading.Lock()

    @property
    def bytes(self) -> int:
        """Device memory that it holds."""
        return self._caches.bytes

    @property
    def busy(self) -> bool:
        """Whether a turn is being answered."""
        return self._turn.locked()

    def clear(self) -> None:
        """Give the device's memory back. The next turn reads all of the conversation, and selects among it.

        Raises:
            SessionBusy: a turn is being answered.
        """
        with self._alone():
            self._caches.clear()

    def generate(
        self,
        prompt: Prompt,
        settings: Settings = _DEFAULTS,
        *,
        watch: Watch | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[PromptOptions],
    ) -> Result:
        """The answer to a turn, once it is complete. Arguments and errors are those of `stream`."""
        return last(self.stream(prompt, settings, watch=watch, cancel=cancel, **options))

    def stream(
        self,
        prompt: Prompt,
        settings: Settings = _DEFAULTS,
        *,
        watch: Watch | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[PromptOptions],
    ) -> Iterator[str | Result]:
        """Pieces of the answer as they come, and at last the `Result`.

        Args:
            prompt: The whole conversation up to here, as for `Engine.stream`.
            settings: Its knob `history` says what becomes of earlier turns: "keep" leaves them as they were
                kept and selects among the new tokens, against everything; "rescore" selects among all.

        Raises:
            SessionBusy: the turn before is still being answered.
            MemoryTooSmall: it does not fit, even if all conversations that are idle give way.
            and all that `Engine.stream` raises.
        """
        with self._alone():
            yield from self.engine.stream(
                prompt, settings, watch=watch, cancel=cancel, caches=self._caches, **options
            )

    def _alone(self) -> "_Turn":
        return _Turn(self._turn)


class _Turn:
    """Holds a session while one of its turns is answered."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise SessionBusy(
                "this conversation is still answering its last turn: read that answer to its end, close it, "
                "or use another session"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Sessions:
    """Conversations by name that share a device's memory; the ones used least recently give way.

    Args:
        engine: What answers them.
        memory: Bytes that all of them may take together; None: no limit.
    """

    def __init__(self, engine: Engine, memory: int | None = None) -> None:
        self._engine = engine
        self._memory = memory
        self._sessions: OrderedDict[Hashable, Session] = OrderedDict()
        # Those that were closed but are still in somebody's hands count again once they are used.
        self._known: WeakValueDictionary[Hashable, Session] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def bytes(self) -> int:
        """Device memory that they hold together."""
        return sum(session.bytes for session in self._sessions.values())

    def open(self, name: Hashable) -> Session:
        """The conversation of that name, which is now the one used last; a new one if there is none."""
        session = self._sessions.pop(name, None)
        if session is None:
            session = Session(self._engine, lambda size, needed: self._make_room(name, size, needed))
        self._known[name] = session
        self._sessions[name] = session
        if len(self._sessions) > MOST_SESSIONS:
            idle = next((name for name, old in self._sessions.items() if not old.busy), name)
            self.close(idle)
        return session

    def close(self, name: Hashable) -> None:
        """Forget a conversation, and give its memory back. A name that is not known is no error.

        Raises:
            SessionBusy: a turn of it is being answered.
        """
        if name in self._sessions:
            self._sessions[name].clear()
            del self._sessions[name]

    def _make_room(self, name: Hashable, size: int, needed: bool) -> None:
        """Clears conversations, the one used least recently first, until `size` more bytes fit.

        None where that would not be enough, and none for what is not `needed`.

        Raises:
            MemoryTooSmall: the conversation of this name does not fit beside none but busy ones; or what it
                asks for is not needed, and does not fit beside all.
        """
        if name not in self._sessions:
            self._sessions[name] = self._known[name]
        if self._memory is None:
            return
        idle = [
            other for at, other in self._sessions.items() if at != name and other.bytes and not other.busy
        ]
        could_free = sum(other.bytes for other in idle) if needed else 0
        if self.bytes - could_free + size > self._memory:
            raise MemoryTooSmall(
                f"a conversation needs {size} more bytes beside {self.bytes} in use, of which {could_free} "
                f"could be freed, but all of them may take {self._memory}: shorten it, lower max_tokens, or "
                "allow more memory"
            )
        for other in idle:
            if self.bytes + size <= self._memory:
                return
            logger.info("a conversation gives %d bytes back for %r", other.bytes, name)
            other.clear()
