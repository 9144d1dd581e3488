"""The transaction that makes a snapshot visible, all of it or nothing (I5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvkeep.errors import CorruptFrame
from kvkeep.persistence.frame import Draft, Frame
from kvkeep.persistence.tensors import TensorSpec
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.lapsed import EVICTED, what_became
from kvkeep.prefixstore.ledger import Ledger
from kvkeep.prefixstore.ranges import Ranges, clip, covers, merged, subtract
from kvkeep.prefixstore.recipe import Recipe
from kvkeep.prefixstore.records import Node, PointRecord, Stored, check_of, detach
from kvkeep.prefixstore.tokens import Tokens
from kvkeep.prefixstore.trie import Path, check_path, held_on, load_recipe, walk


class Vanished(Exception):
    """Rows that the snapshot builds on were evicted or damaged since they were looked up."""


@dataclass(frozen=True)
class Chunk:
    """A stored row frame that no node refers to yet."""

    family: int
    start: int
    stop: int
    frame: Stored


@dataclass(frozen=True)
class Snapshot:
    """What one publishing transaction makes visible.

    ``needs`` are the rows per family that the resume point at ``len(tokens)`` reads.
    """

    space: bytes
    tokens: Tokens
    recipe: Recipe
    needs: tuple[tuple[int, Ranges], ...]
    origin: str
    created: float


def publish(
    ledger: Ledger,
    snapshot: Snapshot,
    chunks: Sequence[Chunk],
    state: Stored | None,
    quarantined: frozenset[int],
) -> int:
    """Insert the tokens, attach chunks and state, and hang the resume point.

    Returns the bytes of rows and state that are new to the store: what another process wrote
    meanwhile is not kept twice. ``state`` is the state frame. Raises ``Vanished`` where the rows of
    the resume point are not all there; the caller then aborts the transaction.
    """
    txn, offset, written = ledger.txn, len(snapshot.tokens), 0
    ledger.space = snapshot.space
    if load_recipe(txn, snapshot.recipe.id) is None:
        txn.put("recipes", snapshot.recipe.id, snapshot.recipe.packed)
    nodes, stored, returned = _insert(ledger, snapshot)
    path = Path(tuple(nodes.values()), offset)
    known = {
        family: held.coverage(family)
        for held in held_on(txn, path, quarantined)
        if held.recipe_id == snapshot.recipe.id
        for family in held.chunks
    }
    for chunk in chunks:
        if txn.get("chunks", layout.u64(chunk.frame.id)) is None:
            raise Vanished("this snapshot waited so long that its chunks were freed")
        have = known.get(chunk.family, ())
        missing = subtract(((chunk.start, chunk.stop),), have)
        written += _attach(ledger, nodes, snapshot.recipe.id, chunk, missing)
        known[chunk.family] = merged((*have, *missing))
    if not all(covers(known.get(family, ()), needs) for family, needs in snapshot.needs):
        raise Vanished("rows that this snapshot builds on are no longer stored")
    written += _hang(ledger, nodes, snapshot, state, quarantined)
    for start, node in nodes.items():
        if node is not stored.get(start):
            ledger.put_node(node)
    on_path = [nodes[start] for start in sorted(nodes) if start < offset]
    ledger.touch(on_path, returned=returned)
    ledger.states.rank(_states(on_path, snapshot.recipe.id, offset))
    return written


def _states(path: Sequence[Node], recipe: bytes, offset: int) -> list[tuple[int, str]]:
    """Chunk and origin of the states of ``recipe`` up to ``offset``, in order."""
    return [
        (point.state, point.origin)
        for node in path
        for point in node.points
        if point.state and point.offset <= offset and node.recipes[point.recipe] == recipe
    ]


def _insert(ledger: Ledger, snapshot: Snapshot) -> tuple[dict[int, Node], dict[int, Node], bool]:
    """The nodes along the tokens, by start offset, with the missing tail appended.

    Then those of them that are stored just so, and whether the tail was stored before, and
    evicted not long ago.
    """
    txn, tokens = ledger.txn, snapshot.tokens
    path = walk(txn, snapshot.space, tokens)
    check_path(path)
    nodes, returned = [detach(node) for node in path.nodes], False
    stored = {node.start: node for node in nodes}
    if path.matched < len(tokens):
        returned = what_became(txn, snapshot.space, tokens, path.matched) == EVICTED
        if nodes and path.matched < nodes[-1].stop:
            nodes[-1:] = [split(ledger, nodes[-1], path.matched)]
        parent = nodes[-1].id if nodes else layout.ROOT
        tail = tokens[path.matched :]
        key = layout.node_key(snapshot.space, parent, int(tail[0]))
        nodes.append(Node(ledger.new_id(), key, path.matched, tail))
    return {node.start: node for node in nodes}, stored, returned


def split(ledger: Ledger, node: Node, at: int) -> Node:
    """Cut a node in two at offset ``at``; the upper half. The lower keeps id and children."""
    upper = Node(
        ledger.new_id(), node.key, node.start, node.tokens[: at - node.start], node.recipes
    )
    lower = replace(
        node,
        key=layout.node_key(node.space, upper.id, int(node.tokens[at - node.start])),
        start=at,
        tokens=node.tokens[at - node.start :],
        refs=node.refs[:0],
        points=tuple(p for p in node.points if p.offset > at),
    )
    upper = replace(upper, points=tuple(p for p in node.points if p.offset <= at))
    halves = {node.start: upper, at: lower}
    for index, family, start, stop, *frame in node.refs.tolist():
        chunk = Chunk(family, start, stop, Stored(*frame))
        _attach(ledger, halves, node.recipes[index], chunk, ((start, stop),), owned=True)
    ledger.split(node, list(halves.values()))
    return halves[node.start]


def _attach(
    ledger: Ledger,
    nodes: dict[int, Node],
    recipe: bytes,
    chunk: Chunk,
    wanted: Ranges,
    *,
    owned: bool = False,
) -> int:
    """Refer to the ``wanted`` rows of ``chunk`` from the nodes that they lie in; their bytes.

    A chunk that does not lie in one node, or is not wanted whole, is cut. Raises
    ``NewerFormat`` where one of a newer format would have to be.
    """
    parts = [
        (node.start, start, stop)
        for node in nodes.values()
        for start, stop in clip(wanted, node.start, node.stop)
    ]
    if [part[1:] for part in parts] == [(chunk.start, chunk.stop)]:
        pieces = [chunk.frame]
        if not owned:
            ledger.own(chunk.frame.size)
    else:
        try:
            pieces = _cut(ledger, chunk, [(start, stop) for _, start, stop in parts])
        except CorruptFrame as error:
            if not owned:
                raise
            # The frame stays for `verify` to name; no node vouches for it any longer.
            ledger.disown(chunk.frame, str(error))
            return 0
        if owned:
            ledger.release(chunk.frame)
        else:
            ledger.drop_chunk(chunk.frame.id)
    for (at, start, stop), piece in zip(parts, pieces, strict=True):
        nodes[at] = nodes[at].with_ref(recipe, chunk.family, start, stop, piece)
    return sum(piece.size for piece in pieces)


def _cut(ledger: Ledger, chunk: Chunk, parts: list[tuple[int, int]]) -> list[Stored]:
    """Store the rows of each part as a frame of its own, counted as owned."""
    data = ledger.txn.get("chunks", layout.u64(chunk.frame.id))
    if data is None:
        raise CorruptFrame("A chunk is missing")
    frame = Frame.open(data)
    if check_of(data) != chunk.frame.check:
        raise CorruptFrame("Another frame lies in the place of a chunk")
    axes = _axes(frame)
    sealed = []
    for start, stop in parts:
        specs = [
            TensorSpec(s.name, s.dtype, _resized(s.shape, axis, stop - start))
            for s, axis in zip(frame.specs.values(), axes, strict=True)
        ]
        draft = Draft(specs, {**frame.extra, "start": start, "stop": stop})
        for spec, axis in zip(specs, axes, strict=True):
            frame.copy_into(
                spec.name, draft.views[spec.name], axis, start - chunk.start, stop - chunk.start
            )
        sealed.append(draft.seal())
    pieces = [ledger.put_chunk(one) for one in sealed]
    for piece in pieces:
        ledger.own(piece.size)
    return pieces


def _axes(frame: Frame) -> list[int]:
    """The token axis of each tensor."""
    axes = frame.extra.get("axes")
    specs = frame.specs.values()
    if type(axes) is not list or len(axes) != len(specs):
        raise CorruptFrame("A chunk does not name the token axes of its tensors")
    for axis, spec in zip(axes, specs, strict=True):
        if type(axis) is not int or not 0 <= axis < len(spec.shape):
            raise CorruptFrame(f"A chunk names a token axis that {spec.name} has not")
    return axes


def _hang(
    ledger: Ledger,
    nodes: dict[int, Node],
    snapshot: Snapshot,
    state: Stored | None,
    quarantined: frozenset[int],
) -> int:
    """Hang the resume point on the node that its offset lies in; the bytes of its state.

    A known point is kept, unless it lacks a whole state and one is at hand.
    """
    offset, recipe = len(snapshot.tokens), snapshot.recipe.id
    at = max(start for start in nodes if start < offset)
    known = nodes[at].find_point(recipe, offset)
    if known is not None:
        if state is None:
            return 0
        if known.state and known.state not in quarantined:
            ledger.drop_chunk(state.id)
            return 0
        if known.state:
            ledger.disown(known.frame, "replaced by a whole state")
        nodes[at] = nodes[at].without_point(known)
    frame = state or Stored(0, 0, 0)
    if state is not None:
        ledger.own(state.size)
    point = PointRecord(offset, 0, snapshot.origin, snapshot.created, *frame, snapshot.needs)
    nodes[at] = nodes[at].with_point(recipe, point)
    return frame.size


def _resized(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    return (*shape[:axis], length, *shape[axis + 1 :])
