"""Devices: the names a user can give, what is present, and opening one."""

import dataclasses
import functools
import logging
import os
import re
from typing import Any

import iree.runtime as iree

from specprefill_jax.artifact.host import cpu_flags, cpu_name
from specprefill_jax.artifact.targets import check_runnable, known_target, known_targets
from specprefill_jax.errors import DeviceError, SettingError
from specprefill_jax.runtime.facts import Facts, parse_facts
from specprefill_jax.runtime.transfer import Transfer

log = logging.getLogger(__name__)

THREADS_VARIABLE = "SPECPREFILL_THREADS"


_MISSING_VULKAN = (
    "No Vulkan device was found. Install a Vulkan 1.3 driver: on Debian or Ubuntu "
    "`apt install libvulkan1 mesa-vulkan-drivers`, which also brings lavapipe for machines without a GPU."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Device:
    """An open device.

    Attributes:
        name: the name it was opened by.
        driver: the IREE driver behind it.
        description: what the driver, or the CPU, calls itself.
        cpu_flags: the /proc/cpuinfo flags of this machine.
        facts: what IREE tells of a Vulkan device; None for the CPU.
        hal: IREE's handle.
        transfer: reads and writes its buffers.
    """

    name: str
    driver: str
    description: str
    cpu_flags: frozenset[str]
    facts: Facts | None
    hal: iree.HalDevice
    transfer: Transfer


@dataclasses.dataclass(frozen=True)
class FoundDevice:
    """A row of `specprefill devices`: a device that is present, and the known names that mean it.

    `fault` says why a driver finds nothing; `description` is empty then.
    """

    driver: str
    description: str
    names: tuple[str, ...]
    fault: str


def open_device(name: str, *, threads: int | None = None) -> Device:
    """Open a known device by name.

    Args:
        threads: CPU worker threads of the `local-task` driver. None: the SPECPREFILL_THREADS variable,
            else one for each physical core.

    Raises:
        DeviceError: the name is unknown, its driver is missing, or no device of that name is present.
        Unproven: the name can only be compiled for.
        SettingError: the number of threads is not a positive whole number.
    """
    known = known_target(name)
    check_runnable(known)
    return open_matching(name, known.driver, known.match, threads=threads)


def open_matching(name: str, driver: str, match: str, *, threads: int | None = None) -> Device:
    """Open the first device of `driver` in whose name the regular expression `match` is found.

    Raises:
        DeviceError: the driver is missing, or none of its devices matches.
        SettingError: the number of threads is not a positive whole number.
    """
    if driver == "local-task":
        hal = _open_local_task(_thread_count(threads))
        return Device(name, driver, cpu_name(), cpu_flags(), None, hal, Transfer(hal))
    if driver != "vulkan":
        raise DeviceError(f"device {name!r} needs IREE's driver {driver!r}, which this version does not open")
    device_id, description = _find_vulkan(name, match)
    hal = _open_vulkan(device_id)
    return Device(name, driver, description, cpu_flags(), _vulkan_facts(device_id), hal, Transfer(hal))


def check_present(name: str) -> None:
    """Look for a known device without opening it.

    Raises:
        DeviceError: the name is unknown, its driver is missing, or no device of that name is present.
        Unproven: the name can only be compiled for.
    """
    known = known_target(name)
    check_runnable(known)
    if known.driver == "vulkan":
        _find_vulkan(name, known.match)


def _find_vulkan(name: str, match: str) -> tuple[int, str]:
    """IREE's number and name of the first Vulkan device that matches."""
    present = _vulkan_devices()
    for device_id, description in present:
        if re.search(match, description, re.IGNORECASE):
            return device_id, description
    found = ", ".join(description for _, description in present)
    raise DeviceError(
        f"no device {name!r} on this machine: no Vulkan device has a name with {match!r}; found {found}. "
        "`specprefill devices` lists what is present"
    )


def list_devices() -> list[FoundDevice]:
    """What each driver finds, CPU first; a driver that finds nothing gives one row with its fault."""
    local = tuple(name for name, known in known_targets().items() if known.driver == "local-task")
    found = [FoundDevice("local-task", cpu_name(), local, "")]
    try:
        present = _vulkan_devices()
    except DeviceError as error:
        return [*found, FoundDevice("vulkan", "", (), str(error))]
    found += [FoundDevice("vulkan", name, names_for(name), "") for _, name in present]
    return found


def names_for(description: str) -> tuple[str, ...]:
    """The known names that mean the Vulkan device of this description."""
    return tuple(
        name
        for name, known in known_targets().items()
        if known.driver == "vulkan" and re.search(known.match, description, re.IGNORECASE)
    )


def _thread_count(threads: int | None) -> int:
    """Worker threads; 0 leaves the choice to IREE: one for each physical core."""
    origin, value = "threads", "" if threads is None else str(threads)
    if threads is None:
        origin, value = f"{THREADS_VARIABLE} in the environment", os.environ.get(THREADS_VARIABLE, "")
        if value == "":
            return 0
    if not value.isdecimal() or int(value) < 1:
        raise SettingError(f"{origin} is {value!r}: give a whole number of at least 1, or leave it out")
    return int(value)


_local_task: dict[int, iree.HalDevice] = {}


def _open_local_task(threads: int) -> iree.HalDevice:
    """The CPU device of this process, one for all: its workers start with its driver and stay.

    Raises:
        SettingError: it was opened with another number of threads before.
    """
    for started, device in _local_task.items():
        if threads not in (0, started):
            before = "the default number of" if started == 0 else str(started)
            raise SettingError(
                f"threads {threads}: this process already runs the CPU device with {before} threads; "
                f"give the number at the first opening, or set {THREADS_VARIABLE}"
            )
        return device
    iree.flags.parse_flags(f"--task_topology_group_count={threads}")
    return _local_task.setdefault(threads, iree.get_driver("local-task").create_default_device())


@functools.cache
def _open_vulkan(device_id: int) -> iree.HalDevice:
    try:
        return iree.get_driver("vulkan").create_device(device_id, None)
    except (RuntimeError, ValueError) as error:
        raise DeviceError(
            f"the Vulkan driver lists a device that it cannot open: {error}. It needs Vulkan 1.3 with "
            "timeline semaphores; update the driver"
        ) from error


@functools.cache
def _vulkan_facts(device_id: int) -> Facts:
    driver: Any = iree.get_driver("vulkan")  # its stubs lack this method
    return parse_facts(driver.dump_device_info(device_id))


def _vulkan_devices() -> list[tuple[int, str]]:
    """IREE's number and name of each Vulkan device, at least one.

    Raises:
        DeviceError: there is none, or no Vulkan at all.
    """
    try:
        present = iree.get_driver("vulkan").query_available_devices()
    except (RuntimeError, ValueError) as error:
        log.debug("querying Vulkan devices: %s", error)
        raise DeviceError(_MISSING_VULKAN) from error
    if not present:
        raise DeviceError(_MISSING_VULKAN)
    return [(info["device_id"], info["name"]) for info in present]
