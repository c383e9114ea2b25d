"""Whether an artifact may run on a device. Code for another one runs silently wrong."""

import re

from specprefill_jax.artifact.manifest import DeviceTarget, Manifest
from specprefill_jax.artifact.targets import known_target
from specprefill_jax.errors import DeviceError, Unproven, WrongTarget
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
        WrongTarget: name, driver, the Vulkan device's name or the CPU's features differ from what the code
        needs.
    """
    target = manifest.device
    matches = target.driver != "vulkan" or re.search(target.device_match, device.description, re.IGNORECASE)
    if device.name != target.name or device.driver != target.driver or not matches:
        names = names_for(device.description) if device.driver == "vulkan" else (device.name,)
        raise WrongTarget(
            f"artifact {manifest.name!r} is compiled for {_wanted(target)}, but the device found is "
            f"{device.name!r} ({device.description}). " + _remedy(" or ".join(names))
        )
    missing = [flag for flag in target.cpu_features if flag not in device.cpu_flags]
    if missing:
        raise WrongTarget(
            f"artifact {manifest.name!r} is compiled for {_wanted(target)} and needs CPU features that "
            f"{device.description} lacks: {', '.join(missing)}. " + _remedy(f"{device.name}, on this machine")
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
    return f"{target.name!r} ({target.driver}, target {target.target}{named})"


def _remedy(device: str) -> str:
    return (
        f"Compile it for what is here: `specprefill compile RECIPE --device NAME`, NAME being {device}; "
        "`specprefill devices` lists the devices of this machine"
    )
