"""Checking the pages of an LMDB file without LMDB.

LMDB trusts its file. A page that is not what it should be may end the process: by SIGBUS where
the file was cut short, by a failed assertion where a page was zeroed. So the pages are looked
at first, with plain reads, which can only fail. Values are not looked at: frames and records
have checksums of their own.

What is checked is one committed state. Other processes may go on writing; a finding counts
only if that state is still the newest one afterwards, or is held by the caller.
"""

from __future__ import annotations

import os
import struct
import sys
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvkeep.errors import Damaged

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

MAGIC = 0xBEEFC0DE
VERSION = 1
HEADER = 16
NODE = 8
MOST_KEY = 511
NONE = (1 << 64) - 1

BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
BIG, TREE = 1, 2
INTEGER_KEYS = 8
FREE = "free pages"

_HEADER = struct.Struct(
    "<"
    "Q"  # the page's own number
    "H"  # not used
    "H"  # the kind of page
    "H"  # where the pointers to the nodes end
    "H"  # where the nodes begin
)
_TREE = struct.Struct(
    "<"
    "I"  # the page size, in the first tree of a meta page
    "H"  # flags
    "H"  # depth
    "Q"  # branch pages
    "Q"  # leaf pages
    "Q"  # overflow pages
    "Q"  # entries
    "Q"  # the root's page number
)
_META = struct.Struct(
    "<"
    "I"  # MAGIC
    "I"  # VERSION
    "Q"  # a fixed address, or 0
    "Q"  # bytes of the map
    "48s"  # the tree of free pages
    "48s"  # the main tree, which holds the roots of the others
    "Q"  # the last page in use
    "Q"  # the transaction that wrote this page
)

TRIES = 5


@dataclass
class PageCheck:
    """What a check found.

    ``complete`` where every page of every tree was read. ``short`` where the file ends before
    the last page in use: right as long as nothing refers to the missing ones, which LMDB then
    never wrote. ``transaction`` is the state that was checked.
    """

    faults: list[str] = field(default_factory=list)
    pages: int = 0
    complete: bool = False
    short: bool = False
    transaction: int | None = None


def check_pages(
    file: Path,
    most: int | None = None,
    *,
    skim: int = 0,
    deep: bool = False,
    held: int | None = None,
) -> PageCheck:
    """Check the trees of ``file`` from their roots down, and no more than ``most`` pages.

    Of ``skim`` leaves after these it looks at the heads, which tell a page that was zeroed, or
    that belongs elsewhere. That takes a tenth of the time.

    A short file is checked whole in any case. ``deep`` also reads the first page of every value
    that has pages of its own, and checks that no page is used twice, or used and free. ``held``
    is the transaction that a reader holds open; without it, what other processes change
    meanwhile makes the check start again.

    An empty file, or one that is not of LMDB's format 1, has no faults and is not ``complete``.
    Raises ``OSError``.
    """
    fd = os.open(file, os.O_RDONLY)
    try:
        for _ in range(TRIES):
            found = _check(fd, most, deep, held, skim)
            now = held if held is not None else _check(fd, 0, deep=False).transaction
            if found.transaction == now:
                return found
        return PageCheck()
    finally:
        os.close(fd)


def _check(
    fd: int, most: int | None, deep: bool, held: int | None = None, skim: int = 0
) -> PageCheck:
    found = PageCheck()
    try:
        meta = _newest(fd)
        if meta is None or (held is not None and meta.transaction != held):
            return found
        size = os.fstat(fd).st_size
        found.transaction = meta.transaction
        found.short = size < (meta.last + 1) * meta.psize
        walk = _Walk(fd, meta, size, deep)
        while walk.waiting and (most is None or found.short or walk.pages < most):
            walk.step()
            found.pages = walk.pages
        if walk.waiting and skim:
            walk.skim(skim)
            found.pages = walk.pages
        found.complete = not walk.waiting
        if deep:
            walk.check_extents()
    except _Fault as fault:
        found.faults.append(str(fault))
    return found


