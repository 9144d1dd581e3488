"""The page, in a real Chromium: what it shows, to whom, and that it is quiet meanwhile."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvkeep.cli import main
from kvkeep.cli.page.collect import RECENT, RESTORES
from kvkeep.cli.page.write import charts_library
from kvkeep.prefixstore.event import Event
from tests.faults.rows import tokens_of
from tests.reports import browser as chromium
from tests.reports.stores import event, keep, opened, space_of, write

Filled = tuple[Path, dict[str, str]]
PROGRAM = chromium.find()
MANY = 100_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if PROGRAM is None:
        pytest.skip("no Chromium is installed here (apt-get install chromium)")
    pytest.importorskip("playwright", reason="playwright is not installed here")
    with chromium.started(PROGRAM) as found:
        yield found


def make(store: Path, file: Path, *words: str, code: int = 0) -> str:
    command = ["report", "--html", str(file), *words, "--store", str(store)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def stores(filled: Filled, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stores from empty to full, by name."""
    root = tmp_path_factory.mktemp("pages")
    with opened(root / "empty"):
        pass
    with opened(root / "one") as store:
        write(store, event(at=time.time() - 1_790_000_100, prompt=9, matched=5, resumed=5))
    with opened(root / "many") as store:
        start = time.time() - 40 * 86_400
        for first in range(0, MANY, 10_000):
            write(store, *(_one(i, start + 34 * i) for i in range(first, first + 10_000)))
    return {name: root / name for name in ("empty", "one", "many")} | {"filled": filled[0]}


def _one(i: int, at: float) -> Event:
    prompt = 100 + i % 9000
    resumed = prompt * (i % 10) // 10
    return Event(
        "lookup",
        at,
        bytes([i % 3]) * 16,
        "full" if resumed else "no_prefix",
        prompt,
        resumed,
        resumed,
        seconds=0.001 + resumed / 1e5,
        request=f"r{i}",
    )


