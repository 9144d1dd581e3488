"""The caches of a model under a scheme.

What the model's layers are is asked of the model: its own caches say of what kind each is, and
a forward over three tokens that is never evaluated says how wide the heads are, which rows are
lent to other layers, and whether the attention can multiply quantized planes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from kvkeep.caches.adapters import RECORD, kind_of
from kvkeep.caches.scheme import Affine, Paged, Plain, Scheme, Turbo, check_head, parse
from kvkeep.errors import BadScheme

POWERS = (2, 4, 8)
"""Widths that mlx-lm's ``QuantizedKVCache`` makes room for from its first token on."""

_NEVER = 1 << 60

_WINDOWS = (RotatingKVCache, ChunkedKVCache)


@dataclass(frozen=True)
class Heads:
    """Head sizes of one cache, and whether other layers read its rows as well."""

    keys: int
    values: int
    lent: bool


def make(model: Any, scheme: str = "bf16") -> list[Any]:
    """The caches of ``model`` under ``scheme``; see ``kvkeep.caches.make``."""
    chosen = parse(scheme)
    caches = list(make_prompt_cache(model))
    if not isinstance(chosen, Plain):
        heads = _heads(model)
        for path, cache in _leaves(caches):
            _check(path, cache, chosen, heads.get(path))
        if not any(_takes(cache, chosen, heads.get(path)) for path, cache in _leaves(caches)):
            kinds = ", ".join(sorted({kind_of(cache) for _, cache in _leaves(caches)}))
            raise BadScheme(f"{chosen} changes no layer of this model, whose caches are {kinds}")
        caches = _built(model, chosen, heads)
    _vouch(caches)
    return caches


def _vouch(caches: Sequence[Any]) -> None:
    """Blank caches have a known history; mlx-lm's own do not note it."""
    for cache in caches:
        if hasattr(cache, "caches"):
            _vouch(cache.caches)
        elif getattr(cache, "offset", None) == 0:
            setattr(cache, RECORD, 0)


@dataclass(frozen=True)
class _Way:
    """``dense`` reads quantized rows densely; ``beside`` replaces selecting caches as well."""

    dense: bool
    beside: bool


_WAYS = (_Way(False, True), _Way(True, True), _Way(True, False))


def _built(model: Any, scheme: Scheme, heads: dict[str, Heads]) -> list[Any]:
    """The first of several ways with which the model's attention runs.

    Planes are multiplied where the attention does that, and read densely otherwise: with sinks,
    or where it does more with its rows than mlx-lm's own. Keys that a model selects by, which
    it keeps beside those of its attention, stay where it reaches into them.
    """
    trials = [scheme]
    if isinstance(scheme, Affine) and scheme.start is not None:
        # Before the conversion and after it; a trial never converts. Planes are planes at any
        # width, and from the first token on mlx-lm has not all of them.
        trials = [replace(scheme, start=_NEVER), replace(scheme, start=None, bits=POWERS[0])]
    problem = ""
    # Keys without values are selected by, with a mask for each query head: not for planes.
    selects = any(not each.values for each in heads.values())
    for way in _WAYS[0 if isinstance(scheme, Affine) and not selects else 1 :]:
        try:
            for trial in trials:
                _forward(model, _replaced(model, trial, heads, way))
        except Exception as error:  # what a model raises at another cache is its own affair
            problem = problem or f"{type(error).__name__}: {error}"
        else:
            return _replaced(model, scheme, heads, way)
    raise BadScheme(f"{scheme} does not run: the model reaches into its caches ({problem})")


def _replaced(model: Any, scheme: Scheme, heads: dict[str, Heads], way: _Way) -> list[Any]:
    def each(path: str, cache: Any) -> Any:
        # In a list of two with rows the second selects what the first is read for.
        selects = path.endswith(".1") and f"{path[:-1]}0" in heads
        if selects and not way.beside:
            return cache
        return _made(cache, scheme, heads.get(path), way.dense)

    return _mapped(make_prompt_cache(model), each)


def _check(path: str, cache: Any, scheme: Scheme, heads: Heads | None) -> None:
    """Raise ``BadScheme`` with the layer where it cannot be kept so."""
    kind = kind_of(cache)
    try:
        if not isinstance(cache, KVCache | RotatingKVCache | ChunkedKVCache | ArraysCache):
            raise BadScheme(
                f"{scheme} is not known for this kind; valid is bf16, and for others kv, "
                "kv-rotating, kv-chunked and arrays"
            )
        _made(cache, scheme, heads, dense=True)
        if heads is None or not _takes(cache, scheme, heads):
            return
        for side, width in (("Keys", heads.keys), ("Values", heads.values)):
            if isinstance(scheme, Affine):
                check_head(side, width, scheme.group_size)
            elif isinstance(scheme, Turbo):
                from kvkeep.caches.turboquant import check_head_size

                check_head_size(side.lower(), width)
    except BadScheme as error:
        raise BadScheme(f"Layer {path} ({kind}): {error.problem}", remedy=error.remedy) from error


