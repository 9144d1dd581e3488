"""What is packed comes back: node records and recipes of any shape."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.codecs.base import Reach, RowSpec
from kvkeep.persistence.tensors import HOST_DTYPES
from kvkeep.prefixstore.layout import node_key
from kvkeep.prefixstore.recipe import Layer, Recipe
from kvkeep.prefixstore.records import REF, Node, PointRecord, unpack

counts = st.integers(0, 2**40)
ids = st.binary(min_size=16, max_size=16)
wide = st.integers(-(2**63), 2**63 - 1)
narrow = st.integers(0, 200_000)


@st.composite
def nodes(draw: Any) -> Node:
    tokens = draw(st.lists(draw(st.sampled_from([wide, narrow])), min_size=1, max_size=40))
    recipes = tuple(draw(st.lists(ids, min_size=1, max_size=4, unique=True)))
    index = st.integers(0, len(recipes) - 1)
    word = st.integers(0, 2**63)
    row = st.tuples(index, st.integers(0, 99), word, word, word, word, word)
    span = st.tuples(counts, st.integers(1, 999)).map(lambda x: (x[0], x[0] + x[1]))
    needs = st.lists(
        st.tuples(st.integers(0, 9), st.lists(span, max_size=3).map(tuple)), max_size=3
    )
    time = st.floats(0, 1e12)
    origin = st.sampled_from(["prompt", "output", "boundary", "junction", "interval"])
    point = st.tuples(counts, index, origin, time, counts, counts, word, needs.map(tuple))
    points = draw(st.lists(point.map(lambda p: PointRecord(*p)), max_size=4))
    rows = np.array(draw(st.lists(row, max_size=5)), REF)
    key = node_key(draw(ids), draw(word), tokens[0])
    return Node(draw(word), key, draw(counts), np.array(tokens), recipes, rows, tuple(points))


@settings(max_examples=150, deadline=None)
@given(nodes())
def test_nodes(node: Node) -> None:
    found = unpack(node.key, node.pack())
    assert found.tokens.tolist() == node.tokens.tolist()
    assert found.refs.tobytes() == node.refs.tobytes()
    assert (found.id, found.key, found.start) == (node.id, node.key, node.start)
    assert (found.recipes, found.points) == (node.recipes, node.points)
    assert found.pack() == node.pack()


names = st.text(min_size=1, max_size=12)
scalars = st.one_of(counts, st.floats(allow_nan=False), names, st.booleans(), st.none())


@st.composite
def recipes(draw: Any) -> Recipe:
    def tree(depth: int) -> Any:
        if depth == 3 or draw(st.booleans()):
            paths.append(str(len(paths)))
            return paths[-1]
        inner = tuple(tree(depth + 1) for _ in range(draw(st.integers(1, 3))))
        return (draw(names), inner)

    paths: list[str] = []
    nested = tuple(tree(0) for _ in range(draw(st.integers(1, 4))))
    return Recipe(tuple(draw(layers(path)) for path in paths), nested)


@st.composite
def layers(draw: Any, path: str) -> Layer:
    shapes = st.lists(st.integers(0, 2**20), min_size=1, max_size=6)
    specs = []
    for shape in draw(st.lists(shapes, max_size=3)):
        axis = draw(st.integers(0, len(shape) - 1))
        dtype = draw(st.sampled_from(sorted(HOST_DTYPES)))
        specs.append(RowSpec(draw(names), dtype, tuple(shape), axis))
    params = draw(st.dictionaries(names, scalars, max_size=3))
    reach = Reach(draw(st.one_of(st.none(), counts)), draw(counts), draw(st.booleans()))
    boundary = draw(st.one_of(st.none(), counts))
    sorted_params = tuple(sorted(params.items(), key=lambda item: item[0]))
    return Layer(path, draw(names), draw(counts), sorted_params, boundary, reach, tuple(specs))


@settings(max_examples=150, deadline=None)
@given(recipes())
def test_recipes(recipe: Recipe) -> None:
    found = Recipe.unpack(recipe.packed)
    assert found == recipe
    assert found.id == recipe.id
    assert found.kinds == recipe.kinds
