"""Why a space holds nothing of a prompt: the field by which another space differs.

Looks only at spaces under the same salt: of other tenants it says nothing, not even that they
are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from kvkeep.errors import CorruptFrame
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore.identity import Identity
from kvkeep.prefixstore.tokens import Tokens
from kvkeep.prefixstore.trie import walk

TELLING = 16
"""Common tokens that make it likely to be the same prompt, not the same beginning."""


def changed_field(txn: Transaction, identity: Identity, tokens: Tokens) -> str:
    """The fields, comma separated, by which the nearest other space differs; or nothing."""
    matching: list[tuple[int, tuple[str, ...]]] = []
    for other in stored_spaces(txn):
        fields = identity.differences(other)
        if not fields or identity.salt != other.salt:
            continue
        matched = walk(txn, other.id, tokens).matched
        if matched >= min(TELLING, len(tokens) - 1):
            matching.append((matched, fields))
    if not matching:
        return ""
    return ",".join(min(matching, key=lambda found: (len(found[1]), -found[0]))[1])


def stored_spaces(txn: Transaction) -> Iterator[Identity]:
    """The identities of all spaces of the store."""
    for _, value in txn.items("spaces"):
        with suppress(CorruptFrame):
            yield Identity.unpack(value)[0]
