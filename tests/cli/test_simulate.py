"""``simulate``: three small traces, and what cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvkeep.cli import main
from kvkeep.cli.options import POLICIES
from kvkeep.cli.simulate import parse_budget
from kvkeep.prefixstore import eviction

GOOD = b'{"hash_ids": [1], "input_length": 500, "timestamp": 0}\n'
TRACES = Path(__file__).parents[1] / "data" / "traces"


def simulate(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["simulate", *words])
    assert result.exit_code == code, result.output
    return result


def asked(*words: str) -> Any:
    return json.loads(simulate(*words, "--json").stdout)


def test_the_command_offers_every_policy() -> None:
    assert set(POLICIES) == set(eviction.POLICIES)
    assert eviction.DEFAULT in POLICIES


def test_json_says_what_each_policy_came_to() -> None:
    found = asked(str(TRACES / "hashed.jsonl"), "--budget", "24blocks")
    assert found["requests"] == 40
    assert found["prompt_tokens"] == 177755
    assert found["ceiling"]["hit_rate"] == pytest.approx(141824 / 177755)
    assert [p["policy"] for p in found["policies"]] == list(POLICIES)
    for policy in found["policies"]:
        assert policy["kept_tokens"] == 24 * 512
        assert policy["kept_bytes"] == 24 * 512 * 131072
        assert policy["written_tokens"] - policy["evicted_tokens"] == policy["kept_tokens"]
        assert policy["regret_tokens"] == 141824 - policy["resumed_tokens"] > 0


@pytest.mark.parametrize("budget", ["12MiB", "12288tokens", "24blocks", "24 blocks"])
def test_a_budget_has_three_units(budget: str) -> None:
    words = (str(TRACES / "hashed.jsonl"), "--policy", "lru", "--bytes-per-token", "1KiB")
    found = asked(*words, "--budget", budget)
    assert found["budget_blocks"] == 24
    assert [p["policy"] for p in found["policies"]] == ["lru"]


def test_sessions_can_be_left_out_and_interleaved() -> None:
    trace = (str(TRACES / "runs.jsonl.gz"), "--budget", "60blocks", "--policy", "lru")
    one, all_at_once = asked(*trace), asked(*trace, "--at-once", "5")
    assert one["sessions"] == all_at_once["sessions"] == 5
    assert one["ceiling"] == all_at_once["ceiling"]
    assert one["policies"][0]["resumed_tokens"] > all_at_once["policies"][0]["resumed_tokens"]
    assert asked(*trace, "--sessions", "2")["requests"] < one["requests"]


def test_without_a_budget_there_is_only_the_ceiling() -> None:
    found = asked(str(TRACES / "text"))
    assert (found["sessions"], found["policies"], found["budget_blocks"]) == (2, [], None)
    assert found["ceiling"]["resumed_tokens"] == 3840
    shown = simulate(str(TRACES / "text")).stdout
    assert shown.startswith("8 requests in 2 sessions, ")
    assert shown.splitlines()[-1].startswith("unbounded   49.9 %")


def test_the_table_fits_a_terminal() -> None:
    shown = simulate(str(TRACES / "runs.jsonl.gz"), "--budget", "1GiB").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "budget 128 blocks, 1.0 GiB" in shown


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("empty.jsonl", b"\n", "holds no request"),
        ("text.jsonl", b"hello\n", "line 1, is not JSON"),
        ("list.jsonl", b"[1]\n", "line 1, is not a JSON object"),
        ("other.jsonl", b'{"a": 1, "b": 2}\n', "lines with a, b, which is no known format"),
        ("cut.jsonl.gz", gzip.compress(GOOD * 50)[:-12], "cannot be read"),
        ("plain.jsonl.gz", b'{"a": 1}\n', "cannot be read"),
        (
            "runs.jsonl",
            b'{"trace": "t", "in": 5, "rle": [[1, "x"]]}\n',
            "A request cannot be read",
        ),
        ("hash.jsonl", b'{"hash_ids": [1], "input_length": 5}\n', "A request cannot be read"),
        (
            "huge.jsonl",
            b'{"trace": "t", "in": 64, "rle": [[1, 10000000000000]]}\n',
            "A request cannot be read",
        ),
    ],
)
def test_what_is_no_trace_is_refused(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    said = simulate(str(file), "--budget", "8blocks", code=2).stderr
    assert problem in said
    assert "docs/simulate.md" in said


def test_budgets_and_blocks_that_make_no_sense_are_usage_errors() -> None:
    trace = str(TRACES / "hashed.jsonl")
    assert "not one block" in simulate(trace, "--budget", "1MB", code=2).stderr
    assert "not a size" in simulate(trace, "--budget", "many", code=2).stderr
    assert "a multiple of 512" in simulate(trace, "--block", "700", code=2).stderr
    assert parse_budget("2,560 tokens") == (2560, "tokens")
    with pytest.raises(ValueError, match="keeps nothing"):
        parse_budget("0blocks")
