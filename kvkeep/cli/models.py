"""Which model a command works for, and how its caches are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.hooks.unloadable import unusable

if TYPE_CHECKING:
    from kvkeep.prefixstore.space import Space
    from kvkeep.prefixstore.store import Store


@dataclass(frozen=True)
class Loaded:
    """A model in memory, and its tokenizer."""

    model: Any
    tokenizer: Any

    def new_caches(self) -> list[Any]:
        """Empty caches, one per layer that owns one."""
        from mlx_lm.models.cache import make_prompt_cache

        caches: list[Any] = make_prompt_cache(self.model)
        return caches


@dataclass(frozen=True)
class Choice:
    """A model by name, and everything else that decides what its caches hold."""

    model: str
    adapter: str | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    prefill_step: int = 2048
    exact: bool = False
    salt: str | None = None

    @property
    def kv_scheme(self) -> str | None:
        """How keys and values are quantized; ``None`` for the model's own precision."""
        if self.kv_bits is None:
            return None
        return f"affine:{self.kv_bits}:{self.kv_group_size}@{self.quantized_kv_start}"

    @property
    def quantization(self) -> dict[str, Any]:
        """The same, as the arguments of mlx-lm and of ``prefill``."""
        return {
            "kv_bits": self.kv_bits,
            "kv_group_size": self.kv_group_size,
            "quantized_kv_start": self.quantized_kv_start,
        }

    def load(self, *, weights: bool = True) -> Loaded:
        """Load it with mlx-lm; without ``weights`` they stay on disk until they are used.

        A hub model that is not there yet is downloaded. Raises ``ModelUnusable``.
        """
        load = _mlx_lm_load()
        try:
            model, tokenizer = load(self.model, adapter_path=self.adapter, lazy=not weights)[:2]
        except Exception as error:
            raise unusable(self.model, error) from error
        return Loaded(model, tokenizer)

    def space(self, store: Store, loaded: Loaded) -> Space:
        """The space of this model in ``store``. Raises ``IdentityUnknown``."""
        return store.space(
            model=loaded.model,
            model_path=self.model,
            tokenizer=loaded.tokenizer,
            adapter=self.adapter,
            kv_scheme=self.kv_scheme,
            salt=self.salt,
            exact=self.exact,
            prefill_step=self.prefill_step,
        )


def _mlx_lm_load() -> Callable[..., tuple[Any, ...]]:
    import mlx_lm

    return mlx_lm.load
