"""A store in which much happened: real lookups, and many more events of every sort."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np

from kvkeep.prefixstore.event import Event
from tests.faults import rows
from tests.reports.stores import keep, opened, space_of, write

KINDS = ("plain", "window", "recurrent")
TENANTS = (None, "red", "blue")
REASONS = (
    "full",
    "no_prefix",
    "last_token",
    "no_state_at_offset",
    "rows_missing",
    "space_changed:adapter",
    "evicted",
    "expired",
    "corrupt",
)


def fill(path: Path, events: int = 2000, hours: float = 30.0) -> dict[str, str]:
    """Fill a new store; its spaces by kind and tenant, ``"plain/red"``."""
    spaces: dict[str, str] = {}
    now = time.time()
    with opened(path) as store:
        write(store, *_made(events, now - hours * 3600, now - 60))
        for kind in KINDS:
            for tenant in TENANTS:
                space = space_of(store, kind, f"model-{kind}", tenant)
                spaces[f"{kind}/{tenant}"] = space.id.hex()
                if tenant != "blue":
                    space.measured(10_000, 8.0)
                for conversation in (0, 1, 5):
                    tokens = rows.tokens_of(conversation, 200)
                    keep(space, kind, tokens, request=f"snap-{kind}-{tenant}-{conversation}")
                    branch = np.concatenate([rows.tokens_of(conversation, 230)[:170], [5, 6, 7]])
                    space.resume(branch, request=f"ask-{kind}-{tenant}-{conversation}")
                    space.resume(rows.tokens_of(conversation, 240))
                space.resume(list(range(900, 950)))
    return spaces


def _made(number: int, start: float, stop: float) -> list[Event]:
    """Events of spaces that nothing is stored in, spread over the time."""
    rng = random.Random(7)
    return [_one(rng, start + (stop - start) * i / number) for i in range(number)]


def _one(rng: random.Random, at: float) -> Event:
    space = bytes([rng.randrange(4)]) * 16
    prompt = rng.randrange(1, 50_000)
    what = rng.choices(("lookup", "snapshot", "evict", "restore", "tomorrow"), (60, 30, 4, 4, 1))[0]
    if what == "lookup":
        reason = rng.choice(REASONS)
        matched = rng.randrange(prompt + 1)
        resumed = rng.randrange(matched + 1) if rng.random() < 0.7 else 0
        limited = reason in ("no_state_at_offset", "rows_missing")
        return Event(
            what,
            at,
            space,
            reason,
            prompt,
            matched,
            resumed,
            nbytes=resumed * 1000,
            seconds=rng.random(),
            kinds=rng.choice(("arrays", "kv-rotating")) if limited else "",
            layers="0-2,4" if limited else "",
            tier=rng.choice(("store", "memory")) if resumed else "",
            request=f"made-{rng.getrandbits(40):010x}",
            rate=rng.choice((0.0, 500.0, 812.5)),
        )
    if what == "snapshot":
        refused = f"A snapshot of {rng.randrange(10**9) / 1024:.1f} KiB does not fit"
        reason = rng.choice(("stored", "already_stored", refused))
        new = rng.randrange(prompt) if reason == "stored" else 0
        nbytes = new * 1000
        return Event(what, at, space, reason, prompt, new=new, known=prompt - new, nbytes=nbytes)
    counts = {"known": prompt, "nodes": 3} if what == "evict" else {"resumed": prompt}
    return Event(what, at, space, "budget", nbytes=4096, seconds=rng.random(), **counts)  # type: ignore[arg-type]
