"""Every test that docs/reliability.md names exists, and every fault test is named there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text("utf-8")
NAMED = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")


def functions(file: Path) -> set[str]:
    """The test functions of a module."""
    tree = ast.parse(file.read_text("utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_what_holds_a_promise_exists() -> None:
    named = [(file, name) for file, name in NAMED.findall(PAGE) if not file.startswith("tests/")]
    assert len(named) > 50
    for file, name in named:
        assert (ROOT / "tests" / file).exists() or file == "a.py", file
        if name and file != "a.py":
            assert name in functions(ROOT / "tests" / file), f"{file}::{name}"


def test_every_promise_is_held() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and line.count("|") == 3]
    promises = PAGE[PAGE.index("## Promises") : PAGE.index("## Not promised")]
    checked = [row for row in rows if row in promises and row != "| promise | held by |"]
    assert len(checked) > 20
    for row in checked:
        assert NAMED.search(row.split("|")[2]), row


def test_every_fault_test_holds_something() -> None:
    named = {file for file, _ in NAMED.findall(PAGE)}
    files = {f"faults/{file.name}" for file in (ROOT / "tests/faults").glob("test_*.py")}
    assert files - {f"faults/{Path(__file__).name}"} <= named
    assert f"tests/faults/{Path(__file__).name}" in named
