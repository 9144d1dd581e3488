"""``kvkeep top``: a store in use, as it is used."""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli import options, top_screen
from kvkeep.cli.output import emit
from kvkeep.cli.report import chosen_space
from kvkeep.cli.stores import open_existing

if TYPE_CHECKING:
    from kvkeep.prefixstore.store import Store

COUNT_SECONDS = 30.0

ENTER = "\x1b[?1049h\x1b[?25l"
LEAVE = "\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
"""Another screen without a cursor, and back; and what is drawn over what was there."""


@click.command("top")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1, max=3600),
    metavar="SECONDS",
    default=1.0,
    show_default=True,
    help="Look again so often.",
)
@click.option("--once", is_flag=True, help="Show it once and end, as where no terminal is.")
@options.which_spaces
@options.common
def command(
    interval: float, once: bool, space: str | None, salt: str | None, store: Path, as_json: bool
) -> None:
    """Show a store in use, live.

    Sums of the last minute, five minutes and hour, where tokens were lost, and the newest
    lookups, of all processes that use the store. q or Ctrl-C ends it. It only reads.

    \b
    Example:
      kvkeep top
      kvkeep top --once --json
    """
    with open_existing(store) as opened:
        named = chosen_space(opened, space, salt)
        watch = Watch(opened, str(store), salt, named)
        if as_json or once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            seen, now = watch.look()
            size = shutil.get_terminal_size()
            shown = top_screen.frame(watch.live, seen, now, size.columns, size.lines - 1)
            emit(as_json, top_screen.as_json(watch.live, seen, now), "\n".join(shown))
            return
        with _screen() as pressed:
            while True:
                seen, now = watch.look()
                width, height = os.get_terminal_size()
                _draw(top_screen.frame(watch.live, seen, now, width - 1, height))
                if pressed(interval) == "q":
                    return


class Watch:
    """Reads what is new in a store, each time from where it stopped."""

    def __init__(self, store: Store, name: str, salt: str | None, space: str | None) -> None:
        self.live = top_screen.Live()
        self._store, self._name = store, name
        self._salt, self._space = salt, space
        self._last = b""
        self._kept, self._counted = 0, 0.0

    def look(self) -> tuple[top_screen.Store, float]:
        """The store now, and the time; what is new is in ``live``."""
        now = time.time()
        since = now - max(top_screen.WINDOWS)
        which = {"salt": self._salt, "space": self._space}
        events, self._last = self._store.events(since, self._last, **which)
        self.live.add(events, now)
        return top_screen.Store(
            self._name, self._used(now), self._store.max_bytes, self._store.labels()
        ), now

    def _used(self, now: float) -> int:
        """Bytes that are kept; those of single spaces have to be added up, now and then."""
        if self._salt is None and self._space is None:
            return self._store.used_bytes
        if now - self._counted > COUNT_SECONDS:
            report = self._store.report(now, salt=self._salt, space=self._space, worst=0)
            self._kept, self._counted = report.used_bytes, now
        return self._kept


def _draw(lines: list[str]) -> None:
    out = HOME + "\n".join(line + REST_OF_LINE for line in lines) + REST_OF_SCREEN
    sys.stdout.write(out.replace("\n", "\r\n"))
    sys.stdout.flush()


@contextmanager
def _screen() -> Iterator[Callable[[float], str]]:
    """Another screen; yields what waits so many seconds for a key, and answers it."""
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([stdin], [], [], seconds)
        return os.read(stdin, 1).decode("utf-8", "replace") if ready else ""

    try:
        tty.setcbreak(stdin)
        sys.stdout.write(ENTER)
        yield pressed
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
