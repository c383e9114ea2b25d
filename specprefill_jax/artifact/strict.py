"""Parsed JSON to frozen dataclasses: every field present, none unknown, every value of its declared type."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from specprefill_jax.errors import ArtifactError

Record = TypeVar("Record")


def read_json(path: Path) -> object:
    """The JSON of a file.

    Raises:
        ArtifactError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read as JSON: {error}") from error


def decode(kind: type[Record], value: object, where: str) -> Record:
    """Build the dataclass `kind` from parsed JSON.

    Args:
        where: the place of `value` in its document, such as `models.draft`; error messages name it.

    Raises:
        ArtifactError: a field is missing or unknown, or a value has another type than declared.
    """
    if not isinstance(value, Mapping):
        raise ArtifactError(f"{where}: expected an object, found {_shown(value)}")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(typing.cast(Any, kind))]
    missing = [name for name in names if name not in value]
    unknown = [name for name in value if name not in names]
    if missing or unknown:
        faults = [f"lacks {', '.join(missing)}"] if missing else []
        faults += [f"holds unknown {', '.join(map(str, unknown))}"] if unknown else []
        raise ArtifactError(f"{where}: {' and '.join(faults)}; its fields are {', '.join(names)}")
    return kind(**{name: _decode_value(hints[name], value[name], f"{where}.{name}") for name in names})


def _decode_value(hint: Any, value: object, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, value, where)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(arguments, value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_decode_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return {str(key): _decode_value(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is object:
        return value
    if hint is float and type(value) in (int, float):
        return float(typing.cast(float, value))
    if hint in (int, str, bool, types.NoneType) and type(value) is hint:
        return value
    raise ArtifactError(f"{where}: expected {_described(hint)}, found {_shown(value)}")


def _decode_union(choices: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and types.NoneType in choices:
        return None
    named = [choice for choice in choices if choice is not types.NoneType]
    if len(named) == 1:
        return _decode_value(named[0], value, where)
    for choice in named:
        if type(value) is choice:
            return value
    raise ArtifactError(f"{where}: expected {' or '.join(map(_described, choices))}, found {_shown(value)}")


def _described(hint: Any) -> str:
    plain = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    if hint in plain:
        return plain[hint]
    if hint is types.NoneType:
        return "null"
    return "a list" if typing.get_origin(hint) is tuple else "an object"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
