"""Caches that mlx-lm lacks, and the contract that all caches satisfy; docs/caches.md.

Importing this package imports neither mlx nor mlx-lm.
"""

from __future__ import annotations

from typing import Any


def make(model: Any, scheme: str = "bf16") -> list[Any]:
    """The caches of an mlx-lm ``model`` under ``scheme``, one per layer that owns one.

    ``scheme`` is ``bf16`` (the model's own), ``affine:BITS:GROUP``, the same with ``@START``
    for a conversion at that offset, ``turbo:KEYS:VALUES`` or ``paged:BLOCK``. Sliding and
    chunked layers are quantized under affine and stay as they are under the others; recurrent
    layers always stay. Pass the list as ``prompt_cache`` to mlx-lm, and ``kv_scheme=scheme``
    with ``layout`` to ``Store.space``.

    Raises ``BadScheme`` with the layer, the value and the valid ones, before anything is
    allocated.
    """
    from kvkeep.caches.building import make as _make

    return _make(model, scheme)


__all__ = ["make"]
