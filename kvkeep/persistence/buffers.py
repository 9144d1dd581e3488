"""Memory for bytes that are soon written: its own mapping where it is large.

The allocator keeps large blocks that were freed in an order that it does not like, so that a
snapshot's memory stays with the process until the last chunk is written, while the kernel looks
for pages to cache the file. A mapping goes back at once.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    Host = np.ndarray[Any, np.dtype[Any]]

HUGE_PAGE = 1 << 21


def fresh(nbytes: int) -> Host:
    """``nbytes`` writable bytes with undefined contents, given back when no view is left."""
    if nbytes < HUGE_PAGE:
        return np.empty(nbytes, np.uint8)
    # Linux begins a mapping at a huge page only if it is as long as some; the rest is not touched.
    room = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    mapping = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _ask_for_huge_pages(mapping, nbytes // HUGE_PAGE * HUGE_PAGE)
    return np.frombuffer(mapping, np.uint8)[:nbytes]


def _ask_for_huge_pages(mapping: mmap.mmap, nbytes: int) -> None:
    """For the first ``nbytes``; a tail would take a whole one."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, 0, nbytes)
    except OSError:
        return  # a kernel without them
