"""The text around the place where two prompts part, shown on one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

BEFORE, AFTER = 8, 12
CHARACTERS = 24
"""Tokens, and at most so many characters, shown on either side of where two prompts part."""

MOST = 3
"""Stored branches that are shown."""

Decode = Callable[[Sequence[int]], str]

VOCABULARY = 1 << 31
NO_TEXT = "[no text]"
"""Stands for ids that no vocabulary has: of images, and of unfinished answers."""


@dataclass(frozen=True)
class Parting:
    """Text before the parting, then what each side has behind it; ``asked`` may be unknown."""

    before: str
    stored: list[str]
    asked: str | None

    def as_json(self) -> dict[str, Any]:
        """For programs: pairs of text before and after."""
        first = self.stored[0] if self.stored else ""
        return {
            "stored": [self.before, first],
            "asked": None if self.asked is None else [self.before, self.asked],
            "branches": self.stored,
        }

    def lines(self) -> list[tuple[str, str]]:
        """For people: ``stored  «…the boats |leave before…»``."""
        rows = [("  stored", quoted(self.before, after)) for after in self.stored[:MOST]]
        if len(self.stored) > MOST:
            rows.append(("", f"and {len(self.stored) - MOST} more branches"))
        if self.asked is not None:
            rows.append(("  asked", quoted(self.before, self.asked)))
        return rows


def parting(
    prefix: Sequence[int],
    continues: Sequence[Sequence[int]],
    asked: Sequence[int] | None,
    decode: Decode,
) -> Parting | None:
    """Where ``prefix`` ends and the two go on; ``None`` where they do not part."""
    if not prefix or not continues or (asked is not None and not asked):
        return None
    return Parting(
        decode(prefix[-BEFORE:]),
        [decode(run[:AFTER]) for run in continues],
        decode(asked[:AFTER]) if asked is not None else None,
    )


def reader(tokenizer: Any) -> Decode:
    """What turns token ids into text, whatever ids are stored."""

    def decode(ids: Sequence[int]) -> str:
        runs = groupby(ids, lambda token: 0 <= token < VOCABULARY)
        return "".join(tokenizer.decode(list(run)) if known else NO_TEXT for known, run in runs)

    return decode


def as_numbers(ids: Sequence[int]) -> str:
    """Token ids where there is no tokenizer."""
    return "".join(f" {token}" for token in ids)


def quoted(before: str, after: str) -> str:
    """The text with the place marked: ``«…the boats |leave before…»``."""
    before, after = (_printable(text) for text in (before, after))
    return f"«…{before[-CHARACTERS:]}|{after[:CHARACTERS]}…»"


def shown_text(text: str) -> str:
    """The beginning of a stretch of text: ``«The harbour opens…»``."""
    shown = _printable(text)
    return f"«{shown[:CHARACTERS]}…»"


def _printable(text: str) -> str:
    """One line without control characters, which could repaint the terminal."""
    shown = text.replace("\n", "\\n").replace("\t", "\\t")
    return "".join(c if c.isprintable() else "·" for c in shown)