def unused_spans(file: Path, before: int) -> list[tuple[int, int]]:
    """Offset and length of all bytes that the newest state and its readers do not need.

    Pages that were freed by transactions before ``before``, what was never in use, and the
    room between the pointers and the nodes of every page. Nobody may write meanwhile. Empty
    where the file cannot be judged; raises ``Damaged`` where it is not sound.
    """
    fd = os.open(file, os.O_RDONLY)
    try:
        meta = _newest(fd)
        if meta is None:
            return []
        size = os.fstat(fd).st_size
        walk = _Walk(fd, meta, size, deep=True)
        while walk.waiting:
            walk.step()
        walk.check_extents()
        return walk.unused(before)
    except _Fault as fault:
        raise Damaged(f"{file}: {fault}") from fault
    finally:
        os.close(fd)


class _Fault(Exception):
    """Something is not as LMDB writes it."""


class _Meta(NamedTuple):
    psize: int
    free: bytes
    main: bytes
    last: int
    transaction: int


def _newest(fd: int) -> _Meta | None:
    """The meta page that LMDB will use; ``None`` where the file is not ours to judge."""
    start = os.pread(fd, HEADER + _META.size, 0)
    if sys.byteorder != "little" or len(start) < HEADER + _META.size:
        return None
    psize = _TREE.unpack(_META.unpack_from(start, HEADER)[4])[0]
    psize = psize if psize in (1 << bits for bits in range(8, 17)) else 4096
    both = [start, os.pread(fd, HEADER + _META.size, psize)]
    signs = [page[HEADER : HEADER + 8] for page in both]
    if struct.pack("<II", MAGIC, VERSION) not in signs:
        return None
    metas = []
    for number, page in enumerate(both):
        if len(page) < HEADER + _META.size:
            raise _Fault(f"meta page {number} is cut off")
        magic, version, _, size, free, main, last, txn = _META.unpack_from(page, HEADER)
        kind = _HEADER.unpack_from(page)[2]
        if (magic, version) != (MAGIC, VERSION) or not kind & META:
            raise _Fault(f"meta page {number} is no meta page")
        if _TREE.unpack(free)[0] != psize or not 1 <= last < size // psize:
            raise _Fault(f"meta page {number} holds sizes that cannot be")
        metas.append(_Meta(psize, free, main, last, txn))
    return max(metas, key=lambda meta: meta.transaction)


class _Job(NamedTuple):
    """A page to read, how many levels of the tree it begins, and what lies in the leaves."""

    page: int
    depth: int
    name: str
    integers: bool
    holds_trees: bool


