"""The process that holds the driver: kernels come in on standard input, what became of them goes out.

It is started by path, under whatever C library the driver needs, and so imports nothing of this package. One
line of JSON per message. First out: the driver. Then, for each kernel that comes in, its pipeline: RADV's own
statistics and the disassembly (VK_KHR_pipeline_executable_properties).
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import vulkan

vk: Any = vulkan  # made of C declarations, which type checkers do not see
ffi: Any = vulkan.ffi

EXTENSIONS = ("VK_KHR_cooperative_matrix", "VK_KHR_pipeline_executable_properties")
# The structures of features that IREE's shaders need: all that the device has is switched on.
FEATURES = {
    "Vulkan11Features": vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES,
    "Vulkan12Features": vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES,
    "Vulkan13Features": vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES,
    "PipelineExecutablePropertiesFeaturesKHR": (
        vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PIPELINE_EXECUTABLE_PROPERTIES_FEATURES_KHR
    ),
    "CooperativeMatrixFeaturesKHR": vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR,
}
CAPTURE = 0x40 | 0x80  # VkPipelineCreateFlagBits: statistics, internal representations


@dataclass(frozen=True)
class Query:
    """A call that lists structures about a pipeline: its name, what it is asked with, what it gives."""

    call: str
    about: tuple[str, int]
    structure: str
    kind: int


EXECUTABLE = ("VkPipelineExecutableInfoKHR", vk.VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INFO_KHR)
PROPERTIES = Query(
    "vkGetPipelineExecutablePropertiesKHR",
    ("VkPipelineInfoKHR", vk.VK_STRUCTURE_TYPE_PIPELINE_INFO_KHR),
    "VkPipelineExecutablePropertiesKHR",
    vk.VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_PROPERTIES_KHR,
)
STATISTICS = Query(
    "vkGetPipelineExecutableStatisticsKHR",
    EXECUTABLE,
    "VkPipelineExecutableStatisticKHR",
    vk.VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_STATISTIC_KHR,
)
REPRESENTATIONS = Query(
    "vkGetPipelineExecutableInternalRepresentationsKHR",
    EXECUTABLE,
    "VkPipelineExecutableInternalRepresentationKHR",
    vk.VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INTERNAL_REPRESENTATION_KHR,
)


def main() -> None:
    """Answer until standard input ends."""
    instance = vk.vkCreateInstance(
        vk.VkInstanceCreateInfo(
            pApplicationInfo=vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 3, 0))
        ),
        None,
    )
    device = vk.vkEnumeratePhysicalDevices(instance)[0]
    say(described(device))
    driver = None
    for line in sys.stdin:
        driver = driver or Driver(device)
        say(driver.compiled(json.loads(line)))


def say(message: Mapping[str, Any]) -> None:
    """One line, at once: a driver that crashes next must not take it along."""
    print(json.dumps(message), flush=True)


def described(device: Any) -> dict[str, str]:
    """The device's name and its driver's version, as the driver words them."""
    driver = ffi.new("VkPhysicalDeviceDriverProperties*")
    driver.sType = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES
    properties = ffi.new("VkPhysicalDeviceProperties2*")
    properties.sType, properties.pNext = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, driver
    vk.vkGetPhysicalDeviceProperties2(device, properties)
    return {
        "device": text(properties.properties.deviceName),
        "driver": text(driver.driverName),
        "version": text(driver.driverInfo),
    }


def text(characters: Any) -> str:
    """A C string."""
    return ffi.string(characters).decode(errors="replace")


class Driver:
    """A device that compiles pipelines and tells about them."""

    def __init__(self, physical: Any) -> None:
        features = ffi.new("VkPhysicalDeviceFeatures2*")
        features.sType = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2
        self._alive, chain = [features], features
        for name, kind in FEATURES.items():
            structure = ffi.new(f"VkPhysicalDevice{name}*")
            structure.sType = kind
            chain.pNext, chain = structure, structure
            self._alive.append(structure)
        vk.vkGetPhysicalDeviceFeatures2(physical, features)
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=0, pQueuePriorities=[1.0])
        self._device = vk.vkCreateDevice(
            physical,
            vk.VkDeviceCreateInfo(
                pNext=features, pQueueCreateInfos=[queue], ppEnabledExtensionNames=EXTENSIONS
            ),
            None,
        )

    def compiled(self, kernel: Mapping[str, Any]) -> dict[str, Any]:
        """What the driver says about one kernel, or {"error": why it refuses it}."""
        try:
            pipeline = self._pipeline(kernel)
            described = {
                "subgroup": self._ask(PROPERTIES, pipeline)[0].subgroupSize,
                "statistics": {text(value.name): number(value) for value in self._ask(STATISTICS, pipeline)},
                "assembly": self._assembly(pipeline),
            }
            vk.vkDestroyPipeline(self._device, pipeline, None)
            return described
        except vk.VkError as error:
            return {"error": repr(error)}

    def _pipeline(self, kernel: Mapping[str, Any]) -> Any:
        code = base64.b64decode(kernel["spirv"])
        module = vk.vkCreateShaderModule(
            self._device, vk.VkShaderModuleCreateInfo(codeSize=len(code), pCode=code), None
        )
        required = (
            vk.VkPipelineShaderStageRequiredSubgroupSizeCreateInfo(requiredSubgroupSize=kernel["subgroup"])
            if kernel["subgroup"]
            else None
        )
        stage = vk.VkPipelineShaderStageCreateInfo(
            pNext=required,
            stage=vk.VK_SHADER_STAGE_COMPUTE_BIT,
            module=module,
            pName=kernel["name"],
            pSpecializationInfo=specialization(kernel["specialization"]),
        )
        described = vk.VkComputePipelineCreateInfo(flags=CAPTURE, stage=stage, layout=self._layout(kernel))
        pipeline = vk.vkCreateComputePipelines(self._device, None, 1, [described], None)[0]
        vk.vkDestroyShaderModule(self._device, module, None)
        return pipeline

    def _layout(self, kernel: Mapping[str, Any]) -> Any:
        stage = vk.VK_SHADER_STAGE_COMPUTE_BIT
        sets = [
            vk.vkCreateDescriptorSetLayout(
                self._device,
                vk.VkDescriptorSetLayoutCreateInfo(
                    pBindings=[
                        vk.VkDescriptorSetLayoutBinding(
                            binding=binding,
                            descriptorType=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                            descriptorCount=1,
                            stageFlags=stage,
                        )
                        for binding in bindings
                    ]
                ),
                None,
            )
            for bindings in kernel["bindings"]
        ]
        constants = (
            [vk.VkPushConstantRange(stageFlags=stage, offset=0, size=kernel["constants"])]
            if kernel["constants"]
            else []
        )
        return vk.vkCreatePipelineLayout(
            self._device,
            vk.VkPipelineLayoutCreateInfo(pSetLayouts=sets, pPushConstantRanges=constants),
            None,
        )

    def _ask(self, query: Query, pipeline: Any, fill: Any = None) -> Any:
        """The structures that the driver gives about a pipeline; `fill` makes room for a second answer.

        The Vulkan package's own wrappers leave out the structures' types, which the driver must be given.
        """
        function = ffi.cast(
            f"PFN_{query.call}", vk.lib.vkGetDeviceProcAddr(self._device, query.call.encode())
        )
        about = ffi.new(f"{query.about[0]}*", {"sType": query.about[1], "pipeline": pipeline})
        count = ffi.new("uint32_t*")
        check(function(self._device, about, count, ffi.NULL))
        found = ffi.new(f"{query.structure}[]", [{"sType": query.kind}] * count[0])
        check(function(self._device, about, count, found))
        if fill is not None:
            fill(found)
            check(function(self._device, about, count, found))
        return found

    def _assembly(self, pipeline: Any) -> str:
        room = []

        def make(found: Any) -> None:
            for one in found:
                room.append(ffi.new("char[]", one.dataSize))
                one.pData = room[-1]

        found = self._ask(REPRESENTATIONS, pipeline, make)
        texts = {text(one.name): text(ffi.cast("char*", one.pData)) for one in found}
        return texts.get("Assembly", "")


def specialization(constants: Sequence[tuple[int, int]]) -> Any:
    """Values of specialization constants, all of them words, by their ids; None for none."""
    if not constants:
        return None
    values = ffi.new("uint32_t[]", [value for _, value in constants])
    entries = [
        vk.VkSpecializationMapEntry(constantID=id, offset=4 * index, size=4)
        for index, (id, _) in enumerate(constants)
    ]
    return vk.VkSpecializationInfo(pMapEntries=entries, dataSize=4 * len(entries), pData=values)


def number(value: Any) -> int | float:
    """A statistic, by its format."""
    return (value.value.b32, value.value.i64, value.value.u64, value.value.f64)[value.format]


def check(result: int) -> None:
    """Raises: VkError, where a call failed."""
    if result != vk.VK_SUCCESS:
        raise vk.exception_codes.get(result, vk.VkError)


if __name__ == "__main__":
    main()
