"""One line of advice for each reason that tokens were lost, with the figures of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.cli.units import magnitude
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.prefixstore.report import Report

MEANING = {
    "full": "the prompts part there; all that was shared was resumed",
    "last_token": "the model must read at least one token",
    "chunk_aligned": "exact mode resumes at multiples of the prefill step",
    "inside_media": "never inside the placeholders of one image",
    "no_prefix": "nothing stored begins like it",
    "no_state_at_offset": "layers that resume only at a resume point",
    "rows_missing": "rows were evicted, or never stored",
    "below_floor": "the cache changed precision later than that",
    "below_minimum": "too short to be worth a restore",
    "space_changed": "stored for another model, tokenizer, adapter …",
    "corrupt": "damaged records",
    "newer_format": "stored by a newer kvkeep",
    "store_failed": "the store could not be read",
    "evicted": "stored once, and evicted before it was wanted again",
    "expired": "stored once, and past its time to live",
}
"""What each reason means, in few words."""

ADVICE = {
    "full": "put what varies (dates, ids, questions) behind what is shared",
    "last_token": "nothing: the whole prompt was stored",
    "chunk_aligned": "a smaller --prefill-step loses less; half of it, about half",
    "inside_media": "nothing: an image is resumed whole or not at all",
    "no_prefix": "new prompts; `kvkeep snapshot` stores long shared beginnings ahead",
    "no_state_at_offset": "more resume points: half the --prefill-step would save about {half}",
    "rows_missing": "a larger --max-bytes keeps more than {budget}",
    "below_floor": "quantize from the start (--quantized-kv-start 0), or not at all",
    "below_minimum": "lower `minimum`, if restoring so little is worth it to you",
    "space_changed": "use one model, tokenizer, adapter and cache scheme, or store for each",
    "corrupt": "run `kvkeep verify`, then `kvkeep verify --repair`; look at the disk",
    "newer_format": "upgrade kvkeep here",
    "store_failed": "run `kvkeep doctor`, and look at the log",
    "evicted": "a larger --max-bytes than {budget}, or pin what comes back",
    "expired": "a longer time to live",
}
"""What to change, for each reason; figures are filled in."""

CHANGED = {
    "weights": "other weights than when it was stored: store it once for these",
    "config": "the model's config or RoPE parameters changed: store it once for these",
    "tokenizer": "the tokenizer changed: the same text may have other tokens now",
    "adapter": "another adapter, or a new version of it: store it once for this one",
    "draft_model": "use the same draft model, or none, each time",
    "layout": "the model keeps other kinds of caches than when it was stored",
    "kv_scheme": "use the same --kv-bits, group size and start each time",
    "plan": "use the same --prefill-step and --exact each time",
    "salt": "stored for another tenant; nothing to change",
    "format": "stored by another version of the format; it fills again by itself",
}


def meaning(reason: str) -> str:
    """What ``reason`` means; empty for one that is not known here."""
    stem, _, detail = reason.partition(":")
    if stem == "space_changed" and detail:
        return f"stored with another {detail.replace(',', ', ').replace('_', ' ')}"
    return MEANING.get(stem, "")


def advice(report: Report, reason: str) -> str:
    """What would help against ``reason``, in one line; empty for one that is not known here."""
    stem, _, detail = reason.partition(":")
    if stem == "space_changed" and detail in CHANGED:
        return CHANGED[detail]
    lost = report.by_reason.get(reason)
    gap = lost.matched_tokens - lost.resumed_tokens if lost is not None else 0
    half = f"{magnitude(gap / 2)} tokens"
    return ADVICE.get(stem, "").format(half=half, budget=format_size(report.max_bytes))
