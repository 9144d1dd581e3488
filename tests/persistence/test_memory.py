from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvkeep.persistence import memory
from kvkeep.persistence.memory import Slab, host
from kvkeep.persistence.tensors import HOST_DTYPES, TensorSpec

SPECS = [
    *(TensorSpec(dtype, dtype, (2, 3, 5)) for dtype in HOST_DTYPES),
    TensorSpec("width 0", "bfloat16", (1, 8, 64, 0)),
    TensorSpec("scalar", "int64", ()),
    TensorSpec("keys", "bfloat16", (1, 4, 4096, 128)),
]


@pytest.fixture(params=["in place", "copied at the end"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways that a slab may have to go, whichever this machine would take."""
    if request.param == "in place":
        if not memory.fills_in_place():
            pytest.skip("MLX does not see writes through a view here")
    else:
        monkeypatch.setattr(memory, "fills_in_place", lambda: False)
    return str(request.param)


def contents(spec: TensorSpec, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 2 if spec.dtype == "bool" else 256, spec.nbytes, dtype=np.uint8)
    return raw.view(spec.host_dtype).reshape(spec.shape)


def address(array: mx.array) -> int:
    return int(host(array).ctypes.data)


def test_a_slab_comes_back_bit_for_bit(way: str) -> None:
    slab = Slab(SPECS)
    want = {spec.name: contents(spec, i) for i, spec in enumerate(SPECS)}
    for name, bits in want.items():
        slab.views[name][...] = bits
    arrays = slab.take()
    assert slab.views == {}
    assert slab.take() == {}
    compared = 0
    for spec in SPECS:
        array = arrays[spec.name]
        assert str(array.dtype) == f"mlx.core.{spec.dtype}"
        assert tuple(array.shape) == spec.shape
        assert host(array).tobytes() == want[spec.name].tobytes()
        compared += spec.nbytes
    assert compared > 4 << 20


def test_an_array_from_a_slab_computes_and_grows_in_place(way: str) -> None:
    spec = TensorSpec("keys", "bfloat16", (1, 4, 512, 64))
    slab = Slab([spec])
    slab.views["keys"][...] = bits = contents(spec) & 0x3FFF  # finite numbers
    array = slab.take().pop("keys")
    want = mx.array(bits).view(mx.bfloat16)
    assert mx.array_equal(array + array, want + want)

    before = address(array)
    array[..., 7:9, :] = mx.ones((1, 4, 2, 64), mx.bfloat16)
    mx.eval(array)
    assert address(array) == before, "the first update after a resume copied the whole array"
    found = np.array(host(array))
    assert (found[..., 7:9, :] == 0x3F80).all()
    untouched = np.r_[0:7, 9:512]
    assert (found[..., untouched, :] == bits[..., untouched, :]).all()


def test_other_threads_fill_a_slab(way: str) -> None:
    spec = TensorSpec("keys", "float16", (1, 2, 400, 64))
    bits = contents(spec)
    slab = Slab([spec])

    def fill(start: int) -> None:
        slab.views["keys"][:, :, start : start + 100] = bits[:, :, start : start + 100]

    threads = [threading.Thread(target=fill, args=(start,)) for start in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert host(slab.take()["keys"]).tobytes() == bits.tobytes()


def test_a_slab_without_tensors_is_empty(way: str) -> None:
    assert Slab([]).take() == {}
    only_nothing = Slab([TensorSpec("values", "float16", (1, 2, 256, 0))]).take()
    assert only_nothing["values"].shape == (1, 2, 256, 0)
    with pytest.raises(ValueError, match="same name"):
        Slab([TensorSpec("a", "uint8", (1,)), TensorSpec("a", "uint8", (2,))])


def test_two_slabs_share_nothing(way: str) -> None:
    spec = TensorSpec("keys", "float32", (64, 1024))
    first, second = Slab([spec]), Slab([spec])
    first.views["keys"][...] = 1
    second.views["keys"][...] = 2
    one, two = first.take()["keys"], second.take()["keys"]
    assert mx.all(one == 1).item()
    assert mx.all(two == 2).item()


def test_host_views_every_dtype_without_a_copy() -> None:
    compared = 0
    for dtype in HOST_DTYPES:
        if dtype == "float64":
            continue  # exists on CPUs only
        mlx_dtype = mx.bool_ if dtype == "bool" else getattr(mx, dtype)
        array = mx.arange(24).reshape(2, 3, 4).astype(mlx_dtype)
        mx.eval(array)
        view = host(array)
        assert view.dtype == TensorSpec("x", dtype, ()).host_dtype
        assert view.ctypes.data == host(array).ctypes.data
        assert not view.flags.writeable
        as_numbers = np.array(array.astype(mx.float32) if dtype == "bfloat16" else array)
        as_floats = (view.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else view
        assert (as_floats == as_numbers).all()
        compared += view.size
    assert compared == 13 * 24


def test_host_views_slices_nothing_and_scalars() -> None:
    array = mx.arange(2 * 16 * 4).reshape(1, 2, 16, 4).astype(mx.bfloat16)
    part = array[:, :, 3:9]
    mx.eval(part)
    whole = host(array)
    assert (host(part) == whole[:, :, 3:9]).all()
    assert host(mx.zeros((1, 2, 16, 0), mx.bfloat16)).shape == (1, 2, 16, 0)
    assert host(mx.array(7)).item() == 7


def test_a_dropped_view_costs_nothing_and_a_held_one_stays_as_it_was() -> None:
    array = mx.zeros((1, 2, 64, 8), mx.bfloat16)
    mx.eval(array)
    before = address(array)
    array[..., :1, :] = 1
    mx.eval(array)
    assert address(array) == before
    held = host(array)
    array[..., 1:2, :] = 1
    mx.eval(array)
    assert (held[..., 0, :] == 0x3F80).all()
    assert not held[..., 1, :].any()
    assert (host(array)[..., :2, :] == 0x3F80).all()
