"""Ways in which an artifact can be another one than it says, as data: 25 and more of each kind.

Those of files and of the manifest change the one and leave the other as it was. Those of the weights give a
complete artifact whose manifest holds the right hashes: only computing shows them.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specprefill_jax.aot.targets import target_for
from specprefill_jax.artifact.host import cpu_flags
from specprefill_jax.artifact.targets import known_targets

FILES = (
    *("chat_template.jinja", "tokenizer.json", "draft.irpa", "draft.self_test.json", "draft.vmfb"),
    *("target.irpa", "target.self_test.json", "target.vmfb"),
)
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Mutation:
    """One change of an artifact's directory; `device` is what a user asks for, None: nothing.

    `refusal` is the class of the error that must come, and `reason` what its message must hold.
    """

    name: str
    change: Callable[[Path], None]
    refusal: str
    reason: str
    device: str | None = None


def replaced(path: Path, content: bytes) -> None:
    """Write a file anew: its old content may be linked to from elsewhere."""
    path.unlink()
    path.write_bytes(content)


# --- bytes


def _other_byte(name: str, part: float) -> Mutation:
    def change(directory: Path) -> None:
        content = bytearray((directory / name).read_bytes())
        content[int(part * len(content))] ^= 0x10
        replaced(directory / name, bytes(content))

    return Mutation(f"a byte at {part:.3f} of {name}", change, "HashMismatch", f"{name} has sha256")


def _cut(name: str, part: float) -> Mutation:
    def change(directory: Path) -> None:
        content = (directory / name).read_bytes()
        replaced(directory / name, content[: int(part * len(content))])

    if name == "manifest.json":
        return Mutation(f"{name} cut at {part:.3f}", change, "ArtifactError", "cannot be read as JSON")
    return Mutation(f"{name} cut at {part:.3f}", change, "HashMismatch", f"{name} has ")


def _swapped(one: str, other: str) -> Mutation:
    def change(directory: Path) -> None:
        first, second = (directory / one).read_bytes(), (directory / other).read_bytes()
        replaced(directory / one, second)
        replaced(directory / other, first)

    return Mutation(f"{one} and {other} swapped", change, "HashMismatch", "but its manifest says")


def _removed(*names: str) -> Mutation:
    def change(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    if names == ("manifest.json",):
        return Mutation("manifest.json removed", change, "ArtifactError", "has no manifest.json")
    return Mutation(f"{' and '.join(names)} removed", change, "FileMissing", " is missing, though")


def _places(seed: int, count: int) -> list[tuple[str, float]]:
    """Files in turn, each at a random place."""
    generator = np.random.default_rng(seed)
    return [(FILES[i % len(FILES)], float(generator.uniform(0, 1))) for i in range(count)]


PAIRS = list(itertools.combinations(FILES, 2))
BYTES = [_other_byte(*place) for place in _places(1, 32)]
CUTS = [_cut(*place) for place in (*_places(2, 28), ("manifest.json", 0.5), ("manifest.json", 0.0))]
SWAPS = [_swapped(*pair) for pair in PAIRS]
REMOVALS = [_removed(name) for name in (*FILES, "manifest.json")] + [
    _removed(*pair) for pair in PAIRS[::-1][:18]
]


# --- the manifest


def edited(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest's JSON."""
    document = json.loads((directory / "manifest.json").read_text())
    edit(document)
    replaced(directory / "manifest.json", json.dumps(document).encode())


def _set(path: str, value: object) -> Callable[[Path], None]:
    *parents, last = path.split("/")

    def edit(document: dict[str, Any]) -> None:
        for key in parents:
            document = document[key]
        document[last] = copy.deepcopy(value)

    return lambda directory: edited(directory, edit)


def _for_target(name: str, asked: str | None) -> Mutation:
    known = known_targets()[name]
    reason = f"compiled for {name!r}" if asked or known.driver == "vulkan" else "HIP"
    return Mutation(
        f"for {name}, {asked or 'nothing'} asked for",
        _set("device", asdict(target_for(name).device)),
        # Lavapipe is here: what an artifact for it holds is no module for it, and IREE says so.
        "ArtifactError" if name in ("vulkan", "llvmpipe", "llvmpipe-f16") and not asked else "WrongTarget",
        "cannot be loaded" if name in ("vulkan", "llvmpipe", "llvmpipe-f16") and not asked else reason,
        asked,
    )


