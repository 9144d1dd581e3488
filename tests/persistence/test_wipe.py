"""Overwriting what was deleted, and compacting: what is kept stays as it is."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvkeep.errors import Damaged, StoreInUse
from kvkeep.persistence.compact import compact
from kvkeep.persistence.environment import Environment

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def opened(folder: Path) -> Environment:
    return Environment(folder, map_size=256 * MIB, databases=["a", "b"])


def contents(env: Environment) -> dict[tuple[str, bytes], bytes]:
    with env.begin() as txn:
        return {(n, bytes(k)): bytes(v) for n in ("a", "b") for k, v in txn.items(n)}


def empty_commits(env: Environment) -> None:
    for _ in range(2):
        with env.begin(write=True) as txn:
            txn.put("a", b"again", b"")


def secret(number: int, size: int) -> bytes:
    return (b"secret%06d" % number) * size


def churn(env: Environment, rng: random.Random, kept: dict[tuple[str, bytes], bytes]) -> set[int]:
    """Random changes, noted in ``kept``; the numbers of all secrets that were ever written."""
    written = set()
    for _ in range(rng.randint(5, 25)):
        with env.begin(write=True) as txn:
            for _ in range(rng.randint(1, 12)):
                name, key = rng.choice("ab"), rng.randrange(60).to_bytes(2, "big")
                if rng.random() < 0.45:
                    txn.delete(name, key)
                    kept.pop((name, key), None)
                else:
                    number = rng.randrange(10**6)
                    kept[name, key] = secret(number, rng.choice((1, 20, 160, 900)))
                    txn.put(name, key, kept[name, key])
                    written.add(number)
    return written


def left(data: bytes, numbers: set[int]) -> set[int]:
    return {n for n in numbers if secret(n, 1) in data}


@pytest.mark.parametrize("seed", range(8))
def test_nothing_that_was_deleted_is_left_and_nothing_else_is_lost(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    kept: dict[tuple[str, bytes], bytes] = {}
    written: set[int] = set()
    file = tmp_path / "store" / "data.mdb"
    removed = 0
    with opened(tmp_path / "store") as env:
        for _ in range(4):
            written |= churn(env, rng, kept)
            empty_commits(env)
            kept["a", b"again"] = b""
            living = {int(v[6:12]) for v in kept.values() if v}
            before = left(file.read_bytes(), written - living)
            assert env.wipe() > 0
            assert left(file.read_bytes(), written - living) == set()
            assert left(file.read_bytes(), living) == living
            assert contents(env) == kept
            assert env.check().faults == []
            assert env.check().complete
            removed += len(before)
    assert removed > 20


def test_a_wipe_writes_nothing_into_a_damaged_file(tmp_path: Path) -> None:
    file = tmp_path / "store" / "data.mdb"
    with opened(tmp_path / "store") as env:
        churn(env, random.Random(1), {})
        with env.begin(write=True) as txn:
            txn.put("b", b"large", bytes(50_000))
        data = bytearray(file.read_bytes())
        # The first page of a value claims to be longer than it is.
        at = next(p for p in range(0, len(data), 4096) if data[p + 10 : p + 16] == b"\4\0\r\0\0\0")
        data[at + 12] += 1
        with file.open("r+b") as out:
            out.write(data)
        with pytest.raises(Damaged, match=r"used twice|not in use"):
            env.wipe()
        assert file.read_bytes() == data


def test_compacting_gives_the_room_back_and_keeps_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    kept: dict[tuple[str, bytes], bytes] = {}
    with opened(folder) as env:
        written = churn(env, random.Random(4), kept)
        with env.begin(write=True) as txn:
            txn.put("b", b"large", bytes(8 * MIB))
        with env.begin(write=True) as txn:
            txn.delete("b", b"large")
        with pytest.raises(StoreInUse, match="in this process"):
            compact(folder)
        assert contents(env) == kept
    before, after = compact(folder, wipe=True)
    assert before > 8 * MIB > after
    assert (folder / "data.mdb").stat().st_size == after
    assert (folder / "data.mdb").stat().st_mode & 0o777 == 0o600
    living = {int(v[6:12]) for v in kept.values()}
    assert left((folder / "data.mdb").read_bytes(), written) == living
    assert sorted(path.name for path in folder.iterdir()) == ["data.mdb", "lock.mdb"]
    with opened(folder) as env:
        assert contents(env) == kept
        churn(env, random.Random(5), kept)
        assert contents(env) == kept
        assert env.check().faults == []


def test_compacting_waits_for_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with opened(folder) as env:
        churn(env, random.Random(4), {})
        before = contents(env)
    script = (
        "import sys\n"
        "from kvkeep.persistence.environment import Environment\n"
        f"env = Environment(sys.argv[1], map_size={256 * MIB}, databases=['a'])\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    words = [sys.executable, "-W", "error", "-c", script, str(folder)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StoreInUse, match="another process"):
            compact(folder)
        assert sorted(path.name for path in folder.iterdir()) == ["data.mdb", "lock.mdb"]
        other.communicate("")
    compact(folder)
    with opened(folder) as env:
        assert contents(env) == before


def test_what_a_killed_compaction_left_goes_at_the_next_opening(tmp_path: Path) -> None:
    opened(tmp_path / "store").close()
    (tmp_path / "store" / "compact-x1").mkdir()
    (tmp_path / "store" / "compact-x1" / "data.mdb").write_bytes(b"half")
    opened(tmp_path / "store").close()
    assert not (tmp_path / "store" / "compact-x1").exists()
