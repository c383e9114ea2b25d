"""What a kernel or an entry must not be: a row per check, each a pure function of plain values.

A function returns what it has against its object, or "".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from specprefill_jax.preflight.cost import cost_of
from specprefill_jax.preflight.kernel import Kernel
from specprefill_jax.preflight.model import waves_per_simd
from specprefill_jax.preflight.report import FAIL, WARN, Entry, Finding, Use, lds_of_valu

LEAST_PRODUCT = 64  # sizes from which on a product belongs onto the matrix unit
MOST_PER_LAYER = {"prefill": 25, "decode": 14}
MOST_LDS_OF_VALU = 0.9
LEAST_WAVES = 2  # per SIMD
FEW_WORKGROUPS, LONG_US = 12, 50.0  # two for each workgroup processor
MOST_REREADS = 2.0
MOST_VGPRS, OF_THREADS = 208, 128
MOST_CONVERTS = 1.0  # per WMMA


@dataclass(frozen=True)
class Build:
    """What a kernel is judged by, beside itself.

    Attributes:
        matrix_unit: whether the target multiplies matrices in the build's number format (WMMA).
    """

    matrix_unit: bool


UseCheck: TypeAlias = Callable[[Use, str, Build], str]
"""A check of a kernel in an entry of that name."""


def wrong_products(use: Use, entry: str, build: Build) -> str:
    """The GPU computes garbage, without an error."""
    wrong = use.kernel.wrong_products
    return f"multiplies matrices that the GPU cannot: {', '.join(wrong)}" if wrong else ""


def subgroup_of_any_size(use: Use, entry: str, build: Build) -> str:
    """The shader was made for one size and adds up other lanes in a subgroup of another, without an error."""
    kernel = use.kernel
    if not kernel.joins_lanes or kernel.required:
        return ""
    return f"joins the lanes of a subgroup and asks for no size of it; the driver takes {kernel.subgroup}"


def spills_in_a_loop(use: Use, entry: str, build: Build) -> str:
    """Every turn stores and loads registers."""
    kernel, numbers = use.kernel, use.kernel.statistics
    spilled = (numbers.spilled_vgprs and _in_a_loop(kernel, "scratch")) or (
        numbers.spilled_sgprs and _in_a_loop(kernel, "lanes")
    )
    if not spilled:
        return ""
    return f"spills {numbers.spilled_vgprs} vector and {numbers.spilled_sgprs} scalar registers in a loop"


def scratch(use: Use, entry: str, build: Build) -> str:
    """Registers in memory."""
    used = use.kernel.statistics.scratch
    return (
        f"uses {used} bytes of scratch memory, {use.kernel.statistics.spilled_vgprs} VGPRs spilled"
        if used
        else ""
    )


def one_lane(use: Use, entry: str, build: Build) -> str:
    """One lane of a GPU is slower than a CPU."""
    kernel = use.kernel
    loops = [loop.turns for loop in kernel.program.loops()]
    if not loops or (kernel.threads > 1 and kernel.lanes_differ):
        return ""
    size = "x".join(map(str, kernel.local))
    same = "" if kernel.threads == 1 else ", all lanes doing the same"
    return f"loops in one lane: workgroups of {size}{same}, turns {', '.join(str(t or '?') for t in loops)}"


def product_without_matrix_unit(use: Use, entry: str, build: Build) -> str:
    """A large product on the vector units."""
    product = use.kernel.product
    if not build.matrix_unit or product is None or use.kernel.wmma:
        return ""
    if min(product.m, product.n, product.k) < LEAST_PRODUCT:
        return ""
    return f"a product of {product.m}x{product.n}x{product.k} ({product.types}) without WMMA"


def matvec_in_single_lanes(use: Use, entry: str, build: Build) -> str:
    """A matrix-vector product whose lanes each sum a row of their own: their loads do not meet in a line."""
    product = use.kernel.product
    per_token = entry.startswith(("decode", "head"))
    if not per_token or product is None or product.kind == "matmul" or use.kernel.joins_lanes:
        return ""
    return f"a matrix-vector product of {product.n}x{product.k} that is no subgroup reduction"


def local_memory_bound(use: Use, entry: str, build: Build) -> str:
    """The vector units wait for local memory."""
    share = lds_of_valu(use.kernel)
    return (
        f"local memory is busy for {share:.0%} of the vector units' cycles"
        if share > MOST_LDS_OF_VALU
        else ""
    )


def few_waves(use: Use, entry: str, build: Build) -> str:
    """Nothing hides the latency of memory."""
    waves = waves_per_simd(use.kernel, use.gpu)
    return f"{waves:g} waves per SIMD" if waves < LEAST_WAVES else ""


def few_workgroups(use: Use, entry: str, build: Build) -> str:
    """Workgroup processors stand idle."""
    if use.workgroups >= FEW_WORKGROUPS or use.prediction.us <= LONG_US:
        return ""
    return f"{use.workgroups} workgroups in {use.prediction.us:.0f} us"


def weights_again(use: Use, entry: str, build: Build) -> str:
    """The order of the workgroups streams weights again and again."""
    again = use.prediction.rereads
    return f"streams its weights {again:g} times" if again > MOST_REREADS else ""


def many_registers(use: Use, entry: str, build: Build) -> str:
    """Close to a spill."""
    kernel = use.kernel
    if kernel.statistics.vgprs <= MOST_VGPRS or kernel.threads != OF_THREADS:
        return ""
    return f"{kernel.statistics.vgprs} VGPRs at {kernel.threads} threads"


def converts(use: Use, entry: str, build: Build) -> str:
    """Operands are converted where they are multiplied."""
    found = use.converts_per_wmma
    return f"{found:.1f} conversions per WMMA in the hot loop" if found > MOST_CONVERTS else ""


CHECKS: tuple[tuple[str, str, UseCheck], ...] = (
    (FAIL, "products", wrong_products),
    (FAIL, "spills", spills_in_a_loop),
    (FAIL, "scratch", scratch),
    (FAIL, "subgroup", subgroup_of_any_size),
    (FAIL, "one lane", one_lane),
    (FAIL, "no WMMA", product_without_matrix_unit),
    (FAIL, "matvec", matvec_in_single_lanes),
    (WARN, "local memory", local_memory_bound),
    (WARN, "waves", few_waves),
    (WARN, "workgroups", few_workgroups),
    (WARN, "re-reads", weights_again),
    (WARN, "registers", many_registers),
    (WARN, "conversions", converts),
)
"""Level, name and function of each check of a kernel."""


def many_dispatches(entry: Entry) -> str:
    """Each dispatch costs some microseconds beside its work."""
    for kind, most in MOST_PER_LAYER.items():
        if entry.layers and entry.name.startswith(kind) and entry.dispatches > most * entry.layers:
            return f"{entry.dispatches / entry.layers:.1f} dispatches per layer, more than {most}"
    return ""


def judge(entries: Iterable[Entry], build: Build) -> tuple[Finding, ...]:
    """All findings of a module: failures first, then slow kernels first.

    What a kernel does in several entries is one finding.
    """
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for entry in entries:
        for use in sorted(entry.uses, key=lambda use: -use.us):
            for level, name, check in CHECKS:
                if text := check(use, entry.name, build):
                    found.setdefault((level, name, use.kernel.name, text), []).append(entry.name)
        if text := many_dispatches(entry):
            found.setdefault((WARN, "dispatches", entry.name, text), []).append(entry.name)
    findings = [Finding(*key, entries=tuple(dict.fromkeys(names))) for key, names in found.items()]
    return tuple(sorted(findings, key=lambda finding: finding.level != FAIL))


def _in_a_loop(kernel: Kernel, kind: str) -> bool:
    return any(
        getattr(cost_of(loop.instructions(), kernel.subgroup), kind) for loop in kernel.program.loops()
    )
