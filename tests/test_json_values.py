"""Dataclasses from JSON values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from modify.errors import ExportError
from modify.export.json_values import CHECKSUM, checksum_of, dataclass_from_json


@dataclasses.dataclass(frozen=True)
class Leaf:
    size: int
    share: float = 0.5


@dataclasses.dataclass(frozen=True)
class Tree:
    name: str
    kind: Literal["oak", "elm"]
    leaves: tuple[Leaf, ...]
    named: Mapping[str, Leaf]
    height: int | None


VALUES: dict[str, Any] = {
    "name": "a",
    "kind": "elm",
    "leaves": [{"size": 1, "share": 1}, {"size": 2}],
    "named": {"b": {"size": 3}},
    "height": None,
    "of a newer version": 1,
}


def test_every_type() -> None:
    tree = dataclass_from_json(Tree, VALUES)
    leaves = (Leaf(size=1, share=1.0), Leaf(size=2))
    assert tree == Tree(name="a", kind="elm", leaves=leaves, named={"b": Leaf(size=3)}, height=None)
    assert type(tree.leaves[0].share) is float
    assert dataclass_from_json(Tree, dataclasses.asdict(tree)) == tree


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 3}, "name is 3 instead of text"),
        ({"kind": "ash"}, "kind is 'ash' instead of one of oak, elm"),
        ({"height": 2.0}, r"height is 2\.0 instead of an integer"),
        ({"leaves": "ab"}, "leaves is 'ab' instead of a list"),
        ({"leaves": [[1]]}, r"leaves\[0\] is \[1\] instead of an object"),
        ({"leaves": [{"size": True}]}, r"leaves\[0\]\.size is True instead of an integer"),
        ({"leaves": [{"size": 1, "share": "1"}]}, r"leaves\[0\]\.share is '1' instead of a number"),
        ({"named": {"b": {}}}, r"named\['b'\] has no size"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        dataclass_from_json(Tree, VALUES | changes)
    with pytest.raises(ExportError, match="it has no height, name"):
        dataclass_from_json(Tree, {name: VALUES[name] for name in ("kind", "leaves", "named")})


def test_the_checksum_is_that_of_the_values() -> None:
    checksum = checksum_of(VALUES)
    assert checksum_of(dict(reversed(VALUES.items())) | {CHECKSUM: checksum}) == checksum
    assert checksum_of(VALUES | {"height": 1}) != checksum
