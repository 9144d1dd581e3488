"""``kvkeep purge`` asks first, and says what went."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from kvkeep.cli import main
from kvkeep.errors import StoreInUse
from tests.faults.rows import KINDS
from tests.privacy.test_purge import fill, opened, serves, space_of


def run(folder: Path, *words: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(main, ["purge", *words, "--store", str(folder)], input=answer)


def test_it_asks_and_then_removes(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with opened(folder) as store:
        fill(store, "red", 1)
        fill(store, "blue", 2)
    refused = run(folder, "--salt", "red", answer="n\n")
    assert refused.exit_code == 1
    assert "Remove all spaces of this salt for good? [y/N]" in refused.stderr
    with opened(folder) as store:
        assert serves(store, "red", 1) == 6 * len(KINDS)
    told = run(folder, "--salt", "red", answer="y\n")
    assert told.exit_code == 0
    assert told.stdout.startswith("Removed ")
    with opened(folder) as store:
        assert serves(store, "red", 1) == 0
        assert serves(store, "blue", 2) == 6 * len(KINDS)


def test_compacting_makes_the_file_smaller(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with opened(folder) as store:
        fill(store, "red", 1)
        fill(store, "blue", 2)
        kept = space_of(store, "blue", KINDS[0]).id.hex()
        busy = run(folder, "--salt", "green", "--yes", "--compact")
        assert busy.exit_code == StoreInUse.exit_code
        assert busy.stderr.startswith("error: The file was not rewritten: ")
        assert "open in this process" in busy.stderr
        assert busy.stdout.startswith("Removed ")
    told = json.loads(run(folder, "--salt", "red", "--yes", "--compact", "--json").stdout)
    assert (told["spaces"], told["nodes"] > 0) == (len(KINDS), True)
    assert told["compacted"]["after"] < told["compacted"]["before"] * 0.7
    assert told["compacted"]["after"] == (folder / "data.mdb").stat().st_size
    told = json.loads(run(folder, "--space", kept[:6], "--yes", "--json").stdout)
    assert (told["spaces"], told["compacted"]) == (1, None)


def test_exactly_one_thing_is_named(tmp_path: Path) -> None:
    for words in ((), ("--salt", "a", "--space", "b")):
        told = run(tmp_path / "store", *words)
        assert told.exit_code == 2
        assert "Say what goes" in told.stderr
