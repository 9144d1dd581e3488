"""The pages that describe the command line say what it does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from kvkeep.cli import COMMANDS, main
from kvkeep.cli.advice import ADVICE, MEANING
from kvkeep.cli.reference import reference
from kvkeep.prefixstore.policy import Reason
from tests.cli.conftest import Ask
from tests.cli.test_simulate import TRACES, asked
from tests.cli.test_store_commands import CONTEXT, FIRST, damage

DOCS = Path(__file__).parents[2] / "docs"
VARYING = (
    "fields",
    "packages",
    "reasons",
    "lost_tokens",
    "limited_by",
    "refusals",
    "tiers",
    "totals",
)


def words(text: str) -> str:
    return " ".join(text.replace("`", "").replace("\b", "").split())


def test_the_reference_holds_every_command_option_and_help_text() -> None:
    page = words((DOCS / "cli.md").read_text(encoding="utf-8"))
    assert "kvkeep snapshot [OPTIONS]" in words(reference())
    missing = []
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        wanted = [f"kvkeep {name} [OPTIONS]", words(command.help or "")]
        for option in command.params:
            if isinstance(option, click.Option):
                wanted += [option.opts[0], words(option.help or "")]
        missing += [f"{name}: {text}" for text in wanted if text not in page]
    assert not missing, "run: python -m kvkeep.cli.reference docs/cli.md"


def paths(value: Any, at: str = "") -> Iterator[str]:
    """Every leaf of a JSON value by its path: ``limits[].kind``; varying keys are ``*``."""
    if isinstance(value, dict) and at.rpartition(".")[2] in VARYING:
        yield f"{at}.*"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, f"{at}.{key}" if at else key)
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, f"{at}[]")
    else:
        yield at


def documented(command: str) -> set[str]:
    """The keys that ``docs/json.md`` lists for a command."""
    text = (DOCS / "json.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {command}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def test_json_has_exactly_the_documented_keys(
    models: Callable[..., str], ask: Ask, store: Path, tmp_path: Path
) -> None:
    model = ("--model", models("falcon_h1"))
    other = CONTEXT + "Which are they?"
    seen: dict[str, Any] = {
        "snapshot": ask("snapshot", *model, "--prompt", FIRST, "--prefill-step", "64"),
        "restore": ask("restore", *model, "--prompt", other, "--generate", "2"),
        "why": ask("why", *model, "--prompt", other),
        "ls": ask("ls"),
        "report": ask("report"),
        "evict": ask("evict", "--to", "1GiB"),
    }
    (over,) = [w for w in seen["report"]["worst"] if w["resumed_tokens"]]
    past = ask("why", over["request"])
    seen["why"] |= {"request": past["request"], "notes": past["notes"]}
    seen["tree"] = ask("tree")
    seen["top"] = ask("top")
    conversation = seen["ls"]["conversations"][0]["id"]
    seen["pin"] = ask("pin", conversation, "--for", "1h")
    seen["ls"] = ask("ls")
    seen["unpin"] = ask("unpin", conversation)
    seen["inspect"] = ask("inspect", conversation, "--tokens")
    file = str(tmp_path / "out.safetensors")
    seen["export"] = ask("export", conversation, file)
    seen["import"] = ask("import", file, *model)
    damage(store)
    seen["verify"] = ask("verify", code=4)
    store.chmod(0o755)
    seen["doctor"] = ask("doctor")
    seen["purge"] = ask("purge", "--conversation", conversation, "--yes", "--compact")

    seen["simulate"] = asked(str(TRACES / "hashed.jsonl"), "--budget", "24blocks")

    assert set(seen) == set(COMMANDS) - {"serve"}  # which prints nothing and goes on
    for name, answer in seen.items():
        empty_here = {p for p in documented(name) if p.endswith("boundaries[]")}
        assert set(paths(answer)) | empty_here == documented(name), name


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_documented(reason: Reason) -> None:
    text = (DOCS / "json.md").read_text(encoding="utf-8").partition("## Reasons")[2]
    assert f"| `{reason}" in text
    assert str(reason) in MEANING
    assert str(reason) in ADVICE
