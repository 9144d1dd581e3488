"""What the disk may hold after a power loss, and what a store makes of it.

    python -m tests.faults.powerloss --images 200
    python -m tests.faults.powerloss --images 200 --durability process

A worker runs under ``strace``, which writes down every write to the data file and every flush.
From that, images of the disk are made as a power loss may leave them at any moment: everything
before the last flush that had ended, and of what was written since an arbitrary part, page by
page or sector by sector, in any order. Each image is opened and checked as after a kill. In
particular, all that the worker had been told to be stored by then must be there. Without that
durability the store must begin anew, and not be believed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvkeep.persistence.unsynced import MARK
from tests.faults.sigkill import ROOT, Told, check

SECTOR = 512
EARLY = 40
PARTS = (0.0, 0.2, 0.5, 0.9, 1.0)
FILE = "".join(f"\\x{byte:02x}" for byte in b"data.mdb")
CALLS = "pwrite64,pwritev,pwritev2,write,writev,lseek,fdatasync,fsync,msync,sync,ftruncate,truncate"

_CALL = re.compile(r"^(\d+) +(\w+)\((.*)$")
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>")
_DATA = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_WRITTEN = re.compile(r"\) *= (\d+)$")
_OFFSET = re.compile(r", (\d+)\)? *(?:=|<unfinished)")


@dataclass
class Write:
    """Bytes that were handed to the system for the data file."""

    offset: int
    data: bytes


@dataclass
class Flush:
    """A flush; what was written before it began is on the disk once it ends."""

    begins: bool


@dataclass
class Said:
    """A line of the worker."""

    line: str


@dataclass
class Trace:
    """What happened, in order."""

    events: list[Write | Flush | Said] = field(default_factory=list)


def record(folder: Path, seconds: int, seed: int, durability: str) -> Trace:
    """Run a worker under strace for a while, and read what it did."""
    log = folder.with_name("trace")
    job = {"folder": str(folder), "seed": seed, "budget": 500_000_000, "harm": False}
    command = ["strace", "-f", "-v", "-y", "-xx", "-s", "33554432", "-e", f"trace={CALLS}"]
    command += ["-o", str(log), sys.executable, "-m", "tests.faults.worker"]
    command += [durability, str(seconds)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    process.communicate(json.dumps(job) + "\n")
    return read(log)


def read(log: Path) -> Trace:
    """The events in strace's output."""
    trace = Trace()
    place = 0
    for line in log.read_text("ascii").splitlines():
        resumed = _RESUMED.match(line)
        if resumed is not None:
            if "sync" in resumed[2]:
                trace.events.append(Flush(begins=False))
            continue
        call = _CALL.match(line)
        if call is None:
            continue
        name, rest = call[2], call[3]
        if name == "write" and rest.startswith("1<"):
            text = _bytes(rest).decode()
            trace.events += [Said(said) for said in text.splitlines()]
        elif f"{FILE}>" not in rest.split(",")[0]:
            continue
        elif "sync" in name:
            trace.events.append(Flush(begins=True))
            if "unfinished" not in rest:
                trace.events.append(Flush(begins=False))
        elif name == "lseek":
            place = int(rest.split(",")[1])
        elif name in ("pwrite64", "writev"):
            data = _bytes(rest)
            assert '"...' not in rest, "strace left something out"
            written = _WRITTEN.search(rest)
            assert written is None or int(written[1]) == len(data), "a write was cut short"
            if name == "pwrite64":
                offset = _OFFSET.search(rest[rest.rindex('"') :])
                assert offset is not None, line[-200:]
                place = int(offset[1])
            trace.events.append(Write(place, data))
            place += len(data)
        else:
            raise AssertionError(f"another way to write: {line[:200]}")
    return trace


def _bytes(text: str) -> bytes:
    return b"".join(bytes.fromhex(part.replace("\\x", "")) for part in _DATA.findall(text))


def image(trace: Trace, end: int, rng: random.Random) -> tuple[bytes, list[str]]:
    """The data file after a power loss right before event ``end``, and what was said by then."""
    flushed, begun = 0, 0
    said = []
    for number, event in enumerate(trace.events[:end]):
        if isinstance(event, Said):
            said.append(event.line)
        elif isinstance(event, Flush) and event.begins:
            begun = number
        elif isinstance(event, Flush):
            flushed = begun
    disk = bytearray()
    piece = rng.choice((SECTOR, 4096, 1 << 30))
    part = rng.choice(PARTS)
    for number, event in enumerate(trace.events[:end]):
        if not isinstance(event, Write):
            continue
        for at in range(0, len(event.data), piece):
            if number < flushed or rng.random() < part:
                _put(disk, event.offset + at, event.data[at : at + piece])
    return bytes(disk), said


def _put(disk: bytearray, offset: int, data: bytes) -> None:
    if len(disk) < offset + len(data):
        disk.extend(bytes(offset + len(data) - len(disk)))
    disk[offset : offset + len(data)] = data


def images(
    folder: Path, trace: Trace, number: int, rng: random.Random, durability: str
) -> Iterator[tuple[Path, Told]]:
    """Stores as a power loss may leave them, and what the worker had been told by then.

    One in five is from the first moments, while the file is being made.
    """
    first = next(n for n, event in enumerate(trace.events) if isinstance(event, Write))
    for turn in range(number):
        end = first + EARLY if turn % 5 == 0 else len(trace.events)
        data, said = image(trace, rng.randrange(first, end + 1), rng)
        copy = folder.with_name("after")
        copy.mkdir(mode=0o700)
        shutil.copy(folder / "store.json", copy)
        (copy / "data.mdb").write_bytes(data)
        (copy / "data.mdb").chmod(0o600)
        told = Told()
        if durability == "safe":
            for line in said[1:]:
                told.hear(line, small=False)
        else:
            (copy / MARK).write_text("another boot")
        yield copy, told
        shutil.rmtree(copy)


def run(root: Path, number: int, seconds: int, seed: int, durability: str = "safe") -> Counter[str]:
    """Record, lose power ``number`` times, check; what was seen."""
    folder = root / "store"
    trace = record(folder, seconds, seed, durability)
    seen: Counter[str] = Counter()
    for event in trace.events:
        seen[f"traced: {type(event).__name__}"] += not isinstance(event, Flush) or event.begins
    for copy, told in images(folder, trace, number, random.Random(seed), durability):
        seen["power losses"] += 1
        seen += check(copy, told, harm=False)
    return seen


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=20, help="of work under strace")
    parser.add_argument("--durability", default="safe")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvkeep-power-") as root:
        seen = run(Path(root), options.images, options.seconds, options.seed, options.durability)
    for what, count in sorted(seen.items()):
        print(f"{count:>14,}  {what}")


if __name__ == "__main__":
    main()
