from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as classes
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)
from safetensors.numpy import save_file

from kvkeep.errors import EmptyCache, FileRefused, MalformedCache, UnknownCache
from kvkeep.hooks.prompt_file import FLOORS, load, save
from kvkeep.persistence.prompt_file import read_prompt_file
from tests.codecs.shuttle import bits
from tests.hooks import make_prompt_files
from tests.hooks.make_prompt_files import feed, recurrent, rows

FIELDS = {
    KVCache: ("keys", "values", "offset"),
    ConcatenateKVCache: ("keys", "values", "offset"),
    QuantizedKVCache: ("keys", "values", "offset", "group_size", "bits"),
    RotatingKVCache: ("keys", "values", "offset", "keep", "max_size", "_idx"),
    ChunkedKVCache: ("keys", "values", "offset", "chunk_size", "start_position"),
    ArraysCache: ("cache", "left_padding", "lengths"),
    CacheList: ("caches",),
}
"""Every attribute that a cache of that class has; a new one must show up here."""


def quantized(*counts: int, group_size: int = 32, bit_count: int = 8) -> QuantizedKVCache:
    cache = QuantizedKVCache(group_size=group_size, bits=bit_count)
    for seed, count in enumerate(counts):
        cache.update_and_fetch(rows(count, 64, seed), rows(count, 64, seed + 50))
    return cache


def chunked() -> ChunkedKVCache:
    cache = feed(ChunkedKVCache(8), 7, 6)
    cache.maybe_trim_front()
    assert cache.start_position == 5
    return feed(cache, 2)


def slots(*values: mx.array | None, padding: list[int] | None = None) -> ArraysCache:
    cache = ArraysCache(len(values), left_padding=padding)
    cache.cache = list(values)
    return cache


def trimmed(cache: Any, count: int) -> Any:
    assert cache.trim(count) == count
    return cache


EXAMPLES: dict[str, Any] = {
    "kv": lambda: feed(KVCache(), 5, 1),
    "kv empty": KVCache,
    "kv at the growth step": lambda: feed(KVCache(), 256),
    "kv trimmed": lambda: trimmed(feed(KVCache(), 9), 4),
    "quantized": lambda: quantized(5, 1),
    "quantized 3 bits": lambda: quantized(2, group_size=64, bit_count=3),
    "quantized empty": lambda: QuantizedKVCache(group_size=128, bits=4),
    "rotating": lambda: feed(RotatingKVCache(max_size=8, keep=2), 5),
    "rotating prefilled": lambda: feed(RotatingKVCache(max_size=4, keep=1), 11),
    "rotating wrapped": lambda: feed(RotatingKVCache(max_size=4, keep=1), *(1,) * 7),
    "rotating empty": lambda: RotatingKVCache(max_size=4),
    "chunked": lambda: feed(ChunkedKVCache(8), 5),
    "chunked past its chunk": chunked,
    "chunked empty": lambda: ChunkedKVCache(8),
    "concatenate": lambda: feed(ConcatenateKVCache(), 2, 3),
    "arrays": lambda: recurrent(ArraysCache(2)),
    "arrays with empty slots": lambda: slots(None, mx.arange(4), None, mx.ones((1, 0, 3))),
    "arrays padded": lambda: slots(mx.zeros((2, 3)), padding=[0, 4]),
    "arrays empty": lambda: ArraysCache(3),
    "list": lambda: CacheList(recurrent(ArraysCache(2)), feed(KVCache(), 4)),
    "list of lists": lambda: CacheList(
        CacheList(slots(None, mx.arange(3)), quantized(3)),
        feed(RotatingKVCache(4), *(1,) * 6),
        CacheList(KVCache()),
    ),
}


def field(cache: Any, name: str) -> Any:
    """An attribute; of keys and values only the slots that hold something."""
    value = getattr(cache, name)
    if name not in ("keys", "values") or value is None:
        return value
    slots = cache.offset - getattr(cache, "start_position", 0)
    if isinstance(value, list | tuple):
        return [plane[..., :slots, :] for plane in value]
    return value[..., :slots, :]


