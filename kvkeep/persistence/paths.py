"""Trees out of dotted paths, as mlx flattens them: ``{"0.1": x, "0.0": y}`` is ``((y, x),)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvkeep.errors import FileRefused

MOST_LEVELS = 16


def tree(leaves: Mapping[str, Any]) -> Any:
    """Nested tuples with the values of ``leaves`` at their paths; ``()`` without leaves.

    Every level must be numbered from 0 without gaps, so that a path cannot ask for a large
    list. Raises ``FileRefused``.

    >>> tree({"0.0": "a", "0.1": "b", "1": "c"})
    (('a', 'b'), 'c')
    """
    root: dict[str, Any] = {}
    for path, value in leaves.items():
        *branches, last = path.split(".")
        if len(branches) >= MOST_LEVELS:
            raise FileRefused(f"the path {path[:80]!r} is too deep")
        at = root
        for branch in branches:
            below = at.setdefault(branch, {})
            if not isinstance(below, dict):
                raise FileRefused(f"the path {path[:80]!r} lies below a value")
            at = below
        if last in at:
            raise FileRefused(f"the path {path[:80]!r} is there twice")
        at[last] = _Leaf(value)
    return _ordered(root)


class _Leaf:
    """A value, kept apart from branches whatever its type is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _ordered(node: dict[str, Any] | _Leaf) -> Any:
    if isinstance(node, _Leaf):
        return node.value
    try:
        return tuple(_ordered(node[str(i)]) for i in range(len(node)))
    except KeyError as error:
        raise FileRefused(f"an item {error} is missing between numbered ones") from error
