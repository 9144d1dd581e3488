"""Gated-delta layers of mlx-lm, recorded over a window of tokens and replayed over its start.

Recurrent state cannot be trimmed. MLX arrays are immutable, so going back to the state before
a window costs nothing: a reference is kept. To stand *inside* the window, the recurrence must
run again over the tokens that stay, on the very values that it ran on before. A projection
computed again for fewer tokens may have other low bits, so its output over the window is kept
and cut; after the projections and the short convolutions every step of such a layer belongs
to one token.

While a cache is watched, a stand-in shadows its layer in the decoder layer's instance
dictionary, and, during a forward, the layer's children in the same way. The tree of
parameters is not touched, and removing the shadow leaves the model as it was. Forwards with
other caches pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.convolution import Conv1d

LAYER = "linear_attn"
"""The name under which mlx-lm's decoder layers hold a gated-delta layer."""


class Point(NamedTuple):
    """What an ``ArraysCache`` holds at one offset: its slots, and the counters of a batch."""

    slots: tuple[mx.array | None, ...]
    left_padding: mx.array | None
    lengths: mx.array | None

    @staticmethod
    def of(cache: Any) -> Point:
        """The point where ``cache`` stands. Copies no slot."""
        return Point(
            tuple(cache.cache), _counter(cache.left_padding, 0), _counter(cache.lengths, 0)
        )

    def put(self, cache: Any) -> None:
        """Set ``cache`` to this point."""
        cache.cache = list(self.slots)
        cache.left_padding = _counter(self.left_padding, 0)
        cache.lengths = _counter(self.lengths, 0)


class Forward(NamedTuple):
    """One forward of a layer: where it began, and what its children gave for its tokens."""

    before: Point
    inputs: mx.array
    mask: mx.array | None
    outputs: Mapping[str, mx.array]

    @property
    def length(self) -> int:
        """Tokens of this forward, one count for all rows."""
        return int(self.inputs.shape[1])


class Tape:
    """The forwards of one cache through one gated-delta layer since ``start``."""

    def __init__(self, owner: Module, cache: Any) -> None:
        self.cache = cache
        self.forwards: list[Forward] = []
        self._owner = owner
        self._first = Point.of(cache)

    def start(self) -> None:
        """Begin to record; the cache stands at the state that ``at(0)`` gives."""
        self.forwards = []
        self._first = Point.of(self.cache)
        own = self._owner.__dict__
        if not isinstance(own.get(LAYER), _Watch):
            own[LAYER] = _Watch(self._owner[LAYER])
        own[LAYER].tapes[id(self.cache)] = self

    def stop(self) -> None:
        """Record no more, and drop what was recorded; the model is as it was before."""
        own = self._owner.__dict__
        watch = own.get(LAYER)
        if isinstance(watch, _Watch):
            watch.tapes.pop(id(self.cache), None)
            if not watch.tapes:
                del own[LAYER]
        self.forwards = []
        self._first = Point((), None, None)

    @property
    def length(self) -> int:
        """Tokens recorded, one count for all rows."""
        return sum(forward.length for forward in self.forwards)

    def at(self, keep: int) -> Point:
        """The state after the first ``keep`` recorded tokens, in ``[0, length]``; not evaluated.

        Equal bit for bit to the state that the recorded forwards had there.
        """
        points = [*(f.before for f in self.forwards), Point.of(self.cache)]
        if keep == 0:
            return self._first
        for forward, after in zip(self.forwards, points[1:], strict=True):
            if keep == forward.length:
                return after
            if keep < forward.length:
                return self._replayed(forward, keep)
            keep -= forward.length
        raise AssertionError("more tokens than were recorded")

    def rows_at(self, keeps: Sequence[int]) -> Point:
        """As ``at``, with one count per row of the batch.

        Every distinct count is replayed by itself, in the shape in which a batch of equal
        counts is.
        """
        points = {keep: self.at(keep) for keep in sorted(set(keeps))}
        slots: list[mx.array | None] = []
        for number in range(len(self.cache.cache)):
            held = {keep: point.slots[number] for keep, point in points.items()}
            like = next((slot for slot in held.values() if slot is not None), None)
            if like is None:
                slots.append(None)
                continue
            # An unset slot counts as zeros in the layer's forward.
            full = {k: mx.zeros_like(like) if s is None else s for k, s in held.items()}
            slots.append(mx.concatenate([full[k][i : i + 1] for i, k in enumerate(keeps)]))
        first = self.at(0)
        taken = mx.array(list(keeps))
        return Point(
            tuple(slots), _counter(first.left_padding, taken), _counter(first.lengths, taken)
        )

    def record(self, layer: Module, inputs: mx.array, mask: mx.array | None) -> mx.array:
        """Run ``layer``; where it raises, the cache stands where it stood."""
        before = Point.of(self.cache)
        outputs: dict[str, mx.array] = {}

        def tapped(name: str, child: Module) -> Callable[..., Any]:
            def run(*args: Any, **named: Any) -> Any:
                output = child(*args, **named)
                # Projections and convolutions give [B, L, width]; norms over heads do not.
                if output.ndim == 3 and output.shape[1] == inputs.shape[1]:
                    outputs[name] = output
                return output

            return run

        stand_ins = {name: tapped(name, child) for name, child in _children(layer)}
        try:
            with _shadowed(layer, stand_ins):
                result: mx.array = layer(inputs, mask, self.cache)
        except BaseException:
            before.put(self.cache)
            raise
        self.forwards.append(Forward(before, inputs, mask, outputs))
        return result

    def _replayed(self, forward: Forward, keep: int) -> Point:
        layer = self._owner[LAYER]
        cache = type(self.cache)(len(self.cache.cache))
        forward.before.put(cache)

        def played(output: mx.array) -> Callable[..., mx.array]:
            return lambda *_, **__: output[:, :keep]

        mask = forward.mask[:, :keep] if forward.mask is not None else None
        with _shadowed(layer, {name: played(x) for name, x in forward.outputs.items()}):
            layer(forward.inputs[:, :keep], mask, cache)
        return Point.of(cache)


class _Watch:
    """Stands in for a gated-delta layer while caches are watched."""

    def __init__(self, layer: Module) -> None:
        self.layer = layer
        self.tapes: dict[int, Tape] = {}

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        tape = self.tapes.get(id(cache))
        if tape is None:
            result: mx.array = self.layer(inputs, mask, cache)
            return result
        return tape.record(self.layer, inputs, mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def is_gated_delta(layer: object) -> bool:
    """Whether the decoder layer ``layer`` holds a layer that ``Tape`` can record and replay.

    Its projections and convolutions must be direct children that keep the token axis.
    """
    held = layer.get(LAYER) if isinstance(layer, Module) else None
    return (
        isinstance(held, Module)
        and {"A_log", "dt_bias"} <= set(held)
        and any(isinstance(child, Conv1d) for _, child in _children(held))
    )


def _children(layer: Module) -> Iterator[tuple[str, Module]]:
    return ((name, child) for name, child in layer.items() if isinstance(child, Module))


@contextmanager
def _shadowed(module: Module, stand_ins: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let ``stand_ins`` answer for children of ``module``, whose own entries stay."""
    own = module.__dict__
    own.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del own[name]


def _counter(value: mx.array | None, passed: mx.array | int) -> mx.array | None:
    # A new array: mlx-lm counts these down in place.
    return None if value is None else value - passed