def same(a: Any, b: Any, where: str = "") -> int:
    """Assert that two caches or fields are equal to the bit; how many elements were compared."""
    if isinstance(a, mx.array):
        assert isinstance(b, mx.array), where
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert (bits(a) == bits(b)).all(), where
        return a.size
    if isinstance(a, list | tuple):
        assert isinstance(b, list | tuple), where
        assert len(a) == len(b), where
        return sum(same(x, y, f"{where}.{i}") for i, (x, y) in enumerate(zip(a, b, strict=True)))
    assert type(a) is type(b), where
    if type(a) in FIELDS:
        assert set(vars(a)) == set(vars(b)) == set(FIELDS[type(a)]), where
        return sum(same(field(a, f), field(b, f), f"{where}.{f}") for f in FIELDS[type(a)])
    assert a == b, where
    return 1


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_mlx_lm_saves_is_read(example: str, tmp_path: Path) -> None:
    live = [EXAMPLES[example](), feed(KVCache(), 3)]
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(str(file), live, {"model": "a/model", "a.b": "dotted", "tokenizer": "é"})
    caches, metadata = load(file)
    assert same(live, caches) > 0
    assert metadata == {"model": "a/model", "a.b": "dotted", "tokenizer": "é"}
    assert read_prompt_file(file).writer == "mlx-lm 0.32 or later"


@pytest.mark.parametrize("example", EXAMPLES)
def test_what_is_saved_mlx_lm_reads(example: str, tmp_path: Path) -> None:
    live = [EXAMPLES[example](), feed(KVCache(), 3)]
    file = save(tmp_path / "cache.safetensors", live, {"model": "a/model"})
    read, metadata = load_prompt_cache(str(file), return_metadata=True)
    assert same(live, read) > 0
    assert metadata == {"model": "a/model"}
    assert same(live, load(file)[0]) > 0


def test_room_to_grow_is_not_written(tmp_path: Path) -> None:
    live = [feed(KVCache(), 3)]
    assert live[0].keys.shape[2] == 256
    (read,) = load_prompt_cache(str(save(tmp_path / "cache.safetensors", live)))
    assert read.keys.shape[2] == read.values.shape[2] == 3
    assert live[0].keys.shape[2] == 256


def test_a_loaded_cache_goes_on_as_the_live_one(tmp_path: Path) -> None:
    names = [name for name in EXAMPLES if "arrays" not in name and "list" not in name]
    live = [EXAMPLES[name]() for name in names]
    caches, _ = load(save(tmp_path / "cache.safetensors", [c for c in live if not empty(c)]))
    compared = 0
    for cache, back in zip([c for c in live if not empty(c)], caches, strict=True):
        width = 64 if isinstance(cache, QuantizedKVCache) else 16
        new = rows(1, 64 if width == 64 else 32, 3), rows(1, width, 4)
        compared += same(cache.update_and_fetch(*new), back.update_and_fetch(*new))
        compared += same(cache, back)
    assert compared > 10_000


def empty(cache: Any) -> bool:
    return cache.keys is None


def test_a_trimmed_concatenate_cache_keeps_its_length(tmp_path: Path) -> None:
    # mlx-lm takes the length from the rows, and trim leaves them: the file must have them cut.
    cache = trimmed(feed(ConcatenateKVCache(), 6), 2)
    nested = CacheList(trimmed(feed(ConcatenateKVCache(), 6), 5))
    file = save(tmp_path / "cache.safetensors", [cache, nested])
    assert cache.keys.shape[2] == 6
    for read in (load_prompt_cache(str(file)), load(file)[0]):
        assert (read[0].offset, read[1].caches[0].offset) == (4, 1)
        assert same(read[0].keys, cache.keys[..., :4, :]) > 0
        assert same(read[1].caches[0].values, feed(ConcatenateKVCache(), 6).values[..., :1, :]) > 0


