"""From `--artifact` and `--device` to an engine; the embedded demo pair is compiled on first use."""

from specprefill_jax.artifact.locate import demo_artifact
from specprefill_jax.artifact.manifest import MANIFEST_NAME
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine import Engine
from specprefill_jax.runtime.device import check_present


def load_engine(
    artifact: str | None, device: str | None, waiting: Waiting, *, self_test: bool = True
) -> Engine:
    """The engine of an artifact, or of the demo pair on a device (cpu unless named).

    Raises:
        DeviceError: the device is unknown, or not here.
        CompilerMissing: the demo pair is not compiled for it yet, and there is no compiler here.
        and all that `Engine.load` raises.
    """
    if artifact is not None:
        return Engine.load(artifact, device, self_test=self_test, watch=waiting)
    device = device or "cpu"
    check_present(device)  # compiling takes longer than finding out that the device is not here
    directory = demo_artifact(device)
    if not (directory / MANIFEST_NAME).is_file():
        # Here and not above: serving needs no compiler.
        from specprefill_jax.cli.compile import compile_demo

        compile_demo(device, directory, waiting.say)
    return Engine.load(directory, device, self_test=self_test, watch=waiting)
