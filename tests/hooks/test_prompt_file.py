"""Prompt-cache files: what mlx-lm saves is read, what is saved mlx-lm reads."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
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

from kvkeep.errors import EmptyCache, FileRefused, MalformedCache, UnknownCache
from kvkeep.hooks.prompt_file import FLOORS, load, save
from kvkeep.persistence.prompt_file import read_prompt_file
from tests.hooks.make_prompt_files import feed, recurrent, rows
from tests.hooks.prompt_file_parts import quantized, same, trimmed


def chunked() -> ChunkedKVCache:
    cache = feed(ChunkedKVCache(8), 7, 6)
    cache.maybe_trim_front()
    assert cache.start_position == 5
    return feed(cache, 2)


def slots(*values: mx.array | None, padding: list[int] | None = None) -> ArraysCache:
    cache = ArraysCache(len(values), left_padding=padding)
    cache.cache = list(values)
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
