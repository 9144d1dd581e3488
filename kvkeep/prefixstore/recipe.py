"""Live caches as a recipe: one kind, its parameters and its boundary per layer, in order.

Composites are flattened here, so that a codec never needs the registry. A leaf's path is
its place: ``"3"`` is the fourth cache, ``"3.1"`` the second inside it. What a composite was made
with is recorded among its leaves' parameters, under ``<kind>.<name>``.

Rows belong to a recipe. Layers that read the same positions form a *family* and are stored
together, so that one chunk holds all of them for a range of tokens. Two recipes never share
rows: after a change of precision even an unconverted layer holds other values, because it
was computed from the converted ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import msgpack

from kvkeep.caches.rounds import check_committed
from kvkeep.codecs import codec_for, codec_named, composite_named
from kvkeep.codecs.base import Codec, Composite, Description, Reach, RowSpec, Scalar
from kvkeep.errors import CorruptFrame, EmptyCache, NewerFormat, OffsetMismatch, Refused
from kvkeep.persistence.packing import unpack_plain
from kvkeep.persistence.table import MOST_AXES, MOST_NAME
from kvkeep.persistence.tensors import HOST_DTYPES

Tree = str | tuple[str, tuple["Tree", ...]]
"""A leaf's path, or a composite's kind with what is inside."""

CHUNK_BYTES = 8 << 20
"""Aim for the bytes of a row chunk: large values read fast, small ones share better."""

MOST_EXTENT = 1 << 32
MOST_DEPTH = 16
"""Composites inside composites."""


@dataclass(frozen=True)
class Layer:
    """The frozen facts of one leaf."""

    path: str
    kind: str
    version: int
    params: tuple[tuple[str, Scalar], ...]
    boundary: int | None
    reach: Reach
    rows: tuple[RowSpec, ...]

    @cached_property
    def codec(self) -> Codec:
        """The codec that rebuilds this layer."""
        return codec_named(self.kind, self.version)

    @property
    def floor(self) -> int:
        """Below it the rows' precision history is not that of a shorter run."""
        return self.boundary or 0


@dataclass(frozen=True)
class Family:
    """Layers whose rows are stored together, and how many positions make a chunk."""

    layers: tuple[int, ...]
    reach: Reach
    bytes_per_token: int

    @property
    def chunk_tokens(self) -> int:
        """A power of two, so that a chunk is a few MiB."""
        wanted = CHUNK_BYTES // max(1, self.bytes_per_token)
        return 1 << max(4, min(13, wanted.bit_length() - 1))


