"""Long answers that survive a crash: checkpoints every so many tokens, for the same request only.

What is continued must equal what would have come. So only a request whose answer is determined
has checkpoints: one that takes the likeliest token, or one with a seed. It is known by its
prompt and by everything that its answer depends on. What was answered before is told again,
text and stop sequences included, and the sampler first draws as often as it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvkeep.hooks.interval_points import needs_points
from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.unfinished import Unfinished

Sampler = Callable[[Any], Any]

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
DRAWS_AT_ONCE = 64


def request_key(args: Any, *, batched: bool) -> bytes | None:
    """What tells requests with the same prompt apart; ``None`` where an answer cannot go on.

    ``args`` are the ``GenerationArguments`` of mlx-lm's server. On its single path penalties
    look at what this reading of the prompt has read, which another reading has not; and the
    probabilities of tokens that were answered before are gone.
    """
    if args.logprobs or args.top_logprobs > 0:
        return None
    if args.sampling.temperature > 0 and args.seed is None:
        return None
    if not batched and any(getattr(args.logits, name) for name in PENALTIES):
        return None
    facts = (args.sampling, args.logits, args.stop_words, args.max_tokens, args.seed, batched)
    return repr(facts).encode()


class Answer:
    """The answer to one request: what was said so far, and when a checkpoint is due.

    ``every`` tokens lie between two checkpoints. ``said`` holds what was answered before.
    """

    def __init__(
        self, unfinished: Unfinished, prompt: Sequence[int], every: int, said: Sequence[int] = ()
    ) -> None:
        self.said = list(said)
        self.prompt = list(prompt)
        self._unfinished = unfinished
        self._every = every
        self._again = False

    def add(self, token: int) -> bool:
        """Note a token that the caches cover by now; whether a checkpoint is due."""
        self.said.append(token)
        return self._again or len(self.said) % self._every == 0

    def checkpoint(self, caches: list[Any]) -> Receipt:
        """Store ``caches``, which cover the prompt and all that was said. Raises ``Refused``.

        Where they resume at resume points only, the next token is due as well: one more has to
        be known than can be resumed.
        """
        self._again = not self._again and needs_points(caches)
        return self._unfinished.checkpoint(self.said, caches)

    def finished(self) -> None:
        """The answer is complete: its checkpoints go."""
        self._unfinished.finished()


def told_again(tokenizer: Any, said: Sequence[int], rest: Iterable[Any]) -> Iterator[Any]:
    """Responses of ``stream_generate`` for what was said before, and then ``rest``'s.

    The text is that of one answer: a word may have been cut between two tokens.
    """
    import mlx.core as mx
    from mlx_lm.generate import GenerationResponse

    words = tokenizer.detokenizer
    for count, token in enumerate(said, 1):
        words.add_token(token)
        unknown = mx.broadcast_to(mx.array(0.0), (token + 1,))
        yield GenerationResponse(words.last_segment, token, unknown, False, 0, 0.0, count, 0.0, 0.0)
    for response in rest:
        if response.finish_reason != "stop":
            words.add_token(response.token)
        if response.finish_reason is not None:
            words.finalize()
        total = response.generation_tokens + len(said)
        yield replace(response, text=words.last_segment, generation_tokens=total)


def drawn(sampler: Sampler, times: int) -> Sampler:
    """``sampler``, which first draws ``times`` in vain, from the first distribution it is given.

    Afterwards the state of the random numbers is what it is after so many tokens.
    """
    left = times

    def sample(logprobs: Any) -> Any:
        import mlx.core as mx

        nonlocal left
        while left:
            at_once = min(left, DRAWS_AT_ONCE)
            mx.eval([sampler(logprobs) for _ in range(at_once)])
            left -= at_once
        return sampler(logprobs)

    return sample


class AdvancedStops:
    """Stop sequences of mlx-lm of which the beginning may have been said already."""

    def __init__(self, stops: Any, said: Sequence[int]) -> None:
        self._stops, self._said = stops, said

    def matcher(self) -> Any:
        """A matcher that has seen what was said."""
        found = self._stops.matcher()
        for token in self._said:
            found.advance(token)
        return found


class Watched:
    """The queue of responses to one request; it notes whether the answer was completed."""

    def __init__(self, responses: Any) -> None:
        self._responses = responses
        self.complete = False

    def put(self, item: Any) -> None:
        """As the queue's own."""
        self.complete = self.complete or getattr(item, "finish_reason", None) is not None
        self._responses.put(item)
