"""A toy model with the calling convention of a real one, and the same arithmetic in NumPy.

State: keys [2, C, 4], which grow with the cache, and one delta vector [4]. Token x at position p is stored
as keys[h, slot, d] = x + p * w[d] + h, and adds x * w[d] to the delta vector. The hidden state is the delta
vector plus the sum over all keys below the end; logit v is v times the sum of the hidden state. The row of a
token x at slot s is x + h for every slot up to s, and 0 after. All values are whole numbers, exact in f32.
"""

import dataclasses
import importlib.metadata
from pathlib import Path

import iree.compiler
import iree.runtime
import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.artifact.hashing import describe_files
from specprefill_jax.artifact.manifest import (
    COMPILER,
    RUNTIME,
    SCHEMA,
    Build,
    DeviceTarget,
    Manifest,
    Model,
    Proof,
    StateTensor,
)
from specprefill_jax.artifact.self_test import Piece, SelfTest, by_head, expect, rows_by_head

WEIGHT = np.array([1, 2, 3, 4], np.float32)
ROWS = 3
BLOCKS = (4, 8)
CAPACITIES = (16, 32)
VOCABULARY = 50

FLAGS = {
    "cpu": [
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        "--iree-llvmcpu-target-cpu=host",
    ],
    "llvmpipe": ["--iree-hal-target-device=vulkan", "--iree-vulkan-target=llvmpipe"],
}
TARGETS = {
    "cpu": DeviceTarget("cpu", "local-task", "host", "", (), "", (), ()),
    "llvmpipe": DeviceTarget("llvmpipe", "vulkan", "llvmpipe", "", (), "llvmpipe", (8,), ()),
}
STATE = (StateTensor("layers.0.k", (2, "C", 4), "f32"), StateTensor("layers.1.matrix", (4,), "f32"))
INSTALLED = importlib.metadata.version(RUNTIME)
TOOLS = {COMPILER: INSTALLED, RUNTIME: INSTALLED}


class ToyReference:
    """The toy model in NumPy, one token at a time."""

    def __init__(self, capacity: int) -> None:
        self.keys = np.zeros((2, capacity, 4), np.float32)
        self.delta = np.zeros(4, np.float32)
        self.rows = np.zeros((0, 1, 2, capacity), np.float32)
        self.length = 0

    def read(self, tokens: list[int], positions: list[int]) -> Float[np.ndarray, "4"]:
        """Read tokens; the last one's hidden state. `rows` then holds a row for each token read so far."""
        for token, position in zip(tokens, positions, strict=True):
            heads = np.arange(2, dtype=np.float32)[:, None]
            self.keys[:, self.length] = token + position * WEIGHT + heads
            self.delta += token * WEIGHT
            self.length += 1
            row = np.zeros((1, 1, 2, self.keys.shape[1]), np.float32)
            row[:, :, :, : self.length] = token + heads
            self.rows = np.concatenate([self.rows, row])
        return self.hidden()

    def hidden(self) -> Float[np.ndarray, "4"]:
        """The hidden state of the last token."""
        return self.delta + self.keys[:, : self.length].sum()


def head(hidden: Float[np.ndarray, "4"]) -> Float[np.ndarray, "V"]:
    """Logits of a hidden state."""
    return np.arange(VOCABULARY, dtype=np.float32) * hidden.sum()


def make_artifact(
    directory: Path, device: str, *, roles: tuple[str, ...] = ("draft", "target"), donate: bool = True
) -> Manifest:
    """Compile the toy for "cpu" or "llvmpipe" and write an artifact, draft and target, to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    iree.runtime.save_archive_file({"model.norm.weight": WEIGHT}, directory / "model.irpa")
    for role in roles:
        module = iree.compiler.compile_str(
            module_text(rows=role == "draft", donate=donate), input_type="auto", extra_args=FLAGS[device]
        )
        assert isinstance(module, bytes)
        (directory / f"{role}.vmfb").write_bytes(module)
        make_self_test(rows=role == "draft").write(directory / f"{role}.self_test.json")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("")
    manifest = Manifest(
        schema=SCHEMA,
        name="toy",
        device=TARGETS[device],
        proof=Proof("self-test", ""),
        minimum_tokens=8,
        tokenizer="tokenizer.json",
        chat_template="chat_template.jinja",
        stop_ids=(2,),
        models={role: model(role) for role in roles},
        files=describe_files(directory),
        build=Build({}, TOOLS, {}, {}),
    )
    manifest.write(directory)
    return manifest


def model(role: str) -> Model:
    """The toy's part of a manifest."""
    return Model(
        module=f"{role}.vmfb",
        parameters="model.irpa",
        numerics="f32",
        layers=2,
        hidden=4,
        vocabulary=VOCABULARY,
        positions=2**18,
        attention_layers=1,
        query_heads=2,
        rows=ROWS if role == "draft" else 0,
        blocks=BLOCKS,
        capacities=CAPACITIES,
        state=STATE,
        largest_parameter=16,
        largest_buffer=0,
        self_test=f"{role}.self_test.json",
    )