def test_the_recorded_floor_survives(tmp_path: Path) -> None:
    known, unknown, ring, inner = (
        quantized(5),
        quantized(5),
        feed(RotatingKVCache(8), 5),
        quantized(7),
    )
    known.minimum_resumable_offset = 3
    ring.minimum_resumable_offset = 0
    inner.minimum_resumable_offset = 7
    live = [known, unknown, ring, CacheList(feed(KVCache(), 7), inner)]
    file = save(tmp_path / "cache.safetensors", live, {"model": "m", FLOORS: "not mine to set"})
    caches, metadata = load(file)
    assert metadata == {"model": "m"}
    assert caches[0].minimum_resumable_offset == 3
    assert not hasattr(caches[1], "minimum_resumable_offset")
    assert caches[2].minimum_resumable_offset == 0
    assert caches[3].caches[1].minimum_resumable_offset == 7
    # And mlx-lm reads the file all the same.
    read, texts = load_prompt_cache(str(file), return_metadata=True)
    assert [c.offset for c in read[:3]] == [5, 5, 5]
    assert texts["model"] == "m"
    # What was recorded goes into the next file as well.
    again, _ = load(save(tmp_path / "again.safetensors", caches))
    assert again[3].caches[1].minimum_resumable_offset == 7


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", "[]", "5", '{"0": 6}', '{"0": -1}', '{"0": true}', '{"0": 1.0}', '{"0": "1"}',
     '{"9": 0}', '{"": 0}', '{"1": 0}', '{"2.1": 0}', "[" * 100_000],
)  # fmt: skip
def test_floors_that_fit_no_cache_are_refused(text: str, tmp_path: Path) -> None:
    live = [quantized(5), recurrent(ArraysCache(2)), CacheList(KVCache())]
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(str(file), live, {FLOORS: json.dumps({"0": 5, "2.0": 0})})
    assert load(file)[0][0].minimum_resumable_offset == 5
    save_prompt_cache(str(file), live, {FLOORS: text})
    with pytest.raises(FileRefused, match=FLOORS):
        load(file)


# Files of other versions of mlx-lm.


def stored(name: str) -> Path:
    return make_prompt_files.FOLDER / f"mlx_lm_{name}.safetensors"


@pytest.mark.parametrize("version", ["0.25.2", "0.28.4", "0.31.3", "0.32.2"])
def test_files_of_other_versions_are_read(version: str) -> None:
    file = stored(f"{version}_caches")
    caches, metadata = load(file)
    assert metadata == {"model": "a/model", "note": "é"}
    # Built by today's mlx-lm from the same rows; the arrays themselves are the file's.
    assert [type(c).__name__ for c in caches[:6]] == [
        "KVCache", "QuantizedKVCache", "RotatingKVCache", "RotatingKVCache", "RotatingKVCache",
        "ChunkedKVCache",
    ]  # fmt: skip
    assert {type(c).__name__ for c in caches[6:]} <= {"ArraysCache", "ConcatenateKVCache"}
    assert [c.offset for c in caches[:6]] == [6, 3, 6, 7, 3, 5]
    assert (caches[1].bits, caches[1].group_size) == (4, 32)
    assert [(c.keep, c.max_size, c._idx) for c in caches[2:5]] == [(1, 4, 6), (1, 4, 4), (0, 8, 3)]
    assert (caches[5].chunk_size, caches[5].start_position) == (8, 0)
    want = make_prompt_files.caches(classes)
    compared = 0
    for cache, live in zip(caches[:6], want, strict=False):
        if isinstance(cache, QuantizedKVCache):
            continue
        held = min(cache.offset, cache.keys.shape[2])
        for side in ("keys", "values"):
            found = getattr(cache, side)[..., :held, :]
            compared += same(found, getattr(live, side)[..., :held, :])
    for cache in caches[6:]:
        live = (
            feed(ConcatenateKVCache(), 2, 3)
            if hasattr(cache, "offset")
            else recurrent(ArraysCache(2))
        )
        compared += same(live, cache)
    assert compared > 2000
    arrays = mx.load(str(file))
    planes = [f"1.{side}.{i}" for side in (0, 1) for i in range(3)]
    assert same([arrays[name] for name in planes], [*caches[1].keys, *caches[1].values]) >= 72


