"""IREE's description of a Vulkan device, as it prints it for lavapipe of Mesa 22.3.6."""

import pytest

from specprefill_jax.runtime.device import open_device
from specprefill_jax.runtime.facts import parse_facts

TEXT = """\
name: AMD Radeon 780M Graphics (RADV PHOENIX)
path: GPU-6d65736132322e332e36000000000000
api: 1.3.230
type: integrated
vendor_id: 0x1002
device_id: 0x15bf
driver: radv
driver_info: Mesa 25.0.7
feature_tier[vulkan-1.3]: supported
features: bufferDeviceAddress=yes timelineSemaphore=yes shaderFloat16=yes shaderBFloat16Type=no
sparse: binding=no residencyBuffer=no residencyAliased=no
subgroup: size=64 operations=0x0000001f quad=no minSubgroupSize=32 maxSubgroupSize=64 stages=0x30
queue_families: 1
  [0] count=1 flags=graphics|compute|transfer timestampValidBits=64
memory_heaps: 2
  [0] size=1000 flags=0x00000001
  [1] size=24 flags=0x00000000
memory_types: 1
  [0] heap=0 flags=0x0000000f
"""


def test_driver_features_subgroups_and_memory_are_read():
    facts = parse_facts(TEXT)
    assert facts.driver == "radv Mesa 25.0.7"
    assert facts.features == {
        *("bufferDeviceAddress", "timelineSemaphore", "shaderFloat16"),
        *("subgroupBasic", "subgroupVote", "subgroupArithmetic", "subgroupBallot", "subgroupShuffle"),
    }
    assert facts.subgroup_sizes == (32, 64)
    assert facts.heap_bytes == 1024


@pytest.mark.parametrize("part", ["driver_info: ", "features: ", "minSubgroupSize", "  [0] size=1000"])
def test_a_text_of_another_form_is_no_description(part: str):
    text = TEXT.replace(part, "x").replace("  [1] size=24", "x")
    with pytest.raises(ValueError, match="in another form than IREE"):
        parse_facts(text)


@pytest.mark.vulkan
def test_an_open_device_carries_its_facts():
    facts = open_device("llvmpipe").facts
    assert facts is not None
    assert facts.driver.startswith("llvmpipe Mesa ")
    assert {"shaderFloat16", "storageBuffer16BitAccess", "subgroupArithmetic"} <= facts.features
    assert facts.subgroup_sizes[0] == 8
    assert facts.heap_bytes > 2**30
    assert open_device("cpu").facts is None
