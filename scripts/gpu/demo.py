"""The demo pair on the device: self-test at a cold load, `specprefill verify`, questions, kept tokens."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from check_demo import AGREEMENT, Outcome, agreed, ask, bars_missed, kept_share, refer
from true_shapes import PRESETS, say

from gpu.artifacts import demo_checkpoints, pack, unpack, write_weights
from gpu.plan import Plan
from gpu.record import Check
from specprefill_jax.artifact.locate import embedded
from specprefill_jax.cli.compile import build
from specprefill_jax.cli.load import load_engine
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine import Engine
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.runtime.checks import run_checks

NAME = "demo"
ANSWERS = "cpu.json"


def read_examples(plan: Plan) -> list[dict[str, Any]]:
    """The questions that are asked."""
    lines = embedded("artifacts/demo/examples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[: plan.questions]]


def build_demo(plan: Plan, folder: Path, work: Path) -> None:
    """The pair for the plan's target, and what it keeps and answers on the CPU."""
    build(embedded("compile/demo.toml"), plan.target, work / "run" / NAME, say)
    pack(work / "run" / NAME, folder / NAME)
    examples = read_examples(plan)
    with Waiting() as waiting:
        engine = load_engine(None, "cpu", waiting)
    say(f"asking the demo pair {len(examples)} questions on the CPU")
    answers = {
        "dense_right": sum(refer(engine, example).dense_right for example in examples),
        "kept": [ask(engine, example).kept.tolist() for example in examples],
    }
    (folder / ANSWERS).write_text(json.dumps(answers) + "\n", encoding="utf-8")


def run_demo(plan: Plan, folder: Path, work: Path) -> Iterator[Check]:
    """All that the pair shows, in the order in which a user would meet it."""
    artifact = work / "run" / NAME
    unpack(folder / NAME, artifact)
    for role, checkpoint in demo_checkpoints().items():
        write_weights(artifact, role, checkpoint)
    answers = json.loads((folder / ANSWERS).read_text(encoding="utf-8"))
    with nothing_remembered():
        engine, check = cold_load(artifact, plan.target)
        yield check
        if engine is not None:
            yield verified(artifact, plan.target)
            yield from asked(engine, plan, answers)


def cold_load(artifact: Path, device: str) -> tuple[Engine | None, Check]:
    """Load where nothing is remembered, so that every entry is tested."""
    name, begin = "loads, with its self-test", time.perf_counter()
    try:
        engine = Engine.load(artifact, device)
    except SpecPrefillError as error:
        return None, Check(name, "failed", str(error))
    seconds = time.perf_counter() - begin
    entries = sum(len(getattr(engine, role).entries) for role in PRESETS)
    words = f"{entries} entries of both models, cold in {seconds:.1f} s"
    return engine, Check(name, "passed", words, {"seconds": seconds})


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """An empty cache folder of the user for this process: no earlier self-test counts, no shader is there."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # a driver may write there until the process ends
        yield


def verified(artifact: Path, device: str) -> Check:
    """What `specprefill verify` says, and the entry that came closest to its limit."""
    checks = list(run_checks(artifact, device, files_only=False))
    failed = [f"{check.name}: {check.detail}" for check in checks if check.result != "passed"]
    numbers = [(c.difference or 0.0, c.allowed, c.name) for c in checks if c.allowed]
    worst = max(numbers, key=lambda one: one[0] / (one[1] or 1.0), default=(0.0, 0.0, "none"))
    words = f"{len(checks)} checks; closest to its limit: {worst[2]}, {worst[0]:.1e} of {worst[1]:.1e}"
    return Check.of("specprefill verify", not failed, "; ".join(failed) or words, difference=worst[0])


def asked(engine: Engine, plan: Plan, answers: dict[str, Any]) -> Iterator[Check]:
    """The questions by the default selection, against the bars of check_demo and what the CPU kept."""
    examples, begin = read_examples(plan), time.perf_counter()
    outcomes = [ask(engine, example) for example in examples]
    seconds = time.perf_counter() - begin
    missed = bars_missed(plan.target, outcomes, answers["dense_right"])
    right = sum(outcome.right for outcome in outcomes)
    words = (
        f"{right} of {len(outcomes)} right (densely on the CPU {answers['dense_right']}), "
        f"{kept_share(outcomes):.0%} kept, in {seconds:.1f} s"
    )
    yield Check.of("questions", not missed, "; ".join(missed) or words, right=right, seconds=seconds)
    yield kept_as_on_cpu(outcomes, answers["kept"])


def kept_as_on_cpu(outcomes: Sequence[Outcome], wanted: Sequence[Sequence[int]]) -> Check:
    """Kept tokens against the CPU's, by the promise that devices keep: a prompt shares at least 98%."""
    shares = []
    for outcome, kept in zip(outcomes, wanted, strict=True):
        on_cpu = Outcome("", outcome.tokens, np.array(kept, np.int32), False, False)
        shares.append(agreed([outcome, on_cpu]))
    same = sum(share == 1.0 for share in shares)
    words = f"the same in {same} of {len(shares)} prompts; in all of them at least {min(shares):.1%}"
    passed = min(shares) >= AGREEMENT
    return Check.of("kept tokens as on the CPU", passed, words, same=same, least=min(shares))
