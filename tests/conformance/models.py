"""Every model of the installed mlx-lm, tiny, with random weights that depend on a seed alone."""

from __future__ import annotations

import ast
import dataclasses
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map_with_path
from mlx_lm.models.switch_layers import SwitchLinear

from tests.conformance import configs


def names():
    """Every module of ``mlx_lm.models`` that has a ``Model``, without importing one."""
    folder = Path(next(iter(mlx_lm.models.__path__)))
    return sorted(path.stem for path in folder.glob("*.py") if _has_model(path))


def before(versions):
    """The models of the table ``versions`` whose version is newer than the installed mlx-lm."""
    here = _numbers(version("mlx-lm"))
    return {name for name, since in versions.items() if here < _numbers(since)}


def _numbers(text):
    return tuple(int(part) for part in text.split(".")[:3])


def _has_model(path):
    return any(
        (isinstance(node, ast.ClassDef) and node.name == "Model")
        or (
            isinstance(node, ast.ImportFrom)
            and any((x.asname or x.name) == "Model" for x in node.names)
        )
        for node in ast.parse(path.read_text()).body
    )


def config(name):
    """The tiny configuration of ``name``, as its ``config.json`` would spell it."""
    own = dict(configs.CONFIGS.get(name, {}))
    if name in configs.TEXT:
        module, args = configs.TEXT[name]
        sizes = _sizes(getattr(_module(module), args))
        shared = own if module == name else configs.CONFIGS.get(module, {})
        inner = own.get("text_config", {})
        own["text_config"] = {"model_type": module, **sizes, **shared, **inner}
    return {"model_type": name, **_sizes(_module(name).ModelArgs), **own}


def build(name, seed=0, **changes):
    """The model ``name`` with ``changes`` to its configuration.

    Raises whatever mlx-lm raises where it cannot be built here.
    """
    module = _module(name)
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict({**config(name), **changes}))
    # On a CPU mixtures of experts run in float32 only.
    experts = any(isinstance(part, SwitchLinear) for part in model.modules())
    narrow = mx.default_device() != mx.cpu or not experts
    cast = getattr(model, "cast_predicate", lambda path: True)
    model.update(
        tree_map_with_path(lambda path, p: _stirred(p, narrow and cast(path)), model.parameters())
    )
    model.eval()
    mx.eval(model.parameters())
    return model


def _stirred(parameter, narrow):
    """No weight stays zero or one, as the initial ones of gates, norms and convolutions are."""
    if not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    dtype = mx.bfloat16 if narrow and parameter.dtype == mx.float32 else parameter.dtype
    return (parameter + 0.05 * mx.random.normal(parameter.shape)).astype(dtype)


def _sizes(args):
    """A size for each field of the dataclass ``args`` that needs one."""
    out = {}
    for field in dataclasses.fields(args):
        required = field.default is dataclasses.MISSING is field.default_factory
        kind = getattr(field.type, "__name__", field.type)
        if field.name in configs.SIZES:
            out[field.name] = configs.SIZES[field.name]
        elif required and kind in configs.BY_TYPE:
            out[field.name] = configs.BY_TYPE[kind]
    return out


def _module(name):
    if find_spec(f"mlx_lm.models.{name}") is None:
        raise KeyError(name)
    return import_module(f"mlx_lm.models.{name}")