def _takes(cache: Any, scheme: Scheme, heads: Heads | None) -> bool:
    """Whether ``scheme`` replaces a cache of this kind.

    A layer that was never fed, and an indexer that keeps keys only, have no rows to replace.
    """
    if heads is None or not heads.values or isinstance(scheme, Plain):
        return False
    kinds = (KVCache, *_WINDOWS) if isinstance(scheme, Affine) else (KVCache,)
    return type(cache) in kinds


def _made(cache: Any, scheme: Scheme, heads: Heads | None, dense: bool) -> Any:
    """What takes the place of the blank ``cache``: itself where the scheme leaves it."""
    if not _takes(cache, scheme, heads):
        return cache
    if isinstance(scheme, Turbo):
        from kvkeep.caches.turboquant import TurboQuantKVCache

        return TurboQuantKVCache(k_bits=scheme.k_bits, v_bits=scheme.v_bits)
    if isinstance(scheme, Paged):
        from kvkeep.caches.paged import PagedKVCache

        return PagedKVCache(block_size=scheme.block_size)
    return _affine(cache, scheme, heads, dense)


def _affine(cache: Any, scheme: Any, heads: Heads | None, dense: bool) -> Any:
    from kvkeep.caches.chunked_quant import ChunkedQuantizedKVCache
    from kvkeep.caches.delayed import DelayedKVCache
    from kvkeep.caches.quantized import DenseQuantizedKVCache
    from kvkeep.caches.rotating_quant import RotatingQuantizedKVCache

    bits, group_size = scheme.bits, scheme.group_size
    if scheme.start is not None:
        lent = heads is not None and heads.lent
        return DelayedKVCache(bits, group_size, scheme.start, source=cache, dense=dense, lent=lent)
    if isinstance(cache, RotatingKVCache):
        return RotatingQuantizedKVCache(cache.max_size, cache.keep, bits, group_size)
    if isinstance(cache, ChunkedKVCache):
        return ChunkedQuantizedKVCache(cache.chunk_size, bits, group_size)
    if dense or bits not in POWERS:
        return DenseQuantizedKVCache(bits, group_size)
    return QuantizedKVCache(group_size=group_size, bits=bits)


def _heads(model: Any) -> dict[str, Heads]:
    """The head sizes of every cache that a forward feeds, by path."""
    caches = list(make_prompt_cache(model))
    leaves = [(path, cache) for path, cache in _leaves(caches) if hasattr(cache, "keys")]
    lent: set[str] = set()
    for path, cache in leaves:
        _watch(cache, lambda path=path: lent.add(path))  # type: ignore[misc]
    _forward(model, caches)
    return {
        path: Heads(cache.keys.shape[-1], cache.values.shape[-1], path in lent)
        for path, cache in leaves
        if cache.keys is not None
    }


def _watch(cache: Any, lends: Callable[[], None]) -> None:
    """Call ``lends`` where another layer asks this one cache for its rows."""
    if not hasattr(cache, "keys_and_values"):
        return
    update, read = cache.update_and_fetch, cache.keys_and_values
    inside = False

    def updated(keys: mx.array, values: mx.array) -> Any:
        nonlocal inside
        inside = True
        try:
            return update(keys, values)
        finally:
            inside = False

    def asked() -> Any:
        if not inside:
            lends()
        return read()

    cache.update_and_fetch, cache.keys_and_values = updated, asked


def _forward(model: Any, caches: Sequence[Any]) -> None:
    """A chunk and a token, whose results nobody evaluates."""
    model(mx.zeros((1, 2), mx.int32), cache=caches)
    model(mx.zeros((1, 1), mx.int32), cache=caches)


def _leaves(caches: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every cache that holds no others, with its path: ``3``, or ``3.1`` inside a list."""
    for number, cache in enumerate(caches):
        path = f"{prefix}{number}"
        if isinstance(cache, CacheList):
            yield from _leaves(cache.caches, f"{path}.")
        else:
            yield path, cache


def _mapped(caches: Sequence[Any], each: Callable[[str, Any], Any], prefix: str = "") -> list[Any]:
    """The same lists with ``each(path, leaf)`` in the place of every leaf."""
    out: list[Any] = []
    for number, cache in enumerate(caches):
        path = f"{prefix}{number}"
        if isinstance(cache, CacheList):
            held = _mapped(cache.caches, each, f"{path}.")
            out.append(CacheList(*held))  # type: ignore[no-untyped-call]
        else:
            out.append(each(path, cache))
    return out