@pytest.fixture(scope="module")
def pages(stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("html")
    for name, store in stores.items():
        make(store, root / f"{name}.html")
    return {name: root / f"{name}.html" for name in stores}


CHARTS = {
    "empty": set(),
    "one": {"chart-rate", "chart-tokens", "chart-lost", "chart-restores"},
    "many": {"chart-rate", "chart-tokens", "chart-lost", "chart-restores"},
    "filled": {"chart-rate", "chart-tokens", "chart-lost", "chart-restores", "chart-stored"},
}


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("empty", "dark"),
        ("one", "light"),
        ("many", "light"),
        ("filled", "light"),
        ("filled", "dark"),
    ],
)
def test_every_chart_is_drawn_and_nothing_is_amiss(
    browser: Any, pages: dict[str, Path], name: str, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with chromium.shown(browser, pages[name], color_scheme=scheme) as page:
        drawn = {
            chart.get_attribute("id")
            for chart in page.locator(".chart").all()
            if chart.locator("svg.main-svg").count()
        }
        assert drawn == CHARTS[name]
        for chart in drawn:
            box = page.locator(f"#{chart} svg.main-svg").first.bounding_box()
            assert box["width"] > 500
            assert box["height"] > 150
            marks = "path.point, path.surface, .points path, .bars path, .trace path"
            assert page.locator(f"#{chart}").locator(marks).count()
        assert page.locator("h1").inner_text() == "kvkeep report"
        if name != "many":
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()


def _trace(page: Any, chart: str) -> list[dict[str, Any]]:
    """What plotly.js really drew from."""
    return json.loads(
        page.evaluate("id => JSON.stringify(document.getElementById(id).data)", chart)
    )


@pytest.mark.parametrize("name", ["one", "many", "filled"])
def test_the_charts_have_the_numbers_of_the_report(
    browser: Any, pages: dict[str, Path], stores: dict[str, Path], name: str
) -> None:
    told = CliRunner().invoke(main, ["report", "--json", "--store", str(stores[name])])
    report = json.loads(told.stdout)
    with chromium.shown(browser, pages[name]) as page:
        resumed, read = _trace(page, "chart-tokens")
        assert sum(resumed["y"]) == report["resumed_tokens"]
        assert sum(read["y"]) == report["prompt_tokens"] - report["resumed_tokens"]
        assert 0 < len(resumed["x"]) <= 121
        (lost,) = _trace(page, "chart-lost")
        assert dict(zip(lost["y"], lost["x"], strict=True)) == report["lost_tokens"]
        points = _trace(page, "chart-restores")
        assert sum(len(p["x"]) for p in points) == min(RESTORES, report["restores"])
        rows = page.locator("#recent tbody tr").count()
        assert rows == min(RECENT, report["lookups"])
        tile = page.locator(".tiles dd strong").first.inner_text()
        assert tile == f"{100 * report['hit_rate']:.1f} %"
        if name == "filled":
            (stored,) = _trace(page, "chart-stored")
            kept = {s["space"]: s["kept_bytes"] for s in report["spaces"] if s["kept_bytes"]}
            boxes = dict(zip(stored["ids"], stored["values"], strict=True))
            assert {space: boxes[space] for space in kept} == kept
            assert boxes["all"] == sum(kept.values())


def test_a_hundred_thousand_events_make_no_larger_page(pages: dict[str, Path]) -> None:
    own = {name: len(file.read_text()) - len(charts_library()) for name, file in pages.items()}
    assert 0 < own["many"] < 1_000_000


def _shown(page: Any) -> int:
    return page.locator("#recent tbody tr:visible").count()


def test_lookups_are_filtered_and_sorted_with_the_keyboard_alone(
    browser: Any, pages: dict[str, Path]
) -> None:
    with chromium.shown(browser, pages["filled"]) as page:
        keyboard = page.keyboard
        keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
        keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        for _ in range(60):
            keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "find":
                break
        assert page.evaluate("document.activeElement.id") == "find"
        assert _shown(page) == RECENT
        keyboard.type("rows_missing")
        missing = _shown(page)
        assert 0 < missing < RECENT
        assert page.locator("#shown").inner_text() == f"{missing} of {RECENT} shown"
        for _ in range(12):
            keyboard.press("Backspace")
        assert _shown(page) == RECENT
        keyboard.press("Tab")
        keyboard.press("Tab")
        keyboard.type("corrupt")
        reasons = page.locator("#recent tbody tr:visible td:nth-child(7)").all_inner_texts()
        assert set(reasons) == {"corrupt"}
        keyboard.press("Tab")
        keyboard.type("9000")
        lost = page.locator("#recent tbody tr:visible td:nth-child(6)").all_inner_texts()
        assert lost
        assert all(int(n.replace(",", "")) >= 9000 for n in lost)
        while page.evaluate("document.activeElement.textContent") != "Lost":
            keyboard.press("Tab")
        keyboard.press("Enter")
        lost = page.locator("#recent tbody tr:visible td:nth-child(6)").all_inner_texts()
        numbers = [int(n.replace(",", "")) for n in lost]
        assert numbers == sorted(numbers, reverse=True)
        assert page.locator("th[aria-sort=descending]").inner_text().startswith("Lost")


def test_light_and_dark_follow_the_system_and_the_reader(
    browser: Any, pages: dict[str, Path]
) -> None:
    def colours(page: Any) -> tuple[str, str]:
        body = page.evaluate("getComputedStyle(document.body).backgroundColor")
        line = page.locator("#chart-rate .scatterlayer path.js-line").first
        return body, line.evaluate("line => getComputedStyle(line).stroke")

    with chromium.shown(browser, pages["filled"], color_scheme="light") as page:
        light = colours(page)
        page.emulate_media(color_scheme="dark")
        dark = colours(page)
        page.locator("#theme").select_option("light")
        assert colours(page) == light
        page.emulate_media(color_scheme="light")
        page.locator("#theme").select_option("dark")
        assert colours(page) == dark
    assert light[0] != dark[0]
    assert light[1] != dark[1]


def test_charts_are_described_and_their_numbers_are_in_tables(
    browser: Any, pages: dict[str, Path]
) -> None:
    with chromium.shown(browser, pages["filled"]) as page:
        images = page.locator("[role=img]").all()
        assert len(images) == 5
        assert all(len(image.get_attribute("aria-label")) > 40 for image in images)
        for title in ("Hit rate over time", "What is stored and shared", "Time of a restore"):
            section = page.get_by_role("region", name=title, exact=True)
            section.locator("summary").press("Enter")
            assert section.get_by_role("table").is_visible()
            assert section.get_by_role("row").count() > 1


def test_the_numbers_are_there_without_scripts(browser: Any, pages: dict[str, Path]) -> None:
    with chromium.shown(browser, pages["filled"], java_script_enabled=False) as page:
        assert page.locator("#recent tbody tr").count() == RECENT
        assert "What would help" in page.locator("body").inner_text()


def test_names_from_outside_stay_text(browser: Any, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=document.title='hit'><b>"
    with opened(tmp_path / "s") as store:
        space = space_of(store, name=evil)
        keep(space, "plain", tokens_of(0, 50))
        space.resume(tokens_of(0, 90), request=evil)
        space.resume(tokens_of(9, 90), request="x")
    make(tmp_path / "s", tmp_path / "page.html")
    with chromium.shown(browser, tmp_path / "page.html") as page:
        assert page.title() == "kvkeep report"
        assert page.locator("main img, main b").count() == 0
        assert evil[: len(evil) - 1] in page.locator("#recent").inner_text()
        assert page.locator("svg.main-svg").count()


def test_a_page_for_one_tenant_knows_no_other(filled: Filled, tmp_path: Path) -> None:
    store, spaces = filled
    make(store, tmp_path / "red.html", "--salt", "red")
    text = (tmp_path / "red.html").read_text().replace(charts_library(), "")
    mine = {space for name, space in spaces.items() if name.endswith("/red")}
    assert all(space[:6] in text for space in mine)
    assert not [space for space in spaces.values() if space not in mine and space in text]
    named = set(re.findall(r"ask-\w+-(\w+)-\d", text))
    assert named == {"red"}
    assert "made-" not in text


def test_the_page_holds_no_token_of_a_prompt(tmp_path: Path) -> None:
    tokens = [31_000 + 7 * i for i in range(60)]
    with opened(tmp_path / "s") as store:
        space = space_of(store)
        keep(space, "plain", tokens)
        space.resume([*tokens[:40], 99_991])
    make(tmp_path / "s", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text().replace(charts_library(), "")
    numbers = set(re.findall(r"\d+", text.replace(",", "")))
    assert {"40", "60"} <= numbers
    assert not numbers & set(map(str, [*tokens, 99_991]))


def test_a_file_that_cannot_be_written_is_an_error(stores: dict[str, Path], tmp_path: Path) -> None:
    said = make(stores["one"], tmp_path / "no" / "page.html", code=5)
    assert "page.html cannot be written: No such file or directory" in said
    assert make(stores["one"], tmp_path, code=2).count("is a directory") == 1
    assert not list(tmp_path.iterdir())


def test_without_plotly_the_remedy_is_named(stores: dict[str, Path], tmp_path: Path) -> None:
    code = "import sys; sys.modules['plotly'] = None; from kvkeep.cli import main; main()"
    command = [sys.executable, "-c", code, "report", "--store", str(stores["one"])]
    file = tmp_path / "page.html"
    done = subprocess.run([*command, "--html", str(file)], capture_output=True, text=True)
    assert done.returncode == 5
    assert "pip install plotly" in done.stderr
    assert not file.exists()
    assert subprocess.run(command, capture_output=True).returncode == 0
