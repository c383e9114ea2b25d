"""All checks of an artifact, one after the other, each with its result: `specprefill verify`."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

from specprefill_jax.artifact.manifest import RUNTIME, Manifest
from specprefill_jax.artifact.verify import Artifact, Progress, verify_files
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.target import check_proof, check_target, check_versions, open_device_for

Result = Literal["passed", "failed", "not run"]
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: what was checked.
        result: "not run" where an earlier check leaves it nothing to run on.
        detail: what was found, or why it failed or was not run.
        difference, allowed: of a self-test, in units of the norm of the tensor that `detail` names.
    """

    name: str
    result: Result
    detail: str
    difference: float | None = None
    allowed: float | None = None


def run_checks(
    directory: Path, device: str | None, *, files_only: bool, progress: Progress | None = None
) -> Iterator[Check]:
    """The manifest, every file (hashed, whatever was noted of it before), and unless `files_only` the version
    of IREE, the device, and every entry of the self-test.

    What cannot be run because an earlier check failed is given as "not run", with that reason.

    Args:
        device: the device that the artifact must be for; None: its own.
        progress: hears bytes hashed, and bytes in all.
    """
    manifest, check = _attempt("manifest", lambda: Manifest.read(directory), _describe)
    yield check
    if manifest is None:
        return
    artifact = Artifact(directory, manifest)
    _, check = _attempt(
        "files",
        lambda: verify_files(artifact, progress, trust_stamps=False),
        lambda _: f"{len(manifest.files)} files, {sum(f.bytes for f in manifest.files.values()):,} bytes",
    )
    yield check
    if not files_only:
        yield from _on_the_device(artifact, device, files=check.result == "passed")


def _on_the_device(artifact: Artifact, asked: str | None, *, files: bool) -> Iterator[Check]:
    manifest = artifact.manifest
    _, version = _attempt(
        "IREE", lambda: check_versions(manifest), lambda _: f"{manifest.build.tools[RUNTIME]}, as installed"
    )
    yield version
    _, proof = _attempt("proof", lambda: check_proof(manifest), lambda _: "a self-test for each model")
    yield proof
    device = None
    if proof.result == "passed":
        device, found = _attempt(
            "device", lambda: open_device_for(manifest, asked), lambda device: device.description
        )
        if device is not None:
            here = found.detail
            _, found = _attempt("device", functools.partial(check_target, manifest, device), lambda _: here)
        yield found
        device = device if found.result == "passed" else None
    for role in manifest.models:
        if device is None or not files or version.result == "failed":
            yield Check(f"self-test of the {role}", "not run", "a check above failed")
            continue
        program, loaded = _attempt(
            f"{role} loads",
            functools.partial(Program.load, artifact, role, device, self_test=False),
            lambda program: f"{len(program.entries)} entries",
        )
        yield loaded
        if program is not None:
            yield from _self_test(artifact, role, program)


def _self_test(artifact: Artifact, role: str, program: Program) -> Iterator[Check]:
    try:
        for outcome in program.test(artifact):
            yield Check(
                f"{role} {outcome.entry}",
                "passed" if outcome.passed else "failed",
                outcome.tensor,
                outcome.difference,
                outcome.allowed,
            )
    except SpecPrefillError as error:
        yield Check(f"self-test of the {role}", "failed", str(error))


def _describe(manifest: Manifest) -> str:
    target = manifest.device
    return f"{manifest.name!r} for {target.name!r} ({target.driver}, target {target.target})"


def _attempt(
    name: str, work: Callable[[], Made], describe: Callable[[Made], str]
) -> tuple[Made | None, Check]:
    """What `work` gives, and the check that it is."""
    try:
        made = work()
    except SpecPrefillError as error:
        return None, Check(name, "failed", str(error))
    return made, Check(name, "passed", describe(made))