@pytest.mark.parametrize("version", ["0.31.3", "0.32.2"])
def test_nested_files_of_other_versions_are_read(version: str) -> None:
    caches, _ = load(stored(f"{version}_nested"))
    want = make_prompt_files.nested(classes)
    assert same(want[0].caches[0], caches[0].caches[0]) > 0
    pairs = [
        (caches[0].caches[1], want[0].caches[1]),
        (caches[1], want[1]),
        (caches[2].caches[0], want[2].caches[0]),
        (caches[2].caches[1], want[2].caches[1]),
    ]
    for found, live in pairs:
        assert (type(found), found.offset) == (type(live), 4)
        assert same(found.keys[..., :4, :], live.keys[..., :4, :]) == 2 * 4 * 32


@pytest.mark.parametrize("version", ["0.25.2", "0.28.4"])
def test_lists_of_the_oldest_files_are_refused_by_name(version: str) -> None:
    with pytest.raises(FileRefused, match=r"mlx-lm before 0\.32.*CacheList(?s:.*)mlx-lm 0\.32\.2"):
        load(stored(f"{version}_nested"))


def test_stored_files_are_never_written_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(make_prompt_files, "FOLDER", tmp_path)
    assert make_prompt_files.main() == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert make_prompt_files.main() == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before != {}


# Hostile and broken files.

K = np.ones((1, 2, 4, 8), np.float16)


def number(value: Any, dtype: Any = np.int32) -> Any:
    return np.array(value, dtype)


def text(value: str) -> Any:
    return np.array([ord(c) for c in value], np.int32)


def hostile(
    tmp_path: Path,
    tensors: dict[str, Any],
    names: list[str],
    scalars: dict[str, str],
    user: dict[str, str] | None = None,
    **texts: str,
) -> Path:
    """A file in the form of 0.32 around whatever is given."""
    metadata = {f"0.{key}": value for key, value in (user or {}).items()}
    metadata |= {f"1.{i}": name for i, name in enumerate(names)}
    metadata["2.0"] = ""
    for i, (path, kind) in enumerate(scalars.items()):
        metadata |= {f"2.{i + 1}.0": path, f"2.{i + 1}.1": kind}
    file = tmp_path / "hostile.safetensors"
    save_file(tensors, file, metadata | {k.replace("_", "."): v for k, v in texts.items()})
    return file


