"""Dataclasses from JSON values, each value checked for its type; and the checksum of JSON values.

This module uses the standard library only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from modify.errors import ExportError

_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
CHECKSUM = "sha256"  # the field that guards the others


def checksum_of(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values without their checksum, whatever their order and spacing."""
    others = {name: value for name, value in values.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def dataclass_from_json(kind: Any, values: Mapping[str, Any], where: str = "") -> Any:
    """Build a dataclass; what is no field of it is ignored, and fields with a default may be missing.

    Args:
        kind: the dataclass; its fields are numbers, text, bools, tuples `tuple[X, ...]`, mappings `Mapping[str, X]`,
            dataclasses, `Literal` or `X | None`.
        values: by field.
        where: what the values are, for messages.

    Raises:
        ExportError: a field is missing or a value is not of its type; the message names it.
    """
    hints, fields = get_type_hints(kind), dataclasses.fields(kind)
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    if missing := sorted(required - values.keys()):
        raise ExportError(f"{where or 'it'} has no {', '.join(missing)}")
    prefix = f"{where}." if where else ""
    return kind(
        **{f.name: _value(hints[f.name], values[f.name], prefix + f.name) for f in fields if f.name in values}
    )


def _value(kind: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:  # X | None
        return None if value is None else _value(inner[0], value, where)
    if origin is Literal:
        _check(value in inner, value, f"one of {', '.join(map(str, inner))}", where)
        return value
    if origin is tuple:
        _check(isinstance(value, list | tuple), value, "a list", where)
        return tuple(_value(inner[0], entry, f"{where}[{number}]") for number, entry in enumerate(value))
    if origin is not None or dataclasses.is_dataclass(kind):
        _check(isinstance(value, Mapping), value, "an object", where)
        if origin is None:
            return dataclass_from_json(kind, value, where)
        return {name: _value(inner[1], entry, f"{where}[{name!r}]") for name, entry in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    _check(type(value) is kind, value, _NAMES[kind], where)  # a bool is no int
    return value


def _check(holds: bool, value: object, expected: str, where: str) -> None:
    if not holds:
        raise ExportError(f"{where} is {value!r} instead of {expected}")
