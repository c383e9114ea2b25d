"""Runs one entry of a module on the only Vulkan device there is: MODULE ENTRY INPUTS.npz OUTPUTS.npz.

A process of its own: it is started under the C library that lavapipe needs.
"""

from __future__ import annotations

import sys

import iree.runtime as iree
import numpy as np

from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.runtime.device import open_matching


def main() -> int:
    """0, or 1 with the reason on standard error."""
    module, entry, inputs, outputs = sys.argv[1:]
    try:
        device = open_matching("lavapipe", "vulkan", "llvmpipe")
        config = iree.Config(device=device.hal)
        context = iree.SystemContext(config=config)
        context.add_vm_module(iree.VmModule.mmap(config.vm_instance, module))
        with np.load(inputs) as arrays:
            arguments = [iree.asdevicearray(device.hal, arrays[name]) for name in arrays.files]
        results = context.modules.coop[entry](*arguments)
        results = results if isinstance(results, tuple) else (results,)
        # IREE 3.13 itself cannot read arrays back here: see `runtime.transfer`.
        np.savez(outputs, *[device.transfer.read(result._buffer_view) for result in results])
    except (SpecPrefillError, RuntimeError, ValueError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
