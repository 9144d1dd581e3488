"""`kvkeep top`: what it sums, that it fits, and that it leaves a real terminal as it was."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvkeep.cli import main
from kvkeep.cli.top import ENTER, HOME, LEAVE
from kvkeep.cli.top_screen import Live, Store, frame
from kvkeep.prefixstore.event import Event
from tests.reports.stores import SPACE, opened, space_of

NOW = 1_790_000_000.0


def lookup(ago: float, **more: object) -> Event:
    values = {"prompt": 100, "matched": 60, "resumed": 50, "seconds": 0.5, "rate": 10.0} | more
    return Event("lookup", NOW - ago, SPACE, "full", **values)  # type: ignore[arg-type]


def test_windows_hold_what_happened_in_them() -> None:
    live = Live()
    live.add([lookup(4000), lookup(3500), lookup(290), lookup(50), lookup(0)], NOW)
    assert [live.window(s, NOW).lookups for s in (60, 300, 3600)] == [2, 3, 4]
    later = NOW + 120
    live.add([], later)
    assert [live.window(s, later).lookups for s in (60, 300, 3600)] == [0, 2, 3]
    live.add([lookup(-9000)], NOW + 130)
    assert live.window(60, NOW + 130).lookups == 1


@pytest.mark.parametrize("size", [(80, 24), (80, 10), (40, 24), (132, 50), (20, 5)])
def test_a_frame_fits_its_terminal(size: tuple[int, int]) -> None:
    live = Live()
    long = "x" * 64
    live.add([lookup(i, request=f"{long}{i}", kinds=long) for i in range(50)], NOW)
    store = Store("/a/very/long/path" * 8, 10**12, 10**13, {SPACE.hex(): long})
    lines = frame(live, store, NOW, *size)
    assert len(lines) <= max(size[1], 10)
    assert max(map(len, lines)) <= max(size[0], 40)
    assert "\x1b" not in "".join(lines)
    if size[0] >= 80 and size[1] >= 24:
        assert any(line.startswith("lookups") for line in lines)
        assert any("full" in line for line in lines[-3:])


def test_it_is_printed_once_where_no_terminal_is(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        space_of(store).resume([1, 2, 3], request="chatcmpl-1")
    shown = CliRunner().invoke(main, ["top", "--store", str(tmp_path / "s")])
    assert shown.exit_code == 0
    assert "chatcmpl-1" in shown.stdout
    assert "\x1b" not in shown.stdout
    told = json.loads(
        CliRunner().invoke(main, ["top", "--json", "--store", str(tmp_path / "s")]).stdout
    )
    assert [w["totals"]["lookups"] for w in told["windows"]] == [1, 1, 1]
    assert told["recent"][0]["request"] == "chatcmpl-1"


def test_one_tenant_sees_nothing_of_another(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        for salt in ("red", "blue"):
            space = space_of(store, name=f"model-{salt}", salt=salt)
            space.resume([1, 2, 3], request=f"ask-{salt}")
    words = ["top", "--once", "--salt", "red", "--store", str(tmp_path / "s")]
    shown = CliRunner().invoke(main, words).stdout
    assert "ask-red" in shown
    assert "blue" not in shown
    told = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert told["windows"][0]["totals"]["lookups"] == 1


class Terminal:
    """``kvkeep top`` in a terminal of its own."""

    def __init__(self, store: Path) -> None:
        self.seen = ""
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(theirs)
        command = [sys.executable, "-m", "kvkeep.cli", "top", "--interval", "0.1"]
        self.process = subprocess.Popen(
            [*command, "--store", str(store)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "NO_COLOR": ""},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.theirs = theirs

    def until(self, text: str) -> None:
        """Read on until ``text`` was shown."""
        patience = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < patience, self.seen[-2000:]
            if select.select([self.ours], [], [], 0.1)[0]:
                self.seen += os.read(self.ours, 65536).decode()

    def key(self, key: bytes) -> None:
        os.write(self.ours, key)

    def frames(self) -> list[list[str]]:
        """Whole frames, as lines without what steers the terminal."""
        parts = self.seen.split(HOME)[1:-1]
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part).split("\r\n") for part in parts]

    def end(self) -> int:
        code = self.process.wait(60)
        assert termios.tcgetattr(self.theirs) == self.before
        os.close(self.ours)
        os.close(self.theirs)
        return code


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_a_terminal_shows_what_happens_and_is_left_as_it_was(tmp_path: Path, key: bytes) -> None:
    with opened(tmp_path / "s") as store:
        space = space_of(store)
        space.resume([1, 2, 3], request="before-one")
        store.flush()
        terminal = Terminal(tmp_path / "s")
        terminal.until("before-one")
        space.resume([1, 2, 3], request="while-two")
        store.flush()
        terminal.until("while-two")
        terminal.until("\x1b[J")
        terminal.key(key)
        terminal.until(LEAVE)
    assert terminal.end() == 0
    assert terminal.seen.count(ENTER) == terminal.seen.count(LEAVE) == 1
    frames = terminal.frames()
    assert frames
    assert all(len(lines) <= 24 for lines in frames)
    assert all(len(line) <= 80 for lines in frames for line in lines)
