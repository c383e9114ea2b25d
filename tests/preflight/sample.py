"""Small kernels, shaders and modules made by hand."""

from __future__ import annotations

from dataclasses import replace

from specprefill_jax.aot.spirv import MAGIC, Shader
from specprefill_jax.artifact.schedule import Dispatch
from specprefill_jax.preflight.gpu import Gpu, known_gpu
from specprefill_jax.preflight.isa import parse
from specprefill_jax.preflight.kernel import Kernel, Statistics, product_of
from specprefill_jax.preflight.model import Prediction
from specprefill_jax.preflight.report import Entry, Use

GPU: Gpu = known_gpu("radeon-780m")
GEMM = "prefill_T256_C4096_dispatch_7_matmul_like_256x6144x1024_f16xf16xf32"
MATVEC = "decode_C4096_dispatch_3_matvec_like_6144x1024_f16xf16xf32"

# A loop of 31 turns around two WMMA, as ACO writes it.
WMMA_LOOP = """
BB0:
	s_mov_b32 s6, 0                                             ; be860080
	buffer_load_b128 v[8:11], v6, s[8:11], 0 offen              ; e05c0000 80420806
BB1:
	s_add_u32 s6, s6, 32                                        ; 8006a006
	ds_load_b128 v[0:3], v9                                     ; d9fc0000
	s_waitcnt lgkmcnt(0)                                        ; bf89fc07
	v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]   ; cc404000
	v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]   ; cc404000
	s_cmpk_ge_i32 s6, 0x3e0                                     ; b30603e0
	s_cbranch_scc0 BB1                                          ; bfa1ff60
BB5:
	buffer_store_b128 v[0:3], v6, s[8:11], 0 offen              ; e05c0000
	s_endpgm                                                    ; bfb00000
"""


def kernel(name: str = GEMM, assembly: str = WMMA_LOOP, **changes: object) -> Kernel:
    """A kernel without fault; statistics are changed by their own names."""
    numbers = {field: value for field, value in changes.items() if field in Statistics.__dataclass_fields__}
    others = {field: value for field, value in changes.items() if field not in numbers}
    plain = Kernel(
        name=name,
        product=product_of(name),
        local=(64, 2, 1),
        subgroup=32,
        required=32,
        statistics=Statistics(
            vgprs=128, sgprs=64, spilled_vgprs=0, spilled_sgprs=0, scratch=0, lds=16384, instructions=11
        ),
        program=parse(assembly),
        wrong_products=(),
        joins_lanes=True,
        lanes_differ=True,
    )
    statistics = replace(plain.statistics, **numbers)
    return replace(plain, statistics=statistics, **others)


def use(of: Kernel, *, workgroups: int = 192, us: float = 100.0, rereads: float = 1.0, count: int = 1) -> Use:
    """A kernel as an entry dispatches it, with a prediction made by hand."""
    dispatch = Dispatch(of.name, (workgroups, 1, 1), {"1": 6144 * 1024 * 2}, count)
    return Use(of, dispatch, Prediction(us=us, limit="valu", bytes=1e6, rereads=rereads), GPU)


def entry(*uses: Use, name: str = "prefill_T256_C4096", layers: int = 24) -> Entry:
    """An entry that dispatches these."""
    return Entry(name, layers, uses)


def shader(*instructions: tuple[int, ...]) -> Shader:
    """SPIR-V of (opcode, operand, ...) rows."""
    words = [MAGIC, 0x10600, 0, 1000, 0]
    for opcode, *operands in instructions:
        words += [(len(operands) + 1) << 16 | opcode, *operands]
    return Shader(tuple(words))
