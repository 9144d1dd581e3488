"""One codec per storage kind. The room finds its own files.

Every module here except ``base`` declares one ``CODEC``; adding a kind is adding a file.
Importing this package imports neither mlx nor mlx-lm.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kvkeep.codecs.base import Codec, Composite
from kvkeep.errors import BatchCache, NewerFormat, UnknownCache

_CONTRACT = "base"


def discover(package: str, path: Iterable[str]) -> dict[str, Codec | Composite]:
    """The codecs that the modules of ``package`` under ``path`` declare, by kind.

    Raises ``TypeError`` for a module without a ``CODEC`` and ``ValueError`` for a kind that two
    modules declare; both name the module.
    """
    found: dict[str, Codec | Composite] = {}
    origin: dict[str, str] = {}
    for module in pkgutil.iter_modules(path):
        if module.name == _CONTRACT:
            continue
        name = f"{package}.{module.name}"
        codec = getattr(importlib.import_module(name), "CODEC", None)
        if not isinstance(codec, Codec | Composite):
            raise TypeError(f"{name} declares no CODEC: one instance of a Codec or a Composite")
        if codec.kind in found:
            raise ValueError(f"{name} declares the kind {codec.kind!r} of {origin[codec.kind]}")
        found[codec.kind] = codec
        origin[codec.kind] = name
    return found


CODECS: Mapping[str, Codec | Composite] = MappingProxyType(discover(__name__, __path__))
"""Every codec by its kind, read-only."""


def codec_for(cache: object) -> Codec | Composite:
    """The one codec that claims the live ``cache``.

    Raises ``BatchCache`` for a batch layout and ``UnknownCache`` for a class that no codec, or
    more than one, claims.
    """
    claims = [codec for codec in CODECS.values() if codec.matches(cache)]
    if len(claims) == 1:
        return claims[0]
    name = f"{type(cache).__module__}.{type(cache).__qualname__}"
    if claims:
        kinds = ", ".join(codec.kind for codec in claims)
        raise UnknownCache(
            f"More than one codec claims the class {name}: {kinds}",
            remedy="Let `matches` of only one of them accept it.",
        )
    # Every batch layout of mlx-lm pads its rows on the left, and no other class does.
    if hasattr(cache, "left_padding"):
        raise BatchCache(f"{name} holds the rows of several requests")
    raise UnknownCache(f"No codec claims the class {name}; the known kinds are {_known()}")


def codec_named(kind: str, version: int) -> Codec:
    """The codec of a stored leaf.

    Raises ``NewerFormat`` for a kind or version that is not known here, and for the kind of a
    composite.
    """
    codec = _named(kind, version)
    if isinstance(codec, Composite):
        raise NewerFormat(f"The kind {kind!r} holds other caches and no rows", remedy="")
    return codec


def composite_named(kind: str, version: int) -> Composite:
    """The holder of a stored composite. Raises ``NewerFormat``, as ``codec_named`` does."""
    codec = _named(kind, version)
    if isinstance(codec, Codec):
        raise NewerFormat(f"The kind {kind!r} holds no other caches", remedy="")
    return codec


def _named(kind: str, version: int) -> Codec | Composite:
    codec = CODECS.get(kind)
    if codec is None:
        raise NewerFormat(f"The kind {kind!r} is not known here; the known kinds are {_known()}")
    if version != codec.version:
        raise NewerFormat(
            f"Version {version} of the kind {kind!r} is not read here; known is {codec.version}",
            remedy=None if version > codec.version else "The record is damaged or obsolete.",
        )
    return codec


def _known() -> str:
    return ", ".join(f"{kind} (version {CODECS[kind].version})" for kind in sorted(CODECS))


__all__ = [
    "CODECS",
    "codec_for",
    "codec_named",
    "composite_named",
    "discover",
]
