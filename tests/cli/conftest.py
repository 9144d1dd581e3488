from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvkeep.cli import main
from tests import model_folders

Run = Callable[..., Result]
Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Folders of tiny models, each made once: ``models("llama", seed=1)``."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str, seed: int = 0) -> str:
        path = root / f"{name}-{seed}"
        return str(path if path.exists() else model_folders.write(name, path, seed))

    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder where no store is yet."""
    return tmp_path / "store"


@pytest.fixture
def run(store: Path) -> Run:
    """Run ``kvkeep`` on the store: ``run("ls", "--json")``. Unforeseen errors fail the test."""

    def call(*words: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [*words, "--store", str(store), "--debug"])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return call


@pytest.fixture
def ask(run: Run) -> Ask:
    """Run ``kvkeep … --json`` and return what it printed."""

    def call(*words: str, code: int = 0) -> Any:
        return json.loads(run(*words, "--json", code=code).stdout)

    return call
