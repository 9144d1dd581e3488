"""The frame that all commands share: help, lazy loading, errors and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvkeep import cli
from kvkeep.cli import COMMANDS, main, options
from kvkeep.errors import Damaged, KvkeepError, StoreFull
from kvkeep.prefixstore.store import open_store

HEAVY = ("mlx", "mlx_lm", "lmdb", "numpy", "transformers", "msgpack", "zstandard", "platformdirs")

WITHOUT_STORE = ("simulate",)
WITHOUT_TABLE = ("serve",)


def loaded(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches_with_an_example(name: str) -> None:
    shown = CliRunner().invoke(main, [name, "--help"])
    assert shown.exit_code == 0
    assert loaded(name).name == name
    _, found, example = shown.output.partition("Example:\n")
    assert found, f"{name} has no example"
    assert f"kvkeep {name} " in example
    assert len(loaded(name).get_short_help_str(200)) <= 64, "cut off in the list of commands"
    assert max(map(len, shown.output.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_and_the_common_ones_are_there(name: str) -> None:
    params = [p for p in loaded(name).params if isinstance(p, click.Option)]
    assert not [p.name for p in params if not p.help]
    common = {"--store", "--json", "--debug"}
    common -= {"--store"} if name in WITHOUT_STORE else set()
    common -= {"--json"} if name in WITHOUT_TABLE else set()
    assert common <= {o for p in params for o in p.opts}


def test_a_misspelt_command_is_told_which_may_be_meant() -> None:
    result = CliRunner().invoke(main, ["reprot"])
    assert result.exit_code == 2
    assert "No such command 'reprot'. Did you mean 'report'?" in result.stderr
    assert "Did you mean" not in CliRunner().invoke(main, ["xyz"]).stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    open_store(tmp_path / "store").close()
    words = [sys.executable, "-m", "kvkeep.cli", "report", "--store", str(tmp_path / "store")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: The output cannot be written: No space left")
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *words]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    os.mkfifo(trace)
    with (
        subprocess.Popen(
            [sys.executable, "-m", "kvkeep.cli", "simulate", str(trace)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        trace.open("w"),
    ):  # opens once the command reads
        process.send_signal(signal.SIGINT)
        said, error = process.communicate(timeout=60)
    assert (process.returncode, said, error) == (130, "", "\ninterrupted\n")


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["doctor", "--help"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    program = (
        "import sys; from kvkeep.cli import main\n"
        f"main({argv!r}, prog_name='kvkeep', standalone_mode=False)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(main, ["nonsense"]).exit_code == 2


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """A command ``fail`` that raises what the list holds."""
    errors: list[Exception] = []

    @click.command("fail")
    @options.common
    def command(store: Path, as_json: bool) -> None:
        raise errors[0]

    monkeypatch.setattr(
        cli.Commands, "get_command", lambda _self, _ctx, name: command if name == "fail" else None
    )
    return errors


@pytest.mark.parametrize(
    ("error", "code", "first"),
    [
        (StoreFull("no room"), 6, "error: no room"),
        (Damaged("bad byte"), 4, "error: bad byte"),
        (KvkeepError("odd"), 1, "error: odd"),
        (ZeroDivisionError("x"), 1, "error: unexpected ZeroDivisionError: x"),
    ],
)
def test_an_error_is_one_message_with_its_exit_code(
    failing: list[Exception], error: Exception, code: int, first: str
) -> None:
    failing.append(error)
    result = CliRunner().invoke(main, ["fail"])
    assert result.exit_code == code
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == first
    assert "Traceback" not in result.stderr
    if remedy := getattr(error, "remedy", "--debug"):
        assert remedy in result.stderr


@pytest.mark.parametrize("error", [StoreFull("no room"), ZeroDivisionError("x")])
def test_debug_keeps_the_error_for_its_traceback(
    failing: list[Exception], error: Exception
) -> None:
    failing.append(error)
    assert CliRunner().invoke(main, ["fail", "--debug"]).exception is error
