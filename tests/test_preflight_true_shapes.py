"""The parts of scripts/preflight_true_shapes that need no compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import preflight_true_shapes

from specprefill_jax.aot.targets import target_for
from specprefill_jax.artifact.locate import embedded
from specprefill_jax.preflight.report import Memory, ModuleReport
from tests.preflight.sample import GEMM, entry, kernel, use


def test_the_untuned_build_differs_in_the_projections_only(tmp_path: Path) -> None:
    target = target_for("radeon-780m")
    untuned, tuned = preflight_true_shapes.builds(target, tmp_path).values()
    assert tuned == target
    (library,) = tmp_path.iterdir()
    (own,) = target.tuning
    assert untuned == replace(target, flags=tuple(flag.replace(own, str(library)) for flag in target.flags))
    lines = (embedded("compile") / own).read_text().splitlines()
    kept = library.read_text().splitlines()
    dropped = [line.strip() for line in lines if line not in kept]
    assert dropped == ["@plain_128x128 -> @annotate,", "@plain_64x128 -> @annotate,"]


def test_the_models_have_their_true_sizes() -> None:
    sizes = {
        name: (c.hidden_size, c.num_hidden_layers) for name, c in preflight_true_shapes.presets().items()
    }
    assert (sizes["0.8b"], sizes["4b"]) == ((1024, 24), (2560, 32))


def test_the_summary_counts_kernels_once_and_dispatches_each_time() -> None:
    wide = kernel(GEMM, scratch=64, spilled_vgprs=2)
    plain = kernel(GEMM.replace("_7_", "_8_"), "BB0:\n\ts_endpgm\n")
    prefill = entry(use(wide, us=1000.0, count=24), use(plain, us=500.0, count=24), layers=24)
    decode = entry(use(plain, us=100.0, count=12), name="decode_C4096", layers=24)
    report = ModuleReport("draft", "f16", (prefill, decode), (), ())
    built = preflight_true_shapes.Built(
        "as it ships", report, Memory(3 << 30, 1 << 30, 1 << 28), repaired=3, products=4, seconds=7.4
    )
    facts = preflight_true_shapes.facts(built, 256)
    assert facts["kernels"] == "2"
    assert facts["dispatches per layer, block of 256"] == "2.0"
    assert facts["dispatches per layer, decode"] == "0.5"
    assert (facts["spilled VGPRs"], facts["scratch memory, bytes"]) == ("2", "64")
    assert facts["products that the audit repaired"] == "3 of 4"
    assert facts["large products on the matrix unit"] == "1 of 2"
    assert facts["projections of a block of 256, predicted ms"] == "36.0"
    assert facts["decode, predicted ms"] == "1.2"
    sizes = ("weights", "caches and states", "buffers of one call")
    assert [facts[f"{size}, GiB"] for size in sizes] == ["3.00", "1.00", "0.25"]