def make_self_test(*, rows: bool) -> SelfTest:
    """What the reference says about five tokens with gaps in two pieces, then one more."""
    pieces = (Piece((3, 1), (0, 2)), Piece((4, 1, 5), (7, 8, 12)))
    reference = ToyReference(16)
    for piece in pieces:
        reference.read(list(piece.tokens), list(piece.positions))
    hidden = reference.hidden()
    prefilled = {"hidden": hidden[None], **_after(reference, hidden, ROWS if rows else 0)}
    decoded = _after(reference, reference.read([9], [13]), 1 if rows else 0)
    return SelfTest(pieces, 9, *({k: expect(v, 1e-5) for k, v in t.items()} for t in (prefilled, decoded)))


def _after(
    reference: ToyReference, hidden: Float[np.ndarray, "4"], rows: int
) -> dict[str, Float[np.ndarray, "groups values"]]:
    """Logits, the last rows, and the state, as a self-test has them."""
    used = reference.length
    tensors = {
        "logits": head(hidden)[None],
        "layers.0.k": by_head(STATE[0], reference.keys[:, :used]),
        "layers.1.matrix": by_head(STATE[1], reference.delta.copy()),
    }
    return tensors | ({"rows": rows_by_head(reference.rows[-rows:, ..., :used])} if rows else {})


def with_model(manifest: Manifest, role: str, **changes: object) -> Manifest:
    """The manifest with some fields of one model changed."""
    changed = dataclasses.replace(manifest.models[role], **changes)
    return dataclasses.replace(manifest, models={**manifest.models, role: changed})


def ids(values: list[int]) -> Int[np.ndarray, "N"]:
    """Token ids or positions as the program takes them."""
    return np.array(values, np.int32)


def module_text(*, rows: bool, donate: bool = True) -> str:
    """The whole module in StableHLO: every entry that a manifest of the toy promises."""
    entries = [_HEAD]
    for capacity in CAPACITIES:
        entries.append(_entry("decode", 1, capacity, rows=rows, donate=donate))
        for length in BLOCKS:
            entries.append(_entry("prefill", length, capacity, rows=False, donate=donate))
            if rows:
                entries.append(_entry("prefill_rows", length, capacity, rows=True, donate=donate))
    parameter = '#flow.parameter.named<"model"::"model.norm.weight">'
    return "\n".join(
        ["module @model {", f"util.global private @w = {parameter} : tensor<4xf32>", *entries, "}"]
    )


def _entry(kind: str, length: int, capacity: int, *, rows: bool, donate: bool) -> str:
    decode = kind == "decode"
    row_type = f"tensor<1x2x{capacity}xf32>" if decode else f"tensor<1x2x{ROWS}x{capacity}xf32>"
    keys, delta = f"tensor<2x{capacity}x4xf32>", "tensor<4xf32>"
    first = f"tensor<{VOCABULARY}xf32>" if decode else "tensor<4xf32>"
    results = [first, *([row_type] if rows else []), keys, delta]
    marks = [
        f"{{iree.abi.output = {i} : index}}" if donate else "" for i in (len(results) - 2, len(results) - 1)
    ]
    scalars = (
        "%token: i32, %position: i32"
        if decode
        else f"%tokens: tensor<{length}xi32>, %positions: tensor<{length}xi32>, %count: i32"
    )
    name = f"decode_C{capacity}" if decode else f"{kind}_T{length}_C{capacity}"
    prologue = _DECODE_PROLOGUE if decode else ""
    body = (
        (prologue + _BODY + (_ROWS if rows else "")).replace("$T", str(length)).replace("$C", str(capacity))
    )
    if decode:
        body += "%logits = func.call @head(%hidden) : (tensor<4xf32>) -> " + first + "\n"
    if rows and decode:
        body += f"%row = stablehlo.slice %rows [0:1, 0:1, 0:2, 0:{capacity}]"
        body += f" : (tensor<{ROWS}x1x2x{capacity}xf32>) -> tensor<1x1x2x{capacity}xf32>\n"
        body += f"%row3 = stablehlo.reshape %row : (tensor<1x1x2x{capacity}xf32>) -> {row_type}\n"
    returned = ["%logits" if decode else "%hidden"]
    if rows:
        returned.append("%row3" if decode else "%by_head")
    return (
        f"func.func public @{name}({scalars}, %slot: i32, %k: {keys} {marks[0]}, %m: {delta} {marks[1]})"
        f" -> ({', '.join(results)}) {{\n{body}"
        f"return {', '.join([*returned, '%k2', '%m2'])} : {', '.join(results)}\n}}"
    )


