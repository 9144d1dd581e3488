"""Prompt-cache files of mlx-lm: read without trusting them, written with mlx-lm's own code.

Files go both ways: ``mlx_lm.generate --prompt-cache-file`` reads what ``save`` writes, and
``load`` reads what ``mlx_lm.cache_prompt`` writes. A class name in a file is looked up in one
fixed table, and each class has a few lines that check its state and set its attributes.

What mlx-lm leaves out, the history of caches that changed precision, travels in the metadata
under ``kvkeep.minimum_resumable_offset``.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvkeep.codecs.base import RECORD
from kvkeep.errors import EmptyCache, FileRefused, MalformedCache, UnknownCache
from kvkeep.persistence.stored_cache import LIST_CLASS, StoredCache

FLOORS = f"kvkeep.{RECORD}"
SUFFIX = ".safetensors"
MODULE = "mlx_lm.models.cache"


def load(path: str | os.PathLike[str]) -> tuple[list[Any], dict[str, str]]:
    """The live caches of a prompt-cache file, and the user's metadata.

    Raises ``FileRefused`` where the file is damaged, hostile, or holds a class without a reader.
    """
    from kvkeep.persistence.prompt_file import read_prompt_file

    file = read_prompt_file(path)
    metadata = dict(file.metadata)
    try:
        caches = [_build(str(i), stored) for i, stored in enumerate(file.caches)]
        _set_floors(caches, metadata.pop(FLOORS, None))
    except FileRefused as error:
        raise FileRefused(
            f"{path}: {error.problem} (written by {file.writer})", remedy=error.remedy or _REMEDY
        ) from error
    return caches, metadata


def save(
    path: str | os.PathLike[str], caches: Sequence[Any], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write ``caches`` so that mlx-lm reads them; the path, which ends in ``.safetensors``.

    The file appears whole or not at all, readable by this user only. Raises ``UnknownCache``,
    ``EmptyCache`` or ``MalformedCache`` for caches that mlx-lm could not read back, and
    ``FileRefused`` where the file cannot be written.
    """
    from mlx_lm.models.cache import save_prompt_cache

    path = Path(path)
    if path.suffix != SUFFIX:
        path = path.with_name(path.name + SUFFIX)
    ready = [_for_mlx_lm(str(i), cache) for i, cache in enumerate(caches)]
    if not ready:
        raise EmptyCache("There is no cache to write")
    texts = {str(key): str(value) for key, value in (metadata or {}).items()}
    texts.pop(FLOORS, None)
    floors = dict(_floors(caches))
    if floors:
        texts[FLOORS] = json.dumps(floors)
    made = path.with_name(f".{path.stem}.{secrets.token_hex(6)}{SUFFIX}")
    try:
        os.close(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        save_prompt_cache(str(made), ready, texts)
        _flush(made)
        made.replace(path)
        _flush(path.parent)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FileRefused(
            f"{path}: cannot be written ({reason})", remedy="Free disk space, or name another file."
        ) from error
    finally:
        with suppress(OSError):
            made.unlink()
    return path


_REMEDY = "Make the file again with `mlx_lm.cache_prompt`."


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _leaves(caches: Sequence[Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every cache that holds something itself, by its path: ``3``, or ``3.0`` in a list."""
    for i, cache in enumerate(caches):
        if type(cache).__name__ == LIST_CLASS:
            yield from _leaves(cache.caches, f"{path}{i}.")
        else:
            yield f"{path}{i}", cache


def _floors(caches: Sequence[Any]) -> Iterator[tuple[str, int]]:
    for path, cache in _leaves(caches):
        floor = getattr(cache, RECORD, None)
        if type(floor) is int:
            yield path, floor


def _set_floors(caches: Sequence[Any], text: str | None) -> None:
    """Set the recorded minimum-resumable offsets on the caches that they were recorded for."""
    if text is None:
        return
    leaves = dict(_leaves(caches))
    try:
        floors = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileRefused(f"{FLOORS} is no JSON") from error
    if not isinstance(floors, dict):
        raise FileRefused(f"{FLOORS} is no mapping")
    for path, floor in floors.items():
        cache = leaves.get(path)
        offset = getattr(cache, "offset", None)
        if type(floor) is not int or type(offset) is not int or not 0 <= floor <= offset:
            raise FileRefused(f"{FLOORS} of cache {path[:80]} does not fit that cache")
        cache.minimum_resumable_offset = floor  # type: ignore[union-attr]


def _for_mlx_lm(where: str, cache: Any) -> Any:
    """``cache``, or a copy of what mlx-lm would write wrongly."""
    name = type(cache).__name__
    if name not in (*_BUILDERS, LIST_CLASS) or type(cache).__module__ != MODULE:
        raise UnknownCache(f"mlx-lm cannot read a {name} (cache {where}) from a file")
    if name == LIST_CLASS:
        inner = [_for_mlx_lm(f"{where}.{i}", child) for i, child in enumerate(cache.caches)]
        if not inner:
            raise EmptyCache(f"Cache {where} is a list without caches")
        return _classes().CacheList(*inner)
    if name == "ConcatenateKVCache" and cache.keys is None:
        raise EmptyCache(f"Cache {where} is empty, which mlx-lm cannot read from a file")
    if name in _CUT and cache.keys is not None:
        return _without_room(cache)
    if name == "ArraysCache" and not cache.cache:
        raise MalformedCache(f"Cache {where} is an ArraysCache without slots")
    return cache


_CUT = ("KVCache", "ConcatenateKVCache", "QuantizedKVCache", "ChunkedKVCache", "RotatingKVCache")


def _without_room(cache: Any) -> Any:
    """A copy without the slots behind the offset, which hold nothing that is anyone's."""
    slots = cache.offset - getattr(cache, "start_position", 0)
    cut = copy.copy(cache)
    if type(cache).__name__ == "QuantizedKVCache":
        cut.keys = tuple(plane[..., :slots, :] for plane in cache.keys)
        cut.values = tuple(plane[..., :slots, :] for plane in cache.values)
    else:
        cut.keys, cut.values = cache.keys[..., :slots, :], cache.values[..., :slots, :]
    return cut


def _classes() -> Any:
    from mlx_lm.models import cache

    return cache


def _build(where: str, stored: StoredCache) -> Any:
    if stored.class_name == LIST_CLASS:
        return _classes().CacheList(
            *(_build(f"{where}.{i}", c) for i, c in enumerate(stored.children))
        )
    builder = _BUILDERS.get(stored.class_name)
    if builder is None:
        known = ", ".join((*_BUILDERS, LIST_CLASS))
        raise FileRefused(f"no reader for class {stored.class_name!r}; known: {known}")
    try:
        return builder(stored.state)
    except _Wrong as error:
        raise FileRefused(f"cache {where} is no {stored.class_name}: {error}") from error


class _Wrong(Exception):
    """What is wrong with a state."""


def _parts(state: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(state, tuple) or len(state) != count:
        raise _Wrong(f"its state does not have {count} parts")
    return state


def _check(what: str, value: Any, low: int, high: int | None = None) -> int:
    if type(value) is not int or value < low or (high is not None and value > high):
        raise _Wrong(f"its {what} is {value!r}"[:120])
    return value


def _array(value: Any, axes: int | None = None) -> Any:
    import mlx.core as mx

    if not isinstance(value, mx.array) or (axes is not None and value.ndim != axes):
        raise _Wrong("something else stands where an array is due")
    return value


def _slots(keys: Any, values: Any) -> int:
    """How many positions ``keys`` and ``values``, ``[B, H, T, D]``, have room for; 0 if none."""
    if keys is None and values is None:
        return 0
    shape = _array(keys, 4).shape
    if _array(values, 4).shape[:3] != shape[:3]:
        raise _Wrong("its keys and values differ in shape")
    return int(shape[2])


def _kv(state: Any) -> Any:
    keys, values, offset = _parts(state, 3)
    cache = _classes().KVCache()
    cache.offset = _check("offset", offset, 0, _slots(keys, values))
    cache.keys, cache.values = keys, values
    return cache


def _concatenate(state: Any) -> Any:
    keys, values = _parts(state, 2)
    cache = _classes().ConcatenateKVCache()
    cache.offset = _slots(keys, values)
    cache.keys, cache.values = keys, values
    return cache


def _quantized(state: Any) -> Any:
    keys, values, offset, group_size, bits = _parts(state, 5)
    if _check("bits", bits, 2, 8) == 7 or _check("group size", group_size, 32) not in (32, 64, 128):
        raise _Wrong(f"it has {bits} bits in groups of {group_size}")
    cache = _classes().QuantizedKVCache(group_size=group_size, bits=bits)
    slots = 0
    if keys is not None or values is not None:
        slots = _slots(_planes(keys, group_size, bits)[0], _planes(values, group_size, bits)[0])
    cache.offset = _check("offset", offset, 0, slots)
    cache.keys, cache.values = keys, values
    return cache


def _planes(side: Any, group_size: int, bits: int) -> tuple[Any, ...]:
    """Packed numbers, scales and biases that belong together."""
    import mlx.core as mx

    packed, scales, biases = (_array(plane, 4) for plane in _parts(side, 3))
    groups = packed.shape[3] * 32 // (bits * group_size)
    if (
        packed.dtype != mx.uint32
        or scales.shape != biases.shape
        or scales.dtype != biases.dtype
        or tuple(scales.shape) != (*packed.shape[:3], groups)
        or groups * bits * group_size != packed.shape[3] * 32
    ):
        raise _Wrong("its packed numbers, scales and biases do not fit")
    return packed, scales, biases


def _rotating(state: Any) -> Any:
    keys, values, offset, keep, max_size, index = _parts(state, 6)
    slots = _slots(keys, values)
    cache = _classes().RotatingKVCache(
        max_size=_check("max_size", max_size, 1), keep=_check("keep", keep, 0, max_size)
    )
    cache.offset = _check("offset", offset, 0, 0 if keys is None else None)
    cache._idx = _check("index", index, 0, slots)
    cache.keys, cache.values = keys, values
    return cache


def _chunked(state: Any) -> Any:
    keys, values, offset, chunk_size, start = _parts(state, 5)
    slots = _slots(keys, values)
    cache = _classes().ChunkedKVCache(_check("chunk size", chunk_size, 1))
    cache.start_position = _check("start", start, 0)
    cache.offset = _check("offset", offset, start, start + slots)
    cache.keys, cache.values = keys, values
    return cache


def _arrays(state: Any) -> Any:
    slots, left_padding, lengths = _parts(state, 3)
    if not isinstance(slots, tuple) or not slots:
        raise _Wrong("it has no slots")
    cache = _classes().ArraysCache(len(slots))
    cache.cache = [None if slot is None else _array(slot) for slot in slots]
    cache.left_padding = None if left_padding is None else _array(left_padding, 1)
    cache.lengths = None if lengths is None else _array(lengths, 1)
    return cache


_BUILDERS: Mapping[str, Callable[[Any], Any]] = {
    "KVCache": _kv,
    "ConcatenateKVCache": _concatenate,
    "QuantizedKVCache": _quantized,
    "RotatingKVCache": _rotating,
    "ChunkedKVCache": _chunked,
    "ArraysCache": _arrays,
}
