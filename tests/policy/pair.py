"""The manifest of a pair with the true shapes of Qwen3.5 0.8B and 4B in f16, its buckets as in compile/."""

import dataclasses
from typing import Any

from specprefill_jax.artifact.manifest import (
    COMPILER,
    RUNTIME,
    SCHEMA,
    Build,
    DeviceTarget,
    FileEntry,
    Manifest,
    Model,
    Proof,
    StateTensor,
)

CAPACITIES = {"draft": (2048, 16384, 32768), "target": (4096, 16384, 32768)}
WEIGHTS = {"draft": 1_504_780_288, "target": 8_417_312_768}

# Per slot: keys and values of 6 layers of 2 heads and of 8 layers of 4 heads, of 256 f16 numbers.
SLOT = {"draft": 6 * 2 * 2 * 256 * 2, "target": 8 * 2 * 4 * 256 * 2}
# f32: 18 layers of 16 heads and 24 of 32 heads, of 128 x 128; 3 inputs of the convolution, z beside them.
FIXED = {
    "draft": 18 * 4 * (16 * 128 * 128 + 3 * (3 * 2048 + 2048)),
    "target": 24 * 4 * (32 * 128 * 128 + 3 * (2 * 2048 + 4096 + 4096)),
}


def make_manifest(
    *, draft: dict[str, Any] | None = None, target: dict[str, Any] | None = None, minimum: int = 8192
) -> Manifest:
    """The pair's manifest, some fields of its models changed."""
    models = {"draft": _model("draft", rows=8, layers=24, hidden=1024, query_heads=8, attention_layers=6)}
    models["target"] = _model("target", rows=0, layers=32, hidden=2560, query_heads=16, attention_layers=8)
    models["draft"] = dataclasses.replace(models["draft"], **(draft or {}))
    models["target"] = dataclasses.replace(models["target"], **(target or {}))
    names = ["tokenizer.json", "chat_template.jinja"]
    files = {name: FileEntry("0" * 64, 1) for name in names}
    for role in models:
        files |= {f"{role}.{kind}": FileEntry("0" * 64, 1) for kind in ("vmfb", "self_test.json")}
        files[f"{role}.irpa"] = FileEntry("0" * 64, WEIGHTS[role])
    return Manifest(
        schema=SCHEMA,
        name="pair",
        device=DeviceTarget("radeon-780m", "vulkan", "gfx1103", "", (), "780M", (32,), ()),
        proof=Proof("self-test", ""),
        minimum_tokens=minimum,
        tokenizer="tokenizer.json",
        chat_template="chat_template.jinja",
        stop_ids=(2,),
        models=models,
        files=files,
        build=Build({}, {COMPILER: "3.13.0", RUNTIME: "3.13.0"}, {}, {}),
    )


def _model(role: str, **shape: int) -> Model:
    heads = SLOT[role] // (shape["attention_layers"] * 2 * 256 * 2)
    caches = [f"layers.{4 * i + 3}.{kind}" for i in range(shape["attention_layers"]) for kind in "kv"]
    return Model(
        module=f"{role}.vmfb",
        parameters=f"{role}.irpa",
        numerics="f16",
        vocabulary=248320,
        positions=2**18,
        blocks=(64, 256),
        capacities=CAPACITIES[role],
        state=(
            *(StateTensor(name, ("C", heads, 256), "f16") for name in caches),
            StateTensor("delta", (FIXED[role] // 4,), "f32"),
        ),
        largest_parameter=248320 * 1024 * 2,
        largest_buffer=0,
        self_test=f"{role}.self_test.json",
        **shape,
    )
