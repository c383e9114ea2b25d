"""JAX entry points -> one MLIR module whose entries share the weights as external parameters.

Each entry is lowered with the weights as leading arguments, made private, and called by a small public
function that loads the weights from `util.global`s, turns primitive i32 scalars into tensors, and donates the
state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

PARAMETER_SCOPE = "model"

_ELEMENT_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "i32", "int8": "i8"}
# A symbol, outside of quoted strings: `@main`, `@_where`, `@jit_f.1`.
_SYMBOL = re.compile(r"@([A-Za-z_][\w.$]*)")
_MODULE_BODY = re.compile(r"^module @\S+ attributes \{.*?\} \{\n(.*)\n\}\s*$", re.DOTALL)
# The private function of `models.matrix.mmt4d`, up to its closing brace.
_TILE_PRODUCT = re.compile(
    r"  func\.func private @(?P<name>\w+__mmt4d\w*)\(%arg0: (?P<left>tensor<[^>]+>)[^,]*, "
    r"%arg1: (?P<right>tensor<[^>]+>)[^)]*\) -> \(?(?P<out>tensor<[^>]+>).*?\n  \}",
    re.DOTALL,
)
# The private function of `models.matrix.apart`.
_APART = re.compile(
    r"  func\.func private @(?P<name>\w+__apart\w*)\(%arg0: (?P<shape>tensor<[^>]+>).*?\n  \}", re.DOTALL
)


@dataclass(frozen=True)
class Entry:
    """One exported function.

    Attributes:
        name: the public symbol.
        function: takes (parameters, *inputs, state) and returns (*outputs, state).
        inputs: shapes of the inputs in order; rank 0 becomes a primitive scalar.
        state: shapes of the donated state arrays in order (a flat tuple; empty for `head`).
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    state: tuple[jax.ShapeDtypeStruct, ...]


def module_text(
    name: str, parameters: Sequence[tuple[str, jax.ShapeDtypeStruct]], entries: Sequence[Entry]
) -> str:
    """The MLIR module of `entries`; `parameters` are (archive key, shape) in the order of their arguments."""
    shapes = tuple(shape for _, shape in parameters)
    lines = [f"module @{name} {{"]
    lines += [_global(key, shape) for key, shape in parameters]
    for entry in entries:
        private, results = _lower(entry, shapes)
        lines += [private, _public(entry, parameters, results)]
    return "\n".join([*lines, "}", ""])


def _lower(entry: Entry, parameters: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[str, tuple[str, ...]]:
    """The entry's StableHLO as private functions named after it, and its result types."""
    lowered = jax.jit(entry.function, keep_unused=True).lower(parameters, *entry.inputs, entry.state)
    text = str(lowered.compiler_ir("stablehlo"))
    body = _MODULE_BODY.match(text)
    assert body is not None, "JAX changed the shape of its module text"
    private = _SYMBOL.sub(lambda symbol: f"@{entry.name}__{symbol.group(1)}", body.group(1))
    private = private.replace("func.func public @", "func.func private @")
    private = _APART.sub(_barrier, _TILE_PRODUCT.sub(_tile_product, private))
    results = tuple(tensor_type(leaf) for leaf in jax.tree.leaves(lowered.out_info))
    return private, results


def _tile_product(function: re.Match[str]) -> str:
    """The product of tiles as `linalg.mmt4d`, which the CPU compiler gives its matrix kernel."""
    left, right, out = function["left"], function["right"], function["out"]
    return f"""  func.func private @{function["name"]}(%left: {left}, %right: {right}) -> {out} {{
    %zero = arith.constant 0.0 : f32
    %empty = tensor.empty() : {out}
    %init = linalg.fill ins(%zero : f32) outs(%empty : {out}) -> {out}
    %product = linalg.mmt4d ins(%left, %right : {left}, {right}) outs(%init : {out}) -> {out}
    return %product : {out}
  }}"""


def _barrier(function: re.Match[str]) -> str:
    """What is computed before and after stays in kernels of their own."""
    shape = function["shape"]
    return f"""  func.func private @{function["name"]}(%x: {shape}) -> {shape} {{
    %apart = iree_tensor_ext.compute_barrier.start %x : {shape} -> {shape}
    return %apart : {shape}
  }}"""


def _public(
    entry: Entry, parameters: Sequence[tuple[str, jax.ShapeDtypeStruct]], results: tuple[str, ...]
) -> str:
    """The public function: loads the weights, wraps the scalars, passes the state through in place."""
    first_state = len(results) - len(entry.state)
    arguments, body, operands, types = [], [], [], []
    for i, (key, shape) in enumerate(parameters):
        body.append(f"    %w{i} = util.global.load @{_quoted(key)} : {tensor_type(shape)}")
        operands.append(f"%w{i}")
        types.append(tensor_type(shape))
    for i, shape in enumerate(entry.inputs):
        if shape.shape:
            arguments.append(f"%x{i}: {tensor_type(shape)}")
            operands.append(f"%x{i}")
        else:
            arguments.append(f"%x{i}: {_ELEMENT_TYPES[shape.dtype.name]}")
            body.append(f"    %t{i} = tensor.from_elements %x{i} : {tensor_type(shape)}")
            operands.append(f"%t{i}")
        types.append(tensor_type(shape))
    for i, shape in enumerate(entry.state):
        arguments.append(f"%s{i}: {tensor_type(shape)} {{iree.abi.output = {first_state + i} : index}}")
        operands.append(f"%s{i}")
        types.append(tensor_type(shape))
    outs = ", ".join(results)
    names = ", ".join(f"%r#{i}" for i in range(len(results)))
    return "\n".join(
        [
            f"  func.func @{entry.name}({', '.join(arguments)}) -> ({outs}) {{",
            *body,
            f"    %r:{len(results)} = func.call @{entry.name}__main({', '.join(operands)})"
            f" : ({', '.join(types)}) -> ({outs})",
            f"    return {names} : {outs}",
            "  }",
        ]
    )


def _global(key: str, shape: jax.ShapeDtypeStruct) -> str:
    source = f'#flow.parameter.named<"{PARAMETER_SCOPE}"::"{key}">'
    return f"  util.global private @{_quoted(key)} = {source} : {tensor_type(shape)}"


def _quoted(key: str) -> str:
    return f'"{key}"'


def tensor_type(shape: Any) -> str:
    """MLIR type of anything with `shape` and `dtype`."""
    dims = "".join(f"{dim}x" for dim in shape.shape)
    return f"tensor<{dims}{_ELEMENT_TYPES[np.dtype(shape.dtype).name]}>"
