"""The engine: one request after another on one artifact and device."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.artifact.locate import demo_artifact, find_artifact
from specprefill_jax.artifact.manifest import MANIFEST_NAME
from specprefill_jax.artifact.targets import known_target
from specprefill_jax.artifact.verify import Artifact, open_artifact
from specprefill_jax.chat import Chat, Message
from specprefill_jax.engine.clock import Clock, Watch, Watcher
from specprefill_jax.engine.reading import Reading, read_prompt
from specprefill_jax.engine.values import Plan, Prompt, Result, Scored, Timings, Usage
from specprefill_jax.errors import (
    ArtifactError,
    BudgetTooSmall,
    DeviceFailed,
    EmptyPrompt,
    FileMissing,
    NotFiniteOutput,
    PromptTooLong,
    ScoresUnusable,
)
from specprefill_jax.policy import Status, decide
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.state import State
from specprefill_jax.runtime.target import check_proof, check_target, check_versions, open_device_for
from specprefill_jax.sampling import sample
from specprefill_jax.selection import keeps_everything, select
from specprefill_jax.settings import Settings

logger = logging.getLogger(__name__)

_DEFAULTS = Settings()


class Engine:
    """Answers prompts with the draft and the target of one artifact. One request at a time.

    Every request has a state of its own, so that none can affect the next, whatever became of it.

    Attributes:
        artifact: What it was loaded from.
        chat: The artifact's tokenizer and template.
        draft, target: Its models on the device.
    """

    def __init__(self, artifact: Artifact, chat: Chat, draft: Program, target: Program) -> None:
        for program in (draft, target):
            if chat.vocabulary > program.model.vocabulary:
                raise ArtifactError(
                    f"the tokenizer of artifact {artifact.manifest.name!r} has {chat.vocabulary} tokens, but "
                    f"{program.label} knows {program.model.vocabulary}; compile it with its own tokenizer"
                )
        self.artifact = artifact
        self.chat = chat
        self.draft = draft
        self.target = target

    @classmethod
    def load(
        cls,
        artifact: str | Path | Artifact | None = None,
        device: str | None = None,
        *,
        self_test: bool = True,
        watch: Watch | None = None,
    ) -> "Engine":
        """Open an artifact, check it, and prove both of its models on its device.

        Args:
            artifact: A path or a name, or one that is open already. None: the embedded demo pair, which
                must have been compiled for the device before.
            device: The device that the artifact must be for. None: whichever it was compiled for.
            self_test: Whether both models compute right results is tested where they have not been tested on
                this device before. False leaves that out.
            watch: Hears bytes checked, as phase "check", models loaded, as phase "load", and entries tested,
                as phase "test".

        Raises:
            FileMissing, ArtifactError, HashMismatch: it is not there, or incomplete, or was changed.
            DeviceError, WrongTarget: the device is unknown, or the artifact was made for another.
            WrongVersion: it was made by another version of IREE.
            Unproven, SelfTestFailed: nothing shows that it computes right here, or it does not.
            TemplateError: its chat template is invalid. SettingError: SPECPREFILL_THREADS is no number.
            DeviceFailed: the device ran out of memory, or was lost.
        """
        watcher = Watcher(watch)
        if not isinstance(artifact, Artifact):
            directory = _find(artifact, device)
            artifact = open_artifact(directory, lambda done, total: watcher("check", done, total))
        manifest = artifact.manifest
        check_proof(manifest)
        check_versions(manifest)
        opened = open_device_for(manifest, device)
        check_target(manifest, opened)
        chat = Chat.load(
            artifact.path(manifest.tokenizer), artifact.path(manifest.chat_template), manifest.stop_ids
        )
        programs = []
        for loaded, role in enumerate(("draft", "target")):
            watcher("load", loaded, 2)
            programs.append(
                Program.load(
                    artifact,
                    role,
                    opened,
                    self_test=self_test,
                    progress=lambda done, total: watcher("test", done, total),
                )
            )
        return cls(artifact, chat, *programs)

    def generate(
        self,
        prompt: Prompt,
        settings: Settings = _DEFAULTS,
        *,
        raw: bool = False,
        prefix: str = "",
        watch: Watch | None = None,
    ) -> Result:
        """The answer to a prompt, once it is complete. Arguments and errors are those of `stream`."""
        return _last(self.stream(prompt, settings, raw=raw, prefix=prefix, watch=watch))

    def stream(
        self,
        prompt: Prompt,
        settings: Settings = _DEFAULTS,
        *,
        raw: bool = False,
        prefix: str = "",
        watch: Watch | None = None,
    ) -> Iterator[str | Result]:
        """Pieces of the answer as they come, whole characters each, and at last the `Result`.

        Args:
            prompt: A text is one user message, in the artifact's chat template.
            raw: A text is taken as it is, its control tokens included, and the answer shows its own.
            prefix: What the answer begins with. It is part of the prompt, and the result's text follows it.
            watch: Hears phases "score", "prefill" and "decode", and may cancel.

        Raises:
            EmptyPrompt, TemplateError: there is nothing to read, or the template refuses the messages.
            SettingError: a knob does not fit this artifact.
            PromptTooLong: the tokens kept and `max_tokens` exceed the target's largest cache, or the prompt
                and `max_tokens` its positions.
            NotFiniteOutput: the target computes no numbers.
            DeviceFailed: the target's device ran out of memory, or was lost.
            ValueError: as `encode`.
        """
        clock = Clock()
        with clock.phase("tokenize"):
            tokens = self.encode(prompt, raw=raw, prefix=prefix)
        self._check_positions(tokens.size, settings)
        request = _Request(tokens, settings, clock, Watcher(watch))
        plan = self._plan(request)
        state, logits = self._read(request, plan)
        if plan.status is Status.ACTIVE and not np.isfinite(logits).all():
            reason = "the target's logits after the kept tokens are not finite numbers"
            logger.warning("%s, so all tokens are read instead", reason)
            plan = _dense(tokens, Status.FAILED_DENSE, reason)
            del state  # its memory is needed now
            state, logits = self._read(request, plan)
        yield from self._write(request, plan, state, logits, show_control=raw)

    def score(
        self,
        prompt: Prompt,
        settings: Settings = _DEFAULTS,
        *,
        raw: bool = False,
        prefix: str = "",
        watch: Watch | None = None,
    ) -> Scored:
        """What the draft finds important in a prompt, and what would be kept if thresholds allow it.

        Raises:
            EmptyPrompt, TemplateError, SettingError: as `stream`.
            ScoresUnusable, NotFiniteOutput: the draft's scores rank nothing; an answer would be dense.
            BudgetTooSmall: nothing beside the forced tokens could be kept; an answer would be dense.
            DeviceFailed: the draft's device ran out of memory, or was lost; an answer would be dense.
        """
        clock = Clock()
        with clock.phase("tokenize"):
            tokens = self.encode(prompt, raw=raw, prefix=prefix)
        with clock.phase("score"):
            reading = self._score(tokens, settings, Watcher(watch))
        with clock.phase("select"):
            selection = select(reading.importance, settings)
        detokenizer = self.chat.detokenizer()
        pieces = [detokenizer.push(int(token)) for token in tokens]
        pieces[-1] += detokenizer.flush()
        return Scored(
            tokens=tokens,
            pieces=tuple(pieces),
            importance=reading.importance,
            selection=selection,
            scoring=reading.scoring,
            windows=reading.windows,
            phases=clock.phases,
        )

    def encode(self, prompt: Prompt, *, raw: bool = False, prefix: str = "") -> Int[np.ndarray, "M"]:
        """The tokens that a prompt stands for.

        Raises:
            EmptyPrompt: it has no tokens, or is a message of nothing but space.
            TemplateError: the template refuses it.
            ValueError: `raw` or `prefix` is given with what it cannot act on, or numbers are no token ids.
        """
        if isinstance(prompt, str):
            if not prompt.strip() and not (raw and prompt):
                raise EmptyPrompt("the prompt is empty; give at least one word")
            text = prompt + prefix if raw else self._templated([_user(prompt)], prefix)
            return self.chat.encode(text)
        if raw:
            raise ValueError("raw is for a text; messages need the template, and tokens are raw already")
        if len(prompt) == 0:
            raise EmptyPrompt("the prompt has no tokens; give at least one")
        if isinstance(prompt[0], Mapping):
            return self.chat.encode(self._templated(list(prompt), prefix))  # type: ignore[arg-type]
        if prefix:
            raise ValueError("prefix is for a text or messages; put its tokens at the end of the prompt's")
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"tokens are whole numbers in one row, not {tokens.dtype} of shape {tokens.shape}"
            )
        vocabulary = min(self.draft.model.vocabulary, self.target.model.vocabulary)
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError(f"a token id is outside 0..{vocabulary - 1}, the models' vocabulary")
        return tokens.astype(np.int32)

    def answer_from(
        self,
        tokens: Int[np.ndarray, "M"],
        kept: Int[np.ndarray, "N"],
        settings: Settings = _DEFAULTS,
        *,
        positions: Int[np.ndarray, "N"] | None = None,
        watch: Watch | None = None,
    ) -> Result:
        """The answer when the target reads exactly `tokens[kept]`: for experiments on what matters.

        Args:
            kept: Indices into `tokens`, ascending.
            positions: The position that each kept token is read at; None: its own, `kept`.

        Raises:
            EmptyPrompt, PromptTooLong, NotFiniteOutput: as `stream`.
        """
        request = _Request(tokens, settings, Clock(), Watcher(watch))
        plan = Plan(kept, Status.ACTIVE, "the kept tokens were given")
        state, logits = self._read(request, plan, positions)
        return _last(self._write(request, plan, state, logits))

    def logits_from(
        self,
        tokens: Int[np.ndarray, "M"],
        kept: Int[np.ndarray, "N"],
        *,
        positions: Int[np.ndarray, "N"] | None = None,
    ) -> Float[np.ndarray, "V"]:
        """The target's logits of the first new token after reading `tokens[kept]`; see `answer_from`."""
        request = _Request(tokens, dataclasses.replace(_DEFAULTS, max_tokens=1), Clock(), Watcher(None))
        return self._read(request, Plan(kept, Status.ACTIVE, "the kept tokens were given"), positions)[1]

    def _templated(self, messages: Sequence[Message], prefix: str) -> str:
        return self.chat.render(messages, prefix=prefix)

    def _plan(self, request: "_Request") -> Plan:
        """What the target will read. A draft that fails, in whatever way, leads to a dense plan."""
        tokens, settings, clock = request.tokens, request.settings, request.clock
        decision = decide(tokens.size, settings, self.artifact.manifest.minimum_tokens)
        if decision.status is not None:
            return _dense(tokens, decision.status, decision.reason)
        if keeps_everything(tokens.size, settings):
            return _dense(tokens, Status.KEPT_ALL, "the settings keep every token of this prompt")
        try:
            with clock.phase("score"):
                reading = self._score(tokens, settings, request.watcher)
            with clock.phase("select"):
                selection = select(reading.importance, settings)
        except BudgetTooSmall as error:
            return _dense(tokens, Status.SKIPPED_INSUFFICIENT_BUDGET, str(error))
        except (ScoresUnusable, NotFiniteOutput) as error:
            return _dense(tokens, Status.FAILED_DENSE, str(error))
        except (DeviceFailed, MemoryError) as error:
            if request.watcher.cancelled_by(error):
                raise
            logger.warning("the draft failed, so all tokens are read: %s", error)
            return _dense(tokens, Status.FAILED_DENSE, f"the draft failed: {error}")
        if selection.kept_all:
            return _dense(tokens, Status.KEPT_ALL, "every chunk of this prompt was selected")
        return Plan(
            selection.kept,
            Status.ACTIVE,
            decision.reason,
            forced=selection.forced,
            mode=selection.mode,
            scoring=reading.scoring,
        )

    def _score(self, tokens: Int[np.ndarray, "M"], settings: Settings, watcher: Watcher) -> Reading:
        return read_prompt(self.draft, self.chat.vocabulary, tokens, settings, watcher)

    def _read(
        self, request: "_Request", plan: Plan, positions: Int[np.ndarray, "N"] | None = None
    ) -> tuple[State, Float[np.ndarray, "V"]]:
        """The target reads the kept tokens into a new state; logits of the first new token."""
        self._check_room(request.tokens.size, plan, request.settings)
        with request.clock.phase("prefill"):
            state = self.target.new_state(plan.kept.size + request.settings.max_tokens)
            hidden = self.target.prefill(
                state,
                request.tokens[plan.kept],
                plan.kept if positions is None else positions,
                before_block=lambda done, total: request.watcher("prefill", done, total),
            ).hidden
        with request.clock.phase("first_token"):
            return state, self.target.head(hidden)

    def _check_positions(self, prompt: int, settings: Settings) -> None:
        """Every token has its own position, whatever is kept."""
        limit = self.target.model.positions
        if prompt + settings.max_tokens > limit:
            raise PromptTooLong(
                f"{prompt} prompt tokens and max_tokens={settings.max_tokens} need as many positions, but "
                f"{self.target.label} has {limit}: shorten the prompt, or lower max_tokens (--max-tokens)"
            )

    def _check_room(self, prompt: int, plan: Plan, settings: Settings) -> None:
        largest, kept = self.target.largest_capacity, plan.kept.size
        if kept + settings.max_tokens <= largest:
            return
        read = f"{prompt} prompt tokens"
        if kept < prompt:
            read = f"{kept} tokens kept of {prompt}"
        elif plan.status is not Status.DISABLED:
            read += f" ({plan.status}: {plan.reason})"
        remedies = ["shorten the prompt", "keep less of it", "use an artifact with larger `capacities`"]
        if kept < largest:
            remedies.insert(0, f"lower max_tokens (--max-tokens) to {largest - kept}")
        raise PromptTooLong(
            f"{read} and max_tokens={settings.max_tokens} for the answer need "
            f"{kept + settings.max_tokens} cache slots, but {self.target.label} was compiled for {largest}: "
            f"{', '.join(remedies[:-1])}, or {remedies[-1]}"
        )

    def _write(
        self,
        request: "_Request",
        plan: Plan,
        state: State,
        logits: Float[np.ndarray, "V"],
        *,
        show_control: bool = False,
    ) -> Iterator[str | Result]:
        """Pieces of text while the target writes, then the result. New token j has position M + j."""
        settings, clock, size = request.settings, request.clock, request.tokens.size
        generator = np.random.default_rng(settings.seed)
        detokenizer = self.chat.detokenizer(keep_special=show_control)
        written: list[int] = []
        text: list[str] = []
        finish: Literal["stop", "length"] = "length"
        with clock.phase("first_token"):
            token = sample(logits, settings, generator, self.chat.vocabulary)
        first_token, phases = clock.elapsed(), clock.phases
        while True:
            if token in self.chat.stop_ids:
                finish = "stop"
                break
            text.append(detokenizer.push(token))
            written.append(token)
            if text[-1]:
                yield text[-1]
            if len(written) == settings.max_tokens:
                break
            request.watcher("decode", len(written), settings.max_tokens)
            with clock.phase("decode"):
                logits = self.target.decode(state, token, size + len(written) - 1).logits
                token = sample(logits, settings, generator, self.chat.vocabulary)
        if rest := detokenizer.flush():
            text.append(rest)
            yield rest
        timings = Timings(
            status=plan.status,
            reason=plan.reason,
            prompt=size,
            kept=plan.kept.size,
            forced=plan.forced,
            mode=plan.mode,
            scoring=plan.scoring,
            phases=phases,
            first_token=first_token,
            decode=clock.phases.get("decode", 0.0),
        )
        usage = Usage(prompt_tokens=size, completion_tokens=len(written))
        yield Result("".join(text), tuple(written), finish, usage, timings, plan.kept)


@dataclasses.dataclass(frozen=True, eq=False)
class _Request:
    """What stays the same while a request runs."""

    tokens: Int[np.ndarray, "M"]
    settings: Settings
    clock: Clock
    watcher: Watcher


def _find(artifact: str | Path | None, device: str | None) -> Path:
    if artifact is not None:
        return find_artifact(str(artifact)) if isinstance(artifact, str) else artifact
    device = device or "cpu"
    known_target(device)
    directory = demo_artifact(device)
    if not (directory / MANIFEST_NAME).is_file():
        raise FileMissing(
            f"the embedded demo pair is not compiled for {device}; `specprefill run --device {device}` does "
            "that on first use. Or name an artifact"
        )
    return directory


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _dense(tokens: Int[np.ndarray, "M"], status: Status, reason: str) -> Plan:
    return Plan(np.arange(tokens.size, dtype=np.int32), status, reason)


def _last(answer: Iterator[str | Result]) -> Result:
    for part in answer:
        if isinstance(part, Result):
            return part
    raise AssertionError("an answer ends in its result")
