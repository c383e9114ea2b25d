"""The parts of scripts/coop_check that need neither the compiler nor lavapipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specprefill_jax.artifact.locate import embedded
from specprefill_jax.errors import CompileError, TargetError

SCRIPTS = Path(__file__).parents[1] / "scripts"
LIBRARY = embedded("compile/tuning/cooperative-16.mlir").read_text(encoding="utf-8")
BLOCKS = (64, 128)


@dataclass(frozen=True)
class Script:
    """The script and what it is made of."""

    check: ModuleType
    kernels: ModuleType
    kinds: ModuleType
    library: ModuleType


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    sys.path.insert(0, str(SCRIPTS))
    try:
        names = ("coop_check", "coop_kernels", "coop_kinds", "coop_library")
        yield Script(*(__import__(name) for name in names))
    finally:
        sys.path.remove(str(SCRIPTS))


# The library


def test_scaling_changes_sizes_and_nothing_else(script: Script) -> None:
    changed = [
        (before, after)
        for before, after in zip(LIBRARY.split("\n"), script.library.scaled(LIBRARY).split("\n"), strict=True)
        if before != after
    ]
    assert len(changed) == 2 * LIBRARY.count("compilation_info<")
    for before, after in changed:
        assert re.sub(r"\d+", "#", before) == re.sub(r"\d+", "#", after)
        assert before.strip().startswith(("lowering_config = ", "pipeline = #passes workgroup_size = "))
    assert script.library.passes(script.library.scaled(LIBRARY)) == script.library.passes(LIBRARY)


def test_tiles_are_half_as_large_and_subgroups_a_quarter(script: Script) -> None:
    small = script.library.scaled(LIBRARY)
    assert {name: tiles for tiles, name in script.library.tiles(small).items()} == {
        "plain_128x128": "[[64, 64], [32, 16], [0, 0, 16], [8, 8, 8]]",
        "plain_64x128": "[[32, 64], [16, 32], [0, 0, 16], [8, 8, 8]]",
        "batched_64x128": "[[1, 32, 64], [1, 16, 32], [0, 0, 0, 16], [1, 8, 8, 8]]",
        "batched_64x64": "[[1, 32, 32], [1, 16, 16], [0, 0, 0, 16], [1, 8, 8, 8]]",
        "batched_16x64": "[[1, 8, 32], [1, 8, 16], [0, 0, 0, 16], [1, 8, 8, 8]]",
        "batched_16x32": "[[1, 8, 16], [1, 8, 16], [0, 0, 0, 16], [1, 8, 8, 8]]",
    }
    threads = re.findall(r"workgroup_size = (\[.*?\]) subgroup_size = (\d+)", small)
    assert threads == [
        ("[32, 2, 1]", "8"),
        ("[16, 2, 1]", "8"),
        ("[16, 2, 1]", "8"),
        ("[16, 2, 1]", "8"),
        ("[16, 1, 1]", "8"),
        ("[8, 1, 1]", "8"),
    ]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[16, 16, 16]]", "[16, 16, 8]]", r"plain_128x128 of the tuning library has tiles"),
        ("[128, 2, 1] subgroup_size = 32", "[128, 2, 1] subgroup_size = 64", "subgroups of 64"),
        ("[128, 2, 1]", "[64, 2, 1]", "in 64 threads"),
        ("[64, 32], [0, 0, 32]", "[64, 32], [0, 0, 24]", r"tiles \[\[128, 128\], \[64, 32\], \[0, 0, 24\]"),
        ("pipeline = #passes workgroup_size = [128, 2, 1]", "pipeline = #passes", "5 of them"),
    ],
    ids=["another unit", "another subgroup", "too few threads", "part of a unit", "written otherwise"],
)
def test_a_library_that_cannot_be_scaled_is_refused(
    before: str, after: str, message: str, script: Script
) -> None:
    with pytest.raises(TargetError, match=message):
        script.library.scaled(LIBRARY.replace(before, after, 1))


def test_what_the_compiler_chose_is_scaled_like_ours_and_matched_first(script: Script) -> None:
    gates = kernel(script, pipeline="Theirs", tiles="[[32, 64], [16, 32], [0, 0, 32], [16, 16, 16]]")
    both = script.library.scaled(script.check.with_compilers_choice(LIBRARY, gates))
    assert script.library.tiles(both)["[[16, 32], [8, 16], [0, 0, 16], [8, 8, 8]]"] == "compilers"
    assert "pipeline = #iree_gpu.spirv_pipeline<Theirs> workgroup_size = [16, 2, 1] subgroup_size = 8" in both
    assert "tensor<32x256xf32>" in both
    assert re.search(r"foreach_match in %variant\s+@compilers -> @annotate,\s+@plain_128x128", both)


# The kinds


def test_every_kind_of_the_true_models_has_their_shapes(script: Script) -> None:
    shapes = {}
    for name in ("0.8b", "4b"):
        kinds = script.kinds.kinds(script.check.presets()[name], (64, 256), 4096)
        assert len({(tokens, kind.name) for tokens, kind in kinds}) == len(kinds) == 17 + 20 + 2
        shapes[name] = {(kind.name, n): [each.shape for each in kind.inputs] for n, kind in kinds}
    assert shapes["0.8b"]["in_proj_qkvz", 256] == [(256, 1024), (8192, 1024)]
    assert shapes["4b"]["in_proj_qkvz", 256] == [(256, 2560), (12288, 2560)]
    assert shapes["4b"]["out_proj", 256] == [(256, 4096), (2560, 4096)]
    assert shapes["4b"]["down_proj", 256] == [(256, 9216), (2560, 9216)]
    assert shapes["0.8b"]["attention: q k^T", 256] == [(8, 256, 256), (4096, 2, 256)]
    assert shapes["4b"]["attention: p v", 1] == [(4, 16, 1, 4096), (4096, 4, 256)]
    assert shapes["4b"]["delta: inverse in 64s, doubling", 256] == [(128, 64, 128)]


def test_numpy_says_of_every_kind_what_jax_computes(script: Script) -> None:
    for tokens, kind in script.kinds.kinds(script.check.presets()["tiny"], BLOCKS, 256):
        inputs = script.check.draw(kind)
        results = jax.jit(kind.spelled)(*map(jnp.asarray, inputs))
        results = results if isinstance(results, tuple) else (results,)
        expected = kind.expected(*(values.astype(np.float64) for values in inputs))
        row = script.check.compared(
            script.check.Row("tiny", kind.name, tokens), list(map(np.asarray, results)), expected
        )
        assert row.status == "ok", row


# The bound


def test_the_bound_of_a_sum_by_hand(script: Script) -> None:
    a, b, added = np.array([[3.0, 4.0]]), np.array([[1.0], [0.5]]), np.array([[6.0]])
    plain = script.kinds.contracted(a, b)
    assert (plain.value, plain.bound) == (5.0, pytest.approx(8 * 2.0**-24 * np.sqrt(2 * 13)))
    more = script.kinds.contracted(a, b, added, stored=np.dtype(np.float16))
    assert more.value == 11.0
    assert more.bound == pytest.approx(8 * 2.0**-24 * np.sqrt(3 * 49) + 11 * 2.0**-10)


@pytest.mark.parametrize("fault", ["a term left out", "sums in f16", "nothing"])
def test_the_bound_tells_faults_from_f32_sums(fault: str, script: Script) -> None:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(np.float16) for shape in ((32, 9216), (9216, 32)))
    right = script.kinds.contracted(a.astype(np.float64), b.astype(np.float64))
    if fault == "a term left out":
        sums = a[:, 1:].astype(np.float32) @ b[1:].astype(np.float32)
    elif fault == "sums in f16":
        halves = [a[:, i::2].astype(np.float32) @ b[i::2].astype(np.float32) for i in range(2)]
        sums = (halves[0].astype(np.float16) + halves[1].astype(np.float16)).astype(np.float32)
    else:
        sums = a.astype(np.float32) @ b.astype(np.float32)
    row = script.check.compared(script.check.Row("x", "x", 1), [sums], [right])
    assert (row.status == "ok") == (fault == "nothing")


def test_what_is_no_number_is_wrong(script: Script) -> None:
    right = script.kinds.Expected(np.ones(3), np.ones(3))
    row = script.check.compared(script.check.Row("x", "x", 1), [np.array([1.0, np.nan, 1.0])], [right])
    assert (row.status, row.note) == ("WRONG", "errors exceed their bound")


# The kernels


def kernel(script: Script, **changes: object) -> object:
    """A kernel as the scaled library makes it; fields are changed by their names."""
    plain = script.kernels.Kernel(
        operation="matmul_like_32x256x1024_f16xf16xf32",
        body=("arith.mulf",),
        pipeline=script.kernels.OURS,
        tiles="[[64, 64], [32, 16], [0, 0, 16], [8, 8, 8]]",
        workgroup="[64, 2, 1]",
        options="{pipeline_depth = 1 : i64}",
        subgroup=8,
        products=32,
        repaired=0,
    )
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"pipeline": "Theirs"}, "the true build has the tile plain_128x128, this has IREE's own"),
        ({"tiles": "[[32, 64], [16, 32], [0, 0, 16], [8, 8, 8]]"}, "this has plain_64x128"),
        ({"products": 0}, "no cooperative product in the shader"),
        ({"repaired": 32}, "the compiler converts the operands to f32"),
        ({"subgroup": 0}, "the kernel asks for subgroups of 0"),
    ],
    ids=["as it should be", "pipeline", "tile", "no product", "f32 operands", "no subgroup size"],
)
def test_a_kernel_that_is_not_as_in_the_true_build_is_a_fault(
    changes: dict[str, object], message: str, script: Script
) -> None:
    true = kernel(script, tiles="[[128, 128], [64, 32], [0, 0, 32], [16, 16, 16]]")
    library = script.library.scaled(LIBRARY)
    found = script.check.fault([kernel(script, **changes)], true, library, LIBRARY)
    assert (message in found) if message else not found


def test_a_kernel_that_the_true_build_lacks_is_a_fault(script: Script) -> None:
    found = script.check.fault([kernel(script)], None, LIBRARY, LIBRARY)
    assert found.startswith("the true build has no such kernel")


def test_a_kernel_beside_it_may_not_depend_on_a_subgroup_size(script: Script) -> None:
    true = kernel(script, tiles="[[128, 128], [64, 32], [0, 0, 32], [16, 16, 16]]")
    beside = kernel(script, operation="reduction_256x1024_f32", pipeline="SubgroupReduce", products=0)
    found = script.check.fault([kernel(script), beside], true, script.library.scaled(LIBRARY), LIBRARY)
    assert found.startswith("reduction_256x1024_f32 depends on a subgroup size")


def test_a_kind_is_one_product(script: Script) -> None:
    with pytest.raises(CompileError, match="2 kernels with products"):
        script.check.contraction([kernel(script), kernel(script)])


def test_the_pipeline_is_ours_only_with_exactly_our_passes(script: Script) -> None:
    name = script.kernels.pipeline_of
    assert (
        name('#iree_codegen.pass_pipeline<"canonicalize,cse">>}', "canonicalize,cse") == script.kernels.OURS
    )
    assert name('#iree_codegen.pass_pipeline<"canonicalize">>}', "canonicalize,cse") != script.kernels.OURS
    assert (
        name("#iree_gpu.spirv_pipeline<SubgroupReduce> workgroup_size = [64, 1, 1]>", "cse")
        == "SubgroupReduce"
    )


def test_a_body_is_axes_and_operations_from_the_contraction_on(script: Script) -> None:
    text = """
  %9 = arith.index_castui %0 : i32 to index
  %12 = linalg.generic {indexing_maps = [#m0, #m1], iterator_types = ["parallel", "reduction"]} ins(%1 : x) {
    %13 = arith.extf %in : f16 to f32
  }
  %15 = linalg.generic {indexing_maps = [#m2], iterator_types = ["parallel"]} ins(%12 : x) {
    %16 = math.exp %in : f32
  }"""
    assert script.kernels.body_of(text) == (
        'indexing_maps = [#m0, #m1], iterator_types = ["parallel", "reduction"]',
        "arith.extf",
        'indexing_maps = [#m2], iterator_types = ["parallel"]',
        "math.exp",
    )
    assert script.kernels.body_of("%1 = arith.addf %2, %3 : f32") == ()
