"""The kernels in a module's archive, and what stops reading them."""

from __future__ import annotations

import io
import struct
import zipfile
from functools import cache

import pytest

from specprefill_jax.aot.compiler import compile_module
from specprefill_jax.aot.executables import read_executables
from specprefill_jax.aot.flatbuffer import Table
from specprefill_jax.aot.targets import target_for
from specprefill_jax.errors import ArtifactError
from specprefill_jax.preflight.kernel import local_size
from tests.preflight.gemm import program


@cache
def module() -> bytes:
    return compile_module(program("float16"), target_for("radeon-780m").flags, "gemm")


def test_a_kernel_carries_what_its_pipeline_needs() -> None:
    (kernel,) = read_executables(module(), "gemm")
    assert kernel.name == "product_dispatch_0_matmul_like_64x256x512_f16xf16xf32"
    assert kernel.shader.name == kernel.name
    assert kernel.subgroup == 32, "IREE's cooperative products ask for waves of 32 lanes"
    assert kernel.bindings == ((0, 1, 2),)
    assert kernel.constants == 0
    assert local_size(kernel.shader) == (64, 2, 1)


def replaced(old: bytes, new: bytes) -> bytes:
    """The module with other bytes in its executables."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(module())) as archive, zipfile.ZipFile(out, "w") as copy:
        for info in archive.infolist():
            data = archive.read(info)
            copy.writestr(info, data.replace(old, new) if info.filename.endswith("spirv_fb.fb") else data)
    return out.getvalue()


def test_an_executable_of_another_schema_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"gemm: its kernels cannot be read: .*not with b'VKE1'"):
        read_executables(replaced(b"VKE1", b"VKE2"), "gemm")


def test_a_module_for_a_cpu_has_no_kernels_for_vulkan() -> None:
    for_cpu = compile_module(program("float32"), target_for("cpu-portable").flags, "gemm")
    with pytest.raises(ArtifactError, match="gemm holds no kernel for Vulkan"):
        read_executables(for_cpu, "gemm")


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ArtifactError, match="gemm: its kernels cannot be read: File is not a zip file"):
        read_executables(b"no module", "gemm")


def flat(*fields: int, offsets: tuple[int, ...]) -> bytes:
    """A buffer with one table: its list of offsets at byte 4, the table behind it."""
    listed = struct.pack(f"<{2 + len(offsets)}H", 4 + 2 * len(offsets), 4 + 4 * len(fields), *offsets)
    table = 4 + len(listed)
    return struct.pack("<I", table) + listed + struct.pack(f"<i{len(fields)}I", len(listed), *fields)


def test_fields_of_a_table_are_found_by_their_numbers() -> None:
    table = Table.root(flat(7, 9, offsets=(8, 4)))
    assert (table.number(0), table.number(1)) == (9, 7)


def test_a_field_that_is_left_out_has_the_formats_default() -> None:
    table = Table.root(flat(7, offsets=(0, 4)))
    assert (table.number(0), table.number(1), table.number(5)) == (0, 7, 0)
    assert (table.text(0), table.bytes(0, 4), table.tables(0), table.numbers(0)) == ("", b"", (), ())


def test_a_buffer_that_ends_early_is_refused() -> None:
    data = flat(7, offsets=(4,))
    with pytest.raises(ValueError, match="4 bytes at byte 10 of 13"):
        Table.root(data[:13]).number(0)
    with pytest.raises(ValueError, match="bytes"):
        Table.root(flat(1000, offsets=(4,))).bytes(0, 1)
    far = struct.pack("<I", 4) + struct.pack("<I", 4)
    with pytest.raises(ValueError, match="bytes"):
        Table.root(flat(4, offsets=(4,)) + struct.pack("<I", 1000) + far).bytes(0, 4)
