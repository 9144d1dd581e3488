"""Indices of a few bits as a flat little-endian bit stream, in words of 32 bits.

Index *i* of a row takes the bits ``[i·b, (i+1)·b)`` of the row's stream; bit *n* is bit *n* mod 32
of word *n* div 32. A group of 32 indices takes exactly *b* words, so the stream of a row is also
what ``mx.dequantize`` reads, for 2, 3, 4, 5 and 8 bits.

>>> import mlx.core as mx
>>> row = mx.array([[5, 1, 7, 0] * 8], dtype=mx.uint32)
>>> words = pack(row, 3)
>>> words.shape, bin(words[0, 0].item() & 0xFFF)
((1, 3), '0b111001101')
>>> [int(x) for x in unpack(words, 3)[0, :4]]
[5, 1, 7, 0]
"""

from __future__ import annotations

import mlx.core as mx

GROUP = 32
"""Indices that share a scale, and end on a word."""


def pack(indices: mx.array, bits: int) -> mx.array:
    """The stream of every row: ``uint32 [..., D·bits/32]`` for indices ``uint32 [..., D]``."""
    # Eight indices make one 64-bit number, of which the low `bits` bytes are the stream.
    lanes = indices.astype(mx.uint64).reshape(*indices.shape[:-1], -1, 8)
    number = lanes[..., 0]
    for lane in range(1, 8):
        number = mx.bitwise_or(number, mx.left_shift(lanes[..., lane], lane * bits))
    octets = mx.contiguous(number[..., None]).view(mx.uint8)[..., :bits]
    return octets.reshape(*indices.shape[:-1], -1).view(mx.uint32)


def unpack(words: mx.array, bits: int) -> mx.array:
    """The indices of every row, as ``float32 [..., D]``: exact, for they are below 256."""
    groups = (*words.shape[:-1], words.shape[-1] // bits)
    return mx.dequantize(
        words,
        mx.ones(groups, dtype=mx.float32),
        mx.zeros(groups, dtype=mx.float32),
        group_size=GROUP,
        bits=bits,
    )
