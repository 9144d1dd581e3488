"""The steps of ``beside`` in real processes: what is stored comes back, and nothing is let pass."""

from __future__ import annotations

import shutil
import sys

import mlx.core as mx
import pytest

from benchmarks import beside_layouts
from benchmarks.beside_damage import flip
from benchmarks.beside_ways import OWN, Way
from benchmarks.harness import StepFailed
from benchmarks.layouts import CHUNK, LAYOUTS
from benchmarks.peers import peer_mlx_lm, plain_steps
from benchmarks.peers._adapter import Adapter
from benchmarks.peers.kinds import difference, extend, in_classes
from benchmarks.rows import Shape

SMALL = Shape(2, 2, 64)
COUNT = 300


@pytest.fixture(params=OWN, ids=lambda way: way.name)
def way(request):
    return request.param


def test_a_plain_cache_goes_through_every_step(way, tmp_path):
    common = {"folder": str(tmp_path / "of it"), "shape": SMALL.json(), "count": COUNT}
    stored = way.run("store", **common)
    assert 0 < stored["caller"] <= stored["settled"] <= stored["durable"]
    assert stored["bytes"] >= SMALL.nbytes(COUNT)
    held = way.run("held", **{**common, "folder": str(tmp_path / "held")})
    assert held["copied"] == 0
    shutil.rmtree(tmp_path / "held")
    whole = way.run("restore", **common)
    assert (whole["offset"], whole["compared"]) == (COUNT, SMALL.nbytes(COUNT))
    part = way.run("restore", **common, shared=200)
    assert (part["offset"], part["compared"]) == (200, SMALL.nbytes(200))
    appended = way.run("append", **common, new=50, number=0)
    assert appended["offset"] == COUNT
    assert appended["bytes"] >= SMALL.nbytes(50)
    assert flip(tmp_path, SMALL, COUNT, 0)
    damaged = way.run("restore", **common)
    assert damaged["wrong"] == (way.name == "mlx-lm")
    assert damaged["compared"] < SMALL.nbytes(COUNT)


def test_a_layout_is_stored_grows_and_comes_back(way, tmp_path):
    size = {"folder": str(tmp_path), "layouts": ["sliding"], "count": 2 * CHUNK}
    stored = way.run("store-layout", **size)["sliding"]
    restored = way.run("restore-layout", **size)["sliding"]
    answer = {**stored, "restore": restored}
    assert beside_layouts.verdict(answer, 3 * CHUNK) == (beside_layouts.EXACT, "")
    assert stored["first"]["bytes"] > 0 < stored["next"]["bytes"]


def test_several_processes_store_and_restore_at_once(way, tmp_path):
    folders = [{"folder": str(tmp_path / ("all" if way.together else str(n)))} for n in range(2)]
    with way.crowd(2) as act:
        act("crowd-ready", [{"number": n, "shape": SMALL.json(), "count": 256} for n in range(2)])
        for number, folder in enumerate(folders):
            act("crowd-open", [folder], first=number)
        assert all(a["done"] > a["start"] for a in act("crowd-store", [{}, {}]))
        restored = act("crowd-restore", folders)
    assert [(a["offset"], a["exact"]) for a in restored] == [(256, True)] * 2


def test_a_peer_that_fails_says_why_and_our_own_ends_the_run():
    peer = Way("peer", "peer_that_is_not_there", "environment")
    answer = peer.guarded(lambda _: peer.run("version"))(0)
    assert "peer_that_is_not_there" in answer["failed"]
    own = Way("own", "peer_that_is_not_there", python=sys.executable)
    with pytest.raises(StepFailed, match="peer_that_is_not_there"):
        own.guarded(lambda _: own.run("version"))(0)
    with peer.crowd(1) as act, pytest.raises(StepFailed, match="crowd"):
        act("crowd-ready", [{"number": 0, "shape": SMALL.json(), "count": 1}])


class Holds(Adapter):
    """A store that keeps the caller's arrays, as some peers do until they are written."""

    def __init__(self, folder, make):
        self.kept = []

    def store(self, tokens, caches):
        self.kept = [cache.keys[:, :, : cache.offset] for cache in caches]
        mx.eval(self.kept)

    def restore(self, prompt):
        return None, 0


def test_a_store_that_holds_the_buffers_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(peer_mlx_lm, "Peer", Holds)
    answer = plain_steps.held("peer_mlx_lm", str(tmp_path), SMALL.json(), COUNT)
    assert answer["copied"] == 1


@pytest.mark.parametrize("layout", ["kv-quant", "sliding", "hybrid", "latent"])
def test_one_changed_bit_of_a_layout_is_told(layout):
    def made():
        caches = in_classes(LAYOUTS[layout][0](), "mlx_lm.models.cache")[-2:]
        for at in range(0, 3 * CHUNK, CHUNK):
            extend(caches, layout, at, at + CHUNK)
        return caches

    assert difference(made(), made(), layout) == ""
    for layer in range(2):
        changed = made()
        flip_one(changed[layer])
        assert difference(changed, made(), layout).startswith(f"layer {layer}, a ")
    assert difference(made()[:1], made(), layout) == "1 layers of 2"


def flip_one(cache):
    """Change the lowest bit of one value that is still read."""
    held = cache.cache[1] if hasattr(cache, "cache") else cache.values
    array = held[0] if isinstance(held, tuple | list) else held
    kind = {2: mx.uint16, 4: mx.uint32}[array.itemsize]
    bits = mx.array(array).view(kind)
    bits[..., -1, -1] = bits[..., -1, -1] ^ 1
    changed = bits.view(array.dtype)
    if hasattr(cache, "cache"):
        cache[1] = changed
    elif isinstance(held, tuple | list):
        cache.values = (changed, *held[1:])
    else:
        cache.values = changed
