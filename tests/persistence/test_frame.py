from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.errors import CorruptFrame
from kvkeep.persistence.encoding import PLANES, RAW, ZSTD
from kvkeep.persistence.frame import Draft, Frame
from kvkeep.persistence.tensors import HOST_DTYPES, TensorSpec
from tests.persistence.frames import floats

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple) | st.sampled_from(
    [(1, 2, 64, 32), (1, 8, 64, 128), (70_000,), (3, 1, 2053)]
)
# Bytes of several characters: constant, few different ones, and incompressible.
CONTENTS = st.sampled_from(["zero", "few", "noise", "mixed"])
EXTRA = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=40)
        | st.text(max_size=20) | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=8,
    ),
    max_size=5,
)  # fmt: skip


def fill(spec: TensorSpec, kind: str, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, {"zero": 1, "few": 4}.get(kind, 256), spec.nbytes, dtype=np.uint8)
    if kind == "mixed":
        raw[: len(raw) // 2] = 7
    if spec.dtype == "bool":
        raw &= 1
    return raw.view(spec.host_dtype).reshape(spec.shape)


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[TensorSpec, str, int]]:
    names = iter(draw(st.lists(st.text(min_size=1, max_size=12), max_size=9, unique=True)))
    found: list[tuple[TensorSpec, str, int]] = []
    for name in names:
        dtype, shape = draw(st.sampled_from(list(HOST_DTYPES))), draw(SHAPES)
        contents = draw(CONTENTS)
        alike = [name, *islice(names, draw(st.integers(0, 4)))]
        found += [
            (TensorSpec(one, dtype, shape), contents, draw(st.integers(0, 99))) for one in alike
        ]
    return found


@settings(deadline=None, max_examples=120)
@given(tensors(), EXTRA, st.sampled_from(["auto", "none"]))
def test_round_trip(given_tensors: Any, extra: Any, compression: Any) -> None:
    draft = Draft([spec for spec, _, _ in given_tensors], extra)
    want = {spec.name: fill(spec, kind, seed) for spec, kind, seed in given_tensors}
    for name, tensor in want.items():
        draft.views[name][...] = tensor
    claimed = draft.nbytes
    sealed = draft.seal(compression)
    frame = Frame.open(sealed)
    assert len(sealed) == frame.nbytes <= claimed
    assert frame.extra == extra
    assert list(frame.specs.values()) == [spec for spec, _, _ in given_tensors]
    for name, tensor in want.items():
        found = frame.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.tobytes() == tensor.tobytes()
        assert not found.flags.writeable


@pytest.mark.parametrize(
    ("dtype", "encoding"),
    [
        ("bfloat16", PLANES),
        ("float16", PLANES),
        ("float32", PLANES),
        ("int64", ZSTD),
        ("uint32", RAW),
    ],
)
def test_rows_are_copied_from_every_encoding(dtype: str, encoding: int) -> None:
    spec = TensorSpec("rows", dtype, (1, 4, 64, 32))
    whole = fill(spec, "noise", 1) if encoding == RAW else floats(spec)
    draft = Draft([spec], {})
    draft.views["rows"][...] = whole
    frame = Frame.open(draft.seal())
    assert [stack.encoding for stack in frame.stacks] == [encoding]
    compared = 0
    for axis in (1, 2, 3):
        for start, stop in ((0, spec.shape[axis]), (1, 3), (2, 2)):
            index = (*(slice(None),) * axis, slice(start, stop))
            plane = np.full((1, 9, 99, 40), 77, spec.host_dtype)
            # A corner of a larger plane, as in a cache with room to grow: not contiguous.
            out = plane[
                tuple(slice(1, 1 + n) if n > 1 else slice(0, n) for n in whole[index].shape)
            ]
            frame.copy_into("rows", out, axis, start, stop)
            assert out.tobytes() == whole[index].tobytes()
            assert (plane == 77).sum() >= plane.size - out.size
            compared += out.size
    assert compared > 3 * whole.size


def test_copies_into_another_shape_or_dtype_are_refused() -> None:
    draft = Draft([TensorSpec("rows", "bfloat16", (1, 2, 8, 4))], {})
    draft.views["rows"][...] = 1
    frame = Frame.open(draft.seal())
    good = np.zeros((1, 2, 3, 4), np.uint16)
    frame.copy_into("rows", good, 2, 5, 8)
    assert good.all()
    for out, start, stop in (
        (np.zeros((1, 2, 4, 4), np.uint16), 5, 8),
        (np.zeros((2, 2, 3, 4), np.uint16), 5, 8),
        (np.zeros((1, 2, 3, 4), np.float16), 5, 8),
        (np.zeros((1, 2, 3, 4), np.uint16), 6, 9),
        (np.zeros((1, 2, 3, 4), np.uint16), -3, 0),
    ):
        with pytest.raises(CorruptFrame):
            frame.copy_into("rows", out, 2, start, stop)
        assert not out.any()


@pytest.mark.parametrize("compression", ["auto", "none"])
def test_a_raw_draft_is_sealed_without_a_copy(compression: Any) -> None:
    spec = TensorSpec("noise", "uint32", (1, 2, 64, 256))
    draft = Draft([spec], {"start": 0})
    view = draft.views["noise"]
    view[...] = fill(spec, "noise", 3)
    sealed = draft.seal(compression)
    assert np.shares_memory(np.frombuffer(sealed, np.uint8), view)
    assert len(sealed) == draft.nbytes
    # And reading it back copies nothing either.
    assert np.shares_memory(Frame.open(sealed).read("noise"), view)


