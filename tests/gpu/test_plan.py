"""Which steps run, what is built for them, and in what time."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.plan import STEPS, Plan, built_for, limit_of, select

from specprefill_jax.models.config import TextConfig


def test_all_steps_run_unless_some_are_named() -> None:
    assert select(None) == STEPS == ("facts", "kernels", "demo", "weights", "shapes", "speed")


def test_steps_run_in_their_order_with_what_they_need() -> None:
    assert select(["speed", "kernels"]) == ("kernels", "weights", "speed")


def test_an_unknown_step_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no step is called tempo; the steps are facts, .*speed"):
        select(["facts", "tempo"])


@pytest.mark.parametrize(
    ("steps", "built"),
    [
        (("facts",), ()),
        (("kernels", "demo"), ("kernels", "demo")),
        (("weights", "speed"), ("shapes",)),
        (STEPS, ("kernels", "demo", "shapes")),
    ],
)
def test_only_what_the_steps_use_is_built(steps: tuple[str, ...], built: tuple[str, ...]) -> None:
    assert built_for(steps) == built


def test_a_budget_cuts_the_limit_of_a_step_to_what_is_left_of_it() -> None:
    assert limit_of("facts", 1.0, None, 500.0) == 60
    assert limit_of("facts", 2.0, None, 500.0) == 120
    assert limit_of("facts", 1.0, 480.0, 100.0) == 60
    assert limit_of("facts", 1.0, 480.0, 450.0) == 30
    assert limit_of("facts", 1.0, 480.0, 500.0) < 0


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = Plan(target="vulkan", tokens=(300,), keeps=(0.5, 0.25), tiny=True, seed=7)
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan


def test_a_plan_with_fields_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"target": "nvidia", "colour": "green"}')
    with pytest.raises(ValueError, match=r"plan\.json is of another version"):
        Plan.read(tmp_path)


def test_caches_hold_every_prompt_and_what_is_kept_of_the_longest() -> None:
    # Whole blocks of 256 for tokens, answer or lookahead, and the padding of a last block.
    plan = Plan(tokens=(4096, 10000), keeps=(0.3, 0.15))
    assert plan.capacities() == {"draft": [4608, 10496], "target": [3328, 4608, 10496]}


def test_models_can_be_cut_to_some_layers() -> None:
    def depth(config: TextConfig) -> tuple[int, int]:
        return config.num_hidden_layers, config.hidden_size

    assert depth(Plan().config("target", 0)) == (32, 2560)
    assert depth(Plan().config("draft", 4)) == (4, 1024)
    assert depth(Plan(tiny=True).config("draft", 0)) == (4, 64)
