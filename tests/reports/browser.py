"""A real Chromium, driven without a window, that notes whatever goes wrong in a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ELSEWHERE = (
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)


def find() -> str | None:
    """The program: what ``KVKEEP_CHROMIUM`` names, or one that is installed."""
    named = os.environ.get("KVKEEP_CHROMIUM")
    if named:
        return named
    found = (shutil.which(name) for name in NAMES)
    return next((f for f in found if f), next((e for e in ELSEWHERE if Path(e).exists()), None))


@contextmanager
def started(program: str) -> Iterator[Any]:
    """A browser of playwright."""
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def shown(browser: Any, file: Path, **options: Any) -> Iterator[Any]:
    """The page of a file; fails at its end if the console or the network saw anything."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
    page = context.new_page()
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.on("request", lambda request: troubles.append(request.url) if request.url != url else None)
    url = file.resolve().as_uri()
    try:
        page.goto(url)
        yield page
        assert not troubles
    finally:
        context.close()
