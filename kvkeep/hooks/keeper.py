"""What the hooks around one server share: its prompt cache, the request in hand, the stop.

A server tokenizes a prompt, looks it up and reads it, in this order and on one thread. What
one step knows and the next needs is kept here: the turns of the prompt for its checkpoints,
the answer of the lookup for the response's header.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvkeep.hooks.answers import Answer
from kvkeep.hooks.interval_points import junction_of
from kvkeep.hooks.model_homes import Home
from kvkeep.hooks.prompt_cache import PromptCache, Served
from kvkeep.hooks.turns import TurnFinder, Turns
from kvkeep.prefixstore.tokens import Tokens
from kvkeep.prefixstore.unfinished import Continued

log = logging.getLogger("kvkeep")

Result = TypeVar("Result")

ROWS_ANYWHERE = {"kv", "kv-quant", "kv-concat", "list"}
"""Kinds that resume at any position; all others want resume points where prompts part."""

REMEMBERED = 64
"""Lookups whose answers are kept for their responses, and for the report."""


class Stopping(Exception):
    """The server stops; the request in hand ends where it is."""


class Keeper:
    """Shared by the hooks of one server.

    ``interval`` tokens lie at least between two checkpoints, 0 for none. Checkpoints lie at
    multiples of ``step``, which is not 1 in chunk-aligned mode only. ``every`` tokens of an
    answer lie between its checkpoints, 0 for none.
    """

    def __init__(
        self, cache: PromptCache, interval: int = 2048, *, step: int = 1, every: int = 0
    ) -> None:
        self.cache = cache
        self.interval = interval
        self.step = step
        self.every = every
        self.stopping = threading.Event()
        self.batch: Any = None
        self.recent: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)
        self._finders: dict[int, tuple[Any, TurnFinder]] = {}
        self._prompt: Any = None
        self._turns = Turns()
        self._served: OrderedDict[int, tuple[Any, Served | None]] = OrderedDict()
        self._news = threading.Condition()
        self._key: bytes | None = None
        self._answer: Answer | None = None
        self.single: Answer | None = None
        cache.on_lookup = self._looked_up
        cache.go_on = self._go_on

    # Tokenizing

    def tokenized(self, tokenizer: Any, prompt: Sequence[int], is_chat: bool) -> Turns:
        """Note the prompt that will be looked up next; its turns."""
        self._prompt, self._turns = prompt, Turns()
        if is_chat:
            self._turns = self.guard("turns", lambda: self._finder(tokenizer)(prompt), Turns())
        return self._turns

    def split(self, segments: list[list[int]], types: list[str], kinds: Sequence[str]) -> None:
        """Cut ``segments`` of the prompt, in place, where later prompts are likely to part.

        Only for models with a kind that cannot resume anywhere. The parts of a segment have
        its type.
        """
        if not self._wants_points(kinds):
            return
        at, cut_segments, cut_types = 0, [], []
        for segment, kind in zip(segments, types, strict=True):
            cuts = [b - at for b in self._turns.boundaries if at < b < at + len(segment)]
            for a, b in zip([0, *cuts], [*cuts, len(segment)], strict=True):
                cut_segments.append(segment[a:b])
                cut_types.append(kind)
            at += len(segment)
        segments[:], types[:] = cut_segments, cut_types

    def boundaries(self, offset: int, stop: int, kinds: Sequence[str]) -> list[int]:
        """Where the reading of ``[offset, stop)`` should pause for a resume point."""
        if not self._wants_points(kinds):
            return []
        return [b for b in self._turns.boundaries if offset < b < stop]

    def _wants_points(self, kinds: Sequence[str]) -> bool:
        names = {
            name for kind in kinds for name in kind.replace(")", "").replace("(", ",").split(",")
        }
        return self.step == 1 and self.interval > 0 and not names <= ROWS_ANYWHERE

    def _finder(self, tokenizer: Any) -> TurnFinder:
        known = self._finders.get(id(tokenizer))
        if known is None or known[0] is not tokenizer:
            self._finders = {id(tokenizer): (tokenizer, TurnFinder(tokenizer))}
        return self._finders[id(tokenizer)][1]

    # Lookups

    def _looked_up(self, served: Served | None) -> None:
        if served is not None:
            line = self._described(served)
            log.info("%s", line.pop("line"))
            self.recent.append(line)
        with self._news:
            self._served[id(self._prompt)] = (self._prompt, served)
            while len(self._served) > REMEMBERED:
                self._served.popitem(last=False)
            self._news.notify_all()

    def served(self, prompt: Any, timeout: float = 0.0) -> Served | None:
        """The answer of the lookup of this very prompt object, within ``timeout`` seconds."""

        def known() -> bool:
            return self._served.get(id(prompt), (None, None))[0] is prompt

        with self._news:
            if not self._news.wait_for(known, timeout):
                return None
            return self._served.pop(id(prompt))[1]

    def _described(self, served: Served) -> dict[str, Any]:
        decision = served.decision
        out: dict[str, Any] = {
            "prompt_tokens": decision.prompt_tokens,
            "matched_tokens": decision.matched,
            "resumed_tokens": decision.offset,
            "tier": served.tier,
            "request": served.request,
            "reason": decision.why,
            "seconds": served.seconds,
            "saved_seconds": served.saved,
            "answered_tokens": served.answered,
            "parted_at": None,
            "parted_turn": None,
            "parted_role": None,
        }
        saved = f", saved about {served.saved:.1f} s" if served.saved else ""
        line = (
            f"kvkeep: resumed {decision.offset:,} of {decision.prompt_tokens:,} tokens "
            f"({served.tier}, {served.seconds:.2f} s{saved}): {decision.why}"
        )
        if served.answered:
            line += f"; goes on behind {served.answered:,} tokens of its answer"
        if 0 < decision.matched < decision.prompt_tokens:
            out["parted_at"] = decision.matched
            line += f"; parted at token {decision.matched:,}"
            turn = self._turns.at(decision.matched)
            if turn is not None:
                out["parted_turn"], out["parted_role"] = turn
                line += f" in turn {turn[0]} ({turn[1]})"
        return {**out, "line": line}

    # Answers

    def asks(self, key: bytes | None) -> None:
        """Note by what the request that is looked up next is known; ``None``: its answer has no
        checkpoints.
        """
        self._key = key if self.every else None
        self._answer = self.single = None

    def take_answer(self) -> Answer | None:
        """The answer to the request that was looked up last, if it has checkpoints."""
        answer, self._answer = self._answer, None
        return answer

    def said(self, answer: Answer, token: int, caches: Callable[[], list[Any]]) -> None:
        """Note a token of an answer, and store ``caches()`` where a checkpoint is due."""
        if answer.add(token):
            self.guard("checkpoint", lambda: self.cache.count(answer.checkpoint(caches())), None)

    def _go_on(self, home: Home, ids: Tokens) -> Continued | None:
        if self._key is None or home.space is None:
            return None
        unfinished = home.space.unfinished(ids, self._key)
        found = unfinished.resume()
        said = found.answer if found is not None else []
        self._answer = Answer(unfinished, ids.tolist(), self.every, said)
        return found

    # Resume points

    def due(self, tokens: int) -> bool:
        """Whether so many tokens since the last resume point call for another."""
        return 0 < self.interval <= tokens

    def junction(self) -> int | None:
        """Where the prompt that was looked up last left a stored path; ``None`` where it could be
        resumed there, and where no resume point helps.
        """
        served = self.cache.last
        if served is None or not self._wants_points(self.cache.kinds(None)):
            return None
        return junction_of(served.decision, served.tokens)

    def checkpoint(
        self, tokens: Sequence[int], caches: list[Any], origin: str = "interval"
    ) -> None:
        """Store a resume point of the server's current model; ``caches`` go on being used."""
        self.cache.checkpoint(None, tokens, caches, origin=origin)

    def keep_batch(self) -> None:
        """Keep what the rows of the batch in progress have done."""
        if self.batch is not None:
            self.guard("stop", self.batch.keep, None)
            self.batch = None

    # What may fail

    def guard(self, doing: str, what: Callable[[], Result], otherwise: Result) -> Result:
        """``what()``, or ``otherwise`` where it fails; see ``PromptCache``."""
        return self.cache.guarded(doing, what, otherwise)
