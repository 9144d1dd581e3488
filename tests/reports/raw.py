"""Totals by another route: the raw records of a ring, decoded by position, summed in SQL.

Shares no code with the reports: neither the decoder nor the sums.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import lmdb
import msgpack

COLUMNS = (
    *("what", "time", "space", "reason", "prompt", "matched", "resumed", "new", "known"),
    *("nbytes", "seconds", "kinds", "layers", "lim", "rule", "origin", "tier", "request"),
    *("rate", "node", "rebuild", "nodes", "asked"),
)

SUMS = """
select
  sum(what = 'lookup') as lookups,
  sum(what = 'lookup' and resumed > 0) as hits,
  sum(iif(what = 'lookup', prompt, 0)) as prompt_tokens,
  sum(iif(what = 'lookup', matched, 0)) as matched_tokens,
  sum(iif(what = 'lookup', resumed, 0)) as resumed_tokens,
  sum(iif(what = 'lookup' and rate > 0, resumed, 0)) as rated_tokens,
  sum(iif(what = 'lookup' and rate > 0, resumed / rate, 0.0)) as saved_seconds,
  sum(iif(what = 'lookup' and rate > 0, (prompt - resumed) / rate, 0.0)) as lost_seconds,
  sum(iif(what = 'lookup', seconds, 0.0)) as lookup_seconds,
  sum(what = 'restore' or (what = 'lookup' and resumed > 0)) as restores,
  sum(iif(what = 'restore' or (what = 'lookup' and resumed > 0), nbytes, 0)) as restored_bytes,
  sum(iif(what = 'restore' or (what = 'lookup' and resumed > 0), seconds, 0.0))
    as restore_seconds,
  sum(what = 'snapshot') as snapshots,
  sum(what = 'snapshot' and reason = 'already_stored') as snapshots_known,
  sum(what = 'snapshot' and reason not in ('stored', 'already_stored')) as snapshots_refused,
  sum(iif(what = 'snapshot', new, 0)) as stored_tokens,
  sum(iif(what = 'snapshot', known, 0)) as known_tokens,
  sum(iif(what = 'snapshot', nbytes, 0)) as written_bytes,
  sum(what = 'evict') as evictions,
  sum(iif(what = 'evict', nodes, 0)) as evicted_nodes,
  sum(iif(what = 'evict', known, 0)) as evicted_tokens,
  sum(iif(what = 'evict', nbytes, 0)) as evicted_bytes,
  sum(what = 'lookup' and (reason like 'evicted%' or reason like 'expired%')) as regrets,
  sum(iif(what = 'lookup' and (reason like 'evicted%' or reason like 'expired%'),
          prompt - resumed, 0)) as regret_tokens
from events where time >= :since
"""


class Raw:
    """The events of a store in a table of SQLite. The store must be closed."""

    def __init__(self, store: Path) -> None:
        self._db = sqlite3.connect(":memory:")
        self._db.row_factory = sqlite3.Row
        self._db.execute(f"create table events ({', '.join(COLUMNS)})")
        env = lmdb.open(str(store), max_dbs=64, readonly=True)
        with env.begin(db=env.open_db(b"events", create=False)) as txn:
            for _, value in txn.cursor():
                values = msgpack.unpackb(value)
                values[2] = values[2].hex()
                row = [repr(v) if isinstance(v, list) else v for v in values]
                self._db.execute(f"insert into events values ({','.join('?' * len(row))})", row)
        env.close()

    def sums(self, where: str = "1", since: float = 0.0, **values: Any) -> dict[str, Any]:
        """All numbers of a group of events."""
        row = self._db.execute(f"{SUMS} and {where}", {"since": since, **values}).fetchone()
        found = {name: value or 0 for name, value in dict(row).items()}
        found["request_hit_rate"] = found["hits"] / found["lookups"] if found["lookups"] else 0
        whole = found["prompt_tokens"]
        found["hit_rate"] = found["resumed_tokens"] / whole if whole else 0
        return found

    def by(self, column: str, value: str, where: str) -> dict[str, Any]:
        """The sum of ``value`` for each ``column``, without zeros."""
        rows = self._db.execute(
            f"select {column} as k, sum({value}) as v from events where {where} group by 1"
        )
        return {row["k"]: row["v"] for row in rows if row["v"]}

    def rows(self, query: str) -> list[sqlite3.Row]:
        """Anything else."""
        return self._db.execute(query).fetchall()
