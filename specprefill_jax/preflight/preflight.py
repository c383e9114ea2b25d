"""An artifact, or a module alone, through the compiler of the GPU that it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from specprefill_jax.aot.executables import Executable, read_executables
from specprefill_jax.aot.targets import Target, target_for
from specprefill_jax.artifact.manifest import Manifest, Model
from specprefill_jax.artifact.schedule import LOADING, Dispatch, Schedule, schedule_name
from specprefill_jax.artifact.verify import Artifact, verify_files
from specprefill_jax.errors import ArtifactError, KernelRefused, WrongTarget
from specprefill_jax.preflight.checks import Build, judge
from specprefill_jax.preflight.driver import Compiled, Driver
from specprefill_jax.preflight.gpu import Gpu, known_gpu
from specprefill_jax.preflight.isa import parse
from specprefill_jax.preflight.kernel import (
    Kernel,
    lanes_differ,
    local_size,
    product_of,
    wrong_products,
)
from specprefill_jax.preflight.model import predict
from specprefill_jax.preflight.report import Entry, Memory, ModuleReport, Prompt, Report, Use
from specprefill_jax.preflight.tiles import weight_tiles

_MATRIX_FORMATS = ("f16", "bf16")  # of builds whose products belong onto a matrix unit


@dataclass(frozen=True)
class Module:
    """A compiled model: its module's bytes, what its entries dispatch, its layers and number format."""

    role: str
    module: bytes
    schedule: Schedule
    layers: int
    numerics: str


def preflight(directory: Path, gpu_name: str, tokens: int | None, say: Callable[[str], None]) -> Report:
    """Every kernel of an artifact, checked, and its time predicted.

    Args:
        tokens: of a prompt whose time is summed up, if any.
        say: hears what takes long.

    Raises:
        FileMissing, ArtifactError: the artifact is incomplete, or not for Vulkan.
        WrongTarget: it is for another device.
        SettingError: the GPU is unknown.
        DeviceError: there is no driver.
        KernelRefused: the driver does not compile a kernel.
    """
    gpu = known_gpu(gpu_name)
    manifest = Manifest.read(directory)
    if manifest.device.name != gpu.name:
        raise WrongTarget(
            f"{directory} was compiled for {manifest.device.name}, and this is a preflight for {gpu.name}. "
            f"Compile it with --device {gpu.name}, or name the device with --gpu"
        )
    modules = [_read(Artifact(directory, manifest), role) for role in manifest.models]
    driver = Driver(gpu, say)
    reports = []
    for module in modules:
        say(f"compiling the kernels of the {module.role} with {driver.version}")
        reports.append(check_module(module, gpu, driver))
    prompts = {}
    if tokens is not None:
        models = manifest.models
        prompts = {report.role: prompt_time(models[report.role], report, tokens) for report in reports}
    memory = {module.role: _memory(manifest, module) for module in modules}
    return Report(gpu, driver.version, tuple(reports), prompts, memory)


def _memory(manifest: Manifest, module: Module) -> Memory:
    model = manifest.models[module.role]
    return Memory(
        weights=manifest.files[model.parameters].bytes,
        state=model.state_bytes(model.capacities[-1]),
        call=module.schedule.most_buffers,
    )


def _read(artifact: Artifact, role: str) -> Module:
    """A model's module and schedule, their hashes checked; the weights are not read."""
    model = artifact.manifest.models[role]
    names = (model.module, schedule_name(role))
    files = {name: entry for name, entry in artifact.manifest.files.items() if name in names}
    verify_files(replace(artifact, manifest=replace(artifact.manifest, files=files)))
    schedule = Schedule.read(artifact.path(schedule_name(role)))
    return Module(role, artifact.path(model.module).read_bytes(), schedule, model.layers, model.numerics)


def check_module(module: Module, gpu: Gpu, driver: Driver) -> ModuleReport:
    """Every kernel of one module.

    Raises:
        ArtifactError: the module and its schedule do not belong together, or cannot be read.
        KernelRefused: the driver does not compile a kernel.
    """
    target = target_for(gpu.name)
    executables = {kernel.name: kernel for kernel in read_executables(module.module, module.role)}
    unknown = module.schedule.traffic.keys() - executables.keys()
    if unknown:
        raise ArtifactError(
            f"{module.role}: the schedule names {min(unknown)}, which the module does not hold: they are of "
            "different builds"
        )
    compiled = driver.compile(tuple(executables.values()), module.role)
    kernels = {name: _kernel(executables[name], compiled[name], target, module.role) for name in executables}
    entries = tuple(
        Entry(
            name,
            0 if name in ("head", LOADING) else module.layers,
            tuple(
                _use(kernels[d.kernel], d, executables[d.kernel], module.schedule, gpu) for d in dispatches
            ),
        )
        for name, dispatches in module.schedule.entries.items()
    )
    build = Build(matrix_unit=bool(target.cooperative) and module.numerics in _MATRIX_FORMATS)
    notes = (
        ()
        if build.matrix_unit
        else (f"{module.numerics} build: {gpu.name} has no WMMA for it, so products need none",)
    )
    return ModuleReport(module.role, module.numerics, entries, judge(entries, build), notes)


def _kernel(executable: Executable, compiled: Compiled, target: Target, name: str) -> Kernel:
    shader = executable.shader
    try:
        return Kernel(
            name=executable.name,
            product=product_of(executable.name),
            local=local_size(shader),
            subgroup=compiled.subgroup,
            required=executable.subgroup,
            statistics=compiled.statistics,
            program=parse(compiled.assembly),
            wrong_products=wrong_products(shader, target.cooperative),
            joins_lanes=shader.joins_lanes(),
            lanes_differ=lanes_differ(shader),
        )
    except ValueError as error:
        raise KernelRefused(f"{name}: {executable.name}: {error}") from error


def _use(kernel: Kernel, dispatch: Dispatch, executable: Executable, schedule: Schedule, gpu: Gpu) -> Use:
    tiles = None
    if kernel.product is not None and kernel.product.kind == "matmul" and dispatch.weights:
        binding = max(dispatch.weights, key=lambda binding: dispatch.weights[binding])
        tiles = weight_tiles(executable.shader, int(binding), dispatch.workgroups)
    return Use(kernel, dispatch, predict(kernel, dispatch, schedule.traffic[kernel.name], tiles, gpu), gpu)


def prompt_time(model: Model, report: ModuleReport, tokens: int) -> Prompt:
    """The time that a model's kernels take to read a prompt in blocks of the largest length.

    The smallest cache that holds the blocks is used; the last block returns rows where the model has them.
    """
    block = model.blocks[-1]
    blocks = -(-tokens // block)
    fitting = [capacity for capacity in model.capacities if capacity >= blocks * block]
    if not fitting:
        return Prompt(tokens, {}, None)
    last = "prefill_rows" if model.rows else "prefill"
    calls: Mapping[str, int] = {
        f"prefill_T{block}_C{fitting[0]}": blocks - 1,
        f"{last}_T{block}_C{fitting[0]}": 1,
    }
    if not model.rows:
        calls = {f"prefill_T{block}_C{fitting[0]}": blocks}
    entries = {entry.name: entry for entry in report.entries}
    return Prompt(tokens, calls, sum(count * entries[name].us for name, count in calls.items()))
