"""What `specprefill calibrate` found out about an artifact's draft: `calibration.json`.

Which of its heads find what is asked for, how its attention is best read, and how many tokens must be kept.
"""

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from specprefill_jax.artifact import strict
from specprefill_jax.artifact.beside import CALIBRATION_NAME, manifest_digest, replace
from specprefill_jax.artifact.manifest import Manifest
from specprefill_jax.errors import ArtifactError

log = logging.getLogger(__name__)

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was chosen, and what it does for prompts that the choice did not see.

    Attributes:
        manifest: The digest of the manifest of the build that was calibrated.
        settings: What was chosen, as a settings file has it (`Settings.with_defaults`).
        wanted: The share of prompts whose facts are to be kept whole.
        retention: The share of the prompts put aside whose facts the chosen settings keep whole.
        lower, upper: Its 95% interval.
        prompts: How many were put aside.
        depth: Full-attention layers of the draft up to the last one whose heads count.
        seed: Of the prompts.
    """

    manifest: str
    settings: Mapping[str, object]
    wanted: float
    retention: float
    lower: float
    upper: float
    prompts: int
    depth: int
    seed: int

    @property
    def reached(self) -> bool:
        """Whether the draft may keep as much as was wanted, as far as the prompts put aside can tell."""
        return self.upper >= self.wanted


@dataclasses.dataclass(frozen=True)
class _File:
    schema: int
    calibration: Calibration


def read_calibration(directory: Path, manifest: Manifest) -> Calibration | None:
    """The calibration of exactly this build; None where there is none.

    Never raises: a request does not depend on it. What lies there and is of no use is said in the log, with
    the command that mends it.
    """
    path = directory / CALIBRATION_NAME
    mend = f"`specprefill calibrate {directory}` calibrates again"
    if not os.path.exists(path):  # unlike Path.exists it is False, not an error, below a closed directory
        return None
    try:
        document = strict.read_json(path)
        if isinstance(document, Mapping) and document.get("schema") != SCHEMA:
            schema = document.get("schema")
            raise ArtifactError(f"{path}: schema {schema!r}, but this version reads schema {SCHEMA}")
        found = strict.decode(_File, document, str(path)).calibration
    except (ArtifactError, OverflowError, RecursionError) as error:
        log.warning("the calibration is damaged and is ignored; %s. %s", mend, error)
        return None
    if found.manifest != manifest_digest(manifest):
        log.warning("%s is of another build of the artifact and is ignored; %s", path, mend)
        return None
    return found


def write_calibration(directory: Path, calibration: Calibration) -> Path:
    """Put it into its file, in place of an earlier one.

    Raises:
        ArtifactError: the file cannot be written.
    """
    path = directory / CALIBRATION_NAME
    replace(path, _File(SCHEMA, calibration))
    return path
