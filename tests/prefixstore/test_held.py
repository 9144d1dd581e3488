"""A caller with caches in memory: the store restores only what reaches further, and never waits."""

from __future__ import annotations

import pytest

import kvkeep
from kvkeep import Reason
from kvkeep.prefixstore import writer
from kvkeep.prefixstore.space import SHED
from tests.prefixstore.shapes import make, space_of

TOKENS = list(range(40))


@pytest.fixture
def store(tmp_path):
    with kvkeep.open(tmp_path / "store", max_bytes="1GB") as store:
        yield store


@pytest.mark.parametrize(("held", "rebuilt"), [(0, 30), (29, 30), (30, 0), (35, 0)])
def test_only_what_reaches_further_is_rebuilt(store, held, rebuilt):
    space = space_of(store, "plain")
    assert space.snapshot(TOKENS[:30], make("plain", TOKENS[:30])).stored
    hit = space.resume([*TOKENS, 99], held=held)
    assert (hit.caches is not None, hit.offset) == (rebuilt > 0, max(held, 30))
    assert hit.rest == [*TOKENS, 99][hit.offset :]
    assert hit.decision.offset == hit.offset


@pytest.mark.parametrize(
    ("prompt", "held", "reason"),
    [
        (TOKENS, 39, Reason.LAST_TOKEN),
        ([*TOKENS[:30], 98, 99], 30, Reason.FULL),
        ([*TOKENS, 99], 25, Reason.NO_STATE_AT_OFFSET),
        ([*TOKENS, 99], 40, Reason.FULL),
    ],
)
def test_what_memory_served_is_counted_with_its_reason(store, prompt, held, reason):
    space = space_of(store, "recurrent")
    assert space.snapshot(TOKENS[:20], make("recurrent", TOKENS[:20])).stored
    assert space.snapshot(TOKENS, make("recurrent", TOKENS)).stored
    if reason is Reason.NO_STATE_AT_OFFSET:
        prompt = [*TOKENS[:38], 98, 99]
    decision = space.resume(prompt, held=held).decision
    assert (decision.offset, decision.reason) == (held, reason)
    total = store.report().total
    assert (total.lookups, total.resumed_tokens, total.hits) == (1, held, 1)
    assert total.reasons == {str(reason): 1}


def test_a_full_queue_is_not_waited_for(store, monkeypatch):
    space = space_of(store, "plain")
    monkeypatch.setattr(writer, "QUEUE_BYTES", 0)
    receipt = space.snapshot(TOKENS, make("plain", TOKENS), wait=False)
    assert (receipt.stored, receipt.reason) == (False, SHED)
    assert space.snapshot(TOKENS, make("plain", TOKENS)).stored
    assert space.explain([*TOKENS, 99]).offset == 40
