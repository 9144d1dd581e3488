"""``kvkeep snapshot``: read a prompt with a model, and store what it computed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli import options
from kvkeep.cli.failures import Interrupted
from kvkeep.cli.interrupts import Stopping
from kvkeep.cli.models import Choice
from kvkeep.cli.output import emit
from kvkeep.cli.progress import progress
from kvkeep.cli.prompts import Source
from kvkeep.cli.units import count, counted, duration
from kvkeep.errors import EmptyCache, StoreUnusable
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.cli.models import Loaded
    from kvkeep.prefixstore.receipt import Receipt
    from kvkeep.prefixstore.space import Space


class NotStored(StoreUnusable):
    """The prompt was read, but the store took none of it."""

    remedy = "`kvkeep ls` shows what is kept; raise --max-bytes, or free the disk."


@dataclass(frozen=True)
class Outcome:
    """What was read and what was stored; offsets and counts are tokens."""

    resumed: int
    read: int
    receipts: list[tuple[int, Receipt]]
    read_seconds: float
    store_seconds: float

    @property
    def offset(self) -> int:
        """The last resume point that is stored; 0 without one."""
        return max(self.points, default=0)

    @property
    def reason(self) -> str:
        """What the store said of the last resume point that it took, or of the last one."""
        stored = [receipt for _, receipt in self.receipts if receipt.stored]
        return (stored or [receipt for _, receipt in self.receipts])[-1].reason

    @property
    def tokens_new(self) -> int:
        """Positions whose rows were not stored before."""
        return sum(receipt.tokens_new for _, receipt in self.receipts if receipt.stored)

    @property
    def bytes_written(self) -> int:
        """Bytes of rows and state, as stored."""
        return sum(receipt.bytes_written for _, receipt in self.receipts)

    @property
    def points(self) -> list[int]:
        """Offsets of the resume points that this run stored."""
        return sorted({offset for offset, receipt in self.receipts if receipt.stored})


@click.command("snapshot")
@options.model
@options.prompt
@options.budget
@options.common
def command(
    choice: Choice,
    source: Source,
    max_bytes: int | None,
    store: Path,
    as_json: bool,
) -> None:
    """Read a prompt with a model and store its cache.

    What the store already holds of the prompt is resumed, not read again. The resume point
    lies one token before the prompt's end, so that the same prompt can be resumed whole.
    Ctrl-C stores what was read so far.

    \b
    Example:
      kvkeep snapshot --model MODEL --prompt-file context.md
      kvkeep snapshot --model MODEL --chat turns.json --max-bytes 50GB
    """
    from kvkeep.prefixstore.store import open_store

    with open_store(store, max_bytes) as opened:
        loaded = choice.load()
        tokens = source.tokens(loaded.tokenizer)
        if len(tokens) < 2:
            raise EmptyCache(
                "A prompt of one token has nothing to resume", remedy="Name a longer one."
            )
        if choice.exact and len(tokens) <= choice.prefill_step:
            raise EmptyCache(
                f"--exact stores whole prefill steps of {count(choice.prefill_step)} tokens, and "
                f"one below the end of this prompt are {count(len(tokens) - 1)}",
                remedy="Name a longer prompt or a smaller --prefill-step, or leave --exact out.",
            )
        loaded.check(tokens)
        space = choice.space(opened, loaded)
        done = take(space, loaded, choice, tokens)
    if not done.points:
        raise NotStored(f"The prompt was read but not stored: {done.reason}")
    emit(as_json, _data(space.id.hex(), tokens, done), _text(done))


def take(space: Space, loaded: Loaded, choice: Choice, tokens: list[int]) -> Outcome:
    """Bring all but the last of ``tokens`` into the store, reading only what it lacks."""
    from kvkeep.hooks.interval_points import IntervalPoints, junction_of
    from kvkeep.hooks.prefill import prefill

    prefix = tokens[:-1]
    hit = space.resume(tokens)
    caches = hit.caches if hit.caches is not None else loaded.new_caches()
    todo = prefix[hit.offset :]
    started = time.perf_counter()
    label = f"Reading {counted(len(todo), 'token')}"
    with progress(label, lambda rate: f"{rate:,.0f} tok/s") as bar, Stopping() as stopping:
        junction = None if choice.exact else junction_of(hit.decision, tokens)
        cuts = [junction - hit.offset] if junction is not None else []
        points = IntervalPoints(space, prefix, caches, hit.offset, bar, junction)
        step, quantization = choice.prefill_step, choice.quantization

        def between(done: int, total: int) -> None:
            points(done, total)
            if stopping.asked and done < total:
                raise _Stopped(hit.offset + done)

        try:
            with choice.quantizing():
                prefill(
                    loaded.model,
                    todo,
                    caches,
                    step=step,
                    progress=between,
                    cuts=cuts,
                    **quantization,
                )
        except _Stopped as stopped:
            raise _interrupted(space, prefix[: stopped.offset], caches, hit.offset) from None
    read = time.perf_counter()
    end = len(prefix) // step * step if choice.exact else len(prefix)
    receipts = [*points.receipts, (end, space.snapshot(prefix, caches, request=hit.request))]
    receipts[-1][1].wait()
    stored = time.perf_counter()
    return Outcome(hit.offset, len(todo), receipts, read - started, stored - read)


class _Stopped(Exception):
    """Somebody pressed Ctrl-C, and the caches stand at ``offset``."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.offset = offset


def _interrupted(
    space: Space, tokens: list[int], caches: list[Any], resumed: int
) -> Interrupted | KeyboardInterrupt:
    """What ends the command; before that, what was read is stored."""
    if len(tokens) == resumed:
        return KeyboardInterrupt()
    receipt = space.snapshot(tokens, caches, origin="interval")
    receipt.wait()
    if not receipt.stored:
        return Interrupted(f"what was read is not stored: {receipt.reason}")
    return Interrupted(f"stored up to token {count(len(tokens))}, where the same command goes on")


def _data(space: str, tokens: list[int], done: Outcome) -> dict[str, Any]:
    return {
        "space": space,
        "prompt_tokens": len(tokens),
        "offset": done.offset,
        "resumed_tokens": done.resumed,
        "read_tokens": done.read,
        "new_tokens": done.tokens_new,
        "known_tokens": done.offset - done.tokens_new,
        "resume_points": done.points,
        "bytes_written": done.bytes_written,
        "reason": done.reason,
        "read_seconds": done.read_seconds,
        "store_seconds": done.store_seconds,
    }


def _text(done: Outcome) -> str:
    lines = [
        f"Read {counted(done.read, 'token')} in {duration(done.read_seconds)}"
        + (f", {count(done.resumed)} resumed from the store" if done.resumed else ""),
        f"Stored {counted(done.offset, 'token')} ({count(done.tokens_new)} new, "
        f"{count(done.offset - done.tokens_new)} already there)  "
        f"{format_size(done.bytes_written)} written in {duration(done.store_seconds)}",
    ]
    if len(done.points) > 1:
        lines.append(f"Resume points at {', '.join(map(count, done.points))}")
    return "\n".join(lines)
