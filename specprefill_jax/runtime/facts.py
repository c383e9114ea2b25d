"""What IREE tells about a Vulkan device beyond its name."""

import dataclasses
import re

# Bits of VkSubgroupFeatureFlagBits, in the words that an artifact's `features` use.
_SUBGROUP_OPERATIONS = (
    "subgroupBasic",
    "subgroupVote",
    "subgroupArithmetic",
    "subgroupBallot",
    "subgroupShuffle",
    "subgroupShuffleRelative",
    "subgroupClustered",
)


@dataclasses.dataclass(frozen=True)
class Facts:
    """A Vulkan device as IREE 3.13 describes it.

    It does not tell the largest single allocation, the size of workgroup memory, 64-bit numbers in shaders,
    nor the shapes and types of cooperative products; what lacks those is refused when a module is loaded, or
    by the self-test.

    Attributes:
        driver: the driver and its version, such as "radv Mesa 25.0.7".
        features: names of what it has.
        subgroup_sizes: the smallest and the largest size of a subgroup.
        heap_bytes: memory of all heaps together.
    """

    driver: str
    features: frozenset[str]
    subgroup_sizes: tuple[int, int]
    heap_bytes: int


def parse_facts(text: str) -> Facts:
    """Reads the text of `HalDriver.dump_device_info`.

    Raises:
        ValueError: the text is of another form.
    """
    fields = dict(re.findall(r"^([a-z_]+): (.*)$", text, re.MULTILINE))
    subgroup = re.search(r"operations=(0x[0-9a-f]+) .*minSubgroupSize=(\d+) maxSubgroupSize=(\d+)", text)
    heaps = re.findall(r"^  \[\d+\] size=(\d+) flags=", text, re.MULTILINE)
    if subgroup is None or not heaps or not {"driver", "driver_info", "features"} <= fields.keys():
        raise ValueError("IREE describes the device in another form than IREE 3.13 does")
    operations = int(subgroup[1], 16)
    told = (pair.partition("=") for pair in fields["features"].split())
    features = {name for name, _, value in told if value == "yes"}
    features |= {name for bit, name in enumerate(_SUBGROUP_OPERATIONS) if operations >> bit & 1}
    return Facts(
        driver=f"{fields['driver']} {fields['driver_info']}",
        features=frozenset(features),
        subgroup_sizes=(int(subgroup[2]), int(subgroup[3])),
        heap_bytes=sum(map(int, heaps)),
    )
