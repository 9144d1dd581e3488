"""What a prompt-cache file holds, as plain data: no class is looked up, no attribute set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tree = Any
"""An ``mx.array``, ``int``, ``float``, ``bool``, ``str`` or ``None``, or a tuple of trees."""

LIST_CLASS = "CacheList"


@dataclass(frozen=True)
class StoredCache:
    """One cache of a file: the class that wrote it, and its state in the form of mlx-lm 0.32.

    A ``CacheList`` has ``children`` and no state of its own.
    """

    class_name: str
    state: Tree
    children: tuple[StoredCache, ...] = ()


@dataclass(frozen=True)
class PromptFile:
    """The caches of a file in order, the user's metadata, and which mlx-lm wrote it."""

    caches: tuple[StoredCache, ...]
    metadata: dict[str, str]
    writer: str
