"""Why a lookup resumed no more, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.cli.units import count
from kvkeep.prefixstore.ranges import spelled

if TYPE_CHECKING:
    from kvkeep.prefixstore.policy import Decision, LayerLimit


def as_json(decision: Decision) -> dict[str, Any]:
    """The decision for programs."""
    return {
        "prompt_tokens": decision.prompt_tokens,
        "matched_tokens": decision.matched,
        "resumed_tokens": decision.offset,
        "reason": decision.why,
        "limits": [
            {
                "kind": limit.kind,
                "layers": list(limit.layers),
                "offset": limit.offset,
                "reason": str(limit.reason),
            }
            for limit in decision.limits
        ],
    }


def in_words(decision: Decision) -> list[str]:
    """What kept the lookup from resuming more; empty where nobody can tell."""
    said = []
    if decision.reason == "last_token" or 0 < decision.offset == decision.prompt_tokens - 1:
        said.append("the model has to read at least one token")
    elif 0 < decision.matched < decision.prompt_tokens - 1:
        said.append(f"the prompts part at token {count(decision.matched)}")
    sentence = _SENTENCES.get(str(decision.reason))
    if sentence:
        said.append(sentence.format(detail=decision.detail.replace(",", ", ").replace("_", " ")))
    said += [_limit(limit) for limit in decision.limits]
    return said


_SENTENCES = {
    "chunk_aligned": "in exact mode a resume lies at a multiple of the prefill step",
    "inside_media": "a resume never lies inside the placeholders of one image",
    "no_prefix": "the store holds no prompt that begins like this one",
    "space_changed": "the store holds this prompt for a model that differs in {detail}",
    "below_minimum": "what is stored is too short to be worth a restore",
    "corrupt": "stored bytes are damaged; see `kvkeep verify`",
    "newer_format": "it was stored by a newer kvkeep",
    "store_failed": "the store could not be read; see the log",
    "evicted": "what comes next was stored, and has been evicted",
    "expired": "what comes next was stored, and has outlived its time to live",
}


def _limit(limit: LayerLimit) -> str:
    layers = spelled(limit.layers)
    who = f"{limit.kind} layers {layers}"
    if limit.reason == "below_floor":
        return f"{who} changed precision later than that"
    if limit.reason == "no_state_at_offset":
        if limit.offset == 0:
            return f"{who} resume only at a resume point, and none lies before it"
        return f"{who} resume only at a resume point; the last one before it is at " + count(
            limit.offset
        )
    if limit.reason == "rows_missing":
        return f"{who} have no rows beyond {count(limit.offset)}"
    return f"{who} have nothing beyond {count(limit.offset)} that can be used"
