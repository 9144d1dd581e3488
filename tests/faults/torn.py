"""Damage the files of a store in every region, and use what is left, in another process.

    python -m tests.faults.torn --cases 40
    python -m tests.faults.torn --cases 40 --unguarded

For each region and each kind of damage: how often the store was refused by name, how often it
was used (every restored byte is compared, and new snapshots are taken), and how often the
process died. ``--unguarded`` leaves out kvkeep's own check of the pages, to see what it is for.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import kvkeep
from kvkeep.errors import KvkeepError
from kvkeep.persistence import opening
from tests.faults import light
from tests.faults.rows import KINDS, caches, tokens_of, wrong
from tests.faults.sigkill import ROOT
from tests.faults.worker import open_spaces, small_chunks

PAGE = 4096
CONVERSATIONS = 24
DAMAGES = ("bit", "head", "zero", "random")


def make(folder: Path) -> None:
    """A store with values of all sizes, freed pages, and branch pages."""
    rng = random.Random(1)
    with kvkeep.open(folder, max_bytes="100MB", disk_reserve=1) as store:
        spaces = open_spaces(store)
        for conversation in range(CONVERSATIONS):
            for kind in KINDS:
                tokens = tokens_of(conversation, rng.randint(100, 600))
                spaces[kind].snapshot(tokens, caches(kind, tokens))
        store.flush()


def regions(data: bytes) -> dict[str, list[int]]:
    """The pages of a data file by what they hold; freed ones by what they held."""
    out: dict[str, list[int]] = defaultdict(list)
    at = 0
    while at < len(data) // PAGE:
        number, _, kind = struct.unpack_from("<QHH", data, at * PAGE)
        more = 0
        if at < 2:
            out["meta"].append(at)
        elif number == at and kind in (1, 2, 4):
            out[{1: "branch", 2: "leaf", 4: "value, first page"}[kind]].append(at)
            if kind == 4:
                more = struct.unpack_from("<I", data, at * PAGE + 12)[0] - 1
        out["value, other pages"] += range(at + 1, at + 1 + more)
        at += 1 + more
    return out


def damage(file: Path, page: int, how: str, rng: random.Random) -> None:
    """Change the file in place. ``cut`` ends it anywhere, whatever ``page`` is."""
    with file.open("r+b") as out:
        if how == "cut":
            out.truncate(rng.randrange(file.stat().st_size))
        elif how in ("zero", "random"):
            out.seek(page * PAGE)
            out.write(bytes(PAGE) if how == "zero" else rng.randbytes(PAGE))
        else:
            at = page * PAGE + rng.randrange(64 if how == "head" else PAGE)
            out.seek(at)
            old = out.read(1)[0]
            out.seek(at)
            out.write(bytes([old ^ 1 << rng.randrange(8)]))


def cases(folder: Path, each: int, rng: random.Random) -> Iterator[tuple[str, str, Path]]:
    """Damaged copies of a store: region, kind of damage, folder. Each is removed afterwards."""
    data = (folder / "data.mdb").read_bytes()
    found = [("file", "cut", [0])]
    found += [(r, how, pages) for r, pages in regions(data).items() for how in DAMAGES]
    found += [("lock file", how, [0, 1, 2]) for how in (*DAMAGES, "cut")]
    for region, how, pages in found:
        for number in range(each):
            copy = folder.with_name(f"{region.split()[0]}-{how}-{number}")
            shutil.copytree(folder, copy)
            name = "lock.mdb" if region == "lock file" else "data.mdb"
            damage(copy / name, rng.choice(pages), how, rng)
            yield region, how, copy
            shutil.rmtree(copy)


class User:
    """A process that uses stores, one after the other, and is started again when it dies."""

    def __init__(self, unguarded: bool = False) -> None:
        self._words = ["--unguarded"] if unguarded else []
        self._process: subprocess.Popen[str] | None = None

    def ask(self, folder: Path) -> str:
        """What became of the store."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.torn", "--use", *self._words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{folder}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if line:
            return str(json.loads(line))
        self._process = None
        return f"died: {process.wait()}"

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()


def use(folder: str) -> str:
    """Open a store, read and check all of it, write to it, evict, verify."""
    try:
        store = kvkeep.open(folder, disk_reserve=1)
    except KvkeepError as error:
        return f"refused: {type(error).__name__}"
    with store:
        try:
            problem = _work(store)
        except KvkeepError as error:
            return f"used, then told: {type(error).__name__}"
    return problem or "used"


def _work(store: kvkeep.Store) -> str:
    spaces = open_spaces(store)
    for conversation in range(CONVERSATIONS):
        for kind in KINDS:
            tokens = tokens_of(conversation, 601)
            hit = spaces[kind].resume(tokens)
            problem = wrong(kind, tokens, hit.offset, hit.caches) if hit.caches else ""
            if problem:
                return f"wrong bytes: {problem}"
    for conversation in range(CONVERSATIONS, CONVERSATIONS + 3):
        for kind in KINDS:
            tokens = tokens_of(conversation, 300)
            spaces[kind].snapshot(tokens, caches(kind, tokens))
    store.flush()
    store.report()
    store.conversations()
    store.verify()
    store.evict(to=store.used_bytes // 2)
    return ""


def serve(unguarded: bool) -> None:
    """Use the stores that are named on stdin."""
    light.install()
    small_chunks()
    logging.disable(logging.CRITICAL)
    if unguarded:
        opening.refuse_damage = lambda file: False
    for line in sys.stdin:
        try:
            told = use(line.strip())
        except Exception as error:
            told = f"raised: {type(error).__name__}: {error}"
        print(json.dumps(told), flush=True)


def run(root: Path, each: int, seed: int, unguarded: bool = False) -> Counter[tuple[str, str, str]]:
    """Damage and use; how often what became of it, by region and damage."""
    make(root / "store")
    seen: Counter[tuple[str, str, str]] = Counter()
    user = User(unguarded)
    try:
        for region, how, copy in cases(root / "store", each, random.Random(seed)):
            seen[region, how, user.ask(copy)] += 1
    finally:
        user.close()
    return seen


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=40, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unguarded", action="store_true")
    parser.add_argument("--use", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.use:
        serve(options.unguarded)
        return
    small_chunks()
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: PTH112
    with tempfile.TemporaryDirectory(prefix="kvkeep-torn-", dir=memory) as root:
        seen = run(Path(root), options.cases, options.seed, options.unguarded)
    total: Counter[str] = Counter()
    for (region, how, told), count in sorted(seen.items()):
        print(f"{count:>5}  {region:20}{how:8}{told}")
        total[told.split(":")[0]] += count
    print(", ".join(f"{what}: {count}" for what, count in total.most_common()))


if __name__ == "__main__":
    main()
