"""The single products of the models, compiled for one GPU and run as they are on another.

Our runtime refuses an artifact that was made for another device, and must. These are no artifacts: each
module is one product, its result is compared with what it must be, and a device runs it only if it offers
what it asks for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from true_shapes import PRESETS, presets, say

from gpu.facts import Described, NotKnown, Product, describe, open_target
from gpu.plan import Plan
from gpu.record import Check
from specprefill_jax.runtime.device import Device

LIST = "kernels.json"
# Norm of the difference from the product in f64, in units of that product's. Sums in f32 of 9,216 terms at
# most, which a matrix unit may truncate at every step of 16, are below 7e-5 (576 steps of 2^-23 at worst).
# Sums that are rounded to f16 (2e-4 already at the end), or one wrong element in two million, are above.
MOST_DIFFERENCE = 1e-4
ROUNDS = 5
# A cooperative product of the tuning library and of IREE's own pipeline; no target here has another size.
SIZE = 16


@dataclass(frozen=True)
class Kernel:
    """One product: y = x wᵀ, or of a batch of matrices.

    Attributes:
        left, right: shapes of the operands, f16.
        equation: which axes they share.
        subgroups: sizes that its shaders ask for.
        types: of its cooperative products; empty where it has none.
        repaired: cooperative products whose operands the audit put right.
    """

    name: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    equation: str
    subgroups: tuple[int, ...] = ()
    types: tuple[str, ...] = ()
    repaired: int = 0

    @property
    def file(self) -> str:
        """Its module's name."""
        return self.name.replace(" ", "-").replace(",", "") + ".vmfb"

    @property
    def product(self) -> Product | None:
        """What it asks of a matrix unit."""
        if not self.types:
            return None
        a, b, result = self.types
        return Product(SIZE, SIZE, SIZE, (a, b, result))


def kernels_of(plan: Plan) -> list[Kernel]:
    """Each projection once per shape, as the models spell it, and products of heads as attention has them."""
    from specprefill_jax.models.checkpoint import parameter_specs

    found: dict[tuple[object, ...], Kernel] = {}

    def add(name: str, left: tuple[int, ...], right: tuple[int, ...], equation: str) -> None:
        found.setdefault((left, right, equation), Kernel(name, left, right, equation))

    for role, preset in PRESETS.items():
        config = presets()["tiny" if plan.tiny else preset]
        for spec in parameter_specs(config):
            if spec.kind != "matrix" or spec.path == ("embed_tokens",):
                continue
            kind, (out, width) = str(spec.path[-1]), spec.shape
            if kind == "in_proj_ba":  # few outputs, each in a row of its own
                add(f"{role} {kind}, block of {plan.block}", (out, width), (plan.block, width), "nk,tk->nt")
                continue
            add(f"{role} {kind}, block of {plan.block}", (plan.block, width), (out, width), "tk,nk->tn")
            if kind == "gate_up_proj":
                for tokens in (64, 1):
                    add(f"{role} {kind}, block of {tokens}", (tokens, width), (out, width), "tk,nk->tn")
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        queries, slots = heads // groups * plan.block, 4 * plan.block
        add(f"{role} q k, {slots} slots", (groups, queries, size), (slots, groups, size), "gqd,cgd->gqc")
        add(f"{role} p v, {slots} slots", (groups, queries, slots), (slots, groups, size), "gqc,cgd->gqd")
    return list(found.values())


def build_kernels(plan: Plan, folder: Path) -> None:
    """Compile each for the GPU that it is of, with its tuning, and audited.

    Raises:
        CompileError: the compiler or the audit refuses one.
    """
    from specprefill_jax.aot.audit import compile_audited
    from specprefill_jax.aot.executables import read_executables
    from specprefill_jax.aot.targets import target_for

    target, built = target_for(plan.kernels), []
    folder.mkdir(parents=True, exist_ok=True)
    for kernel in kernels_of(plan):
        say(f"compiling {kernel.name} for {plan.kernels}")
        audited = compile_audited(text_of(kernel), target, kernel.name)
        executables = read_executables(audited.module, kernel.name)
        types = {product.types for one in executables for product in one.shader.products()}
        assert len(types) <= 1, "one product in one module"
        (folder / kernel.file).write_bytes(audited.module)
        built.append(
            {
                **asdict(kernel),
                "subgroups": sorted({one.subgroup for one in executables} - {0}),
                "types": next((a, b, result) for a, b, _, result in types) if types else (),
                "repaired": audited.repaired,
            }
        )
    (folder / LIST).write_text(json.dumps(built, indent=1) + "\n", encoding="utf-8")


