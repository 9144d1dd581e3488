from __future__ import annotations

import doctest
import importlib
import itertools
import pkgutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

import kvkeep.codecs
from kvkeep.codecs import CODECS, codec_for, codec_named, composite_named, discover
from kvkeep.codecs.base import Codec, Composite
from kvkeep.errors import BatchCache, NewerFormat, UnknownCache

MODULES = [m.name for m in pkgutil.iter_modules(kvkeep.codecs.__path__) if m.name != "base"]
KINDS = [
    "arrays",
    "delayed",
    "kv",
    "kv-chunked",
    "kv-chunked-quant",
    "kv-compressed",
    "kv-concat",
    "kv-paged",
    "kv-quant",
    "kv-rotating",
    "kv-rotating-quant",
    "kv-turboquant",
    "list",
]

DECLARATION = """
from kvkeep.codecs.base import Composite

class Holder(Composite):
    kind = "{kind}"
    def matches(self, cache): return {claims}
    def children(self, cache): return ()
    def assemble(self, children, params): return None

CODEC = Holder()
"""

_names = itertools.count()


@pytest.fixture
def room(tmp_path, monkeypatch):
    """Make a package of modules with these sources, and discover it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(**sources):
        name = f"a_room_{next(_names)}"
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").touch()
        for module, source in sources.items():
            (folder / f"{module}.py").write_text(source)
        importlib.invalidate_caches()
        return name, discover(name, [str(folder)])

    return make


def test_the_room_is_complete():
    assert sorted(CODECS) == KINDS
    assert len(MODULES) == len(CODECS)
    for kind, codec in CODECS.items():
        assert codec.kind == kind
        assert isinstance(codec.version, int)
        assert isinstance(codec, Codec | Composite)


def test_the_table_is_read_only():
    with pytest.raises(TypeError):
        CODECS["kv"] = CODECS["list"]


def test_a_declared_codec_is_found(room):
    _, found = room(mine=DECLARATION.format(kind="mine", claims="False"), base="CODEC = None")
    assert list(found) == ["mine"]


def test_a_missing_declaration_raises(room):
    with pytest.raises(TypeError, match=r"a_room_\d+\.forgotten declares no CODEC"):
        room(forgotten="class Codec: pass")


def test_a_class_is_no_declaration(room):
    with pytest.raises(TypeError, match=r"a_room_\d+\.mine declares no CODEC"):
        room(mine=DECLARATION.format(kind="mine", claims="False") + "CODEC = Holder")


def test_a_duplicate_kind_raises(room):
    source = DECLARATION.format(kind="same", claims="False")
    with pytest.raises(
        ValueError, match=r"a_room_\d+\.second declares the kind 'same' of a_room_\d+\.first"
    ):
        room(first=source, second=source)


def test_an_unknown_class_is_named_with_the_known_kinds():
    class Strange:
        offset = 3

    with pytest.raises(UnknownCache) as caught:
        codec_for(Strange())
    assert "Strange" in str(caught.value)
    for kind in KINDS:
        assert f"{kind} (version 1)" in str(caught.value)
    assert "docs/add-a-kind.md" in str(caught.value)


def test_two_claims_are_refused(room, monkeypatch):
    source = DECLARATION.format(kind="{kind}", claims="isinstance(cache, int)")
    _, found = room(one=source.format(kind="one"), two=source.format(kind="two"))
    monkeypatch.setattr(kvkeep.codecs, "CODECS", found)
    with pytest.raises(UnknownCache, match=r"claims the class builtins\.int: one, two"):
        codec_for(3)


@pytest.mark.parametrize(
    "batch",
    [
        lambda: BatchKVCache([0, 2]),
        lambda: BatchRotatingKVCache(16, [0, 2]),
        lambda: BatchKVCache([0]),
    ],
)
def test_batch_layouts_are_refused_with_the_advice(batch):
    with pytest.raises(BatchCache, match=r"cache\.extract\(i\)"):
        codec_for(batch())


def test_an_extracted_row_is_accepted():
    batch = BatchKVCache([0, 2])
    batch.update_and_fetch(mx.ones((2, 1, 5, 4)), mx.ones((2, 1, 5, 4)))
    codec = codec_for(batch.extract(1))
    assert isinstance(codec, Codec)
    assert codec.describe(batch.extract(1)).offset == 3


@pytest.mark.parametrize("named", [codec_named, composite_named])
def test_unknown_kinds_and_versions_are_refused(named):
    with pytest.raises(NewerFormat, match="kind 'kv-next-year' is not known here") as caught:
        named("kv-next-year", 1)
    assert all(kind in str(caught.value) for kind in KINDS)
    for version in (0, 2):
        with pytest.raises(NewerFormat, match=f"Version {version} of the kind 'kv'.*known is 1"):
            named("kv", version)


def test_importing_the_room_imports_no_mlx():
    code = (
        "import sys, kvkeep.codecs\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'transformers'}\n"
        f"assert len(kvkeep.codecs.CODECS) == {len(KINDS)}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    root = Path(kvkeep.codecs.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("module", MODULES)
def test_every_codec_has_a_contract_test(module):
    path = Path(__file__).with_name(f"test_{module}.py")
    assert path.is_file(), f"write tests/codecs/{path.name}; see tests/codecs/contract.py"
    source = path.read_text()
    assert f"from kvkeep.codecs.{module} import CODEC" in source
    declared = importlib.import_module(f"kvkeep.codecs.{module}").CODEC
    if isinstance(declared, Codec):
        tests = importlib.import_module(f"tests.codecs.test_{module}")
        contracts = [
            x
            for name, x in vars(tests).items()
            if name.startswith("Test") and hasattr(x, "test_continues_like_the_live_cache")
        ]
        assert [contract.codec for contract in contracts] == [declared]


@pytest.mark.parametrize("module", MODULES)
def test_every_codec_teaches_by_an_example_that_runs(module):
    result = doctest.testmod(importlib.import_module(f"kvkeep.codecs.{module}"))
    assert result.attempted > 3
    assert result.failed == 0
