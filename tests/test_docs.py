"""The documentation is about this code: generated pages are current, links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


def test_the_python_page_is_what_the_docstrings_say():
    page = runpy.run_path(str(ROOT / "docs/make_python.py"))["page"]()
    assert (ROOT / "docs/python.md").read_text("utf-8") == page, "run docs/make_python.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target, anchor in LINK.findall(page.read_text("utf-8")):
        file = (page.parent / target).resolve()
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor[1:] in slugs, f"{target}{anchor}"


def test_the_readme_names_every_page():
    readme = (ROOT / "README.md").read_text("utf-8")
    missing = [p.name for p in ROOT.glob("docs/*.md") if f"docs/{p.name}" not in readme]
    assert not missing
