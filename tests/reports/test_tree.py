"""`kvkeep tree`: the edges are those of the stored token sequences, sums included."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from click.testing import CliRunner

from kvkeep.cli import main
from kvkeep.prefixstore.layout import footprint
from tests.faults.rows import tokens_of
from tests.reports.stores import keep, opened, space_of


def show(store: Path, *words: str) -> str:
    result = CliRunner().invoke(main, ["tree", *words, "--store", str(store), "--debug"])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def edges(sequences: list[list[int]]) -> dict[tuple[int, ...], int]:
    """Every edge of the radix tree by brute force: its whole prefix, and who goes through."""
    cuts = set()
    for a in sequences:
        cuts.add(tuple(a))
        for b in sequences:
            shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            if shared:
                cuts.add(tuple(a[:shared]))
    leaves = [s for s in sequences if not any(t != s and t[: len(s)] == s for t in sequences)]
    return {cut: sum(tuple(leaf[: len(cut)]) == cut for leaf in leaves) for cut in cuts}


def test_edges_are_those_of_the_sequences(tmp_path: Path) -> None:
    sequences = [tokens_of(c, n).tolist() for c, n in ((0, 100), (0, 180), (1, 170), (5, 90))]
    due = edges(sequences)
    with opened(tmp_path / "s") as store:
        space = space_of(store)
        for sequence in sequences:
            keep(space, "plain", sequence, origin="output")
        store.flush()
        found = store.tree(space, first=3)
        kept = next(info.bytes for info in store.spaces())
        used = store.used_bytes
    by_id = {branch.id: branch for branch in found}
    starts = {
        cut: max((len(c) for c in due if c != cut and cut[: len(c)] == c), default=0) for cut in due
    }
    assert sorted((starts[cut], len(cut), n) for cut, n in due.items()) == sorted(
        (b.start, b.stop, b.conversations) for b in found
    )
    assert all(
        tuple(s) in {cut[starts[cut] : starts[cut] + 3] for cut in due}
        for s in (b.first for b in found)
    )
    assert {offset for b in found for offset, _ in b.points} == {100, 180, 170, 90}
    assert {origin for b in found for _, origin in b.points} == {"output"}
    roots = [b for b in found if b.depth == 0]
    assert sum(b.below for b in roots) == sum(b.bytes for b in found) == kept < footprint(used)
    for branch in found:
        if branch.depth:
            assert found.index(by_id[branch.parent]) < found.index(branch)
            assert by_id[branch.parent].stop == branch.start
    siblings = [b.below for b in found if b.parent == roots[0].id]
    assert all(a >= b for a, b in pairwise(siblings))


def test_a_conversation_of_very_many_turns_is_shown(tmp_path: Path) -> None:
    turns = 1200
    tokens = [7 * i % 1000 for i in range(turns)]
    with opened(tmp_path / "s") as store:
        space = space_of(store)
        for length in range(1, turns + 1):
            if length % 8 == 0:
                keep(space, "plain", tokens[:length])
        store.flush()
        found = store.tree(space)
    assert len(found) == turns // 8
    assert found[-1].depth == turns // 8 - 1
    shown = show(tmp_path / "s")
    assert f"and {turns // 8 - 40} more" in shown
    assert max(map(len, shown.splitlines())) <= 80
    told = json.loads(show(tmp_path / "s", "--json"))
    assert len(told["spaces"][0]["nodes"]) == turns // 8


def test_the_tree_is_drawn(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        space = space_of(store, name="some/model")
        for conversation in (0, 1, 5):
            keep(space, "plain", tokens_of(conversation, 200))
    shown = show(tmp_path / "s").splitlines()
    assert "model  kv  3 conversations" in shown[0]
    drawn = [line[: line.index("–")] for line in shown[1:]]
    assert drawn in (
        ["└─ 0", "   ├─ 64", "   │  ├─ 150", "   │  └─ 150", "   └─ 64"],
        ["└─ 0", "   ├─ 64", "   └─ 64", "      ├─ 150", "      └─ 150"],
    )
    text = "\n".join(shown)
    assert "shared by 3" in text
    assert text.count("points 200") == 3


def test_only_a_tenants_tree_is_shown_for_its_salt(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        for salt in (None, "red", "blue"):
            keep(space_of(store, salt=salt, name=f"model-{salt}"), "plain", tokens_of(0, 30))
    assert {"model-None", "model-red", "model-blue"} <= set(show(tmp_path / "s").split())
    assert "model-red" in show(tmp_path / "s", "--salt", "red")
    assert "model-blue" not in show(tmp_path / "s", "--salt", "red")
    assert "Nothing is stored" in show(tmp_path / "s", "--salt", "green")
