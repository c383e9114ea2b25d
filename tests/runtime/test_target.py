"""An artifact of another target is refused by name before it runs."""

import dataclasses
import json
from typing import Any

import pytest

from specprefill_jax.artifact.host import cpu_flags
from specprefill_jax.artifact.manifest import DeviceTarget, Manifest
from specprefill_jax.artifact.verify import Artifact
from specprefill_jax.errors import DeviceError, WrongTarget, WrongVersion
from specprefill_jax.runtime.device import Device, open_device
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.target import check_target, open_device_for
from tests.runtime.test_device import NO_VULKAN, run_python

RADEON = DeviceTarget(
    "radeon-780m", "vulkan", "gfx1103", "", (), "780M|PHOENIX|gfx1103", (32, 64), ("shaderFloat16",)
)


def made_for(manifest: Manifest, target: DeviceTarget) -> Manifest:
    return dataclasses.replace(manifest, device=target)


def test_the_device_that_an_artifact_is_for_is_opened_without_asking(artifact: Artifact):
    device = open_device_for(artifact.manifest)
    assert device.name == artifact.manifest.device.name
    assert open_device_for(artifact.manifest, artifact.manifest.device.name).hal is device.hal


def test_a_device_asked_for_by_another_name_is_refused(artifact: Artifact):
    wanted = artifact.manifest.device.name
    with pytest.raises(
        WrongTarget,
        match=rf"'toy' is compiled for '{wanted}' .* device 'vulkan' was asked for\. .*`specprefill compile",
    ):
        open_device_for(artifact.manifest, "vulkan")
    with pytest.raises(DeviceError, match="unknown device 'gpu'"):
        open_device_for(artifact.manifest, "gpu")


@pytest.mark.vulkan
def test_an_artifact_for_a_gpu_that_is_absent_names_both(artifact: Artifact):
    with pytest.raises(WrongTarget, match=r"'radeon-780m' \(vulkan, target gfx1103, .*found llvmpipe"):
        open_device_for(made_for(artifact.manifest, RADEON))


@pytest.mark.vulkan
def test_a_radeon_artifact_is_refused_on_lavapipe_before_anything_is_loaded(artifact: Artifact):
    other = Artifact(artifact.directory / "absent", made_for(artifact.manifest, RADEON))
    with pytest.raises(
        WrongTarget,
        match=r"for 'radeon-780m' .*device found is 'llvmpipe' \(llvmpipe .* NAME being llvmpipe or ",
    ):
        Program.load(other, "draft", open_device("llvmpipe"), self_test=False)


@pytest.mark.vulkan
def test_the_device_must_match_by_its_own_name_too(artifact: Artifact):
    """The name asked for may be right while the GPU behind it is another one."""
    posing = dataclasses.replace(open_device("llvmpipe"), name="radeon-780m")
    with pytest.raises(WrongTarget, match=r"device found is 'radeon-780m' \(llvmpipe"):
        check_target(made_for(artifact.manifest, RADEON), posing)


def test_a_cpu_artifact_is_refused_on_another_driver(artifact: Artifact, device: Device):
    other = DeviceTarget(
        device.name, "vulkan" if device.driver == "local-task" else "local-task", "x", "", (), "", (), ()
    )
    with pytest.raises(WrongTarget, match="but the device found is"):
        check_target(made_for(artifact.manifest, other), device)


def test_missing_cpu_features_are_named(artifact: Artifact):
    cpu = open_device("cpu")
    present = sorted(cpu_flags())[0]
    target = DeviceTarget("cpu", "local-task", "host", "EPYC", (present, "amx_tile9", "avx10_9"), "", (), ())
    with pytest.raises(WrongTarget, match=r"on EPYC\) .* lacks: CPU features amx_tile9, avx10_9\. Compile"):
        check_target(made_for(artifact.manifest, target), cpu)
    check_target(made_for(artifact.manifest, dataclasses.replace(target, cpu_features=(present,))), cpu)


@pytest.mark.parametrize("tool", ["iree-base-compiler", "iree-base-runtime"])
def test_another_version_of_iree_is_refused_with_both_versions(tool: str, artifact: Artifact, device: Device):
    build = dataclasses.replace(
        artifact.manifest.build, tools={**artifact.manifest.build.tools, tool: "3.12.1"}
    )
    other = dataclasses.replace(artifact.manifest, build=build)
    with pytest.raises(WrongVersion, match=rf"made with {tool} 3\.12\.1, but iree-base-runtime 3\.13\.0 is"):
        Program.load(Artifact(artifact.directory, other), "target", device, self_test=False)


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"features": ("shaderFloat16", "cooperativeMatrix")}, r"lacks: features cooperativeMatrix\. "),
        ({"features": ("subgroupClustered",)}, r"lacks: features subgroupClustered\. "),
        ({"subgroup_sizes": (32, 64)}, r"lacks: subgroups of 32 and 64 \(it has 8 to 8\)\. "),
    ],
)
def test_what_a_vulkan_device_lacks_is_named(changes: dict[str, Any], text: str, artifact: Artifact):
    target = DeviceTarget("llvmpipe", "vulkan", "llvmpipe", "", (), "llvmpipe", (8,), ("shaderFloat16",))
    lavapipe = open_device("llvmpipe")
    check_target(made_for(artifact.manifest, target), lavapipe)
    with pytest.raises(WrongTarget, match=text):
        check_target(made_for(artifact.manifest, dataclasses.replace(target, **changes)), lavapipe)


@pytest.mark.vulkan
def test_weights_that_exceed_all_memory_are_refused(artifact: Artifact):
    target = DeviceTarget("llvmpipe", "vulkan", "llvmpipe", "", (), "llvmpipe", (8,), ())
    manifest = made_for(artifact.manifest, target)
    large = dataclasses.replace(manifest.files["model.irpa"], bytes=2**50)
    manifest = dataclasses.replace(manifest, files={**manifest.files, "model.irpa": large})
    with pytest.raises(WrongTarget, match=r"lacks: 1,125,899,9[\d,]+ bytes of memory \(it has [\d,]+\)"):
        check_target(manifest, open_device("llvmpipe"))


def test_a_missing_driver_says_what_the_artifact_wants_and_what_to_install(artifact: Artifact):
    code = """
import json, sys
from specprefill_jax.artifact.manifest import Manifest
from specprefill_jax.errors import WrongTarget
from specprefill_jax.runtime.target import open_device_for
try:
    open_device_for(Manifest.from_json(json.loads(sys.stdin.read())))
except WrongTarget as error:
    print(error)
"""
    manifest = json.dumps(made_for(artifact.manifest, RADEON).to_json())
    output = run_python(code.replace("sys.stdin.read()", repr(manifest)), **NO_VULKAN)
    assert "compiled for 'radeon-780m'" in output
    assert "apt install libvulkan1 mesa-vulkan-drivers" in output
