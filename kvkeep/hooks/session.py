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

A long answer outlives a crash with ``answers=N``: it is stored every ``N`` tokens, and the same
request (``asked`` says what else it depends on) finds in ``answered`` what was emitted before::

    with kvkeep.session(space, prompt, model, answers=64, asked="temp 0.7, seed 5") as s:
        mx.random.seed(5)
        for r in stream_generate(model, tokenizer, s.rest, prompt_cache=s.caches,
                                 sampler=s.sampler(make_sampler(0.7)),
                                 prompt_progress_callback=s.progress):
            s.emitted(r.token)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvkeep.errors import KvkeepError
from kvkeep.hooks.answers import Answer, Sampler, drawn
from kvkeep.hooks.interval_points import junction_of
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

    With ``answers`` the answer is stored every so many tokens until it has ended. ``asked`` is
    what it depends on besides the prompt: how tokens are sampled, and the seed.

    All calls belong to the thread that runs the model.
    """

    def __init__(
        self,
        space: Space,
        model: Any,
        draft_model: Any = None,
        *,
        interval: int = INTERVAL,
        answers: int = 0,
        asked: str = "",
    ) -> None:
        if answers and draft_model is not None:
            raise ValueError("answers with a draft model: its caches run ahead of what is emitted")
        if answers and space.step > 1:
            raise ValueError("answers in chunk-aligned mode, which stores whole prefill steps only")
        self.caches: list[Any] = []
        self.rest: list[int] = []
        self.decision = Decision(0, 0, 0, Reason.NO_PREFIX)
        self.receipt: Receipt | None = None
        self._space, self._model, self._draft = space, model, draft_model
        self._interval = interval
        self._answers, self._asked = answers, asked
        self._begun: Answer | None = None
        self._base = 0
        self._told: list[int] = []
        self._prompt: list[int] = []
        self._answer: list[int] = []
        self._reached = 0
        self._request = ""

    @property
    def resumed(self) -> int:
        """Tokens of the prompt that need not be read."""
        return self.decision.offset

    @property
    def answered(self) -> list[int]:
        """Tokens that were emitted before a crash: the answer goes on behind them."""
        return self._told

    def sampler(self, sampler: Sampler) -> Sampler:
        """``sampler``, which first draws as often as it had for what is ``answered``.

        Seed the random numbers before it is used, as was done the first time.
        """
        return drawn(sampler, len(self._told))

    def begin(self, prompt: Sequence[int]) -> tuple[list[Any], list[int]]:
        """Caches for ``prompt``, and the tokens that the model still has to read.

        The caches are the caller's own, and are stored by ``end``. Where the prompt left a
        stored path and could not be resumed there, it is read up to that place, and a resume
        point stored for the next prompt that parts there.
        """
        self._prompt = as_tokens(prompt).tolist()
        self._answer, self.receipt = [], None
        if self._goes_on():
            return self.caches, self.rest
        hit = self._space.resume(self._prompt)
        self.decision, self._request, self.rest = hit.decision, hit.request, hit.rest
        if hit.caches is None:
            self.caches = _new(self._model) + _new(self._draft)
        else:
            self.caches = hit.caches + self._drafted(hit.draft, hit.draft_offset)
        self._base = self._reached = hit.offset
        track(self.caches)
        self._read_to_junction()
        return self.caches, self.rest

    def checkpoint(self, done: int, *, origin: str = "interval") -> Receipt | None:
        """Store a resume point; the model has read ``done`` tokens of ``rest``.

        Call it between two forwards. ``None`` where the caches refuse it.
        """
        offset = self._base + done
        self._reached = offset
        return self._store(self._prompt[:offset], origin)

    def progress(self, done: int, total: int) -> None:
        """A ``prompt_progress_callback`` of mlx-lm: takes the checkpoints that are due.

        One is always due one token before the prompt's end, where an exact replay resumes.
        """
        last = done == total - 1
        if 0 < done < total and (last or self._base + done - self._reached >= self._interval):
            self.checkpoint(done, origin="prompt" if last else "interval")

    def emitted(self, token: int) -> None:
        """Say that the model has answered with ``token``, which the caches cover by now."""
        self._answer.append(int(token))
        if self._begun is not None and self._begun.add(int(token)):
            try:
                self._begun.checkpoint(newest(self.caches))
            except KvkeepError as error:
                log.warning("kvkeep: not stored: %s", error)

    def end(self, answer: Sequence[int] | None = None) -> Receipt | None:
        """Store the caches, which cover the prompt and, as far as they do, the answer.

        ``answer`` are the tokens that were emitted, if ``emitted`` was not told of them.
        """
        if answer is not None:
            self._answer = [int(token) for token in answer]
        if self._begun is not None:
            self._begun.finished()
        self.receipt = self._store([*self._prompt, *self._answer], "output")
        self.caches = []
        return self.receipt

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        # After an error some layers may be ahead of others; the checkpoints are stored.
        if kind is None:
            self.end()

    def _goes_on(self) -> bool:
        """Whether an answer to this prompt was cut off; then all is set to go on with it."""
        self._begun, self._told = None, []
        if not self._answers:
            return False
        unfinished = self._space.unfinished(self._prompt, self._asked.encode())
        found = unfinished.resume()
        self._told = found.answer if found is not None else []
        self._begun = Answer(unfinished, self._prompt, self._answers, self._told)
        if found is None:
            return False
        length = len(self._prompt)
        self.decision = Decision(length - 1, length, length, Reason.LAST_TOKEN)
        self.caches, self.rest = track(found.caches), self._told[-1:]
        self._answer, self._base = list(self._told), length
        return True

    def _read_to_junction(self) -> None:
        junction = junction_of(self.decision, self._prompt)
        if junction is None or self._draft is not None or self._space.step > 1:
            return
        from kvkeep.hooks.prefill import prefill

        prefill(self._model, self._prompt[self._base : junction], self.caches)
        self.checkpoint(junction - self._base, origin="junction")
        self._base, self.rest = junction, self._prompt[junction:]

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
    answers: int = 0,
    asked: str = "",
) -> Session:
    """A session that has begun with ``prompt``: a context manager that stores when it ends.

    It has ``caches``, ``rest`` and ``decision``. After an error inside the block nothing is
    stored but the checkpoints that were taken.
    """
    begun = Session(space, model, draft_model, interval=interval, answers=answers, asked=asked)
    begun.begin(prompt)
    return begun


def _new(model: Any) -> list[Any]:
    if model is None:
        return []
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    return caches