def _needing(feature: str) -> Mutation:
    def edit(document: dict[str, Any]) -> None:
        document["device"]["cpu_features"].append(feature)

    change = lambda directory: edited(directory, edit)  # noqa: E731
    return Mutation(f"needing {feature}", change, "WrongTarget", f"lacks: CPU features {feature}")


# Real names of features that no CPU of an x86-64 server has together; those of this machine are left out.
FOREIGN = ("3dnow", "avx10_2", "sse4a_x", "tbm", "xop", "fma4", "asimddp", "bf16", "i8mm", "sve", "sve2")
OTHER_NAMES = [name for name in known_targets() if name != "cpu"]
TARGETS = [_for_target(name, "cpu") for name in OTHER_NAMES]
TARGETS += [_for_target(name, None) for name in OTHER_NAMES if name not in ("cpu-portable", "hip-gfx1103")]
TARGETS += [_needing(feature) for feature in FOREIGN if feature not in cpu_flags()]


def _schema(value: object) -> Mutation:
    return Mutation(
        f"schema {value!r}", _set("schema", value), "ArtifactError", "but this version reads schema"
    )


def _without(path: str) -> Mutation:
    *parents, last = path.split("/")

    def edit(document: dict[str, Any]) -> None:
        for key in parents:
            document = document[key]
        del document[last]

    return Mutation(f"no {path}", lambda directory: edited(directory, edit), "ArtifactError", last)


# Schema 1 had none of the last six, and a self-test of another form in the manifest itself.
OLDER = [_schema(value) for value in (None, 0, 1, 1.0, "1", "2", -1, 3, [2], {"schema": 2})]
OLDER += [
    _without(path)
    for path in (
        *("name", "device", "proof", "minimum_tokens", "tokenizer", "chat_template", "stop_ids"),
        *("models", "files", "build", "build/tools", "models/draft/state", "models/target/rows"),
        *("device/cpu", "device/subgroup_sizes", "device/features"),
        *("models/draft/largest_parameter", "models/target/largest_buffer", "models/target/self_test"),
    )
]
OLDER.append(
    Mutation(
        "a self-test of schema 1",
        _set("models/draft/self_test", {"tokens": [1], "positions": [0], "tolerance": 0.1}),
        "ArtifactError",
        "self_test: expected",
    )
)

VERSIONS = ("3.9.0", "3.10.0", "3.11.0", "3.12.0", "3.12.1", "3.13", "3.13.0rc20261016", "3.13.1")
VERSIONS += ("3.13.0.post1", "3.14.0", "4.0.0", "20260101.1", "")
IREES = [
    Mutation(f"{tool} {version!r}", _set(f"build/tools/{tool}", version), "WrongVersion", f"{tool} {version}")
    for version in VERSIONS
    for tool in ("iree-base-compiler", "iree-base-runtime")
]

# --- the weights


@dataclass(frozen=True)
class WeightMutation:
    """A change of a checkpoint; `keys` are the tensors that it must have, without "model." and ".weight"."""

    name: str
    role: str
    change: Callable[[Tensors], None]


def _each(name: str, role: str, key: str, new: Callable[[np.ndarray], np.ndarray]) -> WeightMutation:
    def change(tensors: Tensors) -> None:
        (found,) = (full for full in tensors if full in (key, f"model.{key}", f"model.{key}.weight"))
        tensors[found] = np.ascontiguousarray(new(tensors[found])).astype(tensors[found].dtype)
        assert tensors[found].size

    return WeightMutation(f"{role}: {name}", role, change)


def _exchange(name: str, role: str, part: str, other: str) -> WeightMutation:
    """Swap the tensors whose names differ only in these parts."""

    def change(tensors: Tensors) -> None:
        pairs = [(key, key.replace(part, other)) for key in tensors if part in key]
        assert pairs
        for one, two in pairs:
            tensors[one], tensors[two] = tensors[two], tensors[one]

    return WeightMutation(f"{role}: {name}", role, change)


