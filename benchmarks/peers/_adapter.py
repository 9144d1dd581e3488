"""What every adapter has. The module beside the class names its ``DISTRIBUTION`` on PyPI."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

Make = Callable[[], list[Any]]


class Adapter(ABC):
    """A store in a folder, driven as its own server drives it.

    ``make`` makes the empty caches of the model, as ``make_cache`` of a model does.
    """

    caches = "mlx_lm.models.cache"
    """The module with the cache classes of its server."""

    written: int | None = None
    """Bytes of the last store, where the sizes of files do not tell."""

    @abstractmethod
    def __init__(self, folder: str, make: Make) -> None:
        """Open or make the store."""

    def begin(self, caches: list[Any]) -> None:  # noqa: B027 - most have nothing to do
        """What its server does with caches that are still empty."""

    @abstractmethod
    def store(self, tokens: list[int], caches: list[Any]) -> None:
        """What a server calls; returns as soon as the peer does, and raises where it refuses."""

    def settle(self) -> None:  # noqa: B027
        """Returns once everything is written, durable or not. Then nothing more is stored."""

    def close(self) -> None:  # noqa: B027
        """Let go of the folder."""

    @abstractmethod
    def restore(self, prompt: list[int]) -> tuple[list[Any] | None, int]:
        """The caches, evaluated, and how many tokens of ``prompt`` they cover."""


class Model:
    """A model as far as stores look at one; peers take its name for its identity."""

    args: Any = None

    def __init__(self, make: Make) -> None:
        self.make_cache = make
        self.config: dict[str, Any] = {}


def evaluate(caches: list[Any]) -> list[Any]:
    """The caches, once their arrays are computed or read."""
    import mlx.core as mx

    mx.eval([c.cache if hasattr(c, "cache") else (c.keys, c.values) for c in caches])
    return caches


def shared_length(prompt: list[int], stored: list[int]) -> int:
    """How many tokens both begin with."""
    limit = min(len(prompt), len(stored))
    return next((i for i in range(limit) if prompt[i] != stored[i]), limit)


def trimmed(lib: Any, caches: list[Any], stored: int, shared: int) -> tuple[list[Any] | None, int]:
    """Cut caches of ``stored`` tokens back to ``shared``; nothing where that cannot be."""
    if shared < stored:
        if not lib.can_trim_prompt_cache(caches):
            return None, 0
        lib.trim_prompt_cache(caches, stored - shared)
    return caches, shared
