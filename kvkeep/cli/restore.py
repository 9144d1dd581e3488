"""``kvkeep restore``: resume a prompt from the store, and answer it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli import files, options
from kvkeep.cli.models import Choice
from kvkeep.cli.neighbours import other_spaces
from kvkeep.cli.output import emit, note
from kvkeep.cli.progress import progress
from kvkeep.cli.prompts import Source
from kvkeep.cli.reasons import as_json as decision_json
from kvkeep.cli.reasons import in_words
from kvkeep.cli.stores import is_there, open_to_resume
from kvkeep.cli.units import count, counted, duration
from kvkeep.errors import EXIT_MISS
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.cli.models import Loaded
    from kvkeep.prefixstore.policy import Decision
    from kvkeep.prefixstore.space import Hit, Space


@dataclass
class Answer:
    """What the model said, and when its first token was there (seconds from the start)."""

    text: str = ""
    tokens: int = 0
    first_token: float | None = None
    read_tokens: int = 0
    read_seconds: float = 0.0

    def saved(self, resumed: int) -> float | None:
        """Seconds that reading ``resumed`` tokens would have taken at this answer's rate.

        ``None`` where too little was read here to tell.
        """
        if self.read_tokens < 16 or not self.read_seconds:
            return None
        return resumed * self.read_seconds / self.read_tokens


@click.command("restore")
@options.model
@options.prompt
@click.option("--generate", type=click.IntRange(min=1), metavar="N", help="Answer with N tokens.")
@click.option("--cold", is_flag=True, help="Ignore the store, to compare with.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the resumed cache to FILE, for mlx_lm.generate --prompt-cache-file.",
)
@click.option("--force", is_flag=True, help="Replace FILE where it exists.")
@options.common
@click.pass_context
def command(
    ctx: click.Context,
    choice: Choice,
    source: Source,
    generate: int | None,
    cold: bool,
    output: Path | None,
    force: bool,
    store: Path,
    as_json: bool,
) -> None:
    """Resume a prompt from the store, and answer it.

    Says how much of the prompt could be resumed and why not more. With --generate the model
    reads the rest and answers on stdout; what was resumed is then told on stderr. Stores
    nothing; the report counts the lookup, unless the store may only be read. Exits with 3
    when there was nothing to resume.

    \b
    Example:
      kvkeep restore --model MODEL --prompt-file question.md --generate 64
      kvkeep restore --model MODEL --prompt-file question.md --json
      kvkeep restore --model MODEL --prompt-file question.md -o cache.safetensors
    """
    if cold and not generate:
        raise click.UsageError("--cold compares answers; it needs --generate.")
    if output is not None and cold:
        raise click.UsageError("--cold resumes nothing that could be written to a file.")
    if output is not None:
        files.check_target(output, force=force)
    known = is_there(store)
    with open_to_resume(store) as opened:
        loaded = choice.load()
        tokens = source.tokens(loaded.tokenizer)
        space = choice.space(opened, loaded)
        started = time.perf_counter()
        hit = _nothing(tokens) if cold else space.resume(tokens)
        restored = time.perf_counter() - started
        missed = hit.offset == 0 and not cold
        written = None
        if output is not None and hit.caches is not None:
            written = files.write(output, hit.caches, tokens[: hit.offset], choice.model)
        answer = Answer()
        if generate:
            loaded.check(tokens)
            _generate(loaded, choice, hit, generate, started, answer, shown=not as_json)
            space.measured(answer.read_tokens, answer.read_seconds)
        lines = _cold(len(tokens)) if cold else _facts(hit.decision, restored, answer)
        if answer.first_token is not None:
            lines.append(f"First token after {duration(answer.first_token)}")
        if written is not None:
            lines.append(
                f"Wrote {count(hit.offset)} tokens to {output}  {format_size(written)}; "
                f"left to read of the prompt: {counted(len(hit.rest), 'token')}"
            )
        if missed:
            lines.append(other_spaces(opened.spaces(), space, hit.decision))
            if not known:
                lines.append(f"No store was in {store}; an empty one was made there.")
    if as_json or not generate:
        data = _data(space, cold, hit.decision, restored, answer) | {"bytes_written": written}
        emit(as_json, data, "\n".join(lines))
    else:
        note("\n".join(lines))
    if missed:
        ctx.exit(EXIT_MISS)


def _nothing(tokens: list[int]) -> Hit:
    """What a lookup in an empty store answers."""
    from kvkeep.prefixstore.policy import Decision, Reason
    from kvkeep.prefixstore.space import Hit

    return Hit(None, 0, tokens, Decision(0, 0, len(tokens), Reason.NO_PREFIX))


def _generate(
    loaded: Loaded,
    choice: Choice,
    hit: Hit,
    tokens: int,
    started: float,
    answer: Answer,
    shown: bool,
) -> None:
    """Read what is left of the prompt and answer it, greedily, as mlx-lm does.

    ``shown`` writes the answer to stdout as it comes.
    """
    from mlx_lm import stream_generate

    caches = hit.caches if hit.caches is not None else loaded.new_caches()
    begun = time.perf_counter()
    label = f"Reading {counted(len(hit.rest), 'token')}"
    with progress(label, lambda rate: f"{rate:,.0f} tok/s") as bar:
        parts = stream_generate(
            loaded.model,
            loaded.tokenizer,
            hit.rest,
            max_tokens=tokens,
            prompt_cache=caches,
            prefill_step_size=choice.prefill_step,
            prompt_progress_callback=bar,
            **choice.quantization,
        )
        with choice.quantizing():
            first = next(parts)
    now = time.perf_counter()
    answer.first_token = now - started
    answer.read_tokens, answer.read_seconds = len(hit.rest), now - begun
    for part in chain([first], parts):
        answer.text += part.text
        answer.tokens = part.generation_tokens
        if shown:
            click.echo(part.text, nl=False)
    if shown:
        click.echo()


def _data(
    space: Space, cold: bool, decision: Decision, restored: float, answer: Answer
) -> dict[str, Any]:
    return {
        "space": space.id.hex(),
        "cold": cold,
        **decision_json(decision),
        "restore_seconds": restored,
        "first_token_seconds": answer.first_token,
        "saved_seconds": answer.saved(decision.offset),
        "text": answer.text,
        "generated_tokens": answer.tokens,
    }


def _facts(decision: Decision, restored: float, answer: Answer) -> list[str]:
    if decision.offset == 0:
        lines = ["Nothing to resume"]
    else:
        saved = answer.saved(decision.offset)
        lines = [
            f"Resumed {count(decision.offset)} of {count(decision.prompt_tokens)} tokens "
            f"in {duration(restored)}" + (f" (saved about {duration(saved)})" if saved else "")
        ]
    why = in_words(decision)
    if why:
        lines.append("Not more, because: " + ";\n  ".join(why))
    return lines


def _cold(tokens: int) -> list[str]:
    return [f"Read all {counted(tokens, 'token')}, without the store"]
