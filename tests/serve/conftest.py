from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import model_folders


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Folders of tiny models, each made once: ``model("llama", seed=1)``."""
    root = tmp_path_factory.mktemp("served")

    def folder(name: str, seed: int = 0) -> str:
        path = root / f"{name}-{seed}"
        return str(path if path.exists() else model_folders.write(name, path, seed))

    return folder
