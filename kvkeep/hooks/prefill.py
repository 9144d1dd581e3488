"""Reading a prompt into caches exactly as ``mlx_lm.generate`` would, without the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvkeep.codecs.base import RECORD
from kvkeep.errors import Refused

DEFAULT_STEP = 2048
"""mlx-lm's own chunk; another one gives rows with other low bits."""

Progress = Callable[[int, int], None]


def prefill(
    model: Any,
    tokens: Sequence[int],
    caches: list[Any],
    *,
    step: int = DEFAULT_STEP,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 0,
    progress: Progress | None = None,
    cuts: Sequence[int] = (),
) -> None:
    """Run ``model`` over all of ``tokens``, so that ``caches`` cover them.

    The forwards are those of ``mlx_lm.generate.generate_step`` for the same tokens and one
    more: the same stream, the same chunks of ``step`` tokens, the same conversions. With
    ``kv_bits`` a cache is converted after the first chunk that brings it to
    ``quantized_kv_start``; the converted cache takes its place in ``caches`` and records the
    offset of the conversion, below which it cannot be resumed. ``progress`` is called with
    tokens done and tokens in all, once before the first chunk and after each; ``caches`` are
    evaluated then and may be stored. A cache that is empty at first is marked as one whose
    whole history is known.

    ``cuts`` are numbers of tokens done at which a chunk is read in two parts, so that ``progress``
    is called there as well. Rows behind a cut have other low bits than those of an uncut chunk,
    as with any other chunks. Conversions stay where they were: at the end of the whole chunk. A
    cache that converts itself (``kvkeep.caches``) is told where that is.

    Raises ``ValueError`` for a ``step`` below 1 and ``Refused`` for a cache that mlx-lm
    cannot quantize.
    """
    import mlx.core as mx
    from mlx_lm.generate import generation_stream, wired_limit

    stream: Any = generation_stream
    if step < 1:
        raise ValueError(f"step is {step}; a chunk has at least one token")
    vouch(caches)
    total, done = len(tokens), 0
    with wired_limit(model, [stream]), mx.stream(stream):
        if progress is not None:
            progress(0, total)
        while done < total:
            end = min(done // step * step + step, total)
            stop = min((cut for cut in cuts if done < cut < end), default=end)
            _plan(caches, end - done)
            chunk = mx.array(list(tokens[done:stop]))
            model(chunk[None], cache=caches)
            mx.eval([cache.state for cache in caches])
            if kv_bits is not None and stop == end:
                convert(caches, kv_bits, kv_group_size, quantized_kv_start)
            done += chunk.size
            mx.clear_cache()
            if progress is not None:
                progress(done, total)


def _plan(caches: Sequence[Any], ahead: int) -> None:
    """Tell caches that change precision themselves where the chunk that begins now ends."""
    for cache in caches:
        if hasattr(cache, "plan"):
            cache.plan(cache.offset + ahead)
        else:
            _plan(getattr(cache, "caches", ()), ahead)


def vouch(caches: Sequence[Any]) -> None:
    """Mark every cache that is still empty: from here on its history is known.

    For rings and quantized caches this is what tells rows that can be resumed from rows that
    a batch or another precision may have left.
    """
    for cache in caches:
        if hasattr(cache, "caches"):
            vouch(cache.caches)
        elif getattr(cache, "offset", None) == 0:
            setattr(cache, RECORD, 0)


def convert(caches: list[Any], bits: int, group_size: int, start: int) -> None:
    """Quantize, in place in the list, every evaluated cache that has reached ``start``.

    One layer is converted and evaluated before the next, so that at most one is held twice.
    Raises ``Refused`` for a cache that mlx-lm cannot quantize.
    """
    import mlx.core as mx

    for index, cache in enumerate(caches):
        if not hasattr(cache, "to_quantized") or cache.offset < max(start, 1):
            continue
        try:
            converted = cache.to_quantized(group_size=group_size, bits=bits)
        except NotImplementedError as error:
            raise Refused(
                f"mlx-lm cannot quantize a {type(cache).__name__}",
                remedy="Leave kv_bits out for this model.",
            ) from error
        mx.eval(converted.keys, converted.values)
        setattr(converted, RECORD, cache.offset)
        caches[index] = converted
