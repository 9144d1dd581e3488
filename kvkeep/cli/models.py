"""Which model a command works for, and how its caches are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.errors import KvkeepError, Refused
from kvkeep.hooks.unloadable import unusable

if TYPE_CHECKING:
    from kvkeep.prefixstore.space import Space
    from kvkeep.prefixstore.store import Store


class NotQuantizable(Refused):
    """The size of a head is no whole number of groups."""

    remedy = "Choose another --kv-group-size, which divides the size of a head; or no --kv-bits."


class UnknownToken(KvkeepError):
    """A prompt holds a token id that the model has no embedding for."""

    exit_code = 2
    remedy = "Name ids that the tokenizer of this model made."


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

    def check(self, tokens: Sequence[int]) -> None:
        """Raise ``UnknownToken`` for an id that would be read from beyond the embeddings."""
        args = getattr(self.model, "args", None)
        inner = getattr(args, "text_config", None)
        size = getattr(args, "vocab_size", None)
        if size is None and isinstance(inner, dict):
            size = inner.get("vocab_size")
        if not isinstance(size, int):
            return
        unknown = next((token for token in tokens if not 0 <= token < size), None)
        if unknown is not None:
            raise UnknownToken(f"The prompt has the token {unknown}; the model has 0 to {size - 1}")


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

    @contextmanager
    def quantizing(self) -> Iterator[None]:
        """Run the model; raises ``NotQuantizable`` where its heads do not fit ``--kv-bits``."""
        try:
            yield
        except ValueError as error:
            if self.kv_bits is None or "[quantize]" not in str(error):
                raise
            raise NotQuantizable(
                f"The caches of {self.model} cannot be quantized in groups of {self.kv_group_size}"
            ) from error

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
