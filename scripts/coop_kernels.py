"""What the compiler makes of a program: its kernels as they enter code generation, and their products."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from specprefill_jax.aot.audit import audit
from specprefill_jax.aot.compiler import compile_module
from specprefill_jax.aot.executables import read_executables
from specprefill_jax.aot.targets import Target

OURS = "own"  # the pipeline that has the library's list of passes
_FUNCTION = re.compile(r"func\.func @(?P<name>\w+)\(\)[^\n]*?translation_info<pipeline = (?P<rest>[^\n]*)")
_WORKGROUP = re.compile(r"workgroup_size = (\[[\d, ]+\])(?: subgroup_size = \d+)?(?:, (\{[^}]*\}))?")
_TILES = re.compile(r"lowering_config<tile_sizes = (\[\[[\d, \[\]]*\]\])>")
_OPERATION = re.compile(r"_dispatch_\d+_?")
# What a body consists of, in order: how its operands are indexed, and what is done with their elements.
_PIECE = re.compile(r"indexing_maps = \[.*?\], iterator_types = \[.*?\]|(?<== )(?:arith|math)\.\w+(?= %)")


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        operation: what its name says, sizes included: matmul_like_256x8192x1024_f16xf16xf32.
        body: its contraction and what follows it, without sizes: axes and operations.
        pipeline: `OURS`, or the name of the compiler's.
        tiles: the tile sizes that it is configured by; "" for none.
        workgroup, options: what else its configuration says, as it is written there.
        subgroup: the subgroup size that it requires, or 0.
        products: cooperative multiply-adds in its shader; all of them of the target's kinds.
        repaired: how many of them the audit had to put right.
    """

    operation: str
    body: tuple[str, ...]
    pipeline: str
    tiles: str
    workgroup: str
    options: str
    subgroup: int
    products: int
    repaired: int

    @property
    def is_contraction(self) -> bool:
        """Whether it sums products of matrices."""
        return self.operation.startswith(("matmul", "batch_matmul"))


def compiled(text: str, target: Target, name: str, passes: str) -> tuple[bytes, tuple[Kernel, ...]]:
    """The audited module of a program, and its kernels.

    Raises:
        CompileError: the compiler refuses the program, or the audit its shaders; names `name`.
    """
    with tempfile.TemporaryDirectory(prefix="specprefill-") as folder:
        flag = f"--iree-hal-dump-executable-configurations-to={folder}"
        module = compile_module(text, (*target.flags, flag), name, subgroup=target.reduction_size)
        configured = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.mlir"))]
    audited = audit(module, target.cooperative, name)
    before = {kernel.name: kernel.shader.products() for kernel in read_executables(module, name)}
    after = {kernel.name: kernel for kernel in read_executables(audited.module, name)}
    kernels = []
    for mlir in configured:
        for function in _FUNCTION.finditer(mlir):
            shader = after[function["name"]]
            types = [product.types for product in shader.shader.products()]
            kernels.append(
                Kernel(
                    operation=_OPERATION.split(function["name"], maxsplit=1)[-1],
                    body=body_of(mlir),
                    pipeline=pipeline_of(function["rest"], passes),
                    tiles=_found(_TILES, mlir),
                    workgroup=_found(_WORKGROUP, function["rest"]),
                    options=_found(_WORKGROUP, function["rest"], 2),
                    subgroup=shader.subgroup,
                    products=len(types),
                    repaired=sum(product.types not in types for product in before[shader.name]),
                )
            )
    return audited.module, tuple(kernels)


def _found(pattern: re.Pattern[str], text: str, group: int = 1) -> str:
    found = pattern.search(text)
    return (found and found[group]) or ""


def pipeline_of(information: str, passes: str) -> str:
    """`OURS` for exactly these passes, otherwise what the compiler calls it."""
    if f'pass_pipeline<"{passes}">' in information:
        return OURS
    return (re.match(r"#iree_\w+\.\w+<(\w+)", information) or re.match(r"(\S+)", information) or [""])[1]


def body_of(mlir: str) -> tuple[str, ...]:
    """From the first contraction on."""
    start = mlir.find('"reduction"')
    line = mlir.rfind("\n", 0, max(start, 0))
    return tuple(_PIECE.findall(mlir[line:])) if start >= 0 else ()
