"""The tuning library for 16x16x16 matrix units, scaled to units of 8x8x8 and subgroups of 8.

Passes and matchers stay as they are, so a product gets the passes, and the tile by name, that it gets in a
build for the real unit. Only what is measured in units and lanes shrinks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from specprefill_jax.errors import TargetError

UNIT, LANES = 16, 32  # of the library
SCALED_UNIT, SCALED_LANES = 8, 8  # of lavapipe in Mesa 26

_CONFIGURATION = re.compile(
    r"^#(?P<name>\w+) = #iree_codegen\.compilation_info<"
    r"(?P<before>[^#]*#iree_codegen\.lowering_config<tile_sizes = )(?P<tiles>\[\[[\d, \[\]]+\]\])"
    r"(?P<between>>,[^\[\]]*?pipeline = #[^\[\]]*? workgroup_size = \[)"
    r"(?P<threads>\d+)(?P<rows>, \d+, 1\] subgroup_size = )(?P<lanes>\d+)",
    re.MULTILINE,
)
_PASSES = re.compile(r'^#passes = #iree_codegen\.pass_pipeline<"(?P<passes>[^"]+)">$', re.MULTILINE)
COMPILERS = "compilers"  # the name of the compiler's own configuration where it is written down
# For one product, of exactly these sizes; what stands in the library's own sequences otherwise.
_WRITTEN_DOWN = """
#{name} = #iree_codegen.compilation_info<
  lowering_config = #iree_codegen.lowering_config<tile_sizes = {tiles}>,
  translation_info = #iree_codegen.translation_info<
    pipeline = #iree_gpu.spirv_pipeline<{pipeline}> workgroup_size = {workgroup} subgroup_size = {lanes},
    {options}>>

module attributes {{transform.with_named_sequence}} {{
  transform.named_sequence @{name}(%op: !transform.any_op {{transform.readonly}})
      -> (!transform.any_op, !transform.any_param) {{
    %b, %m, %n, %k = transform.iree.match.contraction %op, lhs_type = f16, rhs_type = f16, output_type = f32
        : !transform.any_op -> !transform.param<i64>
    %out = transform.get_operand %op[2] : (!transform.any_op) -> !transform.any_value
    transform.iree.match.cast_compatible_type %out = tensor<{shape}xf32> : !transform.any_value
    %config = transform.param.constant #{name} -> !transform.any_param
    transform.yield %op, %config : !transform.any_op, !transform.any_param
  }}
"""


def scaled(library: str) -> str:
    """The library for the smaller unit.

    Raises:
        TargetError: a configuration of it is not written or sized as this expects; nothing is left unscaled.
    """
    text, count = _CONFIGURATION.subn(_scaled, library)
    if not count or count != library.count("compilation_info<"):
        raise TargetError(
            f"{library.count('compilation_info<')} configurations stand in the tuning library, and "
            f"{count} of them are written as coop_check can scale them"
        )
    return text


def written_down(library: str, *, pipeline: str, tiles: str, workgroup: str, options: str, shape: str) -> str:
    """The library with what the compiler chose itself for products of a shape, so that it can be scaled too.

    Raises:
        TargetError: the library has no place for it.
    """
    sequence = _WRITTEN_DOWN.format(
        name=COMPILERS,
        pipeline=pipeline,
        tiles=tiles,
        workgroup=workgroup,
        lanes=LANES,
        options=options,
        shape=shape,
    )
    head, matchers = "\nmodule attributes {transform.with_named_sequence} {\n", "foreach_match in %variant\n"
    if library.count(head) != 1 or library.count(matchers) != 1:
        raise TargetError("the tuning library is not one module with one list of matchers")
    return library.replace(head, sequence).replace(
        matchers, f"{matchers}        @{COMPILERS} -> @annotate,\n"
    )


def tiles(library: str) -> Mapping[str, str]:
    """The names of the library's configurations, by their tile sizes."""
    return {found["tiles"]: found["name"] for found in _CONFIGURATION.finditer(library)}


def passes(library: str) -> str:
    """The library's list of passes.

    Raises:
        TargetError: it has none, or several.
    """
    found = _PASSES.findall(library)
    if len(found) != 1:
        raise TargetError(f"{len(found)} lists of passes stand in the tuning library; coop_check expects one")
    return found[0]


def sizes_of(text: str) -> list[list[int]]:
    """Tile sizes as numbers: of the workgroup, a subgroup, along K, and the unit."""
    levels = re.findall(r"\[([\d, ]+)\]", text)
    return [[int(size) for size in level.split(",")] for level in levels]


def _scaled(found: re.Match[str]) -> str:
    """One configuration; names it where its sizes do not fit together."""
    sizes, threads, lanes = sizes_of(found["tiles"]), int(found["threads"]), int(found["lanes"])
    workgroup, subgroup, along_k, unit = sizes
    fits = (
        lanes == LANES
        and unit[-3:] == [UNIT] * 3
        and threads == lanes * (workgroup[-1] // subgroup[-1])
        and int(found["rows"].split(",")[1]) == workgroup[-2] // subgroup[-2]
        and all(size % UNIT == 0 for level in (workgroup[-2:], subgroup[-2:], along_k[-1:]) for size in level)
    )
    if not fits:
        raise TargetError(
            f"{found['name']} of the tuning library has tiles {found['tiles']} in {threads} threads and "
            f"subgroups of {lanes}: coop_check expects units of {UNIT}, shared by subgroups of {LANES}"
        )
    # A batch has the size 1, and a level the size 0 for an axis that it leaves alone.
    smaller = [[size * SCALED_UNIT // UNIT if size > 1 else size for size in level] for level in sizes]
    return (
        f"#{found['name']} = #iree_codegen.compilation_info<{found['before']}{smaller}{found['between']}"
        f"{threads * SCALED_LANES // LANES}{found['rows']}{SCALED_LANES}"
    )
