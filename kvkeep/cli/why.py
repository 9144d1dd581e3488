"""``kvkeep why``: what a prompt would resume, or a request did, and what kept it from more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from kvkeep.cli import options
from kvkeep.cli.explained import Explained
from kvkeep.cli.helps import would_help
from kvkeep.cli.models import Choice
from kvkeep.cli.neighbours import other_spaces
from kvkeep.cli.output import emit
from kvkeep.cli.parting import Decode, as_numbers, parting, reader
from kvkeep.cli.prompts import Source
from kvkeep.cli.stores import open_existing
from kvkeep.errors import EXIT_MISS
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.event import Event
    from kvkeep.prefixstore.past import Past
    from kvkeep.prefixstore.policy import Decision, Reason
    from kvkeep.prefixstore.store import Store
    from kvkeep.prefixstore.trace import Near, RecipeTrace


@click.command("why")
@click.argument("request", required=False)
@options.optional_model
@options.optional_prompt
@options.common
@click.pass_context
def command(
    ctx: click.Context,
    request: str | None,
    choice: Choice | None,
    salt: str | None,
    source: Source | None,
    store: Path,
    as_json: bool,
) -> None:
    """Explain what a prompt would resume, or what a request did.

    Shows where it parts from what is stored, in both texts, how the policy came to its
    offset, which layers set the limit and by which rule, and what would have helped. Runs no
    model, restores nothing and is not counted in the report. Exits with 3 for a miss.

    REQUEST is an id that `kvkeep report` shows, the beginning of one, or with … before it the
    end. Its text is shown with --model, and with the --salt of its tenant.

    \b
    Example:
      kvkeep why --model MODEL --prompt-file question.md
      kvkeep why 3f2a91 --model MODEL
    """
    if (request is None) == (source is None):
        raise click.UsageError("Name a prompt, with --model, or the id of a REQUEST.")
    if source is not None and choice is None:
        raise click.UsageError("Missing option '--model'.")
    with open_existing(store) as opened:
        if request is not None:
            said, more = _request(opened, request, choice, salt), ""
        else:
            assert choice is not None
            assert source is not None
            said, more = _prompt(opened, choice, source)
    emit(as_json, said.as_json(), said.text() + more)
    if said.decision.offset == 0:
        ctx.exit(EXIT_MISS)


def _prompt(opened: Store, choice: Choice, source: Source) -> tuple[Explained, str]:
    """A prompt that is asked now, and what to add for a miss."""
    loaded = choice.load(weights=False)
    tokens = source.tokens(loaded.tokenizer)
    space = choice.space(opened, loaded)
    found = space.trace(tokens)
    decision = found.decision
    at = decision.matched
    asked = tokens[at:] if at else ()
    parts = parting(tokens[:at], found.continues, asked, reader(loaded.tokenizer))
    said = Explained(
        space=space.id.hex(),
        decision=decision,
        parting=parts,
        helps=_helps(opened, decision, found.near, parts is not None, _floor(found.recipes)),
        near=found.near,
        steps=found.steps,
        blocked=found.blocked,
        recipes=found.recipes,
    )
    if decision.offset:
        return said, ""
    return said, "\n" + other_spaces(opened.spaces(), space, decision)


def _request(opened: Store, request: str, choice: Choice | None, salt: str | None) -> Explained:
    """A request that is over."""
    past = opened.past(request)
    decision = _decision(past.event)
    notes: list[str] = []
    decode = _reader(past, choice, salt, notes)
    parts = None
    if decode is not None:
        parts = parting(past.prefix, past.continues, past.asked or None, decode)
        if past.event.matched and not past.prefix:
            notes.append("what it matched is no longer stored")
        elif past.prefix and not past.asked:
            notes.append("what it asked there was not kept (see `event_tokens`)")
    return Explained(
        space=past.event.space.hex(),
        decision=decision,
        parting=parts,
        helps=_helps(opened, decision, past.near, parts is not None),
        near=past.near,
        event=past.event,
        notes=notes,
    )


def _helps(
    opened: Store, decision: Decision, near: Sequence[Near], shown: bool, floor: int = 0
) -> str:
    budget = format_size(opened.max_bytes)
    matched, resumed = decision.matched, decision.offset
    return would_help(decision.why, matched, resumed, near, budget, floor=floor, shown=shown)


def _floor(recipes: Sequence[RecipeTrace]) -> int:
    """The lowest offset that any recipe on the path allows at all."""
    return min((recipe.floor for recipe in recipes), default=0)


def _reader(past: Past, choice: Choice | None, salt: str | None, notes: list[str]) -> Decode | None:
    """What turns tokens into text; ``None`` for another tenant's."""
    from kvkeep.prefixstore.identity import salt_digest

    owner = past.identity.salt if past.identity is not None else ""
    if owner and owner != salt_digest(salt or ""):
        notes.append("its text is shown only with the --salt of its tenant")
        return None
    if choice is None:
        notes.append("token ids are shown; --model shows the text")
        return as_numbers
    return reader(choice.load(weights=False).tokenizer)


def _decision(event: Event) -> Decision:
    """The decision that an event tells of, as far as it does."""
    from kvkeep.prefixstore.policy import Decision, LayerLimit

    limits: tuple[LayerLimit, ...] = ()
    if event.rule:
        rule = _reason(event.rule)
        limits = (LayerLimit(_layers(event.layers), event.kinds, event.limit, rule),)
    detail = event.reason.partition(":")[2]
    reason = _reason(event.stem)
    return Decision(event.resumed, event.matched, event.prompt, reason, limits, detail)


def _reason(name: str) -> Reason:
    """A reason by its name; one of a newer kvkeep stays a plain word."""
    from kvkeep.prefixstore.policy import Reason

    return Reason(name) if name in set(Reason) else cast("Reason", name)


def _layers(spelled: str) -> tuple[str, ...]:
    """The layers of ``0-2,4``, one by one."""
    out: list[str] = []
    for run in filter(None, spelled.split(",")):
        first, _, last = run.partition("-")
        out += map(str, range(int(first), int(last or first) + 1))
    return tuple(out)
