"""An adapter and its clock: what the steps of a peer share."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peers._adapter import Adapter, Make
from benchmarks.peers.kinds import in_classes
from benchmarks.rows import Shape, empty, extend, tokens


def module_of(adapter: str) -> Any:
    """The module of an adapter."""
    return importlib.import_module(f"benchmarks.peers.{adapter}")


def opened(adapter: str, folder: str, make: Make) -> Adapter:
    """The peer over ``folder``, which is made."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    peer: Adapter = module_of(adapter).Peer(folder, make)
    return peer


def maker(adapter: str, make: Make) -> Make:
    """``make`` in the cache classes of the adapter's server."""
    module = module_of(adapter).Peer.caches
    return lambda: in_classes(make(), module)


def imported(adapter: str) -> None:
    """Store and restore a few plain rows in a folder of their own, so that no clock counts imports.

    A peer may import when it first does something, not when it is opened.
    """
    kind, count = Shape(2, 1, 64), 300
    make = maker(adapter, lambda: empty(kind))
    caches, ids = make(), tokens(count, 0).tolist()
    extend(caches, kind, count, 0)
    # Where a peer cannot do even this, the step itself tells.
    with tempfile.TemporaryDirectory() as nothing, contextlib.suppress(Exception):
        peer = opened(adapter, nothing, make)
        peer.store(ids, caches)
        peer.settle()
        peer.close()
        peer = opened(adapter, nothing, make)
        peer.restore([*ids, 1])
        peer.close()


def stored(peer: Adapter, folder: str, ids: list[int], caches: list[Any]) -> dict[str, Any]:
    """Store, and the seconds until the call returns, all is written, and all is on the disk."""
    before = _files(folder)
    os.sync()
    start = time.perf_counter()
    peer.store(ids, caches)
    caller = time.perf_counter() - start
    peer.settle()
    settled = time.perf_counter() - start
    for file in _changed(folder, before):
        flush(file)
    durable = time.perf_counter() - start
    # A file that has several names was written once.
    sizes = {(at := file.stat()).st_ino: at.st_size for file in _changed(folder, before)}
    written = sum(sizes.values()) if peer.written is None else peer.written
    return {"caller": caller, "settled": settled, "durable": durable, "bytes": written}


def flush(file: Path) -> None:
    """Have ``file`` on the disk."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _files(folder: str) -> dict[Path, tuple[int, int, int]]:
    found = {}
    for file in Path(folder).rglob("*"):
        if file.is_file():
            status = file.stat()
            found[file] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return found


def _changed(folder: str, before: dict[Path, tuple[int, int, int]]) -> list[Path]:
    """The files that are new, or other than they were."""
    return [file for file, seen in _files(folder).items() if before.get(file) != seen]
