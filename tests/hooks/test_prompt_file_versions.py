"""Prompt-cache files that other versions of mlx-lm wrote."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import cache as classes
from mlx_lm.models.cache import (
    ArraysCache,
    ConcatenateKVCache,
    QuantizedKVCache,
)

from kvkeep.errors import FileRefused
from kvkeep.hooks.prompt_file import load
from tests.hooks import make_prompt_files
from tests.hooks.make_prompt_files import feed, recurrent
from tests.hooks.prompt_file_parts import same, stored


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
