"""Reads by ranges of buckets and time: what the heat map of the load page shows.

The control plane cuts each table's buckets into at most 64 ranges of neighbours. A column is one
load window of the nodes (5 s); the last 120 are kept, of at most 4,096 ranges each. All tables
together are shown in at most 256 rows, of neighbours added up; one table in all its ranges.
"""

import collections
import itertools
import threading
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embertide.server.cli.fleet_view import FleetAnswers

RANGES = 64
COLUMNS_MAX = 120
ROWS_MAX = 256
EVERY_MS = 5000
Kind = Literal["reads", "max_reads", "remote", "ssd", "bytes"]
KINDS: tuple[Kind, ...] = ("reads", "max_reads", "remote", "ssd", "bytes")


class HeatRow(NamedTuple):
    """A range of neighbouring buckets of a table.

    Attributes:
        table: The table's name.
        first: The first bucket.
        last: The last bucket.
    """

    table: str
    first: int
    last: int

    def __str__(self) -> str:
        """Say it as pages do."""
        return f"{self.table} {self.first}" + (f"-{self.last}" if self.last > self.first else "")


class _Column(NamedTuple):
    at_ms: int
    epoch: int
    values: dict[Kind, NDArray[np.int64]]


class HeatMap:
    """The last columns. Thread-safe."""

    def __init__(self) -> None:
        """Begin without any."""
        self._lock = threading.Lock()
        self._rows: list[HeatRow] = []
        self._columns: collections.deque[_Column] = collections.deque(maxlen=COLUMNS_MAX)

    def add(self, answers: FleetAnswers) -> None:
        """Take the ranges of a fleet, once a load window; other ranges begin anew."""
        figures = answers.figures
        if not figures.ranges:
            return
        with self._lock:
            if self._columns and answers.at_ms - self._columns[-1].at_ms < EVERY_MS:
                return
            names = {table.id: table.name for table in figures.tables}
            rows = [
                HeatRow(
                    names.get(each.table_id, str(each.table_id)),
                    each.bucket_begin,
                    each.bucket_begin + each.bucket_count - 1,
                )
                for each in figures.ranges
            ]
            if rows != self._rows:
                self._rows = rows
                self._columns.clear()
            values = np.array(
                [
                    (each.reads, each.max_reads, each.asked, each.in_ssd, each.bytes)
                    for each in figures.ranges
                ],
                np.int64,
            ).T
            column = dict(zip(KINDS, values, strict=True))
            self._columns.append(_Column(answers.at_ms, figures.plan_epoch, column))

    def facts(self, table: str = "", kind: str = "reads") -> dict[str, Any]:
        """Return the map of a table, or of all, for the script of the page."""
        with self._lock:
            rows, columns = list(self._rows), list(self._columns)
        shown = [at for at, row in enumerate(rows) if table in ("", row.table)]
        begins = _merged(rows, shown)
        chosen: Kind = next((each for each in KINDS if each == kind), "reads")
        add = np.maximum if chosen == "max_reads" else np.add
        return {
            "kind": chosen,
            "rows": [
                str(rows[shown[begin]]._replace(last=rows[shown[end - 1]].last))
                for begin, end in itertools.pairwise([*begins, len(shown)])
            ],
            "times": [each.at_ms / 1000 for each in columns],
            "epochs": [each.epoch for each in columns],
            "values": [
                add.reduceat(each.values[chosen][shown], begins).tolist() if begins else []
                for each in columns
            ],
        }

    def newest(self, count: int, table: str = "") -> list[tuple[HeatRow, dict[Kind, int]]]:
        """Return the ranges of a table, or of all, that were read most in the last window."""
        with self._lock:
            if not self._columns:
                return []
            rows, column = list(self._rows), self._columns[-1]
        order = np.argsort(-column.values["reads"], kind="stable").tolist()
        found = [at for at in order if table in ("", rows[at].table)][:count]
        return [(rows[at], {kind: int(column.values[kind][at]) for kind in KINDS}) for at in found]


def _merged(rows: list[HeatRow], shown: list[int]) -> list[int]:
    """Return where the rows of a map begin: at most ROWS_MAX, unless there are more tables."""
    size = max(1, -(-len(shown) // ROWS_MAX))
    begins, since = [], 0
    for place, at in enumerate(shown):
        if place == 0 or rows[at].table != rows[shown[place - 1]].table or place - since >= size:
            begins.append(place)
            since = place
    return begins
