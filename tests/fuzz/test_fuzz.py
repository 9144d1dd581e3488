"""Hostile bytes for every decoder, for a bounded time; ``fuzz.py`` does it for longer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvkeep.errors import KvkeepError
from tests.fuzz import fuzz, targets

CASES = Path(__file__).parent / "cases"
SECONDS = 2
TRIES = 300


def test_every_target_is_fuzzed() -> None:
    assert tuple(targets.TARGETS) == fuzz.NAMES


@pytest.mark.parametrize("name", fuzz.NAMES)
def test_what_kvkeep_writes_is_accepted(name: str) -> None:
    target = targets.TARGETS[name]
    accepted = 0
    for seed in target.seeds():
        try:
            target.run(seed)
            accepted += 1
        except KvkeepError:
            pass
    assert accepted, "mutations of what is refused at once reach nothing"


@pytest.mark.parametrize("case", sorted(CASES.glob("*/*")), ids=lambda path: path.name)
def test_what_was_found_once(case: Path) -> None:
    targets.run(case.parent.name, case.read_bytes())


@pytest.mark.parametrize("name", fuzz.NAMES)
def test_mutations(name: str) -> None:
    """A few hundred blind mutations, also where the fuzzer is not installed."""
    rng = random.Random(name)
    seeds = targets.TARGETS[name].seeds()
    for _ in range(TRIES):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(4):
                case 0:
                    data[at : at + 1] = rng.randbytes(1)
                case 1:
                    data[at : at + 1] = bytes(b ^ 1 << rng.randrange(8) for b in data[at : at + 1])
                case 2:
                    del data[at : at + rng.randint(1, 9)]
                case 3:
                    data[at:at] = rng.choice(
                        (b"\0", b"\xff", b"\xdd\xff\xff\xff\xff", b"\x91" * 40)
                    )
        targets.run(name, bytes(data))


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.NAMES)
def test_coverage_guided(name: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris, the fuzzer, has no wheel here or is left out")
    assert fuzz.fuzz(name, SECONDS, tmp_path / "corpus", tmp_path / "found") > 100