@dataclass(frozen=True)
class Recipe:
    """Every layer of a cache list, and how they nest."""

    layers: tuple[Layer, ...]
    tree: tuple[Tree, ...]

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """Layers with rows, grouped by what they read and when their precision changed."""
        groups: dict[tuple[Reach, int | None], list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.rows:
                groups.setdefault((layer.reach, layer.boundary), []).append(index)
        return tuple(
            Family(
                tuple(members),
                reach,
                sum(spec.bytes_per_token for i in members for spec in self.layers[i].rows),
            )
            for (reach, _), members in groups.items()
        )

    @cached_property
    def packed(self) -> bytes:
        """The recipe as msgpack, stable for equal recipes."""
        return bytes(
            msgpack.packb(
                {
                    "layers": [
                        [
                            x.path,
                            x.kind,
                            x.version,
                            sorted(x.params),
                            x.boundary,
                            [x.reach.window, x.reach.keep, x.reach.stateful],
                            [[s.name, s.dtype, s.shape, s.axis] for s in x.rows],
                        ]
                        for x in self.layers
                    ],
                    "tree": self.tree,
                }
            )
        )

    @cached_property
    def id(self) -> bytes:
        """16 bytes; equal recipes have equal ids."""
        return recipe_id(self.packed)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Each cache's kind, with the inner kinds of composites: ``list(arrays,kv)``."""
        by_path = {layer.path: layer.kind for layer in self.layers}
        return tuple(_spell(node, by_path) for node in self.tree)

    @staticmethod
    def unpack(data: bytes) -> Recipe:
        """The recipe that ``packed`` wrote. Raises ``CorruptFrame``; kinds are not looked up."""
        match unpack_plain(data):
            case {"layers": tuple(packed), "tree": tuple(tree)}:
                layers = tuple(map(_read_layer, packed))
                leaves = [leaf for node in tree for leaf in _leaves(node)]
                if leaves == [layer.path for layer in layers] and len(set(leaves)) == len(leaves):
                    return Recipe(layers, tree)
        raise CorruptFrame("A recipe of another form")


def recipe_id(packed: bytes | memoryview) -> bytes:
    """The id of a packed recipe."""
    return hashlib.blake2b(packed, digest_size=16).digest()


@dataclass(frozen=True)
class Live:
    """A cache list under the knife: its recipe, and each leaf beside its description."""

    recipe: Recipe
    leaves: tuple[tuple[Codec, Any, Description], ...]
    offset: int


def _read_layer(packed: Any) -> Layer:
    match packed:
        case (
            str(path),
            str(kind),
            int(version),
            tuple(params),
            int() | None as boundary,
            (int() | None as window, int(keep), bool(stateful)),
            tuple(rows),
        ) if (boundary or 0) >= 0 and (window or 0) >= 0 and keep >= 0:
            specs = tuple(map(_read_row, rows))
            reach = Reach(window, keep, stateful)
            return Layer(path, kind, version, _read_params(params), boundary, reach, specs)
    raise CorruptFrame("A recipe holds a layer of another form")


def _read_params(params: tuple[Any, ...]) -> tuple[tuple[str, Scalar], ...]:
    for param in params:
        match param:
            case (str(), int() | float() | str() | bool() | None):
                continue
        raise CorruptFrame("A recipe holds a parameter of another form")
    return params


def _read_row(packed: Any) -> RowSpec:
    match packed:
        case (str(name), str(dtype), tuple(shape), int(axis)) if (
            0 <= axis < len(shape) <= MOST_AXES
        ):
            extents = all(type(n) is int and 0 <= n <= MOST_EXTENT for n in shape)
            if extents and dtype in HOST_DTYPES and 0 < len(name) <= MOST_NAME:
                return RowSpec(name, dtype, shape, axis)
    raise CorruptFrame("A recipe holds rows of another form")


def _leaves(node: Any, depth: int = 0) -> list[str]:
    """The paths in a tree, in order."""
    match node:
        case str(path):
            return [path]
        case (str(), tuple(inner)) if depth < MOST_DEPTH:
            return [leaf for below in inner for leaf in _leaves(below, depth + 1)]
    raise CorruptFrame("A recipe nests its layers in another form")


def kind_tree(caches: Sequence[Any]) -> tuple[str, ...]:
    """The kinds of ``caches``, which may be empty: what a space calls its layout.

    Raises ``Refused`` with the layer's number.
    """
    return tuple(_kind_of(cache, str(i)) for i, cache in enumerate(caches))


def read_caches(caches: Sequence[Any], tokens: int) -> Live:
    """Describe live caches that should cover ``tokens`` positions.

    Raises ``Refused`` with the layer's number and kind. Kinds without an offset of their own
    take that of their siblings, or the token count where there is none.
    """
    if not caches:
        raise EmptyCache("The list of caches is empty")
    leaves: list[tuple[str, Codec, Any, Description]] = []
    tree = tuple(_flatten(cache, str(i), leaves) for i, cache in enumerate(caches))
    offsets: dict[int, str] = {}
    for path, _, _, d in leaves:
        if d.offset is not None:
            offsets.setdefault(d.offset, f"layer {path} ({d.kind}) at {d.offset:,}")
    if len(offsets) > 1:
        seen = ", ".join(offsets.values())
        raise OffsetMismatch(f"The caches stand at different offsets: {seen}")
    offset = next(iter(offsets), tokens)
    layers = tuple(
        Layer(path, d.kind, d.version, tuple(sorted(d.params.items())), d.boundary, d.reach, d.rows)
        for path, _, _, d in leaves
    )
    return Live(Recipe(layers, tree), tuple((c, cache, d) for _, c, cache, d in leaves), offset)


def refuse_stale(caches: Sequence[Any], tokens: int) -> None:
    """Refuse target caches that stopped before the last of ``tokens``.

    With a draft model and quantization mlx-lm converts copies and leaves the old objects in
    the caller's list; they stand where they were converted. Raises ``OffsetMismatch``.
    """
    offset = read_caches(caches, tokens).offset
    if offset < tokens - 1:
        raise OffsetMismatch(
            f"The target's caches stand at {offset:,} of {tokens:,} tokens",
            remedy="Quantization replaced them during generation; hand in the list it left.",
        )


def assemble(recipe: Recipe, leaves: Sequence[Any]) -> list[Any]:
    """The cache list of ``recipe`` from its leaves, in order."""
    pairs = zip(recipe.layers, leaves, strict=True)
    by_path = {layer.path: (leaf, dict(layer.params)) for layer, leaf in pairs}
    return [_join(node, by_path)[0] for node in recipe.tree]


def _flatten(
    cache: Any,
    path: str,
    out: list[tuple[str, Codec, Any, Description]],
    held: Mapping[str, Scalar] = MappingProxyType({}),
) -> Tree:
    """The node of ``cache``; its leaves go to ``out``, with the parameters of what holds them."""
    codec = _codec_of(cache, path)
    with _naming(path, codec.kind):
        check_committed(cache)
        if isinstance(codec, Composite):
            inner = codec.children(cache)
            own = {f"{codec.kind}.{name}": x for name, x in codec.params(cache).items()}
            below = {**held, **own}
            return (
                codec.kind,
                tuple(_flatten(c, f"{path}.{i}", out, below) for i, c in enumerate(inner)),
            )
        facts = codec.describe(cache)
        out.append((path, codec, cache, replace(facts, params={**facts.params, **held})))
        return path


def _kind_of(cache: Any, path: str) -> str:
    codec = _codec_of(cache, path)
    if isinstance(codec, Codec):
        return codec.kind
    with _naming(path, codec.kind):
        inner = codec.children(cache)
        return codec.spelled([_kind_of(c, f"{path}.{i}") for i, c in enumerate(inner)])


def _codec_of(cache: Any, path: str) -> Codec | Composite:
    with _naming(path):
        return codec_for(cache)


@contextmanager
def _naming(path: str, kind: str = "") -> Iterator[None]:
    """Begin the problem of a refusal with the layer, unless an inner one is named already."""
    try:
        yield
    except Refused as error:
        if error.problem.startswith("Layer "):
            raise
        layer = f"Layer {path} ({kind})" if kind else f"Layer {path}"
        raise type(error)(f"{layer}: {error.problem}", remedy=error.remedy) from error


def _spell(node: Tree, kinds: dict[str, str]) -> str:
    if isinstance(node, str):
        return kinds[node]
    kind, below = node
    inner = [_spell(x, kinds) for x in below]
    try:
        return composite_named(kind, 1).spelled(inner)
    except NewerFormat:
        return f"{kind}({','.join(inner)})"


def _join(
    node: Tree, leaves: dict[str, tuple[Any, dict[str, Scalar]]]
) -> tuple[Any, dict[str, Scalar]]:
    """A cache, and the parameters that were recorded with its first leaf."""
    if isinstance(node, str):
        return leaves[node]
    kind, below = node
    inner = [_join(x, leaves) for x in below]
    recorded = inner[0][1] if inner else {}
    prefix = f"{kind}."
    own = {k.removeprefix(prefix): x for k, x in recorded.items() if k.startswith(prefix)}
    return composite_named(kind, 1).assemble([cache for cache, _ in inner], own), recorded
