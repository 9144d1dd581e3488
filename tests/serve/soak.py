"""Many small requests from several clients, and what the server process grows by meanwhile.

    python -m tests.serve.soak --requests 10000

Some conversations go on, some are repeated, most are new. The store and memory are small, so
that both are full soon. Prints one JSON object: requests, errors, and memory, open files and
disk at a quarter of the way and at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import openai

from tests import model_folders
from tests.serve.harness import Server, complete, settle

CLIENTS = 4
MAX_BYTES = 8 << 20
MEMORY_BYTES = 4 << 20
OPTIONS = ("--max-bytes", str(MAX_BYTES), "--prompt-cache-bytes", str(MEMORY_BYTES))


def held(server: Server, store: Path) -> dict[str, int]:
    """Resident memory in KiB, open files, and bytes on disk."""
    process = Path(f"/proc/{server.process.pid}")
    resident = next(
        line for line in (process / "status").read_text().splitlines() if line.startswith("VmRSS")
    )
    return {
        "rss_kib": int(resident.split()[1]),
        "files": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "disk": sum(file.stat().st_blocks * 512 for file in store.iterdir()),
    }


def run(folder: Path, requests: int, name: str = "falcon_h1") -> dict[str, Any]:
    """The outcome of ``requests`` requests against one server."""
    model = model_folders.write(name, folder / "model")
    store, errors, number = folder / "store", [], count()
    out: dict[str, Any] = {"requests": requests, "clients": CLIENTS}
    with Server(folder / "log", store, "--model", str(model), *OPTIONS) as server:

        def client(share: int) -> int:
            found = random.Random(share)
            api, said, resumed = server.client(), "", 0
            for _ in range(requests // CLIENTS):
                if next(number) == requests // 4:
                    out["quarter"] = held(server, store)
                kind = found.random()
                if kind < 0.6 or not said or len(said) > 400:
                    said = f"{found.randrange(10**9)} tell me of number {found.randrange(100)}"
                elif kind < 0.8:
                    said += f" and then {found.randrange(100)}"
                try:
                    how = {"seed": 1} if found.random() < 0.1 else {}
                    reply = complete(api, said, max_tokens=2, stream=kind > 0.9, **how)
                    resumed += reply.cached
                except openai.OpenAIError as error:
                    errors.append(repr(error))
            return resumed

        started = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            out["resumed_tokens"] = sum(pool.map(client, range(CLIENTS)))
        out["seconds"] = time.perf_counter() - started
        settle(server)
        out["end"] = held(server, store)
        out["errors"] = errors
        out["failures"] = server.report()["server"]["failures"]
        out["memory_bytes"] = server.metric("kvkeep_memory_bytes")
        out["store_bytes"] = server.metric("kvkeep_store_bytes")
        out["stopped"] = server.stop()
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--folder", help="where to work; a temporary folder without it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        json.dump(run(Path(made), given.requests), sys.stdout, indent=1)
        print()
