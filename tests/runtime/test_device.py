"""Opening devices by name, and what is said when that fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specprefill_jax.artifact.host import cpu_flags, cpu_name
from specprefill_jax.artifact.targets import known_targets
from specprefill_jax.errors import DeviceError, SettingError, Unproven
from specprefill_jax.runtime.device import (
    check_present,
    list_devices,
    names_for,
    open_device,
)


def run_python(code: str, **environment: str) -> str:
    """The output of a fresh interpreter: drivers and their flags are global to a process."""
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        DeviceError, match=r"unknown device 'gpu'; .* cpu, cpu-portable, .*llvmpipe, .*780m, .*vulkan"
    ):
        open_device("gpu")


def test_the_cpu_opens_with_its_name_and_flags():
    device = open_device("cpu")
    assert (device.name, device.driver) == ("cpu", "local-task")
    assert device.description == cpu_name()
    assert device.cpu_flags == cpu_flags()


@pytest.mark.vulkan
@pytest.mark.parametrize("name", ["llvmpipe", "llvmpipe-f16"])
def test_lavapipe_opens_by_its_own_names(name: str):
    device = open_device(name)
    assert (device.name, device.driver) == (name, "vulkan")
    assert "llvmpipe" in device.description


@pytest.mark.vulkan
def test_a_gpu_that_is_absent_is_named_beside_what_was_found():
    with pytest.raises(
        DeviceError, match=r"no device 'radeon-780m' .*780M\|PHOENIX\|gfx1103.* found .*llvmpipe"
    ):
        open_device("radeon-780m")


def test_the_radeon_is_known_by_the_names_its_drivers_give_it():
    for name in (
        "AMD Radeon 780M Graphics (RADV GFX1103_R1)",
        "AMD Radeon Graphics (RADV PHOENIX)",
        "AMD Radeon(TM) 780M",
    ):
        assert {"vulkan", "radeon-780m"} <= set(names_for(name)) <= {"vulkan", "radeon-780m", "rdna3"}


@pytest.mark.parametrize(
    ("description", "names"),
    [
        ("AMD Radeon RX 7900 XTX (RADV NAVI31)", ["rdna3"]),
        ("AMD Radeon PRO W7800", ["rdna3"]),
        ("AMD Radeon 740M (RADV GFX1103_R2)", ["radeon-780m", "rdna3"]),
        ("Radeon 8060S Graphics (RADV GFX1151)", ["rdna3"]),
        ("AMD Radeon RX 6800 XT (RADV NAVI21)", ["rdna2"]),
        ("AMD Custom GPU 0405 (RADV VANGOGH)", ["rdna2"]),
        ("AMD Radeon 680M (RADV REMBRANDT)", ["rdna2"]),
        ("AMD Radeon RX 5700 XT (RADV NAVI10)", []),
        ("AMD Radeon RX 9070 XT (RADV GFX1201)", []),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", ["nvidia"]),
        ("NVIDIA GeForce RTX 4090", ["nvidia"]),
        ("NVIDIA RTX A6000", ["nvidia"]),
        ("NVIDIA RTX 6000 Ada Generation", ["nvidia"]),
        ("NVIDIA A100-SXM4-80GB", ["nvidia"]),
        ("NVIDIA L40S", ["nvidia"]),
        ("NVIDIA GeForce GTX 1080", []),
        ("NVIDIA GeForce RTX 2080", []),
        ("Intel(R) Arc(tm) A770 Graphics (DG2)", []),
    ],
)
def test_a_gpu_is_known_by_its_family(description: str, names: list[str]):
    assert names_for(description) == (*names, "vulkan")


def test_a_name_that_can_only_be_compiled_for_is_refused_with_its_reason():
    for refuse in (open_device, check_present):
        with pytest.raises(Unproven, match=r"'hip-gfx1103' can be compiled for but not run: nothing .* HIP"):
            refuse("hip-gfx1103")


@pytest.mark.vulkan
def test_the_list_holds_the_cpu_and_lavapipe_with_the_names_that_mean_them():
    found = list_devices()
    assert found[0].driver == "local-task"
    assert found[0].names == ("cpu", "cpu-portable")
    lavapipe = next(device for device in found if "llvmpipe" in device.description)
    assert lavapipe.names == ("llvmpipe", "llvmpipe-f16", "vulkan")
    assert {name for device in found for name in device.names} <= set(known_targets())


NO_VULKAN = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}


def test_without_a_vulkan_driver_the_error_says_what_to_install():
    code = """
from specprefill_jax.artifact.host import cpu_flags, cpu_name
from specprefill_jax.errors import DeviceError
from specprefill_jax.runtime.device import list_devices, open_device
try:
    open_device("vulkan")
except DeviceError as error:
    print(error)
print([(device.driver, bool(device.fault)) for device in list_devices()])
"""
    output = run_python(code, **NO_VULKAN)
    assert "apt install libvulkan1 mesa-vulkan-drivers" in output
    assert output.endswith("[('local-task', False), ('vulkan', True)]")


# A thread takes its name a moment after it starts.
COUNT_WORKERS = """
import os, time
def workers():
    time.sleep(2)
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return sum(name.startswith("iree-worker") for name in names)
"""


@pytest.mark.parametrize(
    ("call", "environment"),
    [("open_device('cpu', threads=3)", {}), ("open_device('cpu')", {"SPECPREFILL_THREADS": "3"})],
)
def test_worker_threads_are_set_by_argument_or_environment(call: str, environment: dict[str, str]):
    code = (
        f"{COUNT_WORKERS}\nfrom specprefill_jax.runtime.device import open_device\n{call}\nprint(workers())"
    )
    assert run_python(code, **environment) == "3"


def test_the_number_of_threads_cannot_change_once_they_run():
    code = """
from specprefill_jax.errors import SettingError
from specprefill_jax.runtime.device import open_device
first = open_device("cpu", threads=1)
assert open_device("cpu").hal is first.hal
assert open_device("cpu-portable", threads=1).hal is first.hal
try:
    open_device("cpu", threads=2)
except SettingError as error:
    print(error)
"""
    assert run_python(code).startswith("threads 2: this process already runs the CPU device with 1 threads")


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_bad_number_of_threads_names_where_it_came_from(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPECPREFILL_THREADS", value)
    with pytest.raises(SettingError, match=f"SPECPREFILL_THREADS in the environment is '{value}'"):
        open_device("cpu")
