"""The manifest: what is written is read back, and nothing else is accepted."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specprefill_jax.artifact.manifest import Manifest, StateTensor
from specprefill_jax.errors import ArtifactError, FileMissing
from tests.artifact.sample import document, make_manifest, write_artifact


def test_what_is_written_is_read_back(tmp_path: Path):
    manifest = write_artifact(tmp_path)
    assert Manifest.read(tmp_path) == manifest


def test_the_same_manifest_gives_the_same_bytes(tmp_path: Path):
    write_artifact(tmp_path / "one")
    write_artifact(tmp_path / "two")
    one, two = ((tmp_path / name / "manifest.json").read_bytes() for name in ("one", "two"))
    assert one == two
    assert one.endswith(b"}\n")


def test_the_keys_are_those_of_the_schema_in_its_order(tmp_path: Path):
    write_artifact(tmp_path)
    assert list(document(tmp_path)) == [
        "schema",
        "name",
        "device",
        "proof",
        "minimum_tokens",
        "tokenizer",
        "chat_template",
        "stop_ids",
        "models",
        "files",
        "build",
    ]


def test_a_proof_by_self_test_may_leave_its_reason_out(tmp_path: Path):
    write_artifact(tmp_path)
    changed = document(tmp_path)
    changed["proof"] = {"kind": "self-test"}
    assert Manifest.from_json(changed).proof.reason == ""


def test_a_model_without_self_test_needs_proof_none(tmp_path: Path):
    write_artifact(tmp_path)
    changed = document(tmp_path)
    changed["models"]["target"]["self_test"] = None
    changed["proof"] = {"kind": "none", "reason": "f16 not audited"}
    assert Manifest.from_json(changed).models["target"].self_test is None


def test_state_takes_the_capacity_of_the_entry():
    keys, matrix = StateTensor("k", (2, "C", 32), "f32"), StateTensor("m", (2, 32, 32), "f32")
    assert (keys.shape_at(512), keys.grows) == ((2, 512, 32), True)
    assert (matrix.shape_at(512), matrix.grows) == ((2, 32, 32), False)


def test_what_a_device_needs_at_least_is_the_weights_and_the_smallest_state(tmp_path: Path):
    """Keys of 2 heads x 512 slots x 32 in bf16 a matrix of 2 x 32 x 32 in f32, 100 bytes of weights."""
    manifest = write_artifact(tmp_path)
    model = manifest.models["target"]
    assert model.state_bytes(512) == 2 * 512 * 32 * 2 + 2 * 32 * 32 * 4
    assert manifest.least_bytes == model.state_bytes(512) + 100


def test_the_largest_allocation_is_a_weight_a_tensor_of_the_largest_state_or_a_buffer(tmp_path: Path):
    model = write_artifact(tmp_path).models["target"]
    assert model.largest_allocation == 2 * 4096 * 32 * 2
    assert dataclasses.replace(model, largest_parameter=10**6).largest_allocation == 10**6
    assert dataclasses.replace(model, largest_buffer=10**7).largest_allocation == 10**7


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(FileMissing, match=r"no artifact at .*absent: the directory does not exist"):
        Manifest.read(tmp_path / "absent")


def test_a_directory_without_manifest_is_no_artifact(tmp_path: Path):
    with pytest.raises(ArtifactError, match=r"has no manifest\.json\. `specprefill compile RECIPE` writes"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\x00\x01", '{"schema": 2'])
def test_a_truncated_manifest_is_refused(text: str, tmp_path: Path):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"manifest\.json cannot be read as JSON"):
        Manifest.read(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ArtifactError, match="cannot be read as JSON"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("value", [[], 3, "text", None])
def test_json_that_is_no_object_is_refused(value: object):
    with pytest.raises(ArtifactError, match="expected an object, found"):
        Manifest.from_json(value)


@pytest.mark.parametrize("schema", [0, 1, 3, "2", None])
def test_another_schema_is_refused_with_both_numbers(schema: object, tmp_path: Path):
    write_artifact(tmp_path)
    with pytest.raises(ArtifactError, match=rf"schema {schema!r}, but this version reads schema 2\. Compile"):
        Manifest.from_json({**document(tmp_path), "schema": schema})


def spoil(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Set the value at a dotted path."""

    def change(manifest: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        place: Any = manifest
        for key in parents:
            place = place[int(key)] if isinstance(place, list) else place[key]
        place[last] = value

    return change


MODEL = "models/target/"

FAULTS: list[tuple[str, object, str]] = [
    # A wrong type, at each kind of place.
    ("name", 3, r"manifest\.name: expected a string, found 3"),
    ("minimum_tokens", 5.0, r"manifest\.minimum_tokens: expected a whole number, found 5\.0"),
    ("minimum_tokens", True, r"manifest\.minimum_tokens: expected a whole number, found True"),
    ("stop_ids", 2, r"manifest\.stop_ids: expected a list, found 2"),
    ("stop_ids", ["2"], r"manifest\.stop_ids\[0\]: expected a whole number, found '2'"),
    ("models", [], r"manifest\.models: expected an object"),
    (MODEL + "blocks", [32, None], r"models\.target\.blocks\[1\]: expected a whole number, found None"),
    (MODEL + "state/0/shape", [2, 1.5], r"state\[0\]\.shape\[1\]: expected a whole number or a string"),
    # An unknown field.
    ("colour", 1, "manifest: holds unknown colour; its fields are schema, name"),
    ("device/speed", 1, r"manifest\.device: holds unknown speed"),
    # A value of the right type that cannot be.
    ("device/driver", "cuda", r"device\.driver 'cuda' is none of local-task, vulkan, hip"),
    ("device/device_match", "(", r"device_match '\(' is not a regular expression"),
    ("proof", {"kind": "oath"}, r"proof\.kind 'oath' is neither self-test nor none"),
    ("proof", {"kind": "none"}, "proof none needs a reason"),
    ("minimum_tokens", -1, "minimum_tokens -1 is negative"),
    ("models", {}, "models is empty"),
    ("tokenizer", "other.json", "tokenizer 'other.json' is not in files"),
    ("chat_template", "other.jinja", "chat_template 'other.jinja' is not in files"),
    ("files/..\\x", {"sha256": "0" * 64, "bytes": 1}, "not a relative path"),
    ("files/manifest.json", {"sha256": "0" * 64, "bytes": 1}, "not a relative path of another file"),
    (
        "files/tokenizer.json",
        {"sha256": "0" * 63, "bytes": 1},
        r"tokenizer\.json\.sha256 is not 64 hex digits",
    ),
    ("files/tokenizer.json", {"sha256": "0" * 64, "bytes": -1}, r"tokenizer\.json\.bytes is negative"),
    (MODEL + "module", "x.vmfb", r"models\.target\.module 'x\.vmfb' is not in files"),
    (MODEL + "parameters", "x.irpa", r"models\.target\.parameters 'x\.irpa' is not in files"),
    (MODEL + "numerics", "f8", "numerics 'f8' is none of f32, bf16, f16"),
    (MODEL + "hidden", 0, r"models\.target\.hidden must be at least 1"),
    (MODEL + "attention_layers", 5, r"attention_layers is not within 0\.\.layers"),
    (MODEL + "blocks", [], "blocks must be positive and ascending"),
    (MODEL + "blocks", [256, 32], "blocks must be positive and ascending"),
    (MODEL + "capacities", [512, 512], "capacities must be positive and ascending"),
    (MODEL + "blocks", [1024], "smallest block, 1024, exceeds the first capacity 512"),
    (MODEL + "rows", 257, r"rows 257 is not within 0\.\.256, the largest block"),
    (MODEL + "state/0/shape", ["C", "C"], 'layers.3.k has more than one "C"'),
    (MODEL + "state/0/shape", [2, "D"], 'a dimension is a positive whole number or "C"'),
    (MODEL + "state/0/shape", [2, 0], 'a dimension is a positive whole number or "C"'),
    (MODEL + "state/0/dtype", "f64", "dtype is none of f32, bf16, f16"),
    (MODEL + "state/0/name", "layers.0.matrix", "state repeats a name"),
    (MODEL + "largest_parameter", 0, "largest_parameter must be at least 1"),
    (MODEL + "largest_buffer", -1, "largest_buffer is negative"),
    (MODEL + "self_test", 3, r"models\.target\.self_test: expected "),
    (MODEL + "self_test", "x.json", r"models\.target\.self_test 'x\.json' is not in files"),
    ("build/tools", {"iree-base-compiler": "3.13.0"}, "build.tools lacks iree-base-runtime"),
    ("device/subgroup_sizes", [8.0], r"subgroup_sizes\[0\]: expected a whole number, found 8\.0"),
    (MODEL + "self_test", None, "self_test is missing, though proof is self-test"),
]


@pytest.mark.parametrize(("path", "value", "message"), FAULTS)
def test_each_fault_is_refused_by_name(path: str, value: object, message: str, tmp_path: Path):
    write_artifact(tmp_path)
    changed = document(tmp_path)
    spoil(path, value)(changed)
    (tmp_path / "manifest.json").write_text(json.dumps(changed))
    with pytest.raises(ArtifactError, match=message) as caught:
        Manifest.read(tmp_path)
    assert str(tmp_path / "manifest.json") in str(caught.value)


def test_names_that_leave_the_artifact_are_refused(tmp_path: Path):
    write_artifact(tmp_path)
    for name in ("../other", "/etc/passwd", "a/../../b"):
        changed = document(tmp_path)
        changed["files"][name] = {"sha256": "0" * 64, "bytes": 1}
        with pytest.raises(ArtifactError, match="not a relative path of another file inside the artifact"):
            Manifest.from_json(changed)


def test_a_missing_field_is_named_at_its_place(tmp_path: Path):
    write_artifact(tmp_path)
    changed = document(tmp_path)
    del changed["models"]["target"]["rows"]
    with pytest.raises(ArtifactError, match=r"manifest\.models\.target: lacks rows; its fields are module, "):
        Manifest.from_json(changed)


def test_an_unknown_role_is_refused(tmp_path: Path):
    write_artifact(tmp_path)
    changed = document(tmp_path)
    changed["models"]["judge"] = changed["models"]["target"]
    with pytest.raises(ArtifactError, match=r"models\.judge: a model is one of draft, target"):
        Manifest.from_json(changed)


def test_an_invalid_manifest_is_not_written(tmp_path: Path):
    """`files` is made from an empty directory, so the tokenizer is not in it."""
    manifest = make_manifest(tmp_path)
    with pytest.raises(ArtifactError, match="is not in files"):
        manifest.write(tmp_path)
    assert not (tmp_path / "manifest.json").exists()
