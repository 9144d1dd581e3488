"""The prompt-cache files of mlx-lm before 0.32.

The metadata are a flattened list of three: ``0.*`` is the ``meta_state`` of each cache, texts
where 0.32 has numbers in the state; ``1.*`` the user's metadata; ``2.*`` the class names. The
states were cut at the offset, which for most classes was not written down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from kvkeep.errors import FileRefused
from kvkeep.persistence.paths import tree
from kvkeep.persistence.stored_cache import LIST_CLASS, PromptFile, StoredCache

WRITER = "mlx-lm before 0.32"
_REMEDY = "Make the file again with `mlx_lm.cache_prompt` of mlx-lm 0.32.2 or later."


def read_old(arrays: Mapping[str, mx.array], texts: Mapping[str, str]) -> PromptFile:
    """The file's contents in the form of today. Raises ``FileRefused``."""
    infos = tree({key[2:]: value for key, value in texts.items() if key.startswith("0.")})
    names = tree({key[2:]: value for key, value in texts.items() if key.startswith("2.")})
    user = {key[2:]: value for key, value in texts.items() if key.startswith("1.")}
    states = tree(arrays)
    if not len(names) == len(infos) == len(states):
        raise _refused(f"{len(states)} states and {len(infos)} infos for {len(names)} caches")
    caches = zip(names, states, infos, strict=True)
    return PromptFile(tuple(_cache(*cache) for cache in caches), user, WRITER)


def _refused(problem: str) -> FileRefused:
    return FileRefused(f"written by {WRITER}: {problem}", remedy=_REMEDY)


def _cache(name: Any, state: Any, info: Any) -> StoredCache:
    if type(name) is not str:
        raise _refused("something else stands where a class name is due")
    if name == LIST_CLASS:
        return StoredCache(name, (), _children(state, info))
    if name not in _FORMS:
        raise _refused(f"no reader for class {name[:80]!r}; known: {', '.join(_FORMS)}")
    return StoredCache("ArraysCache" if name == "MambaCache" else name, _FORMS[name](state, info))


def _children(state: Any, info: Any) -> tuple[StoredCache, ...]:
    match info:
        case (tuple(names), tuple(infos)) if isinstance(state, tuple):
            if len(names) == len(infos) == len(state):
                return tuple(map(_cache, names, state, infos))
    raise _refused("a CacheList without the kinds of what it holds")


def _numbers(info: Any, *lengths: int) -> list[int]:
    """The numbers of a ``meta_state``, which has one of ``lengths``."""
    if not isinstance(info, tuple) or len(info) not in lengths:
        raise _refused("a cache's numbers are missing")
    try:
        numbers = [int(text) for text in info if len(text) < 20]
    except (ValueError, TypeError) as error:
        raise _refused("something else stands where a number is due") from error
    if len(numbers) != len(info):
        raise _refused("a number is too long")
    return numbers


def _pair(state: Any) -> tuple[Any, Any]:
    if not isinstance(state, tuple) or len(state) != 2:
        raise _refused("a cache without keys and values")
    return state


def _kv(state: Any, info: Any) -> tuple[Any, ...]:
    keys, values = _pair(state)
    if info != "" or not isinstance(keys, mx.array) or keys.ndim != 4:
        raise _refused("a KVCache of another form")
    return keys, values, keys.shape[2]


def _concatenate(state: Any, _: Any) -> tuple[Any, ...]:
    return _pair(state)


def _quantized(state: Any, info: Any) -> tuple[Any, ...]:
    # Before 0.26 the growth step came first.
    return (*_pair(state), *_numbers(info, 3, 4)[-3:])


def _rotating(state: Any, info: Any) -> tuple[Any, ...]:
    keep, max_size, *_, offset, index = _numbers(info, 4, 5)
    return (*_pair(state), offset, keep, max_size, index)


def _chunked(state: Any, info: Any) -> tuple[Any, ...]:
    keys, values, rows = _kv(state, "")
    chunk_size, start = _numbers(info, 2)
    if start:
        raise _refused("a ChunkedKVCache past its first chunk, whose offset was not written down")
    return keys, values, rows, chunk_size, 0


def _arrays(state: Any, info: Any) -> tuple[Any, ...]:
    if info != "" or not isinstance(state, tuple):
        raise _refused("an ArraysCache of another form")
    return state, None, None


_FORMS: Mapping[str, Callable[[Any, Any], tuple[Any, ...]]] = {
    "KVCache": _kv,
    "ConcatenateKVCache": _concatenate,
    "QuantizedKVCache": _quantized,
    "RotatingKVCache": _rotating,
    "ChunkedKVCache": _chunked,
    "ArraysCache": _arrays,
    "MambaCache": _arrays,
}