def text_of(kernel: Kernel) -> str:
    """The program of one kernel, as an export writes it."""
    import jax
    import jax.numpy as jnp

    from specprefill_jax.aot.lower import Entry, module_text

    def product(_: tuple[()], x: jax.Array, w: jax.Array, state: tuple[()]) -> tuple[jax.Array]:
        return (jnp.einsum(kernel.equation, x, w, preferred_element_type=jnp.float32),)

    inputs = tuple(jax.ShapeDtypeStruct(shape, jnp.float16) for shape in (kernel.left, kernel.right))
    return module_text("product", [], [Entry("product", product, inputs, ())])


def read_kernels(folder: Path) -> list[Kernel]:
    """Those that were built.

    Raises:
        OSError, ValueError: none were.
    """
    fields = json.loads((folder / LIST).read_text(encoding="utf-8"))
    lists = ("left", "right", "subgroups", "types")
    return [Kernel(**{**one, **{name: tuple(one[name]) for name in lists}}) for one in fields]


def run_kernels(plan: Plan, folder: Path) -> Iterator[Check]:
    """Each on the device of the plan's target, where that offers what it asks for."""
    device, kernels = open_target(plan.target), read_kernels(folder)
    try:
        described = describe(device)
    except NotKnown as error:
        yield Check(f"{len(kernels)} kernels", "not offered", f"what the device offers is not known: {error}")
        return
    for kernel in kernels:
        yield run_kernel(kernel, folder, device, described)


def run_kernel(kernel: Kernel, folder: Path, device: Device, described: Described) -> Check:
    """One of them."""
    lacking = described.lacks(kernel.product, frozenset(kernel.subgroups))
    if lacking:
        return Check(kernel.name, "not offered", f"the device has no {lacking}")
    x, w = operands(kernel)
    call = load(folder / kernel.file, device, x, w)
    difference = difference_of(device.transfer.read(call()), reference(kernel, x, w))
    seconds = min(_timed(call) for _ in range(ROUNDS))
    speed = 2 * x.size * w.size / _shared(kernel, x) / seconds / 1e12
    product = kernel.product or "no cooperative product"
    return Check.of(
        kernel.name,
        difference <= MOST_DIFFERENCE,
        f"differs by {difference:.1e} of its size, {MOST_DIFFERENCE:.0e} is allowed; {product}; "
        f"{seconds * 1e3:.2f} ms with the call, {speed:.3g} Tflop/s",
        difference=difference,
        allowed=MOST_DIFFERENCE,
        ms=seconds * 1e3,
        repaired=kernel.repaired,
    )


def operands(kernel: Kernel) -> tuple[np.ndarray, np.ndarray]:
    """Normal numbers, in f16, that are the same each time."""
    generator = np.random.default_rng(0)
    x, w = (generator.standard_normal(shape, np.float32) for shape in (kernel.left, kernel.right))
    return x.astype(np.float16), w.astype(np.float16)


def reference(kernel: Kernel, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The product of the same numbers in f64."""
    return np.einsum(kernel.equation, x.astype(np.float64), w.astype(np.float64), optimize=True)


def difference_of(found: np.ndarray, wanted: np.ndarray) -> float:
    """Norm of the difference, in units of what is wanted; infinite for another shape or no number."""
    if found.shape != wanted.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def load(path: Path, device: Device, *arrays: np.ndarray) -> Callable[[], Any]:
    """A call of the module's `product` on arrays that lie on the device, where the result stays."""
    import iree.runtime as iree

    instance = iree.VmInstance()
    module = iree.VmModule.mmap(instance, str(path))
    context = iree.VmContext(instance, [iree.create_hal_module(instance, device.hal), module])
    function = module.lookup_function("product")
    assert function is not None, "every kernel's module has it"
    local, usage = int(iree.MemoryType.DEVICE_LOCAL), int(iree.BufferUsage.DEFAULT)
    views: list[Any] = [
        device.hal.allocator.allocate_buffer_copy(
            memory_type=local,
            allowed_usage=usage,
            device=device.hal,
            buffer=array,
            element_type=iree.HalElementType.FLOAT_16,
        )
        for array in arrays
    ]

    def call() -> Any:
        arguments, results = iree.VmVariantList(len(views)), iree.VmVariantList(1)
        for view in views:
            arguments.push_ref(view.ref)
        context.invoke(function, arguments, results)
        return results.get_as_object(0, iree.HalBufferView)

    return call


def _shared(kernel: Kernel, x: np.ndarray) -> int:
    """What the sizes of both operands count twice: axes that the result has from both."""
    left, right = kernel.equation.partition("->")[0].split(",")
    axes = dict(zip(left, x.shape, strict=True))
    both = set(left) & set(right)
    return int(np.prod([axes[axis] for axis in both], dtype=np.int64))


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
