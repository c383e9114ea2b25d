"""The kernels of a Vulkan module: what a driver is given to make a pipeline of each.

Source: runtime/src/iree/schemas/vulkan_executable_def.fbs of IREE 3.13, behind a header of 64 bytes.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO

from specprefill_jax.aot.flatbuffer import Table
from specprefill_jax.aot.spirv import Shader
from specprefill_jax.errors import ArtifactError

ENTRY = "_vulkan_spirv_fb.fb"  # how the names of such entries of the module's archive end
_HEADER, _IDENTIFIER = 64, b"VKE1"


@dataclass(frozen=True)
class Executable:
    """One kernel.

    Attributes:
        name: of its entry point.
        spirv: its shader.
        subgroup: the subgroup size that it requires, or 0.
        bindings: the numbers of its storage buffers by descriptor set.
        constants: bytes of its push constants.
        specialization: values of its specialization constants by their ids; IREE's shaders have none.
    """

    name: str
    spirv: bytes
    subgroup: int
    bindings: tuple[tuple[int, ...], ...]
    constants: int
    specialization: Mapping[int, int] = field(default_factory=dict)

    @property
    def shader(self) -> Shader:
        """The shader, parsed."""
        return Shader.from_bytes(self.spirv)


def read_executables(module: bytes, name: str) -> tuple[Executable, ...]:
    """Every kernel of a module (the bytes of a .vmfb), in the module's order.

    Raises:
        ArtifactError: it is no module for Vulkan, or one of another schema; names `name`.
    """
    try:
        archive = zipfile.ZipFile(BytesIO(module))
        entries = [entry for entry in archive.namelist() if entry.endswith(ENTRY)]
        found = tuple(kernel for entry in entries for kernel in _kernels(archive.read(entry)))
    except (zipfile.BadZipFile, ValueError) as error:
        raise ArtifactError(f"{name}: its kernels cannot be read: {error}. {_REPAIR}") from error
    if not found:
        raise ArtifactError(f"{name} holds no kernel for Vulkan: preflight is for Vulkan artifacts")
    return found


_REPAIR = "Compile the artifact again with this version of specprefill"


def _kernels(data: bytes) -> Iterator[Executable]:
    """Those of one executable: tables of pipelines, set layouts, pipeline layouts and shaders."""
    if data[_HEADER + 4 : _HEADER + 8] != _IDENTIFIER:
        raise ValueError(f"an executable begins with {data[:4]!r}, not with {_IDENTIFIER!r}")
    root = Table.root(data[_HEADER:])
    pipelines, sets, layouts, shaders = (root.tables(field) for field in range(4))
    for pipeline in pipelines:
        layout = layouts[pipeline.number(2)]
        constants = layout.bytes(1, 12)  # ranges of three words: stages, offset, size
        yield Executable(
            name=pipeline.text(1),
            spirv=shaders[pipeline.number(0)].bytes(0, 4),
            subgroup=pipeline.number(3),
            bindings=tuple(
                tuple(binding.number(0) for binding in sets[index].tables(0)) for index in layout.numbers(0)
            ),
            constants=sum(
                int.from_bytes(constants[at + 8 : at + 12], "little") for at in range(0, len(constants), 12)
            ),
        )
