"""The documentation is about this code: generated pages are current, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import pytest

from tests import model_folders

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#:]*)(#[^)]*)?\)")
NAMED = re.compile(r"`((?:benchmarks|docs|examples|kvkeep|tests)/[\w./-]+)`")
MODULE = re.compile(r"python -m ([\w.]+)")
INVENTED = ("kvkeep/codecs/kv_window.py", "tests/codecs/test_kv_window.py", "tests/a.py")


def test_the_python_page_is_what_the_docstrings_say():
    page = runpy.run_path(str(ROOT / "docs/make_python.py"))["page"]()
    assert (ROOT / "docs/python.md").read_text("utf-8") == page, "run docs/make_python.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target, anchor in LINK.findall(page.read_text("utf-8")):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor[1:] in slugs, f"{target}{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_program_that_is_named_exists(page):
    text = page.read_text("utf-8")
    named = [name for name in NAMED.findall(text) if name not in INVENTED]
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [name for name in MODULE.findall(text) if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("page", ["README.md", "docs/caches.md"])
def test_the_first_example_runs_and_resumes(page, tmp_path, monkeypatch, capsys):
    model = model_folders.write("llama", tmp_path / "model")
    text = (ROOT / page).read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    program, named = re.subn(r'^path = ".*"', f"path = {str(model)!r}", text, flags=re.M)
    program, ended = re.subn(r"(prompt_cache=caches)", r"\1, max_tokens=4", program)
    assert (named, ended) == (1, 1)
    if "@5000" in program:  # the tiny model's heads are narrower than 64
        program = program.replace("affine:4:64@5000", "affine:4:32@5")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = [run(program)["hit"].offset for _ in range(2)]
    assert found[0] == 0
    assert found[1] > 5
    assert (tmp_path / ".cache/kvkeep/store.json").exists()


def run(program):
    names = {}
    exec(compile(program, "example", "exec"), names)  # noqa: S102
    return names


def test_the_readme_names_every_page():
    readme = (ROOT / "README.md").read_text("utf-8")
    missing = [p.name for p in ROOT.glob("docs/*.md") if f"docs/{p.name}" not in readme]
    assert not missing
