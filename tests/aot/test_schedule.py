"""The schedule that comes with a module for a GPU: kernels, how often, how many workgroups, which bytes."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from specprefill_jax.aot.audit import compile_audited
from specprefill_jax.aot.compiler import compile_module, count_commands
from specprefill_jax.aot.lower import Entry, module_text
from specprefill_jax.aot.schedule import read_schedule
from specprefill_jax.aot.targets import target_for
from specprefill_jax.artifact.schedule import Schedule, Traffic
from specprefill_jax.errors import ArtifactError, CompileError, FileMissing

RADEON = target_for("radeon-780m")
TOKENS, IN, OUT = 64, 128, 256


def program() -> str:
    """`twice`: x wᵀ w wᵀ, so its first and its last product are one kernel; `row`: a row of x w."""
    product = jax.lax.optimization_barrier

    def twice(weights: tuple[jax.Array, ...], x: jax.Array, state: tuple[()]) -> tuple[jax.Array]:
        (w,) = weights
        for _ in range(2):
            y = product(jnp.einsum("tk,nk->tn", x, w, preferred_element_type=jnp.float32)).astype(w.dtype)
            x = product(jnp.einsum("tn,nk->tk", y, w, preferred_element_type=jnp.float32)).astype(w.dtype)
        return (x.astype(jnp.float32),)

    def row(weights: tuple[jax.Array, ...], x: jax.Array, state: tuple[()]) -> tuple[jax.Array]:
        return (jnp.einsum("k,nk->n", x, weights[0], preferred_element_type=jnp.float32),)

    half = jnp.float16
    entries = [
        Entry("twice", twice, (jax.ShapeDtypeStruct((TOKENS, IN), half),), ()),
        Entry("row", row, (jax.ShapeDtypeStruct((IN,), half),), ()),
    ]
    return module_text("pair", [("w", jax.ShapeDtypeStruct((OUT, IN), half))], entries)


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phases")
    with_phases = compile_module(program(), RADEON.flags, "pair", phases=folder)
    assert with_phases == compile_module(program(), RADEON.flags, "pair"), "the module's bytes have changed"
    return folder


@pytest.fixture(scope="module")
def schedule(phases: Path) -> Schedule:
    return read_schedule(phases, "pair")


def test_an_entry_dispatches_what_the_scheduled_program_does(schedule: Schedule) -> None:
    counted = count_commands(program(), RADEON.flags, "pair")
    dispatched = {name: sum(d.count for d in entry) for name, entry in schedule.entries.items()}
    assert dispatched == {name: commands.dispatches for name, commands in counted.items()}


def test_equal_dispatches_are_counted_together(schedule: Schedule) -> None:
    products = [d for d in schedule.entries["twice"] if "_matmul_" in d.kernel]
    assert [(re.findall(r"\d+x\d+x\d+", d.kernel), d.count) for d in products] == [
        (["64x256x128"], 2),
        (["64x128x256"], 2),
    ]


def test_the_weight_behind_a_binding_is_known(schedule: Schedule) -> None:
    for entry in schedule.entries.values():
        for dispatch in entry:
            reads_weight = "mat" in dispatch.kernel
            assert list(dispatch.weights.values()) == ([OUT * IN * 2] if reads_weight else []), (
                dispatch.kernel
            )


def test_a_matvec_has_a_workgroup_per_output_or_less(schedule: Schedule) -> None:
    (matvec,) = [d for d in schedule.entries["row"] if "_matvec_" in d.kernel]
    x, y, z = matvec.workgroups
    assert 1 < x <= OUT
    assert (y, z) == (1, 1)


def test_traffic_counts_each_tensor_once(schedule: Schedule) -> None:
    (matvec,) = [d for d in schedule.entries["row"] if "_matvec_" in d.kernel]
    assert schedule.traffic[matvec.kernel] == Traffic(reads=(OUT + 1) * IN * 2, writes=OUT * 4)


def test_what_a_call_allocates_is_its_result_and_the_room_between_its_kernels(schedule: Schedule) -> None:
    assert schedule.buffers["row"] == (OUT * 4,)
    sizes = schedule.buffers["twice"]
    assert {TOKENS * OUT * 4, TOKENS * OUT * 2, TOKENS * IN * 4, TOKENS * IN * 2} == set(sizes)
    assert schedule.largest_buffer == TOKENS * OUT * 4
    assert schedule.most_buffers == sum(sizes) > OUT * 4


def test_a_schedule_comes_with_a_module_for_a_gpu_only(schedule: Schedule) -> None:
    assert compile_audited(program(), RADEON, "pair").schedule == schedule
    assert compile_audited(program(), target_for("cpu-portable"), "pair").schedule is None


def test_a_written_schedule_is_read_back(schedule: Schedule, tmp_path: Path) -> None:
    path = tmp_path / "draft.kernels.json"
    schedule.write(path)
    assert Schedule.read(path) == schedule


def test_a_missing_or_broken_schedule_says_so(tmp_path: Path) -> None:
    path = tmp_path / "draft.kernels.json"
    with pytest.raises(FileMissing, match=r"no draft\.kernels\.json in .* Build it again"):
        Schedule.read(path)
    path.write_text("{")
    with pytest.raises(ArtifactError, match="cannot be read as JSON"):
        Schedule.read(path)
    path.write_text('{"entries": {}}')
    with pytest.raises(ArtifactError, match="lacks traffic"):
        Schedule.read(path)


@pytest.mark.parametrize(
    ("phase", "old", "new", "text"),
    [
        ("hal", "hal.command_buffer.dispatch<", "hal.command_buffer.launch<", "no entry dispatches anything"),
        ("hal", "hal.command_buffer.dispatch<", "hal.command_buffer.dispatch.indirect<", "of another form"),
        ("hal", "workgroups([%", "workgroups([%unknown", "'%unknown"),
        ("hal", "!hal.buffer{%", "!hal.memory{%", "a buffer of another form"),
        ("executable-sources", "func.func @", "func.fun @", "has no source"),
    ],
)
def test_another_form_of_the_compilers_text_is_refused(
    phase: str, old: str, new: str, text: str, phases: Path, tmp_path: Path
) -> None:
    for path in phases.iterdir():
        words = path.read_text()
        (tmp_path / path.name).write_text(words.replace(old, new) if f".{phase}." in path.name else words)
    with pytest.raises(CompileError, match=f"pair: the schedule .* cannot be read: .*{text}"):
        read_schedule(tmp_path, "pair")


def test_a_folder_without_phases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="0 files of the phase executable-sources"):
        read_schedule(tmp_path, "pair")
