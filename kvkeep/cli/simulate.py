"""``kvkeep simulate``: what a store of some size would have saved of recorded requests."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli import options
from kvkeep.cli.output import emit
from kvkeep.cli.progress import progress
from kvkeep.cli.tables import table
from kvkeep.cli.units import count, magnitude, share
from kvkeep.prefixstore.sizes import format_size, parse_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.simulate.replay import Outcome
    from kvkeep.prefixstore.simulate.traces import Trace

BYTES_PER_TOKEN = 128 << 10
_AMOUNT = re.compile(r"\s*([0-9][0-9,_]*)\s*(blocks|tokens)\s*", re.IGNORECASE)


def parse_budget(text: str) -> tuple[int, str]:
    """An amount and its unit: ``blocks``, ``tokens`` or ``bytes``. Raises ``ValueError``."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        return parse_size(text), "bytes"
    amount = int(re.sub("[,_]", "", match[1]))
    if amount < 1:
        raise ValueError(f"A budget of {text} keeps nothing")
    return amount, match[2].lower()


@click.command("simulate")
@click.argument("trace", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--budget",
    callback=options.parsed(parse_budget),
    metavar="SIZE",
    help="What the store may keep: 50GB, 2560000tokens or 5000blocks. Without it only the "
    "ceiling is computed, a store that keeps everything.",
)
@click.option(
    "--policy",
    "names",
    type=click.Choice(options.POLICIES),
    multiple=True,
    help="Eviction policy; may be given several times. All of them by default.",
)
@click.option(
    "--bytes-per-token",
    callback=options.parsed(parse_size),
    default=str(BYTES_PER_TOKEN),
    metavar="SIZE",
    show_default=True,
    help="What one token's rows take; `kvkeep inspect` shows it for a stored conversation.",
)
@click.option(
    "--block",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Read the trace in larger blocks, a multiple of its own.",
)
@click.option(
    "--sessions", type=click.IntRange(min=1), metavar="N", help="Replay only the first N sessions."
)
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    show_default=True,
    help="Sessions that run at the same time, one request each in turn.",
)
@options.bare
def command(
    trace: Path,
    budget: tuple[int, str] | None,
    names: tuple[str, ...],
    bytes_per_token: int,
    block: int | None,
    sessions: int | None,
    at_once: int,
    as_json: bool,
) -> None:
    """Replay recorded requests and say what a store would have saved.

    Every request is looked up and then stored, in a store in memory that evicts with the very
    code of a real one. Printed are the share of prompt tokens that were resumed, what was
    written and evicted, and the regret: tokens that were evicted and then wanted. No model and
    no store is needed.

    \b
    TRACE is a file or a folder of .jsonl files, also .gz, one JSON object a line:
      hash_ids, input_length, timestamp   blocks of 512 tokens (Mooncake's traces)
      trace, in, rle                      [first, count] runs of 64-token blocks,
                                          numbered within their session
      input, session_id, timestamp        prompts as text, in blocks of 1,024
                                          characters, taken for 256 tokens

    \b
    Example:
      kvkeep simulate trace.jsonl --budget 50GB --bytes-per-token 128KiB
      kvkeep simulate trace.jsonl --budget 5000blocks --policy lru
    """
    from kvkeep.prefixstore.eviction import policy_named
    from kvkeep.prefixstore.simulate.replay import replay
    from kvkeep.prefixstore.simulate.traces import read_trace

    read = read_trace(trace)
    read = read.first(sessions) if sessions is not None else read
    read = read.in_blocks_of(block) if block is not None else read
    block_bytes = read.block_tokens * bytes_per_token
    capacity = _blocks(budget, read.block_tokens, block_bytes)
    policies = [policy_named(name) for name in names or options.POLICIES] if budget else []
    total = read.requests
    label = f"Replaying {count(total)} requests"
    with progress(label, lambda rate: f"{rate:,.0f} a second") as bar:
        ceiling, outcomes = replay(
            read.replayed(at_once),
            policies,
            read.block_tokens,
            block_bytes,
            capacity,
            lambda done: bar(done, total),
        )
    data = {
        "requests": ceiling.requests,
        "sessions": len(read.sessions),
        "prompt_tokens": ceiling.prompt_tokens,
        "block_tokens": read.block_tokens,
        "block_bytes": block_bytes,
        "budget_blocks": capacity,
        "ceiling": _data(ceiling, read.block_tokens, block_bytes),
        "policies": [_data(x, read.block_tokens, block_bytes) for x in outcomes],
    }
    emit(as_json, data, _text(read, ceiling, outcomes, capacity, block_bytes))


def _blocks(budget: tuple[int, str] | None, tokens: int, nbytes: int) -> int | None:
    if budget is None:
        return None
    amount, unit = budget
    blocks = amount // {"blocks": 1, "tokens": tokens, "bytes": nbytes}[unit]
    if not blocks:
        raise click.UsageError(f"The budget holds not one block of {format_size(nbytes)}.")
    return blocks


def _data(outcome: Outcome, block_tokens: int, block_bytes: int) -> dict[str, Any]:
    found = asdict(outcome)
    out = {key: found[key] for key in ("policy", "resumed_tokens")}
    out["hit_rate"] = _rate(outcome)
    for key in ("regret_tokens", "regret_requests", "refused", "evictions"):
        out[key] = found[key]
    for key in ("written", "evicted", "kept"):
        out[f"{key}_tokens"] = found[f"{key}_blocks"] * block_tokens
        out[f"{key}_bytes"] = found[f"{key}_blocks"] * block_bytes
    return out


def _rate(outcome: Outcome) -> float:
    return outcome.resumed_tokens / outcome.prompt_tokens if outcome.prompt_tokens else 0.0


def _text(
    read: Trace,
    ceiling: Outcome,
    outcomes: list[Outcome],
    capacity: int | None,
    block_bytes: int,
) -> str:
    heads = ("Policy", "resumed", "regret", "refused", "written", "evictions", "kept")
    rows = [
        (
            outcome.policy,
            share(outcome.resumed_tokens, outcome.prompt_tokens),
            share(outcome.regret_tokens, outcome.prompt_tokens),
            count(outcome.refused),
            format_size(outcome.written_blocks * block_bytes),
            count(outcome.evictions),
            format_size(outcome.kept_blocks * block_bytes),
        )
        for outcome in [*outcomes, ceiling]
    ]
    sessions = f" in {count(len(read.sessions))} sessions" if len(read.sessions) > 1 else ""
    lines = [
        f"{count(ceiling.requests)} requests{sessions}, "
        f"{magnitude(ceiling.prompt_tokens)} prompt tokens",
        f"Blocks of {count(read.block_tokens)} tokens, {format_size(block_bytes)}",
    ]
    if capacity is not None:
        lines[-1] += f"; budget {count(capacity)} blocks, {format_size(capacity * block_bytes)}"
    return "\n".join([*lines, "", table(heads, rows, right=heads[1:])])
