"""Schemes: how keys and values are kept, spelled as one string.

==============  ===========================================================================
``bf16``        as the model itself keeps them
``affine:4:64`` 4 bits in groups of 64 along the head, from the first token on
``affine:8:64@5000``  the same with 8 bits, from the first chunk that ends at 5000 or behind
``turbo:8:3``   TurboQuant, keys of 8 bits and values of 3
``paged:256``   blocks of 256 positions
==============  ===========================================================================

Nothing here imports mlx.

>>> parse("affine:8:64@5000")
Affine(bits=8, group_size=64, start=5000)
>>> str(parse("turbo:8:3")), str(parse("affine:4:64"))
('turbo:8:3', 'affine:4:64')
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import BadScheme

BITS = (2, 3, 4, 5, 6, 8)
"""Widths that ``mx.quantize`` takes."""

GROUPS = (32, 64, 128)
"""Values along the head that share a scale and a bias."""

FORMS = "bf16, affine:BITS:GROUP, affine:BITS:GROUP@START, turbo:KEYS:VALUES, paged:BLOCK"


@dataclass(frozen=True)
class Plain:
    """The model's own caches."""

    def __str__(self) -> str:
        return "bf16"


@dataclass(frozen=True)
class Affine:
    """Affine quantization; with ``start`` the rows before it are full precision at first."""

    bits: int
    group_size: int
    start: int | None = None

    def __str__(self) -> str:
        later = "" if self.start is None else f"@{self.start}"
        return f"affine:{self.bits}:{self.group_size}{later}"


@dataclass(frozen=True)
class Turbo:
    """TurboQuant."""

    k_bits: int
    v_bits: int

    def __str__(self) -> str:
        return f"turbo:{self.k_bits}:{self.v_bits}"


@dataclass(frozen=True)
class Paged:
    """Blocks and a table."""

    block_size: int

    def __str__(self) -> str:
        return f"paged:{self.block_size}"


Scheme = Plain | Affine | Turbo | Paged

_AFFINE = re.compile(r"affine:(-?\d+):(-?\d+)(?:@(-?\d+))?")
_TURBO = re.compile(r"turbo:(-?\d+):(-?\d+)")
_PAGED = re.compile(r"paged:(-?\d+)")


def parse(text: str) -> Scheme:
    """The scheme that ``text`` spells.

    Raises ``BadScheme`` for another form, for widths, groups, starts and blocks that do not
    exist, naming the valid ones. TurboQuant's widths are checked where its caches are made.
    """
    if text == "bf16":
        return Plain()
    if found := _AFFINE.fullmatch(text):
        bits, group_size, start = (None if x is None else int(x) for x in found.groups())
        check_affine(bits, group_size)
        if start is not None:
            check_start(start)
        return Affine(bits or 0, group_size or 0, start)
    if found := _TURBO.fullmatch(text):
        return Turbo(*map(int, found.groups()))
    if found := _PAGED.fullmatch(text):
        block = int(found[1])
        if block < 1:
            raise BadScheme(f"{text} has blocks of {block} positions; valid are 1 and above")
        return Paged(block)
    raise BadScheme(f"{text!r} is no scheme; valid are {FORMS}")


def check_affine(bits: object, group_size: object) -> None:
    """Raise ``BadScheme`` for a width or a group that ``mx.quantize`` does not take."""
    for what, value, valid in (("width", bits, BITS), ("group size", group_size, GROUPS)):
        if isinstance(value, bool) or value not in valid:
            listed = ", ".join(map(str, valid))
            raise BadScheme(f"Affine quantization has no {what} {value!r}; valid are {listed}")


def check_start(start: object) -> None:
    """Raise ``BadScheme`` for a start that is no offset."""
    if type(start) is not int or start < 0:
        raise BadScheme(f"A start of {start!r} is no offset; valid are 0 and above")


def check_head(side: str, width: int, group_size: int) -> None:
    """Raise ``BadScheme`` where heads of ``width`` values are no whole number of groups."""
    if width % group_size:
        fitting = [str(size) for size in GROUPS if width % size == 0]
        raise BadScheme(
            f"{side} of head size {width} are no whole groups of {group_size}; "
            + (f"valid are {', '.join(fitting)}" if fitting else "no valid group size divides it")
        )


def scheme_of(caches: Sequence[Any]) -> str | None:
    """The scheme that ``caches`` were made with, by their fields; several joined by ``+``.

    ``None`` where none of them is of a scheme, as with a model's own caches.
    """
    found = sorted({str(scheme) for cache in caches for scheme in _schemes(cache)})
    return "+".join(found) or None


def _schemes(cache: Any) -> Iterator[Scheme]:
    bits = getattr(cache, "packed_bits", getattr(cache, "bits", None))
    if bits is not None:
        yield Affine(bits, cache.group_size, getattr(cache, "start", None))
    elif hasattr(cache, "k_bits"):
        yield Turbo(cache.k_bits, cache.v_bits)
    elif hasattr(cache, "block_size"):
        yield Paged(cache.block_size)
    else:
        for inner in getattr(cache, "caches", ()):
            yield from _schemes(inner)
