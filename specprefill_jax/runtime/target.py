"""Whether an artifact may run on a device and with this IREE. Code for another one runs silently wrong."""

import importlib.metadata
import re

from specprefill_jax.artifact.manifest import COMPILER, RUNTIME, DeviceTarget, Manifest
from specprefill_jax.artifact.targets import known_target
from specprefill_jax.errors import DeviceError, Unproven, WrongTarget, WrongVersion
from specprefill_jax.runtime.device import Device, names_for, open_matching


def open_device_for(manifest: Manifest, asked: str | None = None, *, threads: int | None = None) -> Device:
    """Open the device that an artifact was compiled for.

    Args:
        asked: the device a user named; None takes the artifact's.

    Raises:
        DeviceError: `asked` is no device's name.
        WrongTarget: the artifact is for another device than `asked`, or its device is not on this machine.
        SettingError: the number of threads is not a positive whole number.
    """
    target = manifest.device
    if asked is not None and asked != target.name:
        known_target(asked)
        raise WrongTarget(
            f"artifact {manifest.name!r} is compiled for {_wanted(target)}, but device {asked!r} was asked "
            "for. " + _remedy(asked)
        )
    try:
        return open_matching(target.name, target.driver, target.device_match, threads=threads)
    except DeviceError as error:
        raise WrongTarget(
            f"artifact {manifest.name!r} is compiled for {_wanted(target)}, which is not here: {error}"
        ) from error


def check_target(manifest: Manifest, device: Device) -> None:
    """Refuse a device that the artifact was not compiled for.

    Raises:
        WrongTarget: name, driver or the Vulkan device's name differ from what the code needs, or the device
            lacks features, subgroup sizes or memory.
    """
    target = manifest.device
    matches = target.driver != "vulkan" or re.search(target.device_match, device.description, re.IGNORECASE)
    if device.name != target.name or device.driver != target.driver or not matches:
        names = names_for(device.description) if device.driver == "vulkan" else (device.name,)
        raise WrongTarget(
            f"artifact {manifest.name!r} is compiled for {_wanted(target)}, but the device found is "
            f"{device.name!r} ({device.description}). " + _remedy(" or ".join(names))
        )
    lacking = _lacking(manifest, device)
    if lacking:
        raise WrongTarget(
            f"artifact {manifest.name!r} is compiled for {_wanted(target)} and needs what "
            f"{device.description} lacks: {'; '.join(lacking)}. " + _remedy(f"{device.name}, on this machine")
        )


def _lacking(manifest: Manifest, device: Device) -> list[str]:
    """What the code needs and the device, as far as is known, has not."""
    target, facts = manifest.device, device.facts
    lacking = []
    flags = [flag for flag in target.cpu_features if flag not in device.cpu_flags]
    if flags:
        lacking.append(f"CPU features {', '.join(flags)}")
    if facts is None:
        return lacking
    features = [name for name in target.features if name not in facts.features]
    if features:
        lacking.append(f"features {', '.join(features)}")
    least, most = facts.subgroup_sizes
    if any(not least <= size <= most for size in target.subgroup_sizes):
        sizes = " and ".join(map(str, target.subgroup_sizes))
        lacking.append(f"subgroups of {sizes} (it has {least} to {most})")
    if manifest.least_bytes > facts.heap_bytes:
        lacking.append(f"{manifest.least_bytes:,} bytes of memory (it has {facts.heap_bytes:,})")
    return lacking


def check_versions(manifest: Manifest) -> None:
    """Refuse modules of another IREE than the one that is installed.

    Raises:
        WrongVersion: the compiler or the runtime that the manifest records has another version.
    """
    installed = importlib.metadata.version(RUNTIME)
    for tool in (COMPILER, RUNTIME):
        recorded = manifest.build.tools[tool]
        if recorded != installed:
            raise WrongVersion(
                f"artifact {manifest.name!r} was made with {tool} {recorded}, but {RUNTIME} {installed} is "
                "installed, and a module runs only with exactly the IREE that made it. Compile it again, or "
                f'`pip install "{RUNTIME}=={recorded}"`'
            )


def check_proof(manifest: Manifest) -> None:
    """Refuse an artifact that nothing shows to compute right.

    Raises:
        Unproven: its manifest says `proof: none`.
    """
    if manifest.proof.kind == "none":
        raise Unproven(
            f"artifact {manifest.name!r} for {manifest.device.name!r} is not run: nothing proves that it "
            f"computes right: {manifest.proof.reason}. Use an artifact for another device"
        )


def _wanted(target: DeviceTarget) -> str:
    named = f", a device named like {target.device_match!r}" if target.device_match else ""
    machine = f", compiled on {target.cpu}" if target.cpu else ""
    return f"{target.name!r} ({target.driver}, target {target.target}{named}{machine})"


def _remedy(device: str) -> str:
    return (
        f"Compile it for what is here: `specprefill compile RECIPE --device NAME`, NAME being {device}; "
        "`specprefill devices` lists the devices of this machine"
    )