_HEAD = f"""
func.func public @head(%hidden: tensor<4xf32>) -> tensor<{VOCABULARY}xf32> {{
  %index = stablehlo.iota dim = 0 : tensor<{VOCABULARY}xf32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %sum = stablehlo.reduce(%hidden init: %zero) applies stablehlo.add across dimensions = [0]
    : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  %sums = stablehlo.broadcast_in_dim %sum, dims = [] : (tensor<f32>) -> tensor<{VOCABULARY}xf32>
  %logits = stablehlo.multiply %index, %sums : tensor<{VOCABULARY}xf32>
  return %logits : tensor<{VOCABULARY}xf32>
}}"""

_DECODE_PROLOGUE = """
  %count = arith.constant 1 : i32
  %tokens = tensor.from_elements %token : tensor<1xi32>
  %positions = tensor.from_elements %position : tensor<1xi32>
"""

# Keys of the block are written at the slot, the delta vector takes the valid tokens, and what is below the
# end is summed axis by axis: a sum over two axes at once does not compile for Vulkan.
_BODY = """
  %w = util.global.load @w : tensor<4xf32>
  %count_t = tensor.from_elements %count : tensor<i32>
  %slot_t = tensor.from_elements %slot : tensor<i32>
  %zero_i = stablehlo.constant dense<0> : tensor<i32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %tok = stablehlo.convert %tokens : (tensor<$Txi32>) -> tensor<$Txf32>
  %pos = stablehlo.convert %positions : (tensor<$Txi32>) -> tensor<$Txf32>
  %tok3 = stablehlo.broadcast_in_dim %tok, dims = [1] : (tensor<$Txf32>) -> tensor<2x$Tx4xf32>
  %pos3 = stablehlo.broadcast_in_dim %pos, dims = [1] : (tensor<$Txf32>) -> tensor<2x$Tx4xf32>
  %w3 = stablehlo.broadcast_in_dim %w, dims = [2] : (tensor<4xf32>) -> tensor<2x$Tx4xf32>
  %head3 = stablehlo.iota dim = 0 : tensor<2x$Tx4xf32>
  %turned = stablehlo.multiply %pos3, %w3 : tensor<2x$Tx4xf32>
  %key = stablehlo.add %tok3, %turned : tensor<2x$Tx4xf32>
  %keys = stablehlo.add %key, %head3 : tensor<2x$Tx4xf32>
  %k2 = stablehlo.dynamic_update_slice %k, %keys, %zero_i, %slot_t, %zero_i
    : (tensor<2x$Cx4xf32>, tensor<2x$Tx4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<2x$Cx4xf32>
  %index = stablehlo.iota dim = 0 : tensor<$Txi32>
  %counts = stablehlo.broadcast_in_dim %count_t, dims = [] : (tensor<i32>) -> tensor<$Txi32>
  %valid = stablehlo.compare LT, %index, %counts : (tensor<$Txi32>, tensor<$Txi32>) -> tensor<$Txi1>
  %zeros = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<$Txf32>
  %kept = stablehlo.select %valid, %tok, %zeros : tensor<$Txi1>, tensor<$Txf32>
  %sum = stablehlo.reduce(%kept init: %zero) applies stablehlo.add across dimensions = [0]
    : (tensor<$Txf32>, tensor<f32>) -> tensor<f32>
  %sum4 = stablehlo.broadcast_in_dim %sum, dims = [] : (tensor<f32>) -> tensor<4xf32>
  %update = stablehlo.multiply %sum4, %w : tensor<4xf32>
  %m2 = stablehlo.add %m, %update : tensor<4xf32>
  %end = stablehlo.add %slot_t, %count_t : tensor<i32>
  %ends = stablehlo.broadcast_in_dim %end, dims = [] : (tensor<i32>) -> tensor<2x$Cx4xi32>
  %slots = stablehlo.iota dim = 1 : tensor<2x$Cx4xi32>
  %below = stablehlo.compare LT, %slots, %ends : (tensor<2x$Cx4xi32>, tensor<2x$Cx4xi32>) -> tensor<2x$Cx4xi1>
  %none = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<2x$Cx4xf32>
  %seen = stablehlo.select %below, %k2, %none : tensor<2x$Cx4xi1>, tensor<2x$Cx4xf32>
  %sum_d = stablehlo.reduce(%seen init: %zero) applies stablehlo.add across dimensions = [2]
    : (tensor<2x$Cx4xf32>, tensor<f32>) -> tensor<2x$Cxf32>
  %sum_s = stablehlo.reduce(%sum_d init: %zero) applies stablehlo.add across dimensions = [1]
    : (tensor<2x$Cxf32>, tensor<f32>) -> tensor<2xf32>
  %sum_h = stablehlo.reduce(%sum_s init: %zero) applies stablehlo.add across dimensions = [0]
    : (tensor<2xf32>, tensor<f32>) -> tensor<f32>
  %read = stablehlo.broadcast_in_dim %sum_h, dims = [] : (tensor<f32>) -> tensor<4xf32>
  %hidden = stablehlo.add %read, %m2 : tensor<4xf32>
"""