class _Walk:
    """Breadth first through all trees, so that the pages near the roots come first."""

    def __init__(self, fd: int, meta: _Meta, size: int, deep: bool) -> None:
        self._fd, self._meta, self._size, self._deep = fd, meta, size, deep
        self.pages = 0
        self.waiting: deque[_Job] = deque()
        self._used: list[tuple[int, int]] = [(0, 2)]
        self._free: list[tuple[int, Array]] = []
        self._gaps: list[tuple[int, int]] = []
        self._add(meta.main, "main", holds_trees=True)
        self._add(meta.free, FREE)

    def step(self) -> None:
        """Check the next page, and note the ones below it."""
        job = self.waiting.popleft()
        self.pages += 1
        if self.pages > self._meta.last:
            raise self._fault(job, "is one of more pages than there are")
        page = self._read(job)
        words = np.frombuffer(page, "<u2")
        places = self._places(job, page, words)
        at = places >> 1
        low, high, flags, key_sizes = (words[at + i].astype(np.int64) for i in range(4))
        keys_end = places + NODE + key_sizes
        if key_sizes.max() > MOST_KEY:
            raise self._fault(job, "has a key that is too long")
        if job.depth > 1:
            if keys_end.max() > len(page):
                raise self._fault(job, "has a key beyond its end")
            below = low | high << 16 | flags << 32
            self.waiting.extend(job._replace(page=p, depth=job.depth - 1) for p in below.tolist())
            starts, ends = places[1:], keys_end[1:]  # the first key is never compared
        else:
            self._leaf(job, page, flags, low | high << 16, keys_end)
            starts, ends = places, keys_end
        found = [page[a + NODE : b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        if job.integers:
            found = [key[::-1] for key in found]
        if any(a >= b for a, b in pairwise(found)):
            raise self._fault(job, "has keys out of order")

    def skim(self, most: int) -> None:
        """Look at the heads of the next ``most`` pages, at most; at inner pages as ``step`` does.

        Ends with pages waiting that were skimmed: the check is not complete.
        """
        skimmed = []
        end = self.pages + most
        while self.waiting and self.pages < end:
            job = self.waiting[0]
            if job.depth > 1 or job.holds_trees:
                self.step()
                continue
            self.waiting.popleft()
            skimmed.append(job)
            self.pages += 1
            self._span(job, job.page, 1)
            head = os.pread(self._fd, HEADER, job.page * self._meta.psize)
            number, _, kind, lower, upper = _HEADER.unpack(head)
            if number != job.page or kind != LEAF:
                raise self._fault(job, "is not the page that belongs there")
            if not HEADER < lower <= upper <= self._meta.psize:
                raise self._fault(job, "has bounds that cannot be")
        self.waiting.extend(skimmed)

    def check_extents(self) -> None:
        """No page is used twice, and none is free that is used."""
        used = np.array(self._used, np.int64)
        free = np.concatenate([*(pages for _, pages in self._free), np.empty(0, np.int64)])
        spans = np.concatenate([used, np.stack([free, np.ones_like(free)], 1)])
        spans = spans[np.argsort(spans[:, 0], kind="stable")]
        twice = np.flatnonzero(spans[1:, 0] < spans[:-1].sum(1))
        if len(twice):
            raise _Fault(f"page {spans[twice[0] + 1, 0]} is used twice, or used and free")

    def unused(self, before: int) -> list[tuple[int, int]]:
        """See ``unused_spans``. The whole tree was walked."""
        psize, end = self._meta.psize, self._size
        kept = np.zeros(self._meta.last + 1, bool)
        for first, pages in self._used:
            kept[first : first + pages] = True
        for transaction, freed in self._free:
            if transaction >= before:
                kept[freed] = True
                self._gaps += [gap for page in freed.tolist() if (gap := self._gap(page))]
        edges = np.flatnonzero(np.diff(np.concatenate([[True], kept, [True]])))
        runs = [(a * psize, min(b * psize, end)) for a, b in edges.reshape(-1, 2).tolist()]
        runs.append(((self._meta.last + 1) * psize, end))
        return [*self._gaps, *((a, b - a) for a, b in runs if a < b)]

    def _gap(self, page: int) -> tuple[int, int] | None:
        """The room in a page that belongs to an older state, where it is one of a tree."""
        start = page * self._meta.psize
        head = os.pread(self._fd, HEADER, start)
        if len(head) < HEADER:
            return None
        number, _, kind, lower, upper = _HEADER.unpack(head)
        if number != page or kind not in (BRANCH, LEAF) or not HEADER <= lower <= upper:
            return None
        return (start + lower, upper - lower) if upper <= self._meta.psize else None

    def _add(self, record: bytes, name: str, holds_trees: bool = False) -> None:
        _, flags, depth, *_, root = _TREE.unpack(record)
        if root == NONE and depth == 0:
            return
        if not 0 < depth < 32:
            raise _Fault(f"the tree of {name} has depth {depth}")
        integers = bool(flags & INTEGER_KEYS) or name == FREE
        self.waiting.append(_Job(root, depth, name, integers, holds_trees))

    def _read(self, job: _Job) -> bytes:
        self._span(job, job.page, 1)
        page = os.pread(self._fd, self._meta.psize, job.page * self._meta.psize)
        if len(page) < self._meta.psize:
            raise self._fault(job, "lies beyond the end of the file")
        number, _, kind, _, _ = _HEADER.unpack_from(page)
        if number != job.page or kind != (BRANCH if job.depth > 1 else LEAF):
            raise self._fault(job, "is not the page that belongs there")
        return page

    def _places(self, job: _Job, page: bytes, words: Array) -> Array:
        """Where the nodes of a page begin, in the order of their keys."""
        *_, lower, upper = _HEADER.unpack_from(page)
        count = (lower - HEADER) // 2
        least = 2 if job.depth > 1 else 1
        if lower % 2 or count < least or not lower <= upper <= len(page):
            raise self._fault(job, "has bounds that cannot be")
        if self._deep:
            self._gaps.append((job.page * len(page) + lower, upper - lower))
        places = words[HEADER // 2 : lower // 2].astype(np.int64)
        if places.min() < upper or places.max() > len(page) - NODE or (places & 1).any():
            raise self._fault(job, "has a pointer that leads nowhere")
        return places

    def _leaf(self, job: _Job, page: bytes, flags: Array, sizes: Array, values: Array) -> None:
        big = flags == BIG
        if (values + np.where(big, 8, sizes)).max() > len(page):
            raise self._fault(job, "has a value beyond its end")
        trees = flags == TREE
        if not (big | trees | (flags == 0)).all() or (trees.any() and not job.holds_trees):
            raise self._fault(job, "has a value of an unknown kind")
        for at, size in zip(values[big].tolist(), sizes[big].tolist(), strict=True):
            first = int.from_bytes(page[at : at + 8], "little")
            pages = (HEADER - 1 + size) // self._meta.psize + 1
            self._value(job, first, pages, size)
        for at, size in zip(values[trees].tolist(), sizes[trees].tolist(), strict=True):
            if size != _TREE.size:
                raise self._fault(job, "holds a tree of another size")
            self._add(page[at : at + size], "a database")
        if self._deep and job.name == FREE:
            self._free_lists(job, page, values, sizes, big)

    def _free_lists(self, job: _Job, page: bytes, values: Array, sizes: Array, big: Array) -> None:
        """What each transaction freed; its number is the key, right before the value."""
        psize = self._meta.psize
        rows = zip(values.tolist(), sizes.tolist(), big.tolist(), strict=True)
        for at, size, elsewhere in rows:
            data = page[at : at + size]
            if elsewhere:
                first = int.from_bytes(page[at : at + 8], "little")
                data = os.pread(self._fd, size, first * psize + HEADER)
            freed_by = int.from_bytes(page[at - 8 : at], "little")
            self._free.append((freed_by, self._free_list(job, data)))

    def _value(self, job: _Job, first: int, pages: int, size: int) -> None:
        """A value with pages of its own, which may be more than it needs by now."""
        if not self._deep:
            self._span(job, first, pages)
            return
        self._span(job, first, 1)
        head = os.pread(self._fd, HEADER, first * self._meta.psize)
        if len(head) < HEADER or head[:8] != first.to_bytes(8, "little"):
            raise self._fault(job, f"refers to page {first}, which is another one")
        kind, count = struct.unpack_from("<HI", head, 10)
        if kind != OVERFLOW or count < pages:
            raise self._fault(job, f"refers to page {first}, which holds no such value")
        self._used.pop()
        self._span(job, first, count)
        start, psize = first * self._meta.psize, self._meta.psize
        self._gaps.append((start + HEADER + size, count * psize - HEADER - size))

    def _free_list(self, job: _Job, data: bytes) -> Array:
        numbers = np.frombuffer(data[: len(data) // 8 * 8], "<u8").astype(np.int64)
        count = int(numbers[0]) if len(numbers) else -1
        if not 0 <= count < len(numbers):
            raise self._fault(job, "holds a list of free pages that is too short")
        free = numbers[1 : count + 1]
        if count and not 2 <= free.min() <= free.max() <= self._meta.last:
            raise self._fault(job, "lists free pages that are not there")
        return free

    def _span(self, job: _Job, first: int, pages: int) -> None:
        """Note pages as used, where the file has them."""
        if first < 2 or first + pages - 1 > self._meta.last:
            raise self._fault(job, f"leads to page {first}, which is not in use")
        if (first + pages) * self._meta.psize > self._size:
            raise self._fault(job, f"leads to page {first}, beyond the end of the file")
        if self._deep:
            self._used.append((first, pages))

    def _fault(self, job: _Job, what: str) -> _Fault:
        return _Fault(f"page {job.page} of the tree of {job.name} {what}")
