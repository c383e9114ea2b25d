"""The parts of scripts/preflight_true_shapes that need no compiler."""

from __future__ import annotations

from dataclasses import replace

import preflight_true_shapes

from specprefill_jax.aot.targets import target_for
from specprefill_jax.preflight.report import ModuleReport
from tests.preflight.sample import GEMM, entry, kernel, use

LIBRARY = "--iree-codegen-transform-dialect-library=tuning.mlir@__kernel_config"


def test_a_target_with_a_tuning_library_is_built_with_and_without_it() -> None:
    plain = replace(target_for("radeon-780m"), flags=("--iree-vulkan-target=gfx1103",))
    assert preflight_true_shapes.builds(plain) == {"as it ships": plain}
    tuned = replace(plain, flags=(*plain.flags, LIBRARY))
    assert preflight_true_shapes.builds(tuned) == {"without tuning": plain, "as it ships": tuned}


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
    built = preflight_true_shapes.Built("as it ships", report, repaired=3, products=4, seconds=7.4)
    facts = preflight_true_shapes.facts(built, 256)
    assert facts["kernels"] == "2"
    assert facts["dispatches per layer, block of 256"] == "2.0"
    assert facts["dispatches per layer, decode"] == "0.5"
    assert (facts["spilled VGPRs"], facts["scratch memory, bytes"]) == ("2", "64")
    assert facts["products that the audit repaired"] == "3 of 4"
    assert facts["large products on the matrix unit"] == "1 of 2"
    assert facts["projections of a block of 256, predicted ms"] == "36.0"
    assert facts["decode, predicted ms"] == "1.2"
