"""Where the turns of a chat begin in its tokens, found without rendering it again.

Chat templates open each turn with one special token. Which one is told by a small probe: it
is the special token that occurs most often there, the first of equals.

A prompt that parts from an earlier one mostly does so where a turn begins: a new message, an
answer that was encoded anew, thinking that the template strips later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvkeep.prefixstore.tokens import as_tokens

PROBE = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
)
ROLE_TOKENS = 8
"""Tokens behind an opener that may name the role."""


@dataclass(frozen=True)
class Turns:
    """The turns of one prompt: the offset at which each begins, and its role where known."""

    starts: tuple[int, ...] = ()
    roles: tuple[str, ...] = ()

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where a later prompt is most likely to part.

        Before the model's own turn, before the last message of the user, and behind a system
        prompt.
        """
        users = [s for s, role in zip(self.starts, self.roles, strict=True) if role == "user"]
        found = {*self.starts[-1:], *users[-1:]}
        if len(self.starts) > 1 and self.roles[0] == "other":
            found.add(self.starts[1])
        return tuple(sorted(found - {0}))

    def at(self, offset: int) -> tuple[int, str] | None:
        """Number and role of the turn that ``offset`` lies in; turns are counted from 0."""
        index = bisect_right(self.starts, offset) - 1
        return (index, self.roles[index]) if index >= 0 else None


class TurnFinder:
    """Finds the turns of prompts that ``tokenizer``'s chat template wrote."""

    def __init__(self, tokenizer: Any) -> None:
        self._opener: int | None = None
        self._marks: dict[str, list[int]] = {}
        if getattr(tokenizer, "has_chat_template", True):
            self._probe(tokenizer)

    def __call__(self, prompt: Sequence[int]) -> Turns:
        """The turns of ``prompt``; none where the template shows no opener."""
        if self._opener is None:
            return Turns()
        ids = as_tokens(prompt)
        starts = np.flatnonzero(ids == self._opener).tolist()
        return Turns(tuple(starts), tuple(self._role(ids, start) for start in starts))

    def _probe(self, tokenizer: Any) -> None:
        try:
            written = tokenizer.apply_chat_template(
                [dict(message) for message in PROBE], add_generation_prompt=False, tokenize=True
            )
            ids = as_tokens(written).tolist()
            special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        except Exception:
            # A template may refuse anything; then there are no turns to be found.
            return
        counts = Counter(i for i in ids if i in special)
        if not counts or max(counts.values()) < 2:
            return
        opener = max(counts, key=lambda i: (counts[i], -ids.index(i)))
        after = [ids[at + 1 : at + 1 + ROLE_TOKENS] for at, i in enumerate(ids) if i == opener]
        self._opener = opener
        if len(after) < len(PROBE):  # only one of the two roles opens a turn
            self._marks = {"user": []}
            return
        user, assistant = after[-1], after[-2]
        shared = 0
        while shared < min(len(user), len(assistant)) and user[shared] == assistant[shared]:
            shared += 1
        self._marks = {"user": user[: shared + 1], "assistant": assistant[: shared + 1]}

    def _role(self, ids: Any, start: int) -> str:
        for role, mark in self._marks.items():
            if ids[start + 1 : start + 1 + len(mark)].tolist() == mark:
                return role
        return "other"
