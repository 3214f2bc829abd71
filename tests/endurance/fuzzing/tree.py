"""Data as a tree that may be wrong in every way a text can be: with a key twice, or words that are no value."""

import json
from collections.abc import Iterator
from typing import Any

Tree = Any
"""A `Mapping`, a list, a `Raw` word, or a scalar of JSON."""


class Mapping(list[list[Any]]):
    """Keys and values in pairs, so that a key may stand twice."""


class Raw(str):
    """Text that is written as it is, without quotes."""


def tree_of(data: Any) -> Tree:
    """Return plain data as a tree of its own."""
    if isinstance(data, dict):
        return Mapping([key, tree_of(value)] for key, value in data.items())
    if isinstance(data, list):
        return [tree_of(item) for item in data]
    return data


def copied(tree: Tree) -> Tree:
    """Return a tree that shares no list with ``tree``."""
    return type(tree)(map(copied, tree)) if isinstance(tree, list) else tree


def nodes(tree: Tree) -> Iterator[tuple[list[Any], int]]:
    """Yield every place of a tree that holds a value, as the list that has it and its index there."""
    stack: list[list[Any]] = [tree] if isinstance(tree, list) else []
    while stack:
        holder = stack.pop()
        for index, item in enumerate(holder):
            place = (item, 1) if isinstance(holder, Mapping) else (holder, index)
            yield place
            value = place[0][place[1]]
            if isinstance(value, list):
                stack.append(value)


def text_of(tree: Tree) -> str:
    """Return a tree as JSON, which is YAML in flow style too.

    >>> text_of(Mapping([["a", 1], ["a", [Raw("1e9"), "x"]]]))
    '{"a": 1, "a": [1e9, "x"]}'
    """
    if isinstance(tree, Mapping):
        pairs = (f"{key if isinstance(key, Raw) else json.dumps(key)}: {text_of(value)}" for key, value in tree)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(text_of, tree)) + "]"
    return str(tree) if isinstance(tree, Raw) else json.dumps(tree)
