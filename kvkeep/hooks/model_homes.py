"""Where the caches of a server's current model belong: a space by content, and what is expected.

A server names its model by paths. Paths are not identity: what lies there may change between
two loads. So the content is read again whenever the server has another model object in hand.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from kvkeep.errors import KvkeepError
from kvkeep.prefixstore.recipe import kind_tree

if TYPE_CHECKING:
    from kvkeep.prefixstore.space import Space
    from kvkeep.prefixstore.store import Store

log = logging.getLogger("kvkeep")

RETRY_SECONDS = 30.0
"""A space that could not be opened, because its store failed, is tried again after these."""


class Provider(Protocol):
    """What is asked of a server's model provider: ``mlx_lm.server.ModelProvider`` has all of it.

    ``model_key`` is the paths of model, adapter and draft model, each may be ``None``;
    ``cli_args`` the server's options (``kv_bits``, ``kv_group_size``, ``quantized_kv_start``).
    """

    model_key: Any
    model: Any
    tokenizer: Any
    draft_model: Any
    cli_args: Any


@dataclass(frozen=True)
class Home:
    """Where caches of one loaded model go.

    ``key`` is equal for equal content. ``space`` is ``None`` where nothing can be stored.
    ``kinds`` and ``draft_kinds`` are those of new caches, empty where unknown; ``converts``
    says whether the server quantizes them. ``draft_model`` answers the live one.
    """

    key: Hashable
    space: Space | None = None
    kinds: tuple[str, ...] = ()
    draft_kinds: tuple[str, ...] = ()
    converts: bool = False
    draft_model: Callable[[], Any] = lambda: None

    def split(self, caches: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The target's caches and the draft's, which follow them in one list."""
        width = len(self.kinds) if self.draft_kinds else len(caches)
        return list(caches[:width]), list(caches[width:])

    def welcomes(self, kinds: Sequence[str]) -> bool:
        """Whether caches of these kinds are what this server's own path would make."""
        if not self.kinds or tuple(kinds) == self.kinds:
            return True
        plain = tuple(kind.replace("kv-quant", "kv") for kind in kinds)
        return self.converts and plain == self.kinds


class FixedHome:
    """One space for whatever the server names; for servers that serve one model."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def __call__(self, model_key: Any) -> Home:
        """The space, under the server's own name for the model."""
        drafted = self._space.draft.layout if self._space.draft is not None else ()
        return Home(
            (self._space.id, model_key), self._space, self._space.layout, drafted, converts=True
        )


class NoHome:
    """No store: memory alone, by the server's own name for the model."""

    def __call__(self, model_key: Any) -> Home:
        """A home without a space."""
        return Home(("unknown", model_key))


class ModelHomes:
    """The home of whatever model ``provider`` has in hand."""

    def __init__(
        self,
        provider: Provider,
        store: Store | None,
        *,
        salt: str | None = None,
        exact: bool = False,
    ) -> None:
        self._provider = provider
        self._store = store
        self._salt = salt
        self._exact = exact
        self._serial = count(1)
        self._model: Callable[[], Any] = lambda: None
        self._known: Home | None = None
        self._named: Any = None
        self._again = math.inf

    def __call__(self, model_key: Any) -> Home:
        """The home of the model that the provider holds now, or held last.

        A server that stops lets go of its model before what is in hand is kept. Another name
        than the provider's own is a home without a space.
        """
        model = self._provider.model
        named = self._provider.model_key if model is not None else self._named
        if model_key is not None and model_key != named:
            return Home(("unknown", model_key))
        if model is None:
            return self._known or Home(("unknown", model_key))
        self._named = named
        if self._known is None or self._model() is not model or time.time() > self._again:
            self._again = math.inf
            self._known = self._read(model)
            self._model = weakref.ref(model)
        return self._known

    def _read(self, model: Any) -> Home:
        from mlx_lm.models.cache import make_prompt_cache

        drafter = self._provider.draft_model
        layout = make_prompt_cache(model)
        draft_layout = make_prompt_cache(drafter) if drafter is not None else None
        space = self._space(model, layout, draft_layout)
        return Home(
            space.id if space is not None else ("unknown", next(self._serial)),
            space,
            _kinds(layout),
            _kinds(draft_layout or ()),
            self._option("kv_bits") is not None,
            weakref.ref(drafter) if drafter is not None else lambda: None,
        )

    def _space(self, model: Any, layout: Any, draft_layout: Any) -> Space | None:
        if self._store is None:
            return None
        path, adapter, draft = (*(self._provider.model_key or ()), None, None, None)[:3]
        try:
            return self._store.space(
                model=model,
                model_path=path,
                tokenizer=self._provider.tokenizer,
                adapter=adapter,
                draft_model=draft,
                kv_scheme=self._scheme(),
                salt=self._salt,
                layout=layout,
                draft_layout=draft_layout,
                exact=self._exact,
                prefill_step=self._option("prefill_step_size", 2048),
            )
        except (KvkeepError, OSError, ValueError) as error:
            self._again = time.time() + RETRY_SECONDS
            log.warning("kvkeep: caches of this model stay in memory: %s", error)
            return None

    def _scheme(self) -> str | None:
        bits = self._option("kv_bits")
        if bits is None:
            return None
        group, start = self._option("kv_group_size", 64), self._option("quantized_kv_start", 5000)
        return f"affine:{bits}:{group}@{start}"

    def _option(self, name: str, default: Any = None) -> Any:
        return getattr(self._provider.cli_args, name, default)


def _kinds(layout: Sequence[Any]) -> tuple[str, ...]:
    try:
        return kind_tree(layout)
    except KvkeepError:
        return ()
