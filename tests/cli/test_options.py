from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvkeep.cli import options
from kvkeep.cli.models import Choice
from kvkeep.cli.prompts import PromptUnreadable, Source, parse_chat, parse_ids


class Words:
    """A tokenizer whose ids are the lengths of words; a template adds 900 and 901."""

    def __init__(self, template: bool = True) -> None:
        self.has_chat_template = template

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool
    ) -> list[int]:
        assert add_generation_prompt
        return [900, *(i for m in messages for i in self.encode(m["content"])), 901]


def ran(decorate: Any, argv: list[str], env: dict[str, str] | None = None) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    @click.command()
    @decorate
    def command(**values: Any) -> None:
        seen.update(values)

    result = CliRunner().invoke(command, argv, env=env, catch_exceptions=False)
    return seen if result.exit_code == 0 else {"exit": result.exit_code, "said": result.stderr}


def test_the_store_comes_from_option_then_environment_then_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = {"KVKEEP_STORE": "from-env"}
    assert ran(options.common, ["--store", "given"], env)["store"] == Path("given")
    assert ran(options.common, [], env)["store"] == Path("from-env")
    monkeypatch.delenv("KVKEEP_STORE", raising=False)
    assert ran(options.common, [])["store"].name == "kvkeep"


def test_a_budget_is_bytes_and_a_bad_one_is_a_usage_error() -> None:
    assert ran(options.budget, []) == {"max_bytes": None}
    assert ran(options.budget, ["--max-bytes", "60GiB"]) == {"max_bytes": 60 * 2**30}
    assert ran(options.budget, [], {"KVKEEP_MAX_BYTES": "1kB"}) == {"max_bytes": 1000}
    bad = ran(options.budget, ["--max-bytes", "plenty"])
    assert bad["exit"] == 2
    assert "'plenty' is not a size" in bad["said"]
    assert "50GB" in bad["said"]


def test_the_model_options_carry_the_cache_scheme() -> None:
    seen = ran(options.model, ["--model", "m", "--kv-bits", "8", "--salt", "s"])
    assert seen == {"choice": Choice("m", kv_bits=8, salt="s")}
    assert seen["choice"].kv_scheme == "affine:8:64@5000"
    assert Choice("m").kv_scheme is None
    assert ran(options.model, ["--model", "m", "--kv-bits", "7"])["exit"] == 2
    assert ran(options.model, [])["exit"] == 2


def test_a_prompt_has_exactly_one_source(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("hello")
    assert ran(options.prompt, ["--prompt", "a", "--raw"]) == {"source": Source("a", raw=True)}
    assert ran(options.prompt, ["--prompt-file", str(file)]) == {"source": Source(prompt_file=file)}
    assert ran(options.prompt, [])["exit"] == 2
    assert ran(options.prompt, ["--prompt", "a", "--prompt-file", str(file)])["exit"] == 2
    assert ran(options.prompt, ["--prompt-file", str(tmp_path / "none")])["exit"] == 2


def test_text_is_a_user_message_unless_raw_or_without_template(tmp_path: Path) -> None:
    assert Source("one three").tokens(Words()) == [900, 3, 5, 901]
    assert Source("one three", raw=True).tokens(Words()) == [3, 5]
    assert Source("one three").tokens(Words(template=False)) == [3, 5]
    file = tmp_path / "p.txt"
    file.write_text("seventh")
    assert Source(prompt_file=file).tokens(Words()) == [900, 7, 901]


def test_chats_and_ids_are_read_from_files(tmp_path: Path) -> None:
    chat, ids = tmp_path / "chat.json", tmp_path / "ids"
    chat.write_text(
        json.dumps([{"role": "system", "content": "a"}, {"role": "user", "content": "bb"}])
    )
    ids.write_text("[5, -6, 7]")
    assert Source(chat=chat).tokens(Words()) == [900, 1, 2, 901]
    assert Source(tokens_file=ids).tokens(Words()) == [5, -6, 7]
    ids.write_text(" 5\n-6\t7 ")
    assert Source(tokens_file=ids).tokens(Words()) == [5, -6, 7]


@pytest.mark.parametrize(
    "text", ["[1, 2.5]", "[true]", "[[1]]", '["x"]', "[1", "1 x", "1.5", "9" * 19]
)
def test_ids_that_are_no_integers_are_refused(text: str) -> None:
    with pytest.raises(PromptUnreadable, match="Write"):
        parse_ids(text, "f")


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"content": "x"}]', '[{"role": 1}]'])
def test_chats_that_are_no_messages_are_refused(text: str) -> None:
    with pytest.raises(PromptUnreadable, match="f "):
        parse_chat(text, "f")


def test_what_a_template_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text('[{"role": "user"}]')
    with pytest.raises(PromptUnreadable, match=r"cannot write this prompt: 'content'\n.*--raw"):
        Source(chat=chat).tokens(Words())


@pytest.mark.parametrize(
    "env", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_text_is_utf_8_whatever_the_locale(env: dict[str, str]) -> None:
    program = (
        "import sys; from pathlib import Path; from kvkeep.cli.prompts import Source\n"
        "class Letters:\n"
        "    has_chat_template = False\n"
        "    def encode(self, text): return [ord(c) for c in text]\n"
        "print(Source(sys.argv[1]).tokens(Letters()), "
        "Source(prompt_file=Path('-')).tokens(Letters()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "ü港"],
        input="«é".encode(),
        capture_output=True,
        env={**os.environ, **env},
        check=True,
    )
    assert done.stdout.decode().split("\n")[0] == f"{[*map(ord, 'ü港')]} {[*map(ord, '«é')]}"


def test_bytes_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\x00")))
    for source, name in (
        (Source("a\udcffb"), "--prompt"),
        (Source(prompt_file=Path("-")), "stdin"),
    ):
        with pytest.raises(PromptUnreadable, match=f"{name} is not text in UTF-8"):
            source.tokens(Words())


def test_empty_and_unreadable_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptUnreadable, match="empty"):
        Source("", raw=True).tokens(Words())
    with pytest.raises(PromptUnreadable, match="empty"):
        parse_ids("[]", "f")
    binary = tmp_path / "b"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptUnreadable, match="UTF-8"):
        Source(prompt_file=binary).tokens(Words())
