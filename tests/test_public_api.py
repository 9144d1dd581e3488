"""What ``import kvkeep`` promises: names, lightness, and the example in its docstring."""

from __future__ import annotations

import inspect
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvkeep
from kvkeep.errors import KvkeepError
from tests import model_folders

ROOT = Path(__file__).parents[1]
HEAVY = ("mlx", "mlx_lm", "lmdb", "numpy", "msgpack", "zstandard", "safetensors", "click", "xxhash")


def test_names_are_sorted_and_lead_somewhere():
    assert sorted(kvkeep.__all__) == kvkeep.__all__
    assert set(kvkeep._HOMES) == set(kvkeep.__all__) - {"__version__"}
    assert dir(kvkeep) == kvkeep.__all__
    for name in kvkeep.__all__:
        value = getattr(kvkeep, name)
        if name != "__version__":
            assert value.__name__ == kvkeep._HOMES[name][1]
            assert inspect.getdoc(value)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = kvkeep.nothing_like_it


def test_every_public_method_is_explained():
    found = 0
    for name in kvkeep.__all__:
        value = getattr(kvkeep, name)
        if inspect.isclass(value) and not issubclass(value, Exception):
            for part, member in vars(value).items():
                if callable(member) and not part.startswith("_"):
                    assert inspect.getdoc(member), f"{name}.{part}"
                    found += 1
    assert found > 20


def test_every_error_has_a_remedy_and_an_exit_code():
    waiting, found = [KvkeepError], []
    while waiting:
        error = waiting.pop()
        waiting += error.__subclasses__()
        if error.__module__ == "kvkeep.errors":
            found.append(error)
            assert error.exit_code == 1 if error is KvkeepError else error.exit_code >= 4
            assert str(error("It broke", remedy="Mend it.")) == "It broke\n  Mend it."
    assert len(found) > 15


def run(*lines):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_kvkeep_imports_nothing_heavy():
    loaded = f"print([name for name in {HEAVY} if name in sys.modules])"
    assert run("import sys, kvkeep", "kvkeep.__version__", loaded) == "[]\n"
    assert run("import sys, kvkeep", "from kvkeep import errors", loaded) == "[]\n"
    assert "'lmdb'" in run("import sys, kvkeep", "kvkeep.open", loaded)


def test_the_example_in_the_docstring_works(tmp_path):
    folder = model_folders.write("llama", tmp_path / "model")
    model, tokenizer = mlx_lm.load(str(folder))
    tokens = tokenizer.encode("Once upon a time, a cache was kept.")
    example = "\n".join(
        line for line in kvkeep.__doc__.splitlines() if line.startswith("    ") or not line
    )
    for old, new in (
        ('"~/.cache/kvkeep"', repr(str(tmp_path / "store"))),
        ('"…"', repr(str(folder))),
        ("…", "caches = read(hit)"),
    ):
        assert example.count(old) == 1
        example = example.replace(old, new)
    script = tmp_path / "example.py"
    script.write_text(textwrap.dedent(example), "utf-8")
    seen = []

    def read(hit):
        caches = hit.caches or make_prompt_cache(model)
        mx.eval(model(mx.array(hit.rest)[None], cache=caches), [c.state for c in caches])
        assert all(cache.offset == len(tokens) for cache in caches)
        seen.append((hit.offset, hit.rest))
        return caches

    for _ in range(2):
        names = {"model": model, "tokenizer": tokenizer, "tokens": tokens, "read": read}
        runpy.run_path(str(script), names)
    assert seen == [(0, tokens), (len(tokens) - 1, tokens[-1:])]
