"""The engine: one request after another on one artifact and device."""

import dataclasses
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Unpack

import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.artifact.calibration import Calibration, read_calibration
from specprefill_jax.artifact.locate import demo_artifact, find_artifact
from specprefill_jax.artifact.manifest import MANIFEST_NAME
from specprefill_jax.artifact.rates import EntryTimes, read_rates
from specprefill_jax.artifact.targets import known_target
from specprefill_jax.artifact.verify import Artifact, open_artifact
from specprefill_jax.chat import Chat
from specprefill_jax.engine.answer import check_positions, read_kept, write
from specprefill_jax.engine.caches import Caches, Readings
from specprefill_jax.engine.clock import Clock, Watch, Watcher
from specprefill_jax.engine.gauge import Gauge
from specprefill_jax.engine.planning import Planner, all_of
from specprefill_jax.engine.prompt import Encoded, PromptOptions, encode
from specprefill_jax.engine.reading import Reader
from specprefill_jax.engine.request import Request
from specprefill_jax.engine.track import Track
from specprefill_jax.engine.values import Plan, Prompt, Result, Scored
from specprefill_jax.errors import ArtifactError, DeviceFailed, FileMissing, NotFiniteOutput
from specprefill_jax.policy import Decision, MemoryPlan, Status, plan_memory, require_memory, unfit, usable
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.target import check_proof, check_target, check_versions, open_device_for
from specprefill_jax.runtime.tune import measured_device
from specprefill_jax.scoring import Rows
from specprefill_jax.selection import bounds_of, select
from specprefill_jax.settings import SMALLEST_WINDOW, Settings

logger = logging.getLogger(__name__)

_DEFAULTS = Settings()


