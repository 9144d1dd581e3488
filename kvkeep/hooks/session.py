"""The small hook for servers and scripts of other make: begin, checkpoint, end.

    session = kvkeep.Session(space, model)
    caches, rest = session.begin(prompt)      # resumed or new; the model reads rest
    session.checkpoint(done)                  # between forwards: a resume point inside the prompt
    session.end(answer)                       # stores prompt and answer

or, around plain ``mlx_lm.stream_generate``::

    with kvkeep.session(space, prompt, model) as s:
        for r in stream_generate(model, tokenizer, s.rest, prompt_cache=s.caches,
                                 prompt_progress_callback=s.progress):
            s.emitted(r.token)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from kvkeep.errors import KvkeepError
from kvkeep.hooks.precision import newest, track
from kvkeep.prefixstore.policy import Decision, Reason
from kvkeep.prefixstore.receipt import Receipt
from kvkeep.prefixstore.space import Space
from kvkeep.prefixstore.tokens import as_tokens

log = logging.getLogger("kvkeep")

INTERVAL = 2048


class Session:
    """One request at a time: its caches are resumed before it and stored after it.

    ``model`` makes new caches where nothing can be resumed, and ``draft_model`` those that
    follow them in the list. ``interval`` tokens lie at least between two resume points that
    ``progress`` takes. A failure of the store raises nothing: a lookup is a miss, and what is
    not stored has a ``receipt`` that says why.

    All calls belong to the thread that runs the model.
    """

    def __init__(
        self, space: Space, model: Any, draft_model: Any = None, *, interval: int = INTERVAL
    ) -> None:
        self.caches: list[Any] = []
        self.rest: list[int] = []
        self.decision = Decision(0, 0, 0, Reason.NO_PREFIX)
        self.receipt: Receipt | None = None
        self._space, self._model, self._draft = space, model, draft_model
        self._interval = interval
        self._prompt: list[int] = []
        self._answer: list[int] = []
        self._reached = 0
        self._request = ""

    @property
    def resumed(self) -> int:
        """Tokens of the prompt that need not be read."""
        return self.decision.offset

    def begin(self, prompt: Sequence[int]) -> tuple[list[Any], list[int]]:
        """Caches for ``prompt``, and the tokens that the model still has to read.

        The caches are the caller's own, and are stored by ``end``.
        """
        self._prompt = as_tokens(prompt).tolist()
        self._answer, self.receipt = [], None
        hit = self._space.resume(self._prompt)
        self.decision, self._request, self.rest = hit.decision, hit.request, hit.rest
        if hit.caches is None:
            self.caches = _new(self._model) + _new(self._draft)
        else:
            self.caches = hit.caches + self._drafted(hit.draft, hit.draft_offset)
        self._reached = hit.offset
        track(self.caches)
        return self.caches, self.rest

    def checkpoint(self, done: int, *, origin: str = "interval") -> Receipt | None:
        """Store a resume point; the model has read ``done`` tokens of ``rest``.

        Call it between two forwards. ``None`` where the caches refuse it.
        """
        offset = self.resumed + done
        self._reached = offset
        return self._store(self._prompt[:offset], origin)

    def progress(self, done: int, total: int) -> None:
        """A ``prompt_progress_callback`` of mlx-lm: takes the checkpoints that are due.

        One is always due one token before the prompt's end, where an exact replay resumes.
        """
        last = done == total - 1
        if 0 < done < total and (last or self.resumed + done - self._reached >= self._interval):
            self.checkpoint(done, origin="prompt" if last else "interval")

    def emitted(self, token: int) -> None:
        """Say that the model has answered with ``token``."""
        self._answer.append(int(token))

    def end(self, answer: Sequence[int] | None = None) -> Receipt | None:
        """Store the caches, which cover the prompt and, as far as they do, the answer.

        ``answer`` are the tokens that were emitted, if ``emitted`` was not told of them.
        """
        if answer is not None:
            self._answer = [int(token) for token in answer]
        self.receipt = self._store([*self._prompt, *self._answer], "output")
        self.caches = []
        return self.receipt

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error some layers may be ahead of others; the checkpoints are stored.
        if kind is None:
            self.end()

    def _store(self, tokens: list[int], origin: str) -> Receipt | None:
        caches = newest(self.caches)
        try:
            return self._space.snapshot(tokens, caches, origin, request=self._request)
        except KvkeepError as error:
            log.warning("kvkeep: not stored: %s", error)
            return None

    def _drafted(self, draft: list[Any] | None, offset: int) -> list[Any]:
        """The draft's caches at the target's offset; it reads what it lacks."""
        if self._draft is None:
            return []
        from kvkeep.hooks.prefill import prefill

        caches = draft if draft is not None else _new(self._draft)
        missing = self._prompt[offset if draft is not None else 0 : self.resumed]
        if missing:
            prefill(self._draft, missing, caches)
        return caches


def session(
    space: Space,
    prompt: Sequence[int],
    model: Any,
    draft_model: Any = None,
    *,
    interval: int = INTERVAL,
) -> Session:
    """A session that has begun with ``prompt``: a context manager that stores when it ends.

    It has ``caches``, ``rest`` and ``decision``. After an error inside the block nothing is
    stored but the checkpoints that were taken.
    """
    begun = Session(space, model, draft_model, interval=interval)
    begun.begin(prompt)
    return begun


def _new(model: Any) -> list[Any]:
    if model is None:
        return []
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    return caches
