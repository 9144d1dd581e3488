from __future__ import annotations

import io
import json

import pytest

from kvkeep.cli.output import emit
from kvkeep.cli.progress import Bar, Progress, progress
from kvkeep.cli.tables import columns, table


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def rate(speed: float) -> str:
    return f"{speed:.0f} tok/s"


def test_a_bar_is_drawn_on_a_terminal_and_nothing_elsewhere() -> None:
    assert isinstance(progress("x", rate, Terminal()), Bar)
    assert type(progress("x", rate, io.StringIO())) is Progress


def test_a_bar_redraws_in_place_ten_times_a_second_and_at_the_end() -> None:
    out, clock = Terminal(), Clock()
    with Bar("Reading 100 tokens", rate, out, clock) as bar:
        for done, time in ((10, 1.0), (20, 1.01), (50, 2.0), (100, 2.05)):
            clock.time = time
            bar(done, 100)
    first, *lines = out.getvalue().removesuffix("\n").split("\r")
    assert first == ""
    assert [line.split()[-4:] for line in lines] == [
        ["%", "10", "tok/s", "0:00:09"],
        ["%", "25", "tok/s", "0:00:02"],
        ["%", "49", "tok/s", "0:00:02"],
    ]
    assert all(len(line) <= 79 for line in lines)
    assert out.getvalue().endswith("\n")
    assert "─" in lines[0]
    assert "─" not in lines[-1]


@pytest.mark.parametrize("columns", [1, 20, 40, 200])
def test_a_bar_never_wraps(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    Bar("Reading 41,208 tokens", rate, out, Clock())(1, 2)
    line = out.getvalue().removeprefix("\r")
    assert len(line) == min(columns - 1, 79)
    assert ("Reading" in line) == (columns > 7)


def test_a_bar_ends_its_line_when_the_work_fails() -> None:
    out = Terminal()
    bar = Bar("x", rate, out, Clock())
    bar(1, 2)
    with pytest.raises(RuntimeError), bar:
        raise RuntimeError
    assert out.getvalue().endswith("\n")


def test_a_bar_that_never_moved_leaves_no_line() -> None:
    out = Terminal()
    with Bar("x", rate, out):
        pass
    assert out.getvalue() == ""


def test_a_bar_stays_in_ascii_where_the_terminal_does() -> None:
    out = Terminal()
    out.encoding = "ascii"  # type: ignore[misc]
    Bar("x", rate, out, Clock())(1, 2)
    out.getvalue().encode("ascii")


def test_tables_align_and_leave_no_trailing_blanks() -> None:
    text = table(("a", "long head"), [("xyz", "1"), ("", "22")], right=("long head",))
    assert text.splitlines() == ["a    long head", "xyz          1", "            22"]
    assert columns([("a", "1"), ("bcd", "")]).splitlines() == ["a    1", "bcd"]
    assert columns([]) == ""


def test_json_is_one_object_and_keeps_letters(capsys: pytest.CaptureFixture[str]) -> None:
    emit(True, {"text": "«ü»"}, "for people")
    out = capsys.readouterr().out
    assert json.loads(out) == {"text": "«ü»"}
    assert "ü" in out
    emit(False, {}, "for people")
    assert capsys.readouterr().out == "for people\n"
