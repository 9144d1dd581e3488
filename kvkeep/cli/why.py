"""``kvkeep why``: what a prompt would resume, and what keeps it from more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli import options
from kvkeep.cli.models import Choice
from kvkeep.cli.neighbours import other_spaces
from kvkeep.cli.output import emit
from kvkeep.cli.prompts import Source
from kvkeep.cli.reasons import as_json as decision_json
from kvkeep.cli.reasons import in_words
from kvkeep.cli.tables import columns
from kvkeep.cli.units import count
from kvkeep.errors import EXIT_MISS

if TYPE_CHECKING:
    from kvkeep.prefixstore.policy import Decision
    from kvkeep.prefixstore.space import Space
    from kvkeep.prefixstore.store import Store

BEFORE, AFTER = 8, 12
CHARACTERS = 28
"""Tokens, and at most so many characters, shown on either side of where two prompts part."""


@click.command("why")
@options.model
@options.prompt
@options.common
@click.pass_context
def command(ctx: click.Context, choice: Choice, source: Source, store: Path, as_json: bool) -> None:
    """Explain what a prompt would resume, without running the model.

    Shows where it parts from what is stored, in both texts, and which layers set the limit.
    Restores nothing and is not counted in the report. Exits with 3 for a miss.

    \b
    Example:
      kvkeep why --model MODEL --prompt-file question.md
    """
    from kvkeep.prefixstore.store import open_store

    with open_store(store, read_only=True) as opened:
        loaded = choice.load(weights=False)
        tokens = source.tokens(loaded.tokenizer)
        space = choice.space(opened, loaded)
        decision = space.explain(tokens)
        stored = _nearest(opened, space, tokens, decision.matched)
        spaces = opened.spaces() if decision.offset == 0 else []
    at = decision.matched
    texts = {
        name: [loaded.tokenizer.decode(part) for part in _around(ids, at)]
        for name, ids in (("stored", stored), ("asked", tokens))
    }
    parted = 0 < at < min(len(stored), len(tokens))
    data: dict[str, Any] = {"space": space.id.hex(), **decision_json(decision)}
    data["parting"] = texts if parted else None
    text = _text(decision, texts if parted else None)
    if decision.offset == 0:
        text += "\n" + other_spaces(spaces, space, decision)
    emit(as_json, data, text)
    if decision.offset == 0:
        ctx.exit(EXIT_MISS)


def _nearest(store: Store, space: Space, tokens: list[int], matched: int) -> list[int]:
    """The tokens of a conversation of ``space`` that shares ``matched`` of ``tokens``."""
    if matched == 0:
        return []
    for conversation in store.conversations():
        if conversation.space == space.id.hex() and conversation.tokens >= matched:
            found = store.conversation_tokens(conversation.id)
            if found[:matched] == tokens[:matched]:
                return found
    return []


def _around(ids: list[int], at: int) -> tuple[list[int], list[int]]:
    return ids[max(0, at - BEFORE) : at], ids[at : at + AFTER]


def _text(decision: Decision, texts: dict[str, list[str]] | None) -> str:
    total = count(decision.prompt_tokens)
    rows = [("matched", f"{count(decision.matched)} of {total} tokens")]
    if texts is not None:
        rows += [(f"  {name}", _quoted(*parts)) for name, parts in texts.items()]
    rows.append(("resumed", f"{count(decision.offset)} of {total} tokens"))
    rows += [("  because" if i == 0 else "", said) for i, said in enumerate(in_words(decision))]
    return columns(rows)


def _quoted(before: str, after: str) -> str:
    """The text with the place marked: ``«…the boats |leave before…»``."""
    before, after = (text.replace("\n", "\\n") for text in (before, after))
    return f"«…{before[-CHARACTERS:]}|{after[:CHARACTERS]}…»"
