"""One replay: every request is looked up and then stored, as a server does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvkeep.prefixstore.eviction.base import Policy
from kvkeep.prefixstore.eviction.lru import POLICY as LRU
from kvkeep.prefixstore.simulate.traces import Request
from kvkeep.prefixstore.simulate.trie import Trie

SECOND = 1_000_000_000


@dataclass
class Outcome:
    """What a replay under one policy came to. Tokens count positions.

    ``ceiling_tokens`` a store without a budget would have resumed; ``regret_tokens`` of those
    were evicted and then wanted. ``refused`` prompts did not fit the budget.
    """

    policy: str
    requests: int = 0
    prompt_tokens: int = 0
    resumed_tokens: int = 0
    ceiling_tokens: int = 0
    regret_tokens: int = 0
    regret_requests: int = 0
    refused: int = 0
    written_blocks: int = 0
    evicted_blocks: int = 0
    evictions: int = 0
    kept_blocks: int = 0


def replay(
    requests: Iterable[Request],
    policies: Iterable[Policy],
    block_tokens: int,
    block_bytes: int,
    capacity: int | None,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Outcome, list[Outcome]]:
    """Replay ``requests`` in a store of ``capacity`` blocks under each policy.

    The first outcome is that of a store without a budget. A prompt resumes at most all but
    its last token. Prompts are stored, answers are not: what is known of an answer is the part
    of it that the next prompt holds. ``progress`` is called with requests done.
    """
    boundless = Trie(LRU, None, block_tokens, block_bytes)
    stores = [(Trie(p, capacity, block_tokens, block_bytes), Outcome(p.name)) for p in policies]
    ceiling = Outcome("unbounded")
    now = 0
    for number, request in enumerate(requests, 1):
        now = max(now + 1, request.when if request.when is not None else number * SECOND)
        last = request.tokens - 1
        matched, new = boundless.request(request.blocks, now)
        best = min(matched * block_tokens, last)
        _count(ceiling, request, best, best, new)
        for trie, outcome in stores:
            matched, new = trie.request(request.blocks, now)
            _count(outcome, request, min(matched * block_tokens, last), best, new)
        progress(number)
    for trie, outcome in [(boundless, ceiling), *stores]:
        outcome.evictions, outcome.evicted_blocks = trie.evictions, trie.evicted_blocks
        outcome.kept_blocks = trie.blocks
    return ceiling, [outcome for _, outcome in stores]


def _count(outcome: Outcome, request: Request, resumed: int, best: int, new: int | None) -> None:
    outcome.requests += 1
    outcome.prompt_tokens += request.tokens
    outcome.resumed_tokens += resumed
    outcome.ceiling_tokens += best
    outcome.regret_tokens += best - resumed
    outcome.regret_requests += resumed < best
    outcome.refused += new is None
    outcome.written_blocks += new or 0