def _rounded(tensors: Tensors) -> None:
    """To bf16 and back, by cutting bits off."""
    for key, values in tensors.items():
        tensors[key] = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _one_number(values: np.ndarray) -> np.ndarray:
    changed = values.copy()
    changed.reshape(-1)[changed.size // 3] += 0.5
    return changed


def _rows_reversed(values: np.ndarray) -> np.ndarray:
    return values[::-1]


def _last_row_zero(values: np.ndarray) -> np.ndarray:
    return np.concatenate([values[:-1], np.zeros_like(values[-1:])])


def _scaled(by: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: values * by


# Layers 0 and 2 are delta layers, 1 and 3 attention.
WEIGHTS = [
    _each("the embedding turned by a row", "draft", "embed_tokens", lambda values: np.roll(values, 1, 0)),
    _each("the last norm a hundredth larger", "draft", "norm", lambda values: values + 0.01),
    _each("a norm before a mixer scaled", "draft", "layers.2.input_layernorm", _scaled(1.05)),
    _each("a norm before an MLP zero", "draft", "layers.3.post_attention_layernorm", _scaled(0)),
    _each("what a delta layer reads scaled", "draft", "layers.0.linear_attn.in_proj_qkv", _scaled(1.01)),
    _each("a delta layer's gate negated", "draft", "layers.0.linear_attn.in_proj_z", _scaled(-1)),
    _each("a delta layer's decay zero", "draft", "layers.0.linear_attn.in_proj_a", _scaled(0)),
    _each("write strengths of other heads", "draft", "layers.2.linear_attn.in_proj_b", _rows_reversed),
    _each("convolution turned around", "draft", "layers.0.linear_attn.conv1d", lambda v: v[..., ::-1]),
    _each("A_log a hundredth larger", "draft", "layers.2.linear_attn.A_log", lambda v: v + 0.01),
    _each("A_log of other heads", "draft", "layers.0.linear_attn.A_log", _rows_reversed),
    _each("dt_bias zero", "draft", "layers.2.linear_attn.dt_bias", _scaled(0)),
    _each("a delta layer's norm scaled", "draft", "layers.2.linear_attn.norm", _scaled(1.01)),
    _each("a delta layer's output scaled", "draft", "layers.2.linear_attn.out_proj", _scaled(0.99)),
    _each("queries negated", "draft", "layers.1.self_attn.q_proj", _scaled(-1)),
    _each("keys of other heads", "draft", "layers.3.self_attn.k_proj", _rows_reversed),
    _each("values scaled", "draft", "layers.3.self_attn.v_proj", _scaled(1.01)),
    _each("the last attention's output zero", "draft", "layers.3.self_attn.o_proj", _scaled(0)),
    _each("query norm turned", "draft", "layers.3.self_attn.q_norm", lambda v: np.roll(v, 1)),
    _each("key norm zero", "draft", "layers.1.self_attn.k_norm", _scaled(0)),
    _each("one number of an MLP", "draft", "layers.0.mlp.down_proj", _one_number),
    _each("the last MLP scaled", "draft", "layers.3.mlp.down_proj", _scaled(1.01)),
    _each("rows of an MLP's gate reversed", "target", "layers.1.mlp.gate_proj", _rows_reversed),
    _each("a row of the vocabulary head zero", "target", "lm_head.weight", _last_row_zero),
    _each("the vocabulary head negated", "target", "lm_head.weight", _scaled(-1)),
    _each("one number of an attention's output", "target", "layers.3.self_attn.o_proj", _one_number),
    _exchange("delta layers exchanged", "draft", "layers.0.", "layers.2."),
    _exchange("attention layers exchanged", "target", "layers.1.", "layers.3."),
    _exchange("gates and ups of an MLP exchanged", "target", "layers.2.mlp.gate", "layers.2.mlp.up"),
    _exchange("decays of two layers exchanged", "target", "layers.0.linear_attn.A", "layers.2.linear_attn.A"),
    WeightMutation("target: all weights rounded to bf16", "target", _rounded),
]


KINDS: Mapping[str, list[Mutation]] = {
    "bytes": BYTES,
    "cut": CUTS,
    "swapped": SWAPS,
    "target": TARGETS,
    "older": OLDER,
    "iree": IREES,
    "missing": REMOVALS,
}
