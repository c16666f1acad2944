"""Reads by groups of buckets and time: what the heat map of the load page shows.

Each table's buckets are cut into at most 32 groups of neighbours. A column is one load window of
the nodes (5 s); the last 120 are kept, a column of at most 256 rows each.
"""

import collections
import threading
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embertide.server.cli.fleet_view import FleetAnswers

COLUMNS_MAX = 120
ROWS_MAX = 256
GROUPS_MAX = 32
EVERY_MS = 5000


class HeatRow(NamedTuple):
    """A group of neighbouring buckets of a table.

    Attributes:
        table: The table's name.
        first: The first bucket.
        last: The last bucket.
    """

    table: str
    first: int
    last: int


class _Column(NamedTuple):
    at_ms: int
    epoch: int
    reads: NDArray[np.int64]
    remote: NDArray[np.int64]


class HeatMap:
    """The last columns. Thread-safe."""

    def __init__(self) -> None:
        """Begin without any."""
        self._lock = threading.Lock()
        self._rows: list[HeatRow] = []
        self._columns: collections.deque[_Column] = collections.deque(maxlen=COLUMNS_MAX)

    def add(self, answers: FleetAnswers) -> None:
        """Take the load of a fleet, once a load window; other tables begin anew."""
        plan, load = answers.plan, answers.load
        if plan is None or load is None:
            return
        with self._lock:
            if self._columns and answers.at_ms - self._columns[-1].at_ms < EVERY_MS:
                return
            rows, begins = rows_of(answers)
            if rows != self._rows:
                self._rows = rows
                self._columns.clear()
            reads = np.zeros(len(rows), np.int64)
            remote = np.zeros(len(rows), np.int64)
            for said in answers.columns.values():
                for table, (begin, size, end) in begins.items():
                    at = begin + said.bucket[said.table == table] // size
                    shown = at < end
                    for counts, values in ((reads, said.wanted), (remote, said.asked)):
                        np.add.at(counts, at[shown], values[said.table == table][shown])
            self._columns.append(_Column(answers.at_ms, plan.epoch, reads, remote))

    def facts(self) -> dict[str, Any]:
        """Return the map for the script of the page."""
        with self._lock:
            rows, columns = list(self._rows), list(self._columns)
        return {
            "rows": [
                f"{each.table} {each.first}" + (f"-{each.last}" if each.last != each.first else "")
                for each in rows
            ],
            "times": [each.at_ms / 1000 for each in columns],
            "epochs": [each.epoch for each in columns],
            "reads": [each.reads.tolist() for each in columns],
            "remote": [each.remote.tolist() for each in columns],
        }

    def newest(self, most: int) -> list[tuple[HeatRow, int, int]]:
        """Return the groups that were read most in the last window: row, reads, asked of peers."""
        with self._lock:
            if not self._columns:
                return []
            rows, column = list(self._rows), self._columns[-1]
        order = np.argsort(-column.reads, kind="stable")[:most].tolist()
        return [(rows[at], int(column.reads[at]), int(column.remote[at])) for at in order]


def rows_of(answers: FleetAnswers) -> tuple[list[HeatRow], dict[int, tuple[int, int, int]]]:
    """Return the rows of a plan, and by table its first row, buckets a row, and row behind."""
    rows: list[HeatRow] = []
    begins: dict[int, tuple[int, int, int]] = {}
    tables = answers.plan.tables if answers.plan is not None else ()
    for table in tables:
        buckets = 1 << table.bucket_bits
        size = -(-buckets // GROUPS_MAX)
        begin, count = len(rows), -(-buckets // size)
        if begin + count > ROWS_MAX:
            break  # the load page says how many tables it shows
        begins[table.id] = (begin, size, begin + count)
        rows += [
            HeatRow(table.name, first, min(first + size, buckets) - 1)
            for first in range(0, buckets, size)
        ]
    return rows, begins