# Row r belongs to the valid query count - min(R, count) + r, whose token is picked by a one-hot product.
_ROWS = f"""
  %most = stablehlo.constant dense<{ROWS}> : tensor<i32>
  %rows_valid = stablehlo.minimum %count_t, %most : tensor<i32>
  %skipped = stablehlo.subtract %count_t, %rows_valid : tensor<i32>
  %r = stablehlo.iota dim = 0 : tensor<{ROWS}x$Txi32>
  %skips = stablehlo.broadcast_in_dim %skipped, dims = [] : (tensor<i32>) -> tensor<{ROWS}x$Txi32>
  %query = stablehlo.add %r, %skips : tensor<{ROWS}x$Txi32>
  %t = stablehlo.iota dim = 1 : tensor<{ROWS}x$Txi32>
  %hit = stablehlo.compare EQ, %query, %t
    : (tensor<{ROWS}x$Txi32>, tensor<{ROWS}x$Txi32>) -> tensor<{ROWS}x$Txi1>
  %tok2 = stablehlo.broadcast_in_dim %tok, dims = [1] : (tensor<$Txf32>) -> tensor<{ROWS}x$Txf32>
  %zeros2 = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<{ROWS}x$Txf32>
  %picked = stablehlo.select %hit, %tok2, %zeros2 : tensor<{ROWS}x$Txi1>, tensor<{ROWS}x$Txf32>
  %tok_r = stablehlo.reduce(%picked init: %zero) applies stablehlo.add across dimensions = [1]
    : (tensor<{ROWS}x$Txf32>, tensor<f32>) -> tensor<{ROWS}xf32>
  %tok_4 = stablehlo.broadcast_in_dim %tok_r, dims = [0] : (tensor<{ROWS}xf32>) -> tensor<{ROWS}x1x2x$Cxf32>
  %head_4 = stablehlo.iota dim = 2 : tensor<{ROWS}x1x2x$Cxf32>
  %value = stablehlo.add %tok_4, %head_4 : tensor<{ROWS}x1x2x$Cxf32>
  %r_4 = stablehlo.iota dim = 0 : tensor<{ROWS}x1x2x$Cxi32>
  %first = stablehlo.add %slot_t, %skipped : tensor<i32>
  %first_4 = stablehlo.broadcast_in_dim %first, dims = [] : (tensor<i32>) -> tensor<{ROWS}x1x2x$Cxi32>
  %last_4 = stablehlo.add %r_4, %first_4 : tensor<{ROWS}x1x2x$Cxi32>
  %slot_4 = stablehlo.iota dim = 3 : tensor<{ROWS}x1x2x$Cxi32>
  %causal = stablehlo.compare LE, %slot_4, %last_4
    : (tensor<{ROWS}x1x2x$Cxi32>, tensor<{ROWS}x1x2x$Cxi32>) -> tensor<{ROWS}x1x2x$Cxi1>
  %rv_4 = stablehlo.broadcast_in_dim %rows_valid, dims = [] : (tensor<i32>) -> tensor<{ROWS}x1x2x$Cxi32>
  %used = stablehlo.compare LT, %r_4, %rv_4
    : (tensor<{ROWS}x1x2x$Cxi32>, tensor<{ROWS}x1x2x$Cxi32>) -> tensor<{ROWS}x1x2x$Cxi1>
  %shown = stablehlo.and %causal, %used : tensor<{ROWS}x1x2x$Cxi1>
  %blank = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<{ROWS}x1x2x$Cxf32>
  %rows = stablehlo.select %shown, %value, %blank : tensor<{ROWS}x1x2x$Cxi1>, tensor<{ROWS}x1x2x$Cxf32>
  %by_head = stablehlo.transpose %rows, dims = [1, 2, 0, 3]
    : (tensor<{ROWS}x1x2x$Cxf32>) -> tensor<1x2x{ROWS}x$Cxf32>
"""
