"""The Vulkan devices of a machine: name, driver, subgroup sizes, products of their matrix units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gpu.plan import Plan
from gpu.record import Check
from specprefill_jax.artifact.targets import known_target
from specprefill_jax.runtime.device import Device, open_matching

EXTENSION = "VK_KHR_cooperative_matrix"
QUERY = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
# VkComponentTypeKHR and the scope of a subgroup, as the extension numbers them.
COMPONENTS = ("f16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
SUBGROUP = 3


@dataclass(frozen=True, order=True)
class Product:
    """A product that one subgroup does on the matrix unit: its size, and the types of a, b and the result."""

    m: int
    n: int
    k: int
    types: tuple[str, str, str]

    def __str__(self) -> str:
        a, b, result = self.types
        operands = a if a == b else f"{a}·{b}"
        return f"{self.m}x{self.n}x{self.k} {operands}->{result}"


@dataclass(frozen=True)
class Described:
    """A device as its driver describes it."""

    name: str
    driver: str
    subgroup_sizes: tuple[int, int]
    products: tuple[Product, ...]

    def lacks(self, product: Product | None, subgroups: frozenset[int]) -> str:
        """What it does not offer of a kernel's product and subgroup sizes, in words; "" where it has all."""
        least, most = self.subgroup_sizes
        missing = [f"subgroups of {size}" for size in sorted(subgroups) if not least <= size <= most]
        if product is not None and product not in self.products:
            missing.append(f"cooperative {product}")
        return ", ".join(missing)


class NotKnown(RuntimeError):
    """Nothing here can ask the drivers."""


def describe_devices() -> tuple[Described, ...]:
    """Every Vulkan device.

    Raises:
        NotKnown: the package `vulkan` is missing, or no driver answers it.
    """
    try:
        from specprefill_jax.preflight.child import vk
    except (ImportError, OSError) as error:
        raise NotKnown(f"the Python package `vulkan` cannot be used: {error}") from error
    version = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 3, 0))
    try:
        instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=version), None)
        return tuple(_describe(instance, device) for device in vk.vkEnumeratePhysicalDevices(instance))
    except vk.VkError as error:
        raise NotKnown(f"Vulkan answers {error!r}") from error


def _describe(instance: Any, device: Any) -> Described:
    from specprefill_jax.preflight.child import described, ffi, vk

    words = described(device)
    sizes = ffi.new("VkPhysicalDeviceSubgroupSizeControlProperties*")
    sizes.sType = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES
    properties = ffi.new("VkPhysicalDeviceProperties2*")
    properties.sType, properties.pNext = vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, sizes
    vk.vkGetPhysicalDeviceProperties2(device, properties)
    extensions = {found.extensionName for found in vk.vkEnumerateDeviceExtensionProperties(device, None)}
    return Described(
        name=words["device"],
        driver=f"{words['driver']} {words['version']}",
        subgroup_sizes=(sizes.minSubgroupSize, sizes.maxSubgroupSize),
        products=_products(instance, device) if EXTENSION in extensions else (),
    )


def _products(instance: Any, device: Any) -> tuple[Product, ...]:
    """The package's own wrapper leaves out the structures' types, which the driver must be given."""
    from specprefill_jax.preflight.child import check, ffi, vk

    function = ffi.cast(f"PFN_{QUERY}", vk.lib.vkGetInstanceProcAddr(instance, QUERY.encode()))
    count = ffi.new("uint32_t*")
    check(function(device, count, ffi.NULL))
    kind = vk.VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR
    found = ffi.new("VkCooperativeMatrixPropertiesKHR[]", [{"sType": kind}] * count[0])
    check(function(device, count, found))
    return tuple(sorted({made for one in found if (made := _product(one)) is not None}))


def _product(one: Any) -> Product | None:
    """None for products of whole workgroups, and those of types without a name here."""
    numbers = (one.AType, one.BType, one.ResultType)
    if one.scope != SUBGROUP or not all(number < len(COMPONENTS) for number in numbers):
        return None
    a, b, result = (COMPONENTS[number] for number in numbers)
    return Product(one.MSize, one.NSize, one.KSize, (a, b, result))


def open_target(target: str) -> Device:
    """The Vulkan device that is meant by a target's name.

    Raises:
        DeviceError: it is not here.
    """
    known = known_target(target)
    return open_matching(target, known.driver, known.match)


def describe(device: Device) -> Described:
    """What its driver says about an open device.

    Raises:
        NotKnown: as `describe_devices`, and where it is not among them.
    """
    for found in describe_devices():
        if device.description.startswith(found.name):
            return found
    raise NotKnown(f"{device.description} is not among the devices that Vulkan lists")


def run_facts(plan: Plan) -> Iterator[Check]:
    """Every device with what it offers, and the one that is checked."""
    try:
        for found in describe_devices():
            least, most = found.subgroup_sizes
            products = ", ".join(map(str, found.products)) or "none"
            words = f"{found.driver}; subgroups of {least} to {most}; cooperative products: {products}"
            yield Check(found.name, "passed", words, asdict(found))
    except NotKnown as error:
        yield Check("cooperative products", "not offered", str(error))
    device = open_target(plan.target)
    facts = device.facts
    told: dict[str, Any] = {"device": device.description}
    words = device.description
    if facts is not None:
        told |= {"driver": facts.driver, "memory": facts.heap_bytes}
        words += f"; {facts.heap_bytes / 1e9:.1f} GB"
    yield Check(f"the device for {plan.target}", "passed", words, told)
