"""Resume points on the batched path: between the steps of a prefill, and when a row is dropped.

Seams: ``BatchGenerator.next``, ``insert_segments`` and ``remove`` are extended, and the batch
in progress is read. Rows are copied out of the batch one by one, without copying the batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from kvkeep.hooks.answers import AdvancedStops, Answer
from kvkeep.hooks.keeper import Keeper
from kvkeep.prefixstore.batch import take_row

generate: Any = import_module("mlx_lm.generate")


class KeepingBatchGenerator(generate.BatchGenerator):  # type: ignore[misc]
    """A ``BatchGenerator`` that stores resume points of the prompts that it reads."""

    def __init__(self, *args: Any, keeper: Keeper, **options: Any) -> None:
        super().__init__(*args, **options)
        self._keeper = keeper
        self._reached: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        self._junctions: dict[int, int] = {}
        self._answers: dict[int, Answer] = {}
        self._again: list[Any] = []
        keeper.batch = self

    def insert_segments(self, segments: Any, *args: Any, **options: Any) -> Any:
        """As before; notes how many tokens of each prompt were resumed.

        A prompt that left a stored path is cut there. An answer that was cut off goes on: its
        last token is read as a prompt's last one is.
        """
        answer = self._keeper.take_answer()
        if answer is not None and answer.said:
            segments = [[answer.said[-1:]]]
            options["all_tokens"] = [[*answer.prompt, *answer.said[:-1]]]
            options["max_tokens"] = [options["max_tokens"][0] - len(answer.said)]
            options["stop_sequences"] = [AdvancedStops(options["stop_sequences"][0], answer.said)]
        resumed = options.get("all_tokens") or [[] for _ in segments]
        junction = self._keeper.guard("turns", self._keeper.junction, None)
        cut = junction is not None and _cut(segments[0], junction - len(resumed[0]))
        uids = super().insert_segments(segments, *args, **options)
        if cut and junction is not None:
            self._junctions[uids[0]] = junction
        if answer is not None:
            self._answers[uids[0]] = answer
            self._again += [_told(uids[0], token) for token in answer.said]
        for uid, done in zip(uids, resumed, strict=True):
            self._reached[uid] = self._kept[uid] = len(done)
        return uids

    def next(self) -> Any:
        """One step; then resume points where an interval of a prompt, or an answer, is behind."""
        started = time.perf_counter()
        prompts, answers = super().next()
        seconds = time.perf_counter() - started
        self._keeper.guard("checkpoint", lambda: self._after(prompts, answers, seconds), None)
        self._keeper.guard("checkpoint", lambda: self._answered(answers), None)
        again, self._again = self._again, []
        return prompts, again + answers

    def remove(self, uids: Any, *args: Any, **options: Any) -> Any:
        """As before; what the rows had done is kept."""
        uids = list(uids)
        self._keeper.guard("cancellation", lambda: self.keep(uids), None)
        self._forget(uids)
        for uid in uids:
            self._answers.pop(uid, None)
        return super().remove(uids, *args, **options)

    def close(self) -> None:
        """As before; the server is done with this batch."""
        if self._keeper.batch is self:
            self._keeper.batch = None
        super().close()

    def keep(self, uids: Iterable[int] | None = None) -> None:
        """Hand what these rows have done, or all rows in progress, to the prompt cache."""
        batches = (self._prompt_batch, self._generation_batch)
        if uids is None:
            waiting = [row[0] for row in self._unprocessed_sequences]
            uids = waiting + [uid for batch in batches for uid in batch.uids]
        cache = self._keeper.cache
        for stage, row in self._find_uids(uids).values():
            if stage == 0:
                caches, tokens = self._unprocessed_sequences[row][3:5]
            else:
                batch = batches[stage - 1]
                caches, tokens = take_row(batch.prompt_cache, row), batch.tokens[row]
            if tokens:
                cache.insert_cache(None, list(tokens), caches)

    def _after(self, prompts: Sequence[Any], answers: Sequence[Any], seconds: float) -> None:
        read = 0
        for response in prompts:
            uid = response.uid
            if response.end_of_prompt:
                self._forget([uid])
                continue
            row = self._prompt_batch.uids.index(uid)
            tokens = self._prompt_batch.tokens[row]
            read += len(tokens) - self._reached[uid]
            self._reached[uid] = len(tokens)
            if len(tokens) == self._junctions.get(uid):
                response.end_of_segment = False  # no type of the server's belongs to this one
                self._kept[uid] = len(tokens)
                view = row_view(self._prompt_batch.prompt_cache, row)
                self._keeper.checkpoint(tokens, view, "junction")
            elif response.end_of_segment:  # the server takes this one itself
                self._kept[uid] = len(tokens)
            elif self._keeper.due(len(tokens) - self._kept[uid]):
                self._kept[uid] = len(tokens)
                self._keeper.checkpoint(tokens, row_view(self._prompt_batch.prompt_cache, row))
        if read and not answers:
            self._keeper.cache.measured(read, seconds)

    def _answered(self, answers: Sequence[Any]) -> None:
        batch = self._generation_batch
        for response in answers:
            answer = self._answers.get(response.uid)
            if answer is None:
                continue
            if response.finish_reason is not None:
                del self._answers[response.uid]
                answer.finished()
            else:
                row = batch.uids.index(response.uid)
                self._keeper.said(
                    answer, response.token, partial(row_view, batch.prompt_cache, row)
                )

    def _forget(self, uids: Iterable[int]) -> None:
        for uid in uids:
            self._reached.pop(uid, None)
            self._kept.pop(uid, None)
            self._junctions.pop(uid, None)


def _cut(segments: list[list[int]], at: int) -> bool:
    """Cut the segments, in place, behind ``at`` tokens; whether they were not cut there before."""
    for index, segment in enumerate(segments):
        if 0 < at < len(segment):
            segments[index : index + 1] = [segment[:at], segment[at:]]
            return True
        at -= len(segment)
    return False


def _told(uid: int, token: int) -> Any:
    import mlx.core as mx

    unknown = mx.broadcast_to(mx.array(0.0), (token + 1,))
    return generate.GenerationBatch.Response(uid, token, unknown, None, None, None)


def row_view(caches: Sequence[Any], row: int) -> list[Any]:
    """The caches of one request on the batch's own buffers; to be read at once and dropped."""
    return [_viewed(cache, row) for cache in caches]


def _viewed(cache: Any, row: int) -> Any:
    from mlx_lm.models import cache as mlx_lm_cache

    classes: Any = mlx_lm_cache
    if isinstance(cache, classes.CacheList):
        return classes.CacheList(*(_viewed(inner, row) for inner in cache.caches))
    if type(cache) is not classes.BatchKVCache or cache._right_padding is not None:
        return take_row([cache], row)[0]
    padding = int(cache.left_padding.tolist()[row])
    view = classes.KVCache()
    view.keys = cache.keys[row : row + 1, :, padding : cache._idx]
    view.values = cache.values[row : row + 1, :, padding : cache._idx]
    view.offset = cache._idx - padding
    return view
