"""Recorded requests as sequences of block ids. docs/simulate.md describes the formats.

A block is a fixed number of tokens. Two prompts share a block where they have the same id at
the same place and share all blocks before it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvkeep.errors import KvkeepError
from kvkeep.prefixstore.tokens import Tokens

HASHED_TOKENS = 512
RUN_TOKENS = 64
TEXT_CHARACTERS = 1024
CHARACTERS_A_TOKEN = 4


class TraceUnreadable(KvkeepError):
    """A trace is in none of the formats that can be read."""

    exit_code = 2
    remedy = "`kvkeep simulate --help` lists the formats; docs/simulate.md describes them."


@dataclass(frozen=True)
class Request:
    """One prompt: its blocks, its length in tokens, and when it came (nanoseconds).

    ``when`` is ``None`` in traces that record no common clock. The last block may be short.
    """

    blocks: Tokens
    tokens: int
    when: int | None


@dataclass(frozen=True)
class Trace:
    """Requests by session, each session in order, and the tokens of a block.

    A trace without sessions is a single one. ``requests`` is how many lines there are.
    """

    block_tokens: int
    sessions: Mapping[str, list[bytes]]
    parse: Callable[[int, bytes], Request]

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return sum(map(len, self.sessions.values()))

    def replayed(self, at_once: int = 1) -> Iterator[Request]:
        """The requests, ``at_once`` sessions in turn; one that ends makes room for the next."""
        waiting = enumerate(self.sessions.values())
        running = [self._session(n, s) for n, s in islice(waiting, at_once)]
        while running:
            for session in list(running):
                request = next(session, None)
                if request is not None:
                    yield request
                    continue
                at = running.index(session)
                running[at : at + 1] = [self._session(n, s) for n, s in islice(waiting, 1)]

    def first(self, sessions: int) -> Trace:
        """The trace of the first ``sessions`` sessions."""
        kept = dict(islice(self.sessions.items(), sessions))
        return Trace(self.block_tokens, kept, self.parse)

    def in_blocks_of(self, tokens: int) -> Trace:
        """The same requests in larger blocks, each of several whole ones.

        Raises ``TraceUnreadable`` where ``tokens`` is not a multiple of the trace's own.
        """
        every, rest = divmod(tokens, self.block_tokens)
        if rest or every < 1:
            raise TraceUnreadable(
                f"Blocks of {tokens} tokens cannot be made of blocks of {self.block_tokens}",
                remedy=f"Name a multiple of {self.block_tokens}.",
            )

        def parse(session: int, line: bytes) -> Request:
            request = self.parse(session, line)
            count = len(request.blocks) // every
            whole = request.blocks[: count * every].reshape(count, every)
            blocks = np.array([_digest(block.tobytes()) for block in whole], np.int64)
            return Request(blocks, request.tokens, request.when)

        return self if every == 1 else Trace(tokens, self.sessions, parse)

    def _session(self, number: int, lines: list[bytes]) -> Iterator[Request]:
        for line in lines:
            try:
                yield self.parse(number, line)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                shown = line[:60].decode(errors="replace")
                raise TraceUnreadable(f"A request cannot be read ({error!r}): {shown}…") from error


def read_trace(path: Path) -> Trace:
    """The trace in a file, or in all ``.jsonl`` files of a folder, in the order of their names.

    Which format it is shows in the keys of the first line. Raises ``TraceUnreadable``.
    """
    files = sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]
    sessions: dict[str, list[bytes]] = {}
    found: tuple[int, str, Callable[[int, bytes], Request]] | None = None
    for file in files:
        for number, line in enumerate(_lines(file), 1):
            if not line.strip():
                continue
            record = _record(file, number, line)
            found = found or _format(file, record)
            name = str(record.get(found[1], "")) if found[1] else ""
            sessions.setdefault(name, []).append(line)
    if found is None:
        raise TraceUnreadable(f"{path} holds no request")
    return Trace(found[0], sessions, found[2])


def _format(file: Path, record: Mapping[str, Any]) -> tuple[int, str, Any]:
    """Tokens of a block, the key that names a session, and what reads a line."""
    for keys, tokens, session, parse in (
        (("hash_ids", "input_length"), HASHED_TOKENS, "", _hashed),
        (("rle", "in", "trace"), RUN_TOKENS, "trace", _runs),
        (("input", "session_id"), TEXT_CHARACTERS // CHARACTERS_A_TOKEN, "session_id", _text),
    ):
        if all(key in record for key in keys):
            return tokens, session, parse
    raise TraceUnreadable(f"{file} has lines with {', '.join(record)}, which is no known format")


def _hashed(_: int, line: bytes) -> Request:
    record = json.loads(line)
    blocks = np.array(record["hash_ids"], np.int64)
    return Request(blocks, int(record["input_length"]), int(record["timestamp"]) * 1_000_000)


def _runs(session: int, line: bytes) -> Request:
    record = json.loads(line)
    if sum(int(count) for _, count in record["rle"]) > int(record["in"]) // RUN_TOKENS + 1:
        raise ValueError("more blocks than tokens")
    runs = [np.arange(first, first + count, dtype=np.int64) for first, count in record["rle"]]
    blocks = np.concatenate(runs) if runs else np.empty(0, np.int64)
    return Request(blocks + (session << 32), int(record["in"]), None)


def _text(_: int, line: bytes) -> Request:
    record = json.loads(line)
    text = str(record["input"])
    pieces = [
        text[at : at + TEXT_CHARACTERS]
        for at in range(0, len(text) - TEXT_CHARACTERS + 1, TEXT_CHARACTERS)
    ]
    blocks = np.array([_digest(piece.encode()) for piece in pieces], np.int64)
    return Request(blocks, len(text) // CHARACTERS_A_TOKEN, int(record["timestamp"]) * 1000)


def _digest(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) >> 1


def _record(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TraceUnreadable(f"{file}, line {number}, is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise TraceUnreadable(f"{file}, line {number}, is not a JSON object")
    return record


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            yield from lines
    except (OSError, EOFError, zlib.error) as error:
        raise TraceUnreadable(f"{file} cannot be read: {error}") from error
