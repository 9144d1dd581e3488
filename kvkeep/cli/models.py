"""Loading a model for a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvkeep.errors import KvkeepError


class ModelUnusable(KvkeepError):
    """mlx-lm cannot load the model."""

    exit_code = 5
    remedy = "Name a folder that mlx_lm.load accepts, or a hub id that can be downloaded."


@dataclass(frozen=True)
class Loaded:
    """A model in memory, its tokenizer, and how its caches are to be kept."""

    model: Any
    tokenizer: Any
    path: str
    adapter: str | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int

    @property
    def kv_scheme(self) -> str | None:
        """How the cache's precision is chosen; ``None`` for the model's own."""
        if self.kv_bits is None:
            return None
        return f"bits={self.kv_bits},group={self.kv_group_size},start={self.quantized_kv_start}"

    @property
    def quantization(self) -> dict[str, Any]:
        """The same, as mlx-lm's arguments."""
        return {
            "kv_bits": self.kv_bits,
            "kv_group_size": self.kv_group_size,
            "quantized_kv_start": self.quantized_kv_start,
        }

    def new_caches(self) -> list[Any]:
        """Empty caches, one per layer that owns one."""
        from mlx_lm.models.cache import make_prompt_cache

        caches: list[Any] = make_prompt_cache(self.model)
        return caches


def load(
    path: str,
    adapter: str | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
) -> Loaded:
    """Load a model with mlx-lm. Raises ``ModelUnusable``; a missing hub model is downloaded."""
    import mlx_lm

    try:
        model, tokenizer = mlx_lm.load(path, adapter_path=adapter)[:2]
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelUnusable(f"{path} cannot be loaded: {said}") from error
    return Loaded(model, tokenizer, path, adapter, kv_bits, kv_group_size, quantized_kv_start)