def state(*parts: Any, at: str = "0") -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors and scalars for a cache whose state has these parts."""
    tensors: dict[str, Any] = {}
    scalars: dict[str, str] = {}
    for i, part in enumerate(parts):
        path = f"{at}.{i}"
        if isinstance(part, np.ndarray):
            tensors[path] = part
        elif isinstance(part, tuple):
            below = state(*part, at=path)
            tensors |= below[0]
            scalars |= below[1]
        else:
            kind = "none" if part is None else "string" if isinstance(part, str) else "scalar"
            scalars[path] = kind
            tensors[path] = (
                np.zeros(0, np.float32) if part is None
                else text(part) if isinstance(part, str) else np.array(part).astype(
                    {bool: np.bool_, int: np.int32, float: np.float32}[type(part)]
                )
            )  # fmt: skip
    return tensors, scalars


PACKED = np.zeros((1, 2, 4, 8), np.uint32)  # 64 numbers of 4 bits
SCALES = np.zeros((1, 2, 4, 2), np.float16)
SIDE = (PACKED, SCALES, SCALES)

GOOD: dict[str, tuple[Any, ...]] = {
    "KVCache": (K, K, 3),
    "ConcatenateKVCache": (K, K),
    "QuantizedKVCache": (SIDE, SIDE, 3, 32, 4),
    "RotatingKVCache": (K, K, 9, 1, 4, 2),
    "ChunkedKVCache": (K, K, 9, 4, 6),
    "ArraysCache": ((K, None), None, None),
    "CacheList": (((K, K, 3), "KVCache"), ((K, K), "ConcatenateKVCache")),
}


@pytest.mark.parametrize("name", GOOD)
def test_states_made_by_hand_are_read(name: str, tmp_path: Path) -> None:
    # The base of the cases below, each of which changes one thing.
    caches, _ = load(hostile(tmp_path, *reordered(name, GOOD[name])))
    assert [type(c).__name__ for c in caches] == [name]


def reordered(name: str, parts: tuple[Any, ...]) -> tuple[Any, list[str], Any]:
    tensors, scalars = state(*parts)
    return tensors, [name], scalars


BAD: dict[str, tuple[str, tuple[Any, ...]]] = {
    "kv: offset negative": ("KVCache", (K, K, -1)),
    "kv: offset beyond": ("KVCache", (K, K, 5)),
    "kv: offset a bool": ("KVCache", (K, K, True)),
    "kv: offset a float": ("KVCache", (K, K, 3.0)),
    "kv: offset an array": ("KVCache", (K, K, np.array([3], np.int32))),
    "kv: offset none": ("KVCache", (K, K, None)),
    "kv: offset text": ("KVCache", (K, K, "3")),
    "kv: empty with an offset": ("KVCache", (None, None, 3)),
    "kv: keys only": ("KVCache", (K, None, 0)),
    "kv: a number for keys": ("KVCache", (3, 3, 0)),
    "kv: other heads": ("KVCache", (K, K[:, :1], 3)),
    "kv: other positions": ("KVCache", (K, K[:, :, :2], 2)),
    "kv: three axes": ("KVCache", (K[0], K[0], 2)),
    "kv: a part missing": ("KVCache", (K, K)),
    "kv: a part more": ("KVCache", (K, K, 3, 3)),
    "kv: planes": ("KVCache", (SIDE, SIDE, 3)),
    "concatenate: a part more": ("ConcatenateKVCache", (K, K, 4)),
    "quantized: 7 bits": ("QuantizedKVCache", (SIDE, SIDE, 3, 32, 7)),
    "quantized: 16 bits": ("QuantizedKVCache", (SIDE, SIDE, 3, 32, 16)),
    "quantized: other bits": ("QuantizedKVCache", (SIDE, SIDE, 3, 32, 8)),
    "quantized: groups of 0": ("QuantizedKVCache", (SIDE, SIDE, 3, 0, 4)),
    "quantized: other groups": ("QuantizedKVCache", (SIDE, SIDE, 3, 64, 4)),
    "quantized: bits an array": ("QuantizedKVCache", (SIDE, SIDE, 3, 32, np.zeros(2, np.int32))),
    "quantized: two planes": ("QuantizedKVCache", (SIDE[:2], SIDE[:2], 3, 32, 4)),
    "quantized: not packed": ("QuantizedKVCache", ((K, SCALES, SCALES), SIDE, 3, 32, 4)),
    "quantized: other scales": ("QuantizedKVCache", ((PACKED, SCALES, K), SIDE, 3, 32, 4)),
    "quantized: offset beyond": ("QuantizedKVCache", (SIDE, SIDE, 5, 32, 4)),
    "quantized: keys only": ("QuantizedKVCache", (SIDE, None, 3, 32, 4)),
    "rotating: index beyond": ("RotatingKVCache", (K, K, 9, 1, 4, 5)),
    "rotating: index negative": ("RotatingKVCache", (K, K, 9, 1, 4, -1)),
    "rotating: max_size 0": ("RotatingKVCache", (K, K, 9, 0, 0, 2)),
    "rotating: keep beyond": ("RotatingKVCache", (K, K, 9, 5, 4, 2)),
    "rotating: empty with an offset": ("RotatingKVCache", (None, None, 9, 1, 4, 0)),
    "chunked: offset before the start": ("ChunkedKVCache", (K, K, 5, 4, 6)),
    "chunked: offset beyond": ("ChunkedKVCache", (K, K, 11, 4, 6)),
    "chunked: chunks of 0": ("ChunkedKVCache", (K, K, 9, 0, 6)),
    "arrays: a number in a slot": ("ArraysCache", ((3, K), None, None)),
    "arrays: slots no list": ("ArraysCache", (K, None, None)),
    "arrays: padding of two axes": ("ArraysCache", ((K,), K[0, 0], None)),
    "arrays: lengths a number": ("ArraysCache", ((K,), None, 3)),
    "list: inner unknown": ("CacheList", (((K, K, 3), "Popen"),)),
    "list: inner a batch": ("CacheList", (((K, K, 3), "BatchKVCache"),)),
    "list: inner a number": ("CacheList", (((K, K, 3), 5),)),
    "list: inner without a name": ("CacheList", ((K, K, 3),)),
    "list: an array": ("CacheList", (K,)),
    "list: inner state wrong": ("CacheList", (((K, K, 7), "KVCache"),)),
    "a batch": ("BatchKVCache", (K, K, np.zeros(1, np.int32), np.zeros(1, np.int32))),
    "a class of mlx-lm that is no cache": ("TokenBuffer", (K,)),
    "a module there": ("copy", (K,)),
    "a function there": ("load_prompt_cache", (K,)),
    "a builtin": ("eval", (K,)),
    "a path": ("os.system", (K,)),
    "an attribute": ("__class__", (K,)),
    "no name": ("", (K,)),
    "a long name": ("K" * 257, (K,)),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_states_that_fit_no_cache_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(FileRefused) as caught:
        load(hostile(tmp_path, *reordered(*BAD[case])))
    assert str(tmp_path) in str(caught.value)
    assert caught.value.remedy


def test_trees_that_cannot_be_are_refused(tmp_path: Path) -> None:
    tensors, scalars = state(*GOOD["KVCache"])
    one, kv = np.zeros(1, np.float32), ["KVCache"]
    cases: list[tuple[dict[str, Any], list[str], dict[str, str]]] = [
        (tensors | {"0.3.0": one, "0.3": one}, kv, scalars),  # a value and a branch
        (tensors | {"0.4": one}, kv, scalars),  # a gap
        (tensors | {"0.999999999999": one}, kv, scalars),
        (tensors | {"999999999999.0": one}, kv, scalars),
        (tensors | {"0.-1": one}, kv, scalars),
        (tensors | {"0.03": one}, kv, scalars),
        (tensors | {"weights": one}, kv, scalars),
        (tensors | {"0." + "0." * 40 + "0": one}, kv, scalars),
        (tensors | {"1.0": one}, kv, scalars),  # more states than names
        (tensors, ["KVCache", "KVCache"], scalars),
        (tensors, kv, {"0.2": "pickle"}),
        (tensors, kv, {"0.2": "none"}),
        (tensors, kv, {"0.2": "string"}),
        (tensors, kv, {"0.0": "scalar"}),
        (tensors, kv, scalars | {"0.9": "none"}),
        (tensors | {"0.2": text("x" * 1000)}, kv, {"0.2": "string"}),
        (tensors | {"0.2": number([-1, 1 << 30])}, kv, {"0.2": "string"}),
        (tensors | {"0.2": np.zeros(3, np.float32)}, kv, {"0.2": "string"}),
        ({}, [], {}),
    ]
    for case in cases:
        with pytest.raises(FileRefused):
            load(hostile(tmp_path, *case))
    twice = {"2_1_0": "0.2", "2_1_1": "scalar", "2_2_0": "0.2", "2_2_1": "scalar"}
    for texts in ({"2_1": "x"}, {"2_9_0": "0.2"}, {"3_0": "x"}, {"more": "x"}, twice):
        with pytest.raises(FileRefused):
            load(hostile(tmp_path, tensors, kv, scalars, **texts))
    assert len(load(hostile(tmp_path, tensors, kv, scalars))[0]) == 1


def old(tmp_path: Path, tensors: dict[str, Any], info: dict[str, str], names: list[str]) -> Path:
    file = tmp_path / "old.safetensors"
    metadata = {f"0.{k}": v for k, v in info.items()} | {f"2.{i}": n for i, n in enumerate(names)}
    save_file(tensors, file, metadata)
    return file


def test_broken_files_of_the_old_form_are_refused(tmp_path: Path) -> None:
    tensors = {"0.0": K, "0.1": K}
    ring = {"0.0": "1", "0.1": "4", "0.2": "9", "0.3": "2"}
    good = [
        (tensors, {"0": ""}, ["KVCache"]),
        (tensors, ring, ["RotatingKVCache"]),
        (tensors, {"0.0": "8", "0.1": "0"}, ["ChunkedKVCache"]),
    ]
    for case in good:
        assert len(load(old(tmp_path, *case))[0]) == 1
    bad: list[tuple[dict[str, Any], dict[str, str], list[str]]] = [
        (tensors, {"0": ""}, ["eval"]),
        (tensors, {"0": ""}, ["BatchKVCache"]),
        (tensors, {"0": ""}, ["KVCache", "KVCache"]),
        (tensors, {"0": "", "1": ""}, ["KVCache"]),
        (tensors, {"0": "5"}, ["KVCache"]),
        (tensors | {"0.2": K}, {"0": ""}, ["KVCache"]),
        (tensors, {"0": ""}, ["RotatingKVCache"]),
        (tensors, ring | {"0.3": "x"}, ["RotatingKVCache"]),
        (tensors, ring | {"0.3": "9" * 5000}, ["RotatingKVCache"]),
        (tensors, ring | {"0.3": "5"}, ["RotatingKVCache"]),
        (tensors, {"0.0": "8", "0.1": "3"}, ["ChunkedKVCache"]),
        (tensors, {"0": ""}, ["CacheList"]),
        (tensors, {"0.0.0": "KVCache", "0.1.0": ""}, ["CacheList"]),
        (tensors, {"0": ""}, ["ArraysCache", ""]),
    ]
    for case in bad:
        with pytest.raises(FileRefused, match=r"before 0\.32"):
            load(old(tmp_path, *case))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = stored("0.31.3_caches").read_bytes()
    file = tmp_path / "cut.safetensors"
    for length in (*range(64), *range(64, len(whole), 97), len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(FileRefused):
            load(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(FileRefused):
        load(file)
    file.write_bytes(whole)
    load(file)


def raw(header: bytes, payload: bytes = b"", claimed: int | None = None) -> bytes:
    length = len(header) if claimed is None else claimed
    return length.to_bytes(8, "little") + header + payload


def one_tensor(**fields: Any) -> bytes:
    return raw(json.dumps({"__metadata__": {"2.0": ""}, "0": fields}).encode(), bytes(8))


@pytest.mark.parametrize(
    "content",
    [
        raw(b"{}", claimed=1 << 62),
        raw(b"{}", claimed=1 << 30),
        raw(b"[" * 100_000),
        raw(b"{" + b'"a":{' * 50_000),
        one_tensor(dtype="U8", shape=[1 << 40], data_offsets=[0, 1 << 40]),
        one_tensor(dtype="U8", shape=[(1 << 64) - 1, 2], data_offsets=[0, 8]),
        one_tensor(dtype="U8", shape=[8], data_offsets=[8, 0]),
        one_tensor(dtype="U8", shape=[8], data_offsets=[8, 16]),
        one_tensor(dtype="U8", shape=[4], data_offsets=[0, 8]),
        one_tensor(dtype="X8", shape=[8], data_offsets=[0, 8]),
        raw(b'{"__metadata__":{"2.0":5}}'),
        raw(b"null"),
        b"GGUF" + bytes(64),
        b"\x93NUMPY" + bytes(64),
        b"PK\x03\x04" + bytes(64),
        b"tokens and words, but no tensors at all",
    ],
)  # fmt: skip
def test_other_bytes_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    file.write_bytes(content)
    with pytest.raises(FileRefused, match="not a readable safetensors file"):
        load(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileRefused, match="No such file"):
        load(tmp_path / "none.safetensors")
    with pytest.raises(FileRefused):
        load(tmp_path)
    for metadata in ({}, {"format": "mlx"}, {"2.0": "", "format": "pt"}, {"0.a": "b"}):
        save_file({"model.layers.0.weight": K}, tmp_path / "weights.safetensors", metadata)
        with pytest.raises(FileRefused, match="no prompt cache"):
            load(tmp_path / "weights.safetensors")
    save_file(
        {"0.0": K.astype(np.float64), "0.1": K, "0.2": number(3)}, tmp_path / "f64.safetensors"
    )
    with pytest.raises(FileRefused, match="F64"):
        load(tmp_path / "f64.safetensors")


# Writing.


def test_a_file_is_private_whole_and_named_as_mlx_lm_names_it(tmp_path: Path) -> None:
    live = [feed(KVCache(), 3)]
    old_mask = os.umask(0)
    try:
        file = save(tmp_path / "cache", live)
    finally:
        os.umask(old_mask)
    assert file == tmp_path / "cache.safetensors"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]
    file.chmod(0o644)
    assert save(file, [feed(KVCache(), 4)]) == file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load(file)[0][0].offset == 4
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]


class MyCache(KVCache):
    pass


@pytest.mark.parametrize(
    ("live", "error"),
    [
        ([], EmptyCache),
        ([object()], UnknownCache),
        ([MyCache()], UnknownCache),
        ([type("KVCache", (KVCache,), {})()], UnknownCache),
        ([BatchKVCache([0])], UnknownCache),
        ([CacheList(KVCache(), MyCache())], UnknownCache),
        ([CacheList()], EmptyCache),
        ([ConcatenateKVCache()], EmptyCache),
        ([ArraysCache(0)], MalformedCache),
    ],
)
def test_what_mlx_lm_could_not_read_is_not_written(live: Any, error: Any, tmp_path: Path) -> None:
    file = save(tmp_path / "cache.safetensors", [feed(KVCache(), 3)])
    before = file.read_bytes()
    with pytest.raises(error):
        save(file, live)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileRefused, match="cannot be written"):
        save(tmp_path / "none" / "cache.safetensors", [feed(KVCache(), 3)])
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(FileRefused, match="cannot be written"):
        save(tmp_path / "folder.safetensors", [feed(KVCache(), 3)])
    assert [path.name for path in tmp_path.iterdir()] == ["folder.safetensors"]


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    file = save(tmp_path / "cache.safetensors", [feed(KVCache(), 3)])
    before = file.read_bytes()
    body = (
        "import resource, sys\n"
        "from kvkeep.hooks.prompt_file import save\n"
        "from kvkeep.errors import FileRefused\n"
        "from tests.hooks.make_prompt_files import feed\n"
        "from mlx_lm.models.cache import KVCache\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    save(sys.argv[1], [feed(KVCache(), 300)])\n"
        "except FileRefused:\n"
        "    print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", body, str(file)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("refused", 0), done.stderr
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