def test_tensors_that_stay_raw_move_down_past_those_that_shrink() -> None:
    specs = [
        TensorSpec("shrinks", "bfloat16", (1, 2, 256, 64)),
        TensorSpec("stays", "uint32", (1, 2, 64, 256)),
        TensorSpec("shrinks too", "float16", (1, 2, 256, 64)),
        TensorSpec("small", "uint8", (5,)),
    ]
    want = [
        floats(specs[0]),
        fill(specs[1], "noise", 5),
        floats(specs[2], 1),
        fill(specs[3], "noise", 6),
    ]
    draft = Draft(specs, {})
    for spec, tensor in zip(specs, want, strict=True):
        draft.views[spec.name][...] = tensor
    frame = Frame.open(draft.seal())
    assert [stack.encoding for stack in frame.stacks] == [PLANES, RAW, PLANES, RAW]
    assert frame.nbytes < draft.nbytes
    for spec, tensor in zip(specs, want, strict=True):
        assert frame.read(spec.name).tobytes() == tensor.tobytes()


def test_tensors_that_are_alike_and_side_by_side_are_stored_as_one() -> None:
    specs = [
        *(TensorSpec(f"{i}/k", "bfloat16", (1, 2, 64, 512)) for i in range(20)),  # 128 KiB each
        TensorSpec("other", "bfloat16", (1, 2, 64, 511)),
        *(TensorSpec(f"{i}/s", "float16", (1, 2, 64, 2)) for i in range(20)),
        TensorSpec("last", "bfloat16", (1, 2, 64, 512)),
    ]
    draft = Draft(specs, {})
    for seed, spec in enumerate(specs):
        draft.views[spec.name][...] = floats(spec, seed)
    frame = Frame.open(draft.seal())
    # A stack is full at a MiB. Each of the small ones alone would be too small to compress.
    assert [len(stack.names) for stack in frame.stacks] == [8, 8, 4, 1, 20, 1]
    assert [stack.encoding for stack in frame.stacks] == [PLANES] * 6
    compared = 0
    for seed, spec in reversed(list(enumerate(specs))):
        want, out = floats(spec, seed), np.zeros((1, 2, 9, spec.shape[3]), spec.host_dtype)
        assert frame.read(spec.name).tobytes() == want.tobytes()
        frame.copy_into(spec.name, out, 2, 30, 39)
        assert out.tobytes() == want[:, :, 30:39].tobytes()
        compared += out.nbytes
    assert compared > 1 << 18


def test_what_gains_too_little_stays_raw() -> None:
    zeros = TensorSpec("zeros", "float32", (1 << 20,))
    tiny = TensorSpec("tiny", "bfloat16", (2047,))
    draft = Draft([tiny, zeros], {})
    for view in draft.views.values():
        view[...] = 0
    frame = Frame.open(draft.seal())
    # Below 4 KiB, and beyond the factor by which a stored tensor may expand.
    assert [stack.encoding for stack in frame.stacks] == [RAW, RAW]


def test_no_memory_of_others_leaks_into_the_gaps() -> None:
    specs = [TensorSpec(str(i), "uint8", (i,)) for i in (1, 63, 64, 65, 0, 7)]
    for compression in ("none", "auto"):
        draft = Draft(specs, {})
        assert draft._buffer is not None
        for view in draft.views.values():
            view[...] = 255
        sealed = bytes(draft.seal(compression))  # type: ignore[arg-type]
        payload = sealed[len(sealed) - Frame.open(sealed)._payload.size :]
        assert payload.count(255) == 200
        assert payload.count(0) == len(payload) - 200 > 0


def test_a_draft_is_sealed_once() -> None:
    draft = Draft([TensorSpec("a", "uint8", (3,))], {})
    draft.views["a"][...] = 0
    draft.seal()
    assert draft.views == {}
    with pytest.raises(RuntimeError, match="sealed already"):
        draft.seal()


@pytest.mark.parametrize(
    ("specs", "extra"),
    [
        ([TensorSpec("a", "uint8", (1,)), TensorSpec("a", "uint8", (2,))], {}),
        ([TensorSpec("", "uint8", (1,))], {}),
        ([TensorSpec("n" * 257, "uint8", (1,))], {}),
        ([TensorSpec("a", "uint8", (1,) * 9)], {}),
        ([TensorSpec("a", "uint8", (1 << 33,))], {}),
        ([], {"many": [0] * 20_000}),
        ([], {"large": b"x" * (1 << 23)}),
        ([], {5: "a key that is no string"}),
    ],
)
def test_what_no_reader_would_take_is_not_written(specs: Any, extra: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Draft(specs, extra)


def test_specs_know_their_bytes() -> None:
    assert {d: TensorSpec("x", d, (2, 3)).nbytes // 6 for d in HOST_DTYPES} == {
        "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
        "uint32": 4, "int32": 4, "float32": 4, "uint64": 8, "int64": 8, "float64": 8,
        "complex64": 8,
    }  # fmt: skip
    for bad in (("x", "float8", (1,)), ("x", "uint8", (-1,))):
        with pytest.raises(ValueError, match=r"\w"):
            TensorSpec(*bad)
