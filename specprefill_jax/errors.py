"""Every error a caller can meet: one class per situation.

The place that raises writes the message: the fact, the limit it ran into, and the knob that helps. The
command line prints that message after `specprefill: error:` and never shows a traceback for these classes.
"""


class SpecPrefillError(Exception):
    """Base of every error that this package raises on purpose."""


class SettingError(SpecPrefillError):
    """A knob holds a value that it cannot have; the message names the flag, variable or file it came from."""


class FileMissing(SpecPrefillError):
    """A file or directory that was asked for does not exist."""


class CheckpointError(SpecPrefillError):
    """A checkpoint is truncated or unreadable, or a tensor is unknown, missing or wrongly shaped or typed."""


class ConfigError(SpecPrefillError):
    """A config.json describes another architecture, or contradicts itself."""


class TargetError(SpecPrefillError):
    """A file of compile/targets/ lacks a field, holds an unknown one, or a value that cannot be."""


class RecipeError(SpecPrefillError):
    """A compile recipe lacks a field, holds an unknown one, or asks for shapes that cannot work together."""


class CompileError(SpecPrefillError):
    """The compiler refused a program; the message names the stage."""


class CompilerMissing(SpecPrefillError):
    """Compiling was asked for where only serving is installed: `pip install "specprefill-jax[compile]"`."""


class PreflightMissing(SpecPrefillError):
    """Preflight was asked for without what it needs: `pip install "specprefill-jax[preflight]"`."""


class EvaluationMissing(SpecPrefillError):
    """An evaluation was asked for without what it needs: `pip install "specprefill-jax[eval]"`."""


class KernelRefused(SpecPrefillError):
    """The GPU's driver refuses a kernel of an artifact, or crashes on it; the message names the kernel."""


class ArtifactError(SpecPrefillError):
    """A directory is not a usable artifact: its manifest is missing, invalid, or of another schema."""


class HashMismatch(ArtifactError):
    """A file of an artifact differs from the one that its manifest was written for."""


class WrongTarget(SpecPrefillError):
    """An artifact was compiled for another target than the device found; it would run silently wrong."""


class WrongVersion(ArtifactError):
    """An artifact was made with another version of IREE than the one that is installed."""


class Unproven(SpecPrefillError):
    """An artifact carries no proof that it computes right results (`proof: none`), so it is not run."""


class DeviceError(SpecPrefillError):
    """A device name is unknown, or its driver is missing; the message lists the known names."""


class DeviceFailed(SpecPrefillError):
    """A device ran out of memory or was lost while it worked. The request is lost, the artifact is not."""


class EmptyPrompt(SpecPrefillError):
    """The prompt has no tokens."""


class PromptTooLong(SpecPrefillError):
    """The tokens of a request do not fit the largest compiled cache capacity."""


class MemoryTooSmall(SpecPrefillError):
    """No way to answer a request fits the memory that it may take; the message has the sum, part by part."""


class TemplateError(SpecPrefillError):
    """The chat template is invalid, or cannot render the messages it was given."""


class PinError(SpecPrefillError):
    """What a caller wants kept is not in the prompt; the message names it and what there is."""


class ScoresUnusable(SpecPrefillError):
    """Token importance is not finite, all zero, or constant: it ranks nothing. The request runs dense."""


class BudgetTooSmall(SpecPrefillError):
    """The forced tokens leave the token budget no room for any other token. The request runs dense."""


class SelfTestFailed(SpecPrefillError):
    """A loaded program does not reproduce the results that its manifest records."""


class NotFiniteOutput(SpecPrefillError):
    """A program returned logits that are not finite numbers."""


class Cancelled(SpecPrefillError):
    """A request was stopped because its caller wished so. What it had read is kept where it has a session."""


class DeadlineExceeded(Cancelled):
    """A request took longer than its caller allowed."""


class SessionBusy(SpecPrefillError):
    """A conversation was given a turn while it was answering another."""
