"""The toy artifact, compiled once for each device."""

from pathlib import Path

import pytest

from specprefill_jax.artifact.verify import Artifact, open_artifact
from specprefill_jax.runtime.device import Device
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.target import open_device_for
from tests.runtime import toy


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session", params=["cpu", pytest.param("llvmpipe", marks=pytest.mark.vulkan)])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    directory = tmp_path_factory.mktemp(f"toy-{request.param}")
    toy.make_artifact(directory, request.param)
    return open_artifact(directory)


@pytest.fixture(scope="session")
def device(artifact: Artifact) -> Device:
    return open_device_for(artifact.manifest)


@pytest.fixture(scope="session")
def draft(artifact: Artifact, device: Device) -> Program:
    return Program.load(artifact, "draft", device)


@pytest.fixture(scope="session")
def target(artifact: Artifact, device: Device) -> Program:
    return Program.load(artifact, "target", device)
