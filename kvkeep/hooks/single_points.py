"""Resume points on the path for one request: between the chunks of ``stream_generate``.

Seam: the server's name ``stream_generate``. The real one does all the reading and answering;
what is added is tracked caches, a callback around the server's own, and, for kinds that resume
only where they were stored, a pause where later prompts are likely to part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from kvkeep.hooks.answers import drawn, told_again
from kvkeep.hooks.keeper import Keeper, Stopping
from kvkeep.hooks.precision import newest, track
from kvkeep.hooks.prefill import Progress, prefill

QUANTIZATION = ("kv_bits", "kv_group_size", "quantized_kv_start")


def keeping(keeper: Keeper, stream_generate: Callable[..., Iterator[Any]]) -> Callable[..., Any]:
    """``stream_generate`` as the server calls it, with resume points."""

    def kept(
        *,
        model: Any,
        prompt: list[int],
        prompt_cache: list[Any],
        prompt_progress_callback: Progress,
        **options: Any,
    ) -> Iterator[Any]:
        track(prompt_cache)
        answer = keeper.take_answer()
        said = list(answer.said) if answer is not None else []
        if said:
            prompt = said[-1:]
            options["max_tokens"] -= len(said)
            options["sampler"] = drawn(options["sampler"], len(said))
        points = _Points(keeper, prompt_cache, len(prompt), prompt_progress_callback)
        done = 0
        quantization: dict[str, Any] = {}
        if options.get("kv_bits") is not None:
            quantization = {name: options[name] for name in QUANTIZATION}
        if _may_pause(options):
            for boundary in points.boundaries:
                prefill(
                    model,
                    prompt[done:boundary],
                    prompt_cache,
                    step=options.get("prefill_step_size", 2048),
                    progress=points.after(done),
                    **quantization,
                )
                done = boundary
        elif options.get("draft_model") is not None:
            done = _read_with_draft(model, prompt, prompt_cache, points, options, quantization)
        answers = stream_generate(
            model=model,
            prompt=prompt[done:],
            prompt_cache=prompt_cache,
            prompt_progress_callback=points.after(done),
            **options,
        )
        keeper.single = answer
        if said:
            answers = told_again(options["tokenizer"], said, answers)
        for count, response in enumerate(answers, 1):
            yield response
            if answer is not None and count > len(said) and response.finish_reason is None:
                keeper.said(answer, response.token, lambda: newest(prompt_cache))
            if keeper.stopping.is_set():
                return

    return kept


def _may_pause(options: dict[str, Any]) -> bool:
    """Whether the first part of a prompt may be read apart from the rest.

    Not with a draft model, embeddings of images, or logits processors that look at the whole
    prompt as they see it read.
    """
    names = ("draft_model", "input_embeddings", "logits_processors")
    return not any(options.get(name) is not None and options.get(name) != [] for name in names)


def _read_with_draft(
    model: Any,
    prompt: list[int],
    caches: list[Any],
    points: _Points,
    options: dict[str, Any],
    quantization: dict[str, Any],
) -> int:
    """Read as much as whole intervals take, with both models; tokens read.

    mlx-lm reports no progress where a draft model is. Its chunks are the same, and it splits
    the list of caches at the same place.
    """
    step = options.get("prefill_step_size", 512)
    stride = -(-points.interval // step) * step
    width, done = len(model.layers), 0
    while stride and len(prompt) - 1 - done > stride:
        part = prompt[done : done + stride]
        for reader, mine in ((model, caches[:width]), (options["draft_model"], caches[width:])):
            prefill(reader, part, mine, step=step, **quantization)
            at = 0 if reader is model else width
            caches[at : at + len(mine)] = mine
        done += stride
        points.after(0)(done, len(prompt))
    return done


class _Points:
    """The progress of one prompt: told to the server, timed, and stored where it is due.

    ``total`` tokens are to be read after those that were resumed.
    """

    def __init__(self, keeper: Keeper, caches: list[Any], total: int, tell: Progress) -> None:
        served = keeper.cache.last
        self._keeper, self._caches, self._total, self._tell = keeper, caches, total, tell
        self._tokens: list[int] = served.tokens.tolist() if served is not None else []
        self._start = max(0, len(self._tokens) - total)
        self._kept = self._start
        self.interval = keeper.interval
        self._began = time.perf_counter()
        kinds = keeper.cache.kinds(None)
        offsets = set(keeper.boundaries(self._start, self._start + total, kinds))
        self._junction = keeper.junction()
        if self._junction is not None:
            offsets.add(self._junction)
        self.boundaries = sorted(offset - self._start for offset in offsets)

    def after(self, before: int) -> Progress:
        """The callback of a reading that begins ``before`` tokens into the rest."""

        def progress(done: int, total: int) -> None:
            del total
            self._at(before + done)

        return progress

    def _at(self, done: int) -> None:
        offset, stopping = self._start + done, self._keeper.stopping.is_set()
        if not stopping:
            self._tell(done, self._total)
        if 0 < done < self._total and self._tokens:
            last = done == self._total - 1
            if last:
                self._keeper.cache.measured(done, time.perf_counter() - self._began)
            due = last or stopping or done in self.boundaries
            due = due or self._keeper.due(offset - self._kept)
            if due and offset % self._keeper.step == 0:
                self._kept = offset
                origin = "junction" if offset == self._junction else "interval"
                self._keeper.checkpoint(self._tokens[:offset], self._caches, origin)
        if stopping:
            raise Stopping("The server stops")
