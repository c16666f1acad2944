"""The records of a replay: one row an impression, one row a request, one row a check.

    OUT/scores.parquet      event, ts_ms, score, version, plan_epoch, node, answered_ms
    OUT/requests.parquet    first event, events, ts_ms of the last, sent_ms, latency_us, version,
                            node, failures, compared, difference
    OUT/checks.parquet      the same of events that were asked again (checks.py), all compared

All are written under a temporary name and appear whole. `answered_ms` and `sent_ms` are wall
clock, ms since the Unix epoch; `version` and `plan_epoch` are what the answer named. `failures`
are the times that the request failed before it was answered. `compared` says whether a copy was
asked the same at the same version, `difference` how far a score was from its at most; it is null
where the copy did not hold the version.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

SCORES = pa.schema(
    {
        "event": pa.int64(),
        "ts_ms": pa.int64(),
        "score": pa.float32(),
        "version": pa.int64(),
        "plan_epoch": pa.int64(),
        "node": pa.string(),
        "answered_ms": pa.int64(),
    }
)
REQUESTS = pa.schema(
    {
        "first": pa.int64(),
        "events": pa.int32(),
        "ts_ms": pa.int64(),
        "sent_ms": pa.int64(),
        "latency_us": pa.int64(),
        "version": pa.int64(),
        "node": pa.string(),
        "failures": pa.int32(),
        "compared": pa.bool_(),
        "difference": pa.float64(),
    }
)
_GROUP_ROWS = 1 << 17


@dataclasses.dataclass(frozen=True, slots=True)
class Records:
    """Where the records of one replay are."""

    directory: Path

    @property
    def scores(self) -> Path:
        """A row an impression."""
        return self.directory / "scores.parquet"

    @property
    def requests(self) -> Path:
        """A row a request."""
        return self.directory / "requests.parquet"

    @property
    def checks(self) -> Path:
        """A row an answer to what was asked again; a replay of a build before has none."""
        return self.directory / "checks.parquet"


class RecordWriter:
    """Writes one Parquet file, a row group at a time. A context manager.

    On an error the temporary file is removed and nothing appears.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Open the temporary file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._schema = schema
        self._writer = pq.ParquetWriter(self._partial, schema, compression="zstd")
        self._tables: list[pa.Table] = []
        self._rows = 0

    def add(self, columns: Mapping[str, Any]) -> None:
        """Add rows: arrays of one length, or lists."""
        arrays = [pa.array(columns[field.name], field.type) for field in self._schema]
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        self._tables.append(table)
        self._rows += len(table)
        if self._rows >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables).combine_chunks())
        self._tables, self._rows = [], 0

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write what is left and give the file its name."""
        if error is None:
            self._flush()
        self._writer.close()
        if error is None:
            self._partial.rename(self._path)
        else:
            self._partial.unlink(missing_ok=True)
