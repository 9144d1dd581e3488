from __future__ import annotations

from pathlib import Path

import pytest

from tests.reports.filled import fill


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A full store, which no test writes to, and its spaces."""
    path = tmp_path_factory.mktemp("filled") / "store"
    return path, fill(path)
