"""Steps of a peer, run by the peer's own Python: ``python -m benchmarks.peers.program``.

``ADAPTER STEP ARGUMENTS`` name a module of this folder, a step and its JSON arguments; the
mapping that it returns is printed as the last line. ``ADAPTER serve`` instead reads a line
``STEP ARGUMENTS`` at a time and answers each with a line, so that several processes, all ready,
can do a step at once. A module with ``BARE`` names packages whose ``__init__`` is left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.peers import crowd_steps, layout_steps, plain_steps
from benchmarks.peers.timed import module_of

Answer = dict[str, Any]


def version(adapter: str) -> Answer:
    """The peer's version, and that of the mlx-lm and MLX beside it."""
    from importlib.metadata import version as of

    module = module_of(adapter)
    own = getattr(module, "version", None)
    mine = own() if own is not None else of(module.DISTRIBUTION)
    return {"version": mine, "mlx-lm": of("mlx-lm"), "mlx": of("mlx")}


STEPS: dict[str, Callable[..., Answer]] = {
    "version": version,
    "store": plain_steps.store,
    "held": plain_steps.held,
    "append": plain_steps.append,
    "restore": plain_steps.restore,
    "store-layout": layout_steps.store,
    "restore-layout": layout_steps.restore,
    "crowd-ready": crowd_steps.ready,
    "crowd-open": crowd_steps.open_over,
    "crowd-store": crowd_steps.store,
    "crowd-restore": crowd_steps.restore,
}


def main() -> None:
    """Run the step that the command line names, or serve."""
    adapter, step, *arguments = sys.argv[1:]
    for package in ("mlx_lm", *getattr(module_of(adapter), "BARE", ())):
        _leave_bare(package)
    # What a peer prints is not an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if step != "serve":
        print(json.dumps(STEPS[step](adapter, **json.loads(arguments[0]))), file=answers)
        return
    for line in sys.stdin:
        name, _, words = line.partition(" ")
        print(json.dumps(_tried(STEPS[name], adapter, json.loads(words))), file=answers)


def _leave_bare(package: str) -> None:
    """Have ``package`` imported without its ``__init__``, so that only what is used is read.

    Those of mlx-lm and of some peers import their models, tokenizers and torch: for seconds, in
    each of some hundred processes. No clock counts it, but the run lasts as long.
    """
    spec = importlib.util.find_spec(package)
    if spec is not None and package not in sys.modules:
        sys.modules[package] = importlib.util.module_from_spec(spec)


def _tried(step: Callable[..., Answer], adapter: str, arguments: Answer) -> Answer:
    try:
        return step(adapter, **arguments)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
