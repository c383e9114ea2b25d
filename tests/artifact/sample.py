"""A small complete artifact directory; its modules are any bytes, for nothing here runs them."""

import json
from pathlib import Path
from typing import Any

from specprefill_jax.artifact.hashing import describe_files
from specprefill_jax.artifact.manifest import (
    COMPILER,
    RUNTIME,
    SCHEMA,
    Build,
    DeviceTarget,
    Manifest,
    Model,
    Proof,
    StateTensor,
)

CONTENT = {
    "chat_template.jinja": b"{{ messages }}",
    "target.irpa": b"parameters" * 10,
    "target.self_test.json": b"{}",
    "target.vmfb": b"module",
    "tokenizer.json": b"{}",
}


def write_artifact(directory: Path) -> Manifest:
    """Write the files and the manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in CONTENT.items():
        (directory / name).write_bytes(content)
    manifest = make_manifest(directory)
    manifest.write(directory)
    return manifest


def make_manifest(directory: Path) -> Manifest:
    """The manifest of the files in `directory`."""
    model = Model(
        module="target.vmfb",
        parameters="target.irpa",
        numerics="bf16",
        layers=4,
        hidden=96,
        vocabulary=1664,
        positions=2**18,
        attention_layers=1,
        query_heads=4,
        rows=0,
        blocks=(32, 256),
        capacities=(512, 4096),
        state=(
            StateTensor("layers.3.k", (2, "C", 32), "bf16"),
            StateTensor("layers.0.matrix", (2, 32, 32), "f32"),
        ),
        largest_parameter=96 * 1664 * 2,
        largest_buffer=1000,
        self_test="target.self_test.json",
    )
    return Manifest(
        schema=SCHEMA,
        name="sample",
        device=DeviceTarget("cpu", "local-task", "host", "EPYC", ("avx2",), "", (), ()),
        proof=Proof("self-test", ""),
        minimum_tokens=512,
        tokenizer="tokenizer.json",
        chat_template="chat_template.jinja",
        stop_ids=(2,),
        models={"target": model},
        files=describe_files(directory),
        build=Build(
            {"device": "cpu"},
            {COMPILER: "3.13.0", RUNTIME: "3.13.0"},
            {"target": ["--x"]},
            {"target": "0" * 64},
        ),
    )


def document(directory: Path) -> dict[str, Any]:
    """The manifest of `directory` as parsed JSON, to be spoiled by a test."""
    return json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
