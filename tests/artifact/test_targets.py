"""Files of compile targets: what is in them is read, and nothing else is accepted."""

from pathlib import Path

import pytest

from specprefill_jax.artifact.targets import check_runnable, known_target, known_targets, read_targets
from specprefill_jax.errors import DeviceError, TargetError, Unproven

GPU = """\
about = "a GPU"
driver = "vulkan"
target = "gfx1"
numerics = ["f16", "f32"]
flags = ["--iree-hal-target-device=vulkan"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "targets").mkdir()
    return tmp_path / "targets"


def test_a_target_is_named_by_its_file_and_fields_left_out_ask_nothing(folder: Path):
    (folder / "b.toml").write_text(GPU)
    (folder / "a.toml").write_text(GPU + 'match = "RX 1"\nsubgroup_sizes = [32, 64]\n')
    (folder / "notes.md").write_text("not a target")
    found = read_targets(folder)
    assert list(found) == ["a", "b"]
    assert (found["a"].name, found["a"].match, found["a"].subgroup_sizes) == ("a", "RX 1", (32, 64))
    bare = found["b"]
    assert (bare.match, bare.tiled, bare.cooperative, bare.tuning, bare.unproven) == ("", False, (), "", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GPU + "speed = 1\n", r"^targets/gpu\.toml: holds unknown speed; its fields are name, about"),
        (GPU + 'name = "gpu"\n', r"^targets/gpu\.toml: holds unknown name; a target is named by its file"),
        (GPU.replace("about", "abuot"), r"gpu\.toml: lacks about and holds unknown abuot"),
        (GPU.replace('["f16", "f32"]', '"f16"'), r"gpu\.toml\.numerics: expected a list, found 'f16'"),
        (GPU.replace('["f16", "f32"]', "[]"), r"numerics must be some of f32, bf16, f16, not \[\]"),
        (GPU.replace('"f32"]', '"f8"]'), r"numerics must be some of f32, bf16, f16, not \['f16', 'f8'\]"),
        (GPU.replace("vulkan", "cuda"), r"driver 'cuda' is none of local-task, vulkan, hip"),
        (GPU.replace('"vulkan"', '"hip"') + "subgroup_sizes = [32]\n", "are for the driver vulkan"),
        (GPU + 'match = "("\n', r"match '\(' is not a regular expression"),
        (GPU + 'cooperative = [["f16", "f32"]]\n', "a product has three element types"),
        (GPU + "subgroup_sizes = [48]\n", r"subgroup_sizes must be powers of two, not \[48\]"),
        (GPU + 'tuning = "tuning/none.mlir"\n', r"tuning 'tuning/none\.mlir' is no file below "),
        ("about = ", r"^targets/gpu\.toml cannot be read as TOML"),
        ("\x00", r"^targets/gpu\.toml cannot be read as TOML"),
    ],
)
def test_each_fault_names_file_and_field(text: str, message: str, folder: Path):
    (folder / "gpu.toml").write_text(text)
    with pytest.raises(TargetError, match=message):
        read_targets(folder)


def test_a_tuning_is_named_relative_to_the_folder_above(folder: Path):
    (folder.parent / "tuning").mkdir()
    (folder.parent / "tuning" / "gpu.mlir").write_text("module {}")
    (folder / "gpu.toml").write_text(GPU + 'tuning = "tuning/gpu.mlir"\n')
    assert read_targets(folder)["gpu"].tuning == "tuning/gpu.mlir"


def test_the_known_targets_are_those_of_the_repository():
    assert list(known_targets()) == [
        *("cpu", "cpu-portable", "hip-gfx1103", "llvmpipe", "llvmpipe-f16", "nvidia", "radeon-780m"),
        *("rdna2", "rdna3", "vulkan"),
    ]
    assert all(target.name == name for name, target in known_targets().items())


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DeviceError, match=r"^unknown device 'gpu'; the known ones are cpu, cpu-portable, "):
        known_target("gpu")


def test_only_targets_without_a_proof_are_refused():
    refused = []
    for name, target in known_targets().items():
        try:
            check_runnable(target)
        except Unproven:
            refused.append(name)
    assert refused == ["hip-gfx1103"]
