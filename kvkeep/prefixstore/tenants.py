"""Tenants: the spaces under one salt, the bytes that they use, and their quota."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from kvkeep.errors import CorruptFrame
from kvkeep.persistence.environment import Transaction
from kvkeep.prefixstore.identity import Identity

NOBODY = b"-"
"""The key of spaces without a salt, which share a quota as well."""

_RECORD = struct.Struct(">QQ")
_SPACES: dict[bytes, bytes] = {}


class Tenant(NamedTuple):
    """``quota`` is a number of bytes, 0 without one; ``used`` are those of all its spaces."""

    quota: int
    used: int


def key_of(identity: Identity) -> bytes:
    """Under which key the tenant of a space is kept: the digest of its salt."""
    return identity.salt.encode() or NOBODY


def tenant_of(txn: Transaction, space: bytes) -> bytes:
    """The key of the tenant that ``space`` belongs to; a damaged record belongs to nobody."""
    known = _SPACES.get(space) if space else NOBODY
    if known is None:
        data = txn.get("spaces", space)
        if data is None:
            return NOBODY
        try:
            known = key_of(Identity.unpack(data)[0])
        except CorruptFrame:
            return NOBODY
        if len(_SPACES) < 1 << 16:
            _SPACES[space] = known
    return known


def read_tenant(txn: Transaction, key: bytes) -> Tenant:
    """Quota and use of a tenant."""
    data = txn.get("tenants", key)
    if data is None or len(data) != _RECORD.size:
        return Tenant(0, 0)
    return Tenant(*_RECORD.unpack(data))


def write_tenant(txn: Transaction, key: bytes, tenant: Tenant) -> None:
    """Write down quota and use of a tenant; nothing where both are 0."""
    if any(tenant):
        txn.put("tenants", key, _RECORD.pack(*tenant))
    else:
        txn.delete("tenants", key)


def spaces_of(txn: Transaction, key: bytes) -> Iterator[bytes]:
    """The spaces of a tenant that something was stored in."""
    for space in list(txn.keys("spaces")):
        if tenant_of(txn, space) == key:
            yield space
