"""`specprefill devices`: the names, what is there, what to install."""

import json

import pytest

from specprefill_jax.artifact.targets import known_targets
from specprefill_jax.runtime.device import FoundDevice
from tests.cli.conftest import Run

FOUND = [
    FoundDevice("local-task", "Some CPU", ("cpu", "cpu-portable"), ""),
    FoundDevice("vulkan", "llvmpipe (LLVM)", ("vulkan", "llvmpipe", "llvmpipe-f16"), ""),
    FoundDevice("vulkan", "AMD Radeon 780M", ("vulkan", "radeon-780m"), ""),
]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[FoundDevice]:
    present = list(FOUND)
    monkeypatch.setattr("specprefill_jax.cli.devices.list_devices", lambda: present)
    return present


def test_each_known_name_is_listed_with_what_it_would_open(found: list[FoundDevice], specprefill: Run):
    rows = json.loads(specprefill("devices", "--json").out)["devices"]
    assert {row["name"]: row["found"] for row in rows if row["found"]} == {
        "cpu": "Some CPU",
        "cpu-portable": "Some CPU",
        "vulkan": "llvmpipe (LLVM)",
        "llvmpipe": "llvmpipe (LLVM)",
        "llvmpipe-f16": "llvmpipe (LLVM)",
        "radeon-780m": "AMD Radeon 780M",
    }
    assert [row["name"] for row in rows] == list(known_targets())


def test_a_driver_that_finds_nothing_says_what_to_install(found: list[FoundDevice], specprefill: Run):
    found[1:] = [FoundDevice("vulkan", "", (), "No Vulkan device. Install a driver")]
    ran = specprefill("devices")
    assert ran.status == 0
    assert "No Vulkan device. Install a driver" in ran.out
    document = json.loads(specprefill("devices", "--json").out)
    assert document["faults"] == ["No Vulkan device. Install a driver"]
    assert [row["name"] for row in document["devices"] if row["found"]] == ["cpu", "cpu-portable"]


def test_the_table_names_every_device(specprefill: Run):
    out = specprefill("devices").out
    assert [name for name in known_targets() if name not in out] == []
