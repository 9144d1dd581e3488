"""The byte budget of a store: which one is in force, and that it holds from the first moment."""

from __future__ import annotations

from kvkeep.persistence.environment import Environment
from kvkeep.prefixstore import layout
from kvkeep.prefixstore.ledger import Ledger, counter
from kvkeep.prefixstore.opening import Marker
from kvkeep.prefixstore.pins import TooMuchPinned, bytes_of, protected
from kvkeep.prefixstore.room import Room
from kvkeep.prefixstore.sizes import format_size


def settle_budget(env: Environment, budget: int | None, marker: Marker) -> int:
    """The budget in force: the given one, which is recorded, or the recorded one."""
    with env.begin() as txn:
        recorded = counter(txn, "budget") or marker.budget
    if budget is None or budget == recorded or env.read_only:
        return recorded
    with env.begin(write=True) as txn:
        held = bytes_of(txn, protected(txn)[0])
        if held > budget:
            raise TooMuchPinned(f"Pins without a deadline hold {format_size(held)}")
        txn.put("meta", b"budget", layout.u64(budget))
    return budget


def shrink(env: Environment, max_bytes: int) -> None:
    """Bring an over-full store down to its budget, and let go of what has expired."""
    with env.begin() as txn:
        due = counter(txn, "used") > max_bytes or txn.count("ttls")
    if due:
        with env.begin(write=True) as txn:
            ledger = Ledger(txn)
            room = Room(ledger, max_bytes)
            room.make(b"", 0)
            room.report()
            ledger.settle()
