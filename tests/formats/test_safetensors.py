import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specprefill_jax.errors import CheckpointError, FileMissing
from specprefill_jax.formats.safetensors import (
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    TensorSpec,
    read_file,
    read_tensors,
    write_file,
    write_tensors,
)

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(4, dtype=np.float16)


def raw_file(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return file


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def specs(**arrays: np.ndarray) -> list[TensorSpec]:
    return [TensorSpec(name, array.dtype, array.shape) for name, array in arrays.items()]


def two_shards(directory: Path) -> Path:
    """A checkpoint with `a` in the first shard and `b` in the second."""
    write_tensors(directory, specs(a=A, b=B), [A, B], shard_bytes=24)
    return directory


def edit_index(directory: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((directory / INDEX_FILE).read_text())
    change(index["weight_map"])
    (directory / INDEX_FILE).write_text(json.dumps(index))


def test_bfloat16_reads_as_torch_wrote_it(tmp_path: Path) -> None:
    values = torch.tensor([[1.0, -2.5], [3.0e38, 0.0]], dtype=torch.bfloat16)
    save_file({"x": values, "y": torch.tensor([7], dtype=torch.int64)}, tmp_path / SINGLE_FILE)
    tensors = read_tensors(tmp_path)
    assert tensors["x"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(tensors["x"].astype(np.float32), values.float().numpy())
    np.testing.assert_array_equal(tensors["y"], [7])


def test_tensors_are_read_only_views_of_the_file(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", specs(a=A), [A])
    tensor = read_file(tmp_path / "x.safetensors")["a"]
    with pytest.raises(ValueError, match="read-only"):
        tensor[0, 0] = 1
    root = tensor
    while isinstance(root.base, np.ndarray):
        root = root.base
    assert isinstance(root, np.memmap)


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_number_format_survives_a_round_trip(tmp_path: Path, name: str) -> None:
    array = np.array([0, 1, 1, 0, 1], np.uint8).astype(DTYPES[name])
    file = tmp_path / "x.safetensors"
    write_file(file, specs(x=array), [array])
    read = read_file(file)["x"]
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


def test_the_safetensors_package_reads_what_we_write(tmp_path: Path) -> None:
    scalar, empty = np.array(3.0, np.float32), np.zeros((0, 4), np.float32)
    file = tmp_path / "x.safetensors"
    write_file(file, specs(a=A, b=B, scalar=scalar, empty=empty), [A, B, scalar, empty])
    with safe_open(file, "np") as reference:
        assert set(reference.keys()) == {"a", "b", "scalar", "empty"}
        np.testing.assert_array_equal(reference.get_tensor("a"), A)
        np.testing.assert_array_equal(reference.get_tensor("b"), B)
        assert reference.get_tensor("scalar") == 3.0
        assert reference.get_tensor("empty").shape == (0, 4)
    assert read_file(file)["empty"].shape == (0, 4)


def test_shards_are_cut_by_size_and_read_as_one(tmp_path: Path) -> None:
    two_shards(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX_FILE,
    ]
    tensors = read_tensors(tmp_path)
    np.testing.assert_array_equal(tensors["a"], A)
    np.testing.assert_array_equal(tensors["b"], B)


def test_what_fits_the_size_is_one_file(tmp_path: Path) -> None:
    write_tensors(tmp_path, specs(a=A, b=B), [A, B], shard_bytes=32)
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE_FILE]


def test_writer_refuses_a_tensor_that_breaks_the_announced_header(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a was announced as float32 \[2, 3\], but is float16 \[4\]"):
        write_file(tmp_path / "x.safetensors", specs(a=A), [B])


def test_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match=f"neither {SINGLE_FILE} nor {INDEX_FILE} is there"):
        read_tensors(tmp_path)
    with pytest.raises(FileMissing, match="nowhere holds no checkpoint"):
        read_tensors(tmp_path / "nowhere")


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_truncated_file_is_named_at_every_length(tmp_path: Path, kept: int) -> None:
    file = tmp_path / SINGLE_FILE
    write_file(file, specs(a=A), [A])
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE}: the file is truncated: .*; fetch it again"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, "a and b overlap by 4 bytes"),
        ({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, "4 bytes between a and b belong to no tensor"),
        ({"a": entry([2], 4, 12)}, "4 bytes between the header and a belong to no tensor"),
        ({"a": entry([2], 0, 8)}, "8 bytes after a belong to no tensor"),
        ({"a": entry([5], 0, 20)}, "truncated: a ends at byte 20 of the data, which has 16"),
        ({"a": entry([3], 0, 16)}, "a is F32 \\[3\\], which takes 12 bytes, but its data_offsets .* span 16"),
        ({"a": entry([4], 16, 0)}, "data_offsets \\[16, 0\\] span -16"),
        ({"a": entry([4], -16, 0)}, "must be whole numbers"),
        ({"a": entry([2.0, 2], 0, 16)}, "must be whole numbers"),  # type: ignore[list-item]
        ({"a": entry([4], 0, 16, "F4")}, "a has the unknown dtype 'F4'; known are F64, F32"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "a needs a dtype, a shape and two data_offsets"),
        ({"a": 4}, "a needs a dtype, a shape and two data_offsets"),
        ([], "no safetensors file: its header is not a JSON object"),
        (b"{nonsense", "no safetensors file: its header is not valid JSON"),
        (b'{"a": 1, "a": 2}', "a is named twice"),
    ],
)
def test_malformed_header_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    file = raw_file(tmp_path / SINGLE_FILE, header, bytes(16))
    with pytest.raises(CheckpointError, match=message):
        read_file(file)


def test_other_kind_of_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / SINGLE_FILE
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="this is no safetensors file: its header would have"):
        read_file(file)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (two_shards(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        FileMissing, match=r"model-00002-of-00002.safetensors does not exist, .* places 1 tensors"
    ):
        read_tensors(tmp_path)


def test_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    edit_index(two_shards(tmp_path), lambda placed: placed.update(c=placed["a"]))
    with pytest.raises(
        CheckpointError, match=r"places c in .*model-00001-of-00002.safetensors, which lacks it"
    ):
        read_tensors(tmp_path)


def test_tensor_in_another_shard_than_the_index_says_is_named(tmp_path: Path) -> None:
    edit_index(two_shards(tmp_path), lambda placed: placed.update(a=placed["b"], c=placed["a"]))
    with pytest.raises(CheckpointError, match=r"places a in .*00002-of-.*it is in model-00001-of-00002"):
        read_tensors(tmp_path)


def test_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    write_file(tmp_path / "model-00002-of-00002.safetensors", specs(b=B, a=A), [B, A])
    with pytest.raises(CheckpointError, match=r"a is in two shards .*: model-00001.* and model-00002"):
        read_tensors(tmp_path)


def test_tensor_that_the_index_does_not_name_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    write_file(tmp_path / "model-00002-of-00002.safetensors", specs(b=B, c=A), [B, A])
    with pytest.raises(CheckpointError, match=f"c is in .*, but {INDEX_FILE} does not name it"):
        read_tensors(tmp_path)


def test_single_file_beside_shards_is_ambiguous(tmp_path: Path) -> None:
    two_shards(tmp_path)
    write_file(tmp_path / SINGLE_FILE, specs(a=A), [A])
    with pytest.raises(CheckpointError, match="holds two checkpoints"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "has no weight_map"),
        ("[]", "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map must name a file for each tensor"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "shards must lie beside the index"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "a is named twice"),
    ],
)
def test_malformed_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(CheckpointError, match=message):
        read_tensors(tmp_path)
