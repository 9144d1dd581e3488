"""Reading the prompt-cache files of mlx-lm: ``mlx_lm.cache_prompt``, ``save_prompt_cache``.

mlx-lm looks up the classes that such a file names, and sets their attributes from it. Nothing
of that happens here: a file becomes plain data, checked against its own header first, and
whoever builds caches from it decides which class names it knows.

mlx-lm 0.32 writes one safetensors file. Tensors are named by their path, ``layer.i.j…``, in
the ``state`` of each cache; numbers, texts and ``None`` in it are stored as small tensors. The
file's metadata are a flattened list of three:

* ``0.*``: the user's metadata,
* ``1.*``: the class name of each cache,
* ``2.*``: an empty text, then the path and type of each tensor that stands for something else.

``prompt_file_old`` has the form before that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from kvkeep.errors import FileRefused
from kvkeep.persistence.paths import tree
from kvkeep.persistence.prompt_file_old import read_old
from kvkeep.persistence.stored_cache import LIST_CLASS, PromptFile, StoredCache, Tree
from kvkeep.persistence.tensors import SAFETENSORS_DTYPES

MOST_TENSORS = 1 << 16
MOST_TEXT = 256


def read_prompt_file(path: str | os.PathLike[str]) -> PromptFile:
    """The contents of a prompt-cache file, with every array evaluated.

    Raises ``FileRefused`` where the file is not one, or contradicts itself.
    """
    path = Path(path)
    try:
        shapes, texts = _read_header(path)
        user, classes, rest = _three(texts)
        if rest.get("0") == "":
            arrays = _load(path, shapes)
            names = tree(classes)
            caches = _caches(names, tree(_without_stand_ins(arrays, tree(rest)[1:])))
            return PromptFile(caches, user, "mlx-lm 0.32 or later")
        return read_old(_load(path, shapes), texts)
    except FileRefused as error:
        raise FileRefused(f"{path}: {error.problem}", remedy=error.remedy or _REMEDY) from error


_REMEDY = "Make the file again with `mlx_lm.cache_prompt` or `kvkeep`."


def _read_header(path: Path) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, str]]:
    """Dtype and shape of every tensor, and the metadata. The library checks all lengths."""
    try:
        with safe_open(path, framework="numpy") as file:
            texts = file.metadata() or {}
            names = list(file.keys())
            if len(names) > MOST_TENSORS or len(texts) > 4 * MOST_TENSORS:
                raise FileRefused(f"{len(names):,} tensors are too many for a prompt cache")
            parts = {name: file.get_slice(name) for name in names}
            shapes = {n: (str(p.get_dtype()), tuple(p.get_shape())) for n, p in parts.items()}
    except (SafetensorError, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FileRefused(f"not a readable safetensors file ({reason})") from error
    for name, (dtype, _) in shapes.items():
        if dtype not in SAFETENSORS_DTYPES.values():
            raise FileRefused(f"tensor {name[:80]!r} has dtype {dtype}, which MLX has not")
    return shapes, texts


def _three(texts: Mapping[str, str]) -> tuple[dict[str, str], ...]:
    """The metadata of the three places of the list, by the rest of their key."""
    places: tuple[dict[str, str], ...] = ({}, {}, {})
    for key, value in texts.items():
        place, _, rest = key.partition(".")
        if place not in ("0", "1", "2") or not rest:
            break
        places[int(place)][rest] = value
    else:
        if places[2]:
            return places
    raise FileRefused(
        "a safetensors file, but no prompt cache of mlx-lm",
        remedy="Name a file that `mlx_lm.cache_prompt` wrote.",
    )


def _load(path: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, mx.array]:
    try:
        loaded: Any = mx.load(str(path), format="safetensors")
        mx.eval(list(loaded.values()))
    except (RuntimeError, ValueError) as error:
        raise FileRefused(f"MLX cannot load it ({error})") from error
    if {n: tuple(a.shape) for n, a in loaded.items()} != {n: s for n, (_, s) in shapes.items()}:
        raise FileRefused("the file changed while it was read")
    return dict(loaded)


def _without_stand_ins(arrays: Mapping[str, mx.array], listed: tuple[Any, ...]) -> dict[str, Tree]:
    """``arrays`` with numbers, texts and ``None`` where the file says that a tensor is one."""
    out: dict[str, Tree] = dict(arrays)
    seen: set[str] = set()
    for entry in listed:
        match entry:
            case (str(path), str(kind)) if path in arrays and path not in seen:
                seen.add(path)
                out[path] = _stand_in(path, kind, arrays[path])
            case _:
                raise FileRefused(f"the list of scalars names {str(entry)[:80]}")
    return out


def _stand_in(path: str, kind: str, array: mx.array) -> Tree:
    if kind == "none" and array.size == 0:
        return None
    if kind == "scalar" and array.ndim == 0 and array.dtype != mx.complex64:
        return array.item()
    if kind == "string" and array.ndim == 1 and array.size <= MOST_TEXT:
        return "".join(_letter(path, code) for code in array.tolist())  # type: ignore[union-attr]
    raise FileRefused(f"tensor {path[:80]!r} cannot be a {kind[:80]}")


def _letter(path: str, code: Any) -> str:
    if type(code) is not int or not 0x20 <= code < 0x7F:
        raise FileRefused(f"tensor {path[:80]!r} is no text")
    return chr(code)


def _caches(names: tuple[Any, ...], states: tuple[Any, ...]) -> tuple[StoredCache, ...]:
    if len(names) != len(states) or not names:
        raise FileRefused(f"{len(states)} states for {len(names)} caches")
    return tuple(_cache(name, state) for name, state in zip(names, states, strict=True))


def _cache(name: Any, state: Tree) -> StoredCache:
    if type(name) is not str or not 0 < len(name) <= MOST_TEXT:
        raise FileRefused("something else stands where a class name is due")
    if name != LIST_CLASS:
        return StoredCache(name, state)
    if not isinstance(state, tuple) or not all(isinstance(c, tuple) and len(c) == 2 for c in state):
        raise FileRefused("a CacheList holds something else than caches")
    return StoredCache(name, (), tuple(_cache(inner, below) for below, inner in state))
