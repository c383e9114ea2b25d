"""What is known about a kernel before it runs: from its name, its shader, and the driver's compiler."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from specprefill_jax.aot.spirv import Shader
from specprefill_jax.aot.targets import Products
from specprefill_jax.preflight.cost import Cost, cost_of
from specprefill_jax.preflight.isa import ASSUMED_TURNS, Instruction, Loop
from specprefill_jax.preflight.replay import replay

# IREE's own names: ..._dispatch_12_matmul_like_16x64x64x128_f16xf16xf32, the last three sizes are M, N and K.
_NAME = re.compile(r"^(?P<entry>.*?)_dispatch_\d+(?:_(?P<operation>.*))?$")
_PRODUCT = re.compile(
    r"^(?:batch_)?(?P<kind>matmul|matvec|vecmat)[a-z_]*_(?P<sizes>\d+(?:x\d+)+)_(?P<types>[a-z]+\d+(?:x[a-z]+\d+)*)$"
)
_EXECUTION_MODE, _LOCAL_SIZE, _DECORATE, _BUILTIN = 16, 17, 71, 11
_LANE_BUILTINS = (
    27,
    28,
    29,
    41,
)  # LocalInvocationId, GlobalInvocationId, LocalInvocationIndex, SubgroupLocal..


@dataclass(frozen=True)
class Product:
    """A product of matrices, [batch, M, K] x [batch, K, N], or of a matrix and a vector (M is 1)."""

    kind: str
    batch: int
    m: int
    n: int
    k: int
    types: str


@dataclass(frozen=True)
class Statistics:
    """The driver's own numbers: registers, how many of them are spilled, bytes of memory, instructions."""

    vgprs: int
    sgprs: int
    spilled_vgprs: int
    spilled_sgprs: int
    scratch: int
    lds: int
    instructions: int


@dataclass(frozen=True)
class Stretch:
    """What is in one loop of a kernel and in no inner one.

    Attributes:
        cost: of one turn, for one wave.
        latency: cycles of one turn of a wave that is alone.
        turns: in all.
    """

    cost: Cost
    latency: float
    turns: int


@dataclass(frozen=True)
class Kernel:
    """One kernel as the target's driver compiles it.

    Attributes:
        name: of its entry point.
        product: the product of matrices that it is, if one.
        local: sizes of a workgroup.
        subgroup: lanes of a wave.
        required: the lanes of a wave that it asks for; 0 where the driver chooses.
        statistics: the driver's.
        program: its instructions.
        wrong_products: cooperative products in it that the target lacks, in words.
        joins_lanes: whether it reduces over, or moves between, the lanes of a subgroup.
        lanes_differ: whether its lanes do different things.
    """

    name: str
    product: Product | None
    local: tuple[int, ...]
    subgroup: int
    required: int
    statistics: Statistics
    program: Loop
    wrong_products: tuple[str, ...]
    joins_lanes: bool
    lanes_differ: bool

    @property
    def operation(self) -> str:
        """Its name without the entry that it was found in first, and without its number."""
        found = _NAME.match(self.name)
        return (found and found["operation"]) or "scalars"

    @property
    def threads(self) -> int:
        """Lanes of a workgroup."""
        return math.prod(self.local)

    @property
    def waves(self) -> int:
        """Waves of a workgroup."""
        return -(-self.threads // self.subgroup)

    @cached_property
    def wmma(self) -> int:
        """WMMA instructions in the program's text."""
        return round(self._once(self.program).wmma)

    @cached_property
    def hot(self) -> Loop | None:
        """The loop that does the work: the inner one of those with the most WMMA, or else the longest."""

        def rank(loop: Loop) -> tuple[float, int]:
            wmma, length = self._once(loop).wmma, sum(1 for _ in loop.instructions())
            return wmma, -length if wmma else length

        return max(self.program.loops(), key=rank, default=None)

    @cached_property
    def hot_cost(self) -> Cost:
        """Of one turn of the hot loop; of the whole kernel where there is no loop."""
        return self._once(self.hot or self.program)

    @cached_property
    def cost(self) -> Cost:
        """Of one wave, all turns of all loops."""
        total = Cost()
        for stretch in self.stretches:
            total = total.plus(stretch.cost, stretch.turns)
        return total

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """What it consists of, the stretch outside all loops first."""
        return tuple(self._stretches(self.program, 1))

    def _stretches(self, loop: Loop, around: int) -> Iterator[Stretch]:
        turns = around * (loop.turns or ASSUMED_TURNS)
        own = [item for item in loop.body if isinstance(item, Instruction)]
        latency = replay(own, self.subgroup, repeated=turns > 1)
        yield Stretch(cost_of(own, self.subgroup), latency, turns)
        for item in loop.body:
            if isinstance(item, Loop):
                yield from self._stretches(item, turns)

    def _once(self, loop: Loop) -> Cost:
        return cost_of(loop.instructions(), self.subgroup)


def product_of(name: str) -> Product | None:
    """The product of matrices that a kernel is, by its name."""
    found = _NAME.match(name)
    product = _PRODUCT.match((found and found["operation"]) or "")
    if product is None:
        return None
    *batch, m, n, k = (1, 1, *map(int, product["sizes"].split("x")))
    if product["kind"] != "matmul":
        batch, m = [*batch, m], 1
    return Product(product["kind"], math.prod(batch), m, n, k, product["types"])


def local_size(shader: Shader) -> tuple[int, ...]:
    """Sizes of a workgroup.

    Raises:
        ValueError: the shader does not say.
    """
    for instruction in shader.instructions:
        if instruction.opcode == _EXECUTION_MODE and instruction.operands[1] == _LOCAL_SIZE:
            return instruction.operands[2:5]
    raise ValueError(f"{shader.name} does not say how large a workgroup is")


def wrong_products(shader: Shader, products: Products) -> tuple[str, ...]:
    """Cooperative products of a shader that are not among `products`, each kind once."""
    found = {f"{a} x {b} + {c} -> {result}" for a, b, c, result in shader.products_beside(products)}
    return tuple(sorted(found))


def lanes_differ(shader: Shader) -> bool:
    """Whether lanes share the work: they ask for their number, or multiply cooperative matrices together."""
    return bool(shader.products()) or any(
        instruction.opcode == _DECORATE
        and instruction.operands[1] == _BUILTIN
        and instruction.operands[2] in _LANE_BUILTINS
        for instruction in shader.instructions
    )
