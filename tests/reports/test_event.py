"""One record: what it holds, and that records of other versions are read or left alone."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.prefixstore.event import Event, request_id
from tests.reports.stores import event

counts = st.integers(0, 1 << 40)
seconds = st.floats(0, 1e9, allow_nan=False)
lookups = st.builds(
    lambda resumed, more, rest, **rest_of: event(
        resumed=resumed, matched=resumed + more, prompt=resumed + more + rest, **rest_of
    ),
    counts,
    counts,
    counts,
    nbytes=counts,
    seconds=seconds,
    rebuild=seconds,
    rate=seconds,
    kinds=st.text(max_size=20),
    request=st.text(max_size=20),
    node=st.integers(0, (1 << 64) - 1),
    asked=st.lists(st.integers(-(1 << 62), 1 << 31), max_size=64).map(tuple),
)


@given(lookups)
def test_an_event_comes_back_as_it_was(written: Event) -> None:
    assert Event.unpack(written.pack()) == written


def test_a_record_of_the_first_version_is_read() -> None:
    first = ["lookup", 5.0, b"s" * 16, "full", 10, 8, 7, 0, 0, 64, 0.5, "kv"]
    found = Event.unpack(msgpack.packb(first))
    assert found is not None
    assert (found.prompt, found.matched, found.resumed, found.kinds) == (10, 8, 7, "kv")
    assert (found.rate, found.saved, found.request, found.asked) == (0.0, None, "", ())


def test_a_record_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    known = event(prompt=10, matched=5, resumed=5)
    values = [getattr(known, f.name) for f in dataclasses.fields(Event)]
    assert Event.unpack(msgpack.packb([*values, {"new": 1}, 7])) == known


@given(st.binary(max_size=200))
def test_other_bytes_are_no_event(data: bytes) -> None:
    found = Event.unpack(data)
    assert found is None or isinstance(found.prompt, int)


@given(lookups, st.data())
def test_a_flipped_bit_gives_no_impossible_number(written: Event, data: st.DataObject) -> None:
    packed = bytearray(written.pack())
    at = data.draw(st.integers(0, 8 * len(packed) - 1))
    packed[at // 8] ^= 1 << at % 8
    found = Event.unpack(bytes(packed))
    if found is not None and found.what == "lookup":
        assert 0 <= found.resumed <= found.matched <= found.prompt
        assert found.seconds >= 0
        assert found.rate >= 0
        assert found.nbytes >= 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"resumed": 9, "matched": 8, "prompt": 10},
        {"matched": 11, "prompt": 10},
        {"resumed": -1},
        {"seconds": float("nan")},
        {"rate": float("inf")},
        {"seconds": -1.0},
        {"nbytes": -1},
        {"asked": ("x",)},
        {"prompt": 2.5},
        {"kinds": 3},
    ],
)
def test_what_cannot_be_is_not_counted(wrong: dict[str, object]) -> None:
    assert Event.unpack(event(prompt=0).pack()) is not None
    assert Event.unpack(dataclasses.replace(event(), **wrong).pack()) is None


def test_a_saving_needs_a_rate() -> None:
    assert event(prompt=10, matched=9, resumed=8, rate=4.0).saved == 2.0
    assert event(prompt=10, matched=9, resumed=8).saved is None


def test_a_request_id_is_short_and_printable() -> None:
    assert request_id(None) == request_id("") == ""
    assert request_id("chatcmpl-1") == "chatcmpl-1"
    assert request_id("a\x1b[31m\n" + "x" * 100) == "a?[31m?" + "x" * 57
