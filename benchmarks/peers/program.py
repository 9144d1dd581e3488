"""One step of a peer, run by the peer's own Python: ``python -m benchmarks.peers.program``.

``ADAPTER STEP ARGUMENTS`` name a module of this folder, a function below and its JSON arguments;
the mapping that it returns is printed as the last line. An adapter has ``DISTRIBUTION``, the
name on PyPI, and a class ``Peer(folder)`` with

* ``store(tokens, caches)``: what a server calls, returns as soon as the peer does;
* ``settle()``: returns once everything is written, durable or not;
* ``restore(prompt)``: the caches, evaluated, and how many tokens they cover;
* perhaps ``written``: the bytes of the last store, where files do not tell.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import Shape, check, empty, extend, tokens


def version(adapter: str) -> dict[str, Any]:
    """The peer's version, and that of the mlx-lm and MLX beside it."""
    from importlib.metadata import version as of

    module = _module(adapter)
    own = getattr(module, "version", None)
    mine = own() if own is not None else of(module.DISTRIBUTION)
    return {"version": mine, "mlx-lm": of("mlx-lm"), "mlx": of("mlx")}


def store(adapter: str, folder: str, shape: dict[str, int], count: int) -> dict[str, Any]:
    """Store ``count`` tokens in a new folder."""
    kind = Shape(**shape)
    peer = _peer(adapter, folder)
    caches = empty(kind)
    extend(caches, kind, count, 0)
    return _timed(peer, folder, tokens(count, 0), caches)


def append(
    adapter: str, folder: str, shape: dict[str, int], count: int, new: int, number: int
) -> dict[str, Any]:
    """Restore ``count`` tokens, read ``new`` ones more, and store all of them."""
    kind = Shape(**shape)
    peer = _peer(adapter, folder)
    prompt = np.concatenate([tokens(count, 0), tokens(new, 1 + number)])
    caches, offset = peer.restore(np.append(prompt[:count], 1).tolist())
    assert caches is not None, "nothing came back"
    extend(caches, kind, count, 0)
    extend(caches, kind, count + new, 1 + number)
    return {**_timed(peer, folder, prompt, caches), "offset": offset}


def restore(
    adapter: str, folder: str, shape: dict[str, int], count: int, shared: int = 0
) -> dict[str, Any]:
    """Restore what a prompt shares with ``count`` stored tokens, all of it or ``shared``."""
    kind = Shape(**shape)
    prompt = np.append(tokens(count, 0), 1)
    if shared:
        prompt[shared:] = 2
    ids = prompt.tolist()
    empty(kind)
    with tempfile.TemporaryDirectory() as nothing:
        _peer(adapter, nothing)  # so that no clock counts imports
    start = time.perf_counter()
    peer = _peer(adapter, folder)
    caches, offset = peer.restore(ids)
    seconds = time.perf_counter() - start
    compared = 0
    wrong = False
    if offset:
        try:
            compared = check(caches, kind, 0, min(offset, count), 0)
        except AssertionError:
            wrong = True
    return {"seconds": seconds, "offset": offset, "compared": compared, "wrong": wrong}


def _timed(peer: Any, folder: str, ids: Any, caches: list[Any]) -> dict[str, Any]:
    before = _files(folder)
    listed = ids.tolist()
    os.sync()
    start = time.perf_counter()
    peer.store(listed, caches)
    caller = time.perf_counter() - start
    peer.settle()
    settled = time.perf_counter() - start
    for file in _changed(folder, before):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    durable = time.perf_counter() - start
    sizes = [file.stat().st_size for file in _changed(folder, before)]
    written = getattr(peer, "written", None)
    return {
        "caller": caller,
        "settled": settled,
        "durable": durable,
        "bytes": sum(sizes) if written is None else written,
    }


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


def _module(adapter: str) -> Any:
    return importlib.import_module(f"benchmarks.peers.{adapter}")


def _peer(adapter: str, folder: str) -> Any:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return _module(adapter).Peer(folder)


def main() -> None:
    """Run the step that the command line names."""
    adapter, step, arguments = sys.argv[1:]
    steps = {"version": version, "store": store, "append": append, "restore": restore}
    answer = steps[step](adapter, **json.loads(arguments))
    print()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