class Engine:
    """Answers prompts with the draft and the target of one artifact. One request at a time.

    Every request has caches of its own, so that none can affect the next, whatever became of it; unless it is
    given those of a conversation (`specprefill_jax.session`).

    Attributes:
        artifact: What it was loaded from.
        chat: The artifact's tokenizer and template.
        draft, target: Its models on the device. Without a draft every prompt is read whole.
        no_draft: Why there is no draft, where there is none.
        calibration: What is known about how to read the draft's attention; None: nothing.

    Args:
        times: Milliseconds of each measured entry, by role; None: nothing was measured on this device.
        no_draft: Why there is no draft, where there is none.
    """

    def __init__(
        self,
        artifact: Artifact,
        chat: Chat,
        draft: Program | None,
        target: Program,
        times: Mapping[str, EntryTimes] | None = None,
        *,
        no_draft: str = "this artifact has no draft",
        calibration: Calibration | None = None,
    ) -> None:
        self.artifact = artifact
        self.chat = chat
        self.draft = draft
        self.target = target
        for program in self.programs.values():
            if chat.vocabulary > program.model.vocabulary:
                raise ArtifactError(
                    f"the tokenizer of artifact {artifact.manifest.name!r} has {chat.vocabulary} tokens, but "
                    f"{program.label} knows {program.model.vocabulary}; compile it with its own tokenizer"
                )
        self.no_draft = no_draft
        self.calibration = calibration
        self._readings = Readings()
        self._gauge = Gauge(times or {})
        self._planner = Planner(
            minimum=artifact.manifest.minimum_tokens,
            vocabulary=chat.vocabulary,
            largest=target.largest_capacity,
            gauge=self._gauge,
            no_draft=no_draft,
            unfit=unfit(calibration),
        )

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

        def program(role: str) -> Program:
            watcher("load", ("draft", "target").index(role), 2)
            return Program.load(
                artifact,
                role,
                opened,
                self_test=self_test,
                progress=lambda done, total: watcher("test", done, total),
            )

        draft, no_draft = None, "this artifact has no draft"
        if "draft" in manifest.models:
            try:
                draft = program("draft")
            except DeviceFailed as error:
                if watcher.stopped_by(error):
                    raise
                no_draft = f"the draft could not be loaded: {error}"
                logger.warning("every prompt will be read whole: %s", no_draft)
        times = read_rates(artifact.directory, manifest, measured_device(opened))
        calibration = usable(read_calibration(artifact.directory, manifest), manifest.models.get("draft"))
        target = program("target")
        return cls(artifact, chat, draft, target, times, no_draft=no_draft, calibration=calibration)

    def generate(
        self,
        prompt: Prompt,
        settings: Settings = _DEFAULTS,
        *,
        watch: Watch | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[PromptOptions],
    ) -> Result:
        """The answer to a prompt, once it is complete. Arguments and errors are those of `stream`."""
        return last(self.stream(prompt, settings, watch=watch, cancel=cancel, **options))

    def stream(
        self,
        prompt: Prompt,
        settings: Settings = _DEFAULTS,
        *,
        watch: Watch | None = None,
        cancel: threading.Event | None = None,
        caches: Caches | None = None,
        **options: Unpack[PromptOptions],
    ) -> Iterator[str | Result]:
        """Pieces of the answer as they come, whole characters each, and at last the `Result`.

        Args:
            prompt: A text is one user message, in the artifact's chat template.
            watch: Hears phases "score", "prefill" and "decode", and may cancel.
            cancel: Another thread may set it: the request ends at the next block or decode step.
            caches: What earlier turns of a conversation left; None: nothing lasts beyond this request.
            options: See `PromptOptions`.

        Raises:
            EmptyPrompt, TemplateError: there is nothing to read, or the template refuses the messages.
            SettingError: a knob does not fit this artifact. PinError: a pin has no place in the prompt.
            PromptTooLong: the tokens kept and `max_tokens` exceed the target's largest cache, or the prompt
                and `max_tokens` its positions.
            MemoryTooSmall: the prompt does not fit the setting `memory` in any way.
            NotFiniteOutput: the target computes no numbers.
            DeviceFailed: the target's device ran out of memory, or was lost.
            Cancelled, DeadlineExceeded: `cancel` was set, or the setting `deadline` has passed.
            ValueError: as `encode`.
        """
        watcher = Watcher(watch, cancel, settings.deadline)
        request = self._request(prompt, settings, watcher, caches or self._caches(), options)
        check_positions(request)
        try:
            yield from self._answer(request, show_control=options.get("raw", False))
        except (DeviceFailed, NotFiniteOutput) as error:
            if not watcher.stopped_by(error):
                request.caches.clear()  # nobody knows what is left in them
            raise

    def score(
        self,
        prompt: Prompt,
        settings: Settings = _DEFAULTS,
        *,
        watch: Watch | None = None,
        **options: Unpack[PromptOptions],
    ) -> Scored:
        """What the draft finds important in a prompt, and what would be kept if thresholds allow it.

        Raises:
            EmptyPrompt, TemplateError, SettingError, PinError: as `stream`.
            ArtifactError: the artifact has no draft.
            ScoresUnusable, NotFiniteOutput: the draft's scores rank nothing; an answer would be dense.
            BudgetTooSmall: nothing beside the forced tokens could be kept; an answer would be dense.
            DeviceFailed: the draft's device ran out of memory, or was lost; an answer would be dense.
        """
        if self.draft is None:
            raise ArtifactError(f"only a draft scores, and {self.no_draft}")
        request = self._request(prompt, settings, Watcher(watch), self._caches(), options)
        settings = request.settings  # with what was calibrated, as an answer takes it
        bounds_of(request.size, settings, request.pinned, edges=request.edges)
        reading, _ = self._planner.score(request)
        request.clock.enter("select")
        selection = select(reading.importance, settings, request.pinned, edges=request.edges)
        request.clock.pause()
        detokenizer = self.chat.detokenizer()
        pieces = [detokenizer.push(int(token)) for token in request.tokens]
        pieces[-1] += detokenizer.flush()
        return Scored(
            tokens=request.tokens,
            pieces=tuple(pieces),
            importance=reading.importance,
            chunk=settings.chunk,
            selection=selection,
            scoring=reading.scoring,
            windows=reading.windows,
            phases=request.clock.phases,
        )

    def rows(self, tokens: Int[np.ndarray, "M"], lookahead: int = 0, *, watch: Watch | None = None) -> Rows:
        """The draft's attention over a prompt that its largest cache holds: for experiments on scorers.

        Raises:
            ArtifactError: the artifact has no draft. PromptTooLong: the draft's largest cache is smaller.
            ScoresUnusable, NotFiniteOutput, DeviceFailed: as `score`.
        """
        if self.draft is None:
            raise ArtifactError(f"only a draft scores, and {self.no_draft}")
        settings = dataclasses.replace(_DEFAULTS, lookahead=lookahead)
        reader = Reader(
            Track(self.draft),
            self.chat.vocabulary,
            settings,
            clock=Clock("draft_prefill"),
            watcher=Watcher(watch),
        )
        return reader.rows(tokens)

    def encode(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> Int[np.ndarray, "M"]:
        """The tokens that a prompt stands for.

        Raises:
            EmptyPrompt: it has no tokens, or is a message of nothing but space.
            TemplateError: the template refuses it.
            ValueError: an option is given with what it cannot act on, or numbers are no token ids.
        """
        return encode(self.chat, self._vocabulary, prompt, _DEFAULTS, **options).tokens

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

        The result's `logits` say what the target made of them, whatever `max_tokens` is.

        Args:
            kept: Indices into `tokens`, ascending; the last token is among them.
            positions: The position that each kept token is read at; None: its own, `kept`.

        Raises:
            PromptTooLong, NotFiniteOutput, DeviceFailed: as `stream`.
        """
        request = Request(tokens, settings, self._caches(), Clock("tokenize"), Watcher(watch))
        plan = Plan(kept, Status.ACTIVE, "the kept tokens were given")
        logits, reused = read_kept(request, plan, positions)
        return last(write(request, plan, self.chat, logits, reused=reused))

    def forget(self) -> None:
        """Forget what the draft found in earlier prompts, so that each is scored again: for measurements."""
        self._readings = Readings()

    @property
    def programs(self) -> dict[str, Program]:
        """Its models by role, the draft first where there is one."""
        draft = {} if self.draft is None else {"draft": self.draft}
        return {**draft, "target": self.target}

    @property
    def _vocabulary(self) -> int:
        return min(program.model.vocabulary for program in self.programs.values())

    def _caches(self) -> Caches:
        """What a single request needs: nothing lasts but the importance of its prompt."""
        draft = None if self.draft is None else Track(self.draft)
        return Caches(draft, Track(self.target), self._readings, lasting=False)

    def _request(
        self,
        prompt: Prompt,
        settings: Settings,
        watcher: Watcher,
        caches: Caches,
        options: PromptOptions,
    ) -> Request:
        clock = Clock("tokenize")
        if self.calibration is not None and settings.calibration:
            settings = settings.with_defaults(self.calibration.settings)
        encoded = encode(self.chat, self._vocabulary, prompt, settings, **options)
        clock.enter("decide")
        settings, too_large = self._within_memory(encoded.tokens.size, settings)
        stops = self._stops(encoded) if caches.lasting else ()
        guard = encoded.guard or too_large
        return Request(
            encoded.tokens,
            settings,
            caches,
            clock,
            watcher,
            stops,
            encoded.pinned,
            guard,
            encoded.edges,
        )

    def _stops(self, encoded: Encoded) -> tuple[int, ...]:
        """Where to leave places for the next turn: the last boundary, the end, and others that pay.

        What is read up to a stop ends in a block of its own, so a stop close behind another costs what it may
        save.
        """
        *others, last = (0, *encoded.boundaries)
        least = self.target.model.blocks[0]
        stops: list[int] = []
        for boundary in others:
            if boundary - (stops[-1] if stops else 0) >= least:
                stops.append(boundary)
        return (*stops, *([last] if last else []), encoded.tokens.size)

    def _within_memory(self, tokens: int, settings: Settings) -> tuple[Settings, Decision | None]:
        """Settings with which a prompt fits the memory allowed, or what forbids the draft there.

        Raises:
            MemoryTooSmall: it does not fit in any way. PromptTooLong: no compiled cache is that large.
        """
        if settings.memory is None or self.draft is None:
            return settings, None
        plan = self._memory_plan(tokens, settings)
        way = require_memory(plan, settings.memory)
        if plan.ways[-1].total > settings.memory:  # dense does not fit, so there is nothing to weigh
            settings = dataclasses.replace(settings, break_even=False, calibration=False)
        if way.window is not None:
            window = way.window if way.window >= SMALLEST_WINDOW else 0
            return dataclasses.replace(settings, window=window), None
        if way.mode == "dense" and plan.ways[0].mode != "dense":
            reason = f"the draft does not fit {settings.memory} bytes (memory) beside the target"
            return settings, Decision(Status.FAILED_DENSE, reason)
        return settings, None

    def _require_memory(self, request: Request, plan: Plan) -> None:
        """What is kept in the end, with earlier turns or because the draft was declined, must fit as well.

        Raises:
            MemoryTooSmall: more is kept than was planned for, and reading as much does not fit.
        """
        settings = request.settings
        if settings.memory is None or self.draft is None:
            return
        planned = self._memory_plan(request.size, settings)
        if plan.kept.size > planned.ways[0].kept:
            dense = dataclasses.replace(settings, mode="dense")
            require_memory(self._memory_plan(request.size, dense), settings.memory)

    def _memory_plan(self, tokens: int, settings: Settings) -> MemoryPlan:
        return plan_memory(self.artifact.manifest, tokens, settings, unfit=unfit(self.calibration))

    def _answer(self, request: Request, *, show_control: bool) -> Iterator[str | Result]:
        """Plans, reads and writes; where the kept tokens lead to no numbers, all of them are read instead."""
        plan = self._planner.plan(request)
        self._require_memory(request, plan)
        if request.caches.draft is not None and not request.caches.lasting:
            request.caches.draft.clear()  # the target needs the memory now
        logits, reused = self._read(request, plan)
        if plan.kept.size < request.size and not np.isfinite(logits).all():
            reason = "the target's logits after the kept tokens are not finite numbers"
            logger.warning("%s, so all tokens are read instead", reason)
            plan = all_of(request, Status.FAILED_DENSE, reason)
            request.caches.target.clear()
            logits, reused = read_kept(request, plan)
        yield from write(request, plan, self.chat, logits, reused=reused, show_control=show_control)

    def _read(self, request: Request, plan: Plan) -> tuple[Float[np.ndarray, "V"], int]:
        """As `read_kept`; the time it takes helps to foresee that of the next request."""
        logits, reused = read_kept(request, plan)
        target, slots = request.caches.target, int(np.searchsorted(plan.kept, reused))
        took = request.clock.phases["target_prefill"]
        self._gauge.prefilled(target, slots, plan.kept.size - slots, request.settings.max_tokens, took)
        return logits, reused


def last(answer: Iterator[str | Result]) -> Result:
    """The result that an answer ends with."""
    for part in answer:
        if isinstance(part, Result):
            return part
    raise AssertionError("an answer ends in its result")


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
