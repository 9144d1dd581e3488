from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("mlx", "numpy", "lmdb", "safetensors", "zstandard", "msgpack")


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("kvkeep.persistence", ()),
        ("kvkeep.persistence.tensors", ()),
        ("kvkeep.persistence.stored_cache", ()),
        ("kvkeep.persistence.environment", ("lmdb",)),
        ("kvkeep.persistence.frame", ("numpy", "zstandard", "msgpack")),
        ("kvkeep.hooks.prompt_file", ()),
    ],
)
def test_heavy_imports_come_only_where_they_are_used(module: str, allowed: tuple[str, ...]) -> None:
    code = f"import sys, {module}\nprint(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    assert set(done.stdout.split()) == set(allowed)
