"""What lies in a store, read record by record."""

from __future__ import annotations

import numpy as np

from kvkeep.prefixstore import records
from kvkeep.prefixstore.layout import DATABASES


def content(store, names=DATABASES):
    """Every record of some databases."""
    with store.env.begin() as txn:
        return {name: {k: bytes(v) for k, v in txn.items(name)} for name in names}


def coverage(store):
    """How often each position of each node is covered, by recipe and family."""
    found = []
    for key, data in content(store, ["nodes"])["nodes"].items():
        node = records.unpack(key, data)
        counts = {}
        for ref in node.refs:
            row = counts.setdefault((ref["recipe"], ref["family"]), np.zeros(len(node.tokens), int))
            row[int(ref["start"]) - node.start : int(ref["stop"]) - node.start] += 1
        found += counts.values()
    return np.concatenate(found)
