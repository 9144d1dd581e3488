"""Every cache class of the installed mlx-lm, and of ours, has one codec or a reason for none."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import mlx_lm.models
import pytest
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

import kvkeep.caches
from kvkeep.codecs import CODECS, codec_for
from kvkeep.errors import BatchCache

SURFACE = ({"update_and_fetch"}, {"state", "is_trimmable"})
"""A class with all names of one of these is a cache."""

BATCHES = {
    BatchKVCache: lambda: BatchKVCache([0, 1]),
    BatchRotatingKVCache: lambda: BatchRotatingKVCache(16, [0, 1]),
}

UNCLAIMED = {
    "mlx_lm.models.cache._BaseCache": "the abstract base of the others; no model makes one",
    "mlx_lm.models.cache.TokenBuffer": "token ids of one generation, not a cache of a model",
    "kvkeep.caches.positions.Traced": "the inside of a traced step; the cache around it is stored",
    "kvkeep.caches.quantized.QuantizedRows": "the abstract base of those that hold planes",
}


def modules():
    """Every module with caches, and the names of those that cannot be imported here."""
    found, broken = [], []
    for info in (
        *pkgutil.iter_modules(mlx_lm.models.__path__, "mlx_lm.models."),
        *pkgutil.iter_modules(kvkeep.caches.__path__, "kvkeep.caches."),
    ):
        try:
            found.append(import_module(info.name))
        except (ImportError, SystemExit):
            broken.append(info.name)
    return found, broken


def cache_classes(found):
    """The classes that these modules define and that have the surface of a cache."""
    return [
        thing
        for module in found
        for thing in vars(module).values()
        if inspect.isclass(thing)
        and thing.__module__ == module.__name__
        and any(names <= set(dir(thing)) for names in SURFACE)
    ]


def name(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


def verdict(cls):
    """What kvkeep does with ``cls``, or ``None`` where nobody has thought of it."""
    blank = cls.__new__(cls)
    claims = [codec.kind for codec in CODECS.values() if codec.matches(blank)]
    if claims:
        return ", ".join(claims)
    if cls in BATCHES:
        with pytest.raises(BatchCache, match=r"cache\.extract\(i\)"):
            codec_for(BATCHES[cls]())
        return "a batch layout"
    return UNCLAIMED.get(name(cls))


def test_every_class_has_one_codec_or_a_reason():
    found, _ = modules()
    verdicts = {name(cls): verdict(cls) for cls in cache_classes(found)}
    unknown = [cls for cls, what in verdicts.items() if what is None]
    assert not unknown, f"there are caches that no codec claims: {unknown}; docs/add-a-kind.md"
    assert sorted(CODECS) == sorted({what for what in verdicts.values() if what in CODECS})
    assert [what for what in verdicts.values() if what == "a batch layout"] == [
        "a batch layout"
    ] * len(BATCHES)
    assert set(UNCLAIMED) <= set(verdicts)


def test_what_cannot_be_imported_defines_no_cache():
    _, broken = modules()
    for module in broken:
        tree = ast.parse(Path(find_spec(module).origin).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
                assert not any(wanted <= names for wanted in SURFACE), f"{module}.{node.name}"


def test_a_new_class_would_be_found_and_named():
    module = ModuleType("mlx_lm.models.next_year")
    classes = {
        "by update": type("RowCache", (), {"update_and_fetch": lambda self, k, v: None}),
        "by state": type("StateCache", (), {"state": (), "is_trimmable": lambda self: False}),
        "derived": type("Derived", (BatchKVCache,), {}),
        "no cache": type("Args", (), {"state": ()}),
    }
    for cls in classes.values():
        cls.__module__ = module.__name__
        setattr(module, cls.__name__, cls)
    found = cache_classes([module])
    assert [cls.__name__ for cls in found] == ["RowCache", "StateCache", "Derived"]
    assert [verdict(cls) for cls in found] == [None, None, None]
