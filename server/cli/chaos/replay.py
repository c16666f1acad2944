"""The contents of every version, replayed from the publication's own files as they appear.

The log is the first snapshot and then the delta files of every version (docs/formats.md). It is
read here with Python alone, so that a fault of the store's code cannot hide in both sides of a
comparison. A file is read once, soon after it is there: what is harmed later was read before.
"""

import bisect
import contextlib
import dataclasses
import json
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError

from embertide import _store
from embertide.server.adapters.process import ProcessError
from embertide.server.cli.snapshot import Files
from embertide.v1 import update_pb2

_COMMIT_MAGIC, _DELTA_MAGIC = b"EMCMT001", b"EMDLT001"
_RECORD = struct.Struct("<QHBB")
_DTYPES = {"fp32": "<f4", "fp16": "<f2", "int8": "i1", "int4": "i1"}
_SCALED = ("int8", "int4")  # steps of a scale, which stands before them
# Rows of versions further behind than this are forgotten: no node may still answer by them.
_KEPT_VERSIONS = 2000


class LogError(ProcessError):
    """The log cannot be read; the message names the file."""

    remedy = "see the trainer's log in the folder of the run"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A version as the publication has it."""

    number: int
    lineage: int
    watermark_ms: int
    committed_ms: int
    rows: int  # records, tombstones among them
    bytes: int  # of the delta files


@dataclasses.dataclass(slots=True)
class _Table:
    config: _store.TableConfig
    default: bytes  # the row of a key without one, as fp32
    keys: list[int] = dataclasses.field(default_factory=list)  # of all that ever had a row
    # By key: versions, ascending, and the row from each on; None: no row.
    rows: dict[int, tuple[list[int], list[bytes | None]]] = dataclasses.field(default_factory=dict)


def decode_row(layout: _store.RowLayout, live: int, payload: bytes) -> bytes:
    """Return a row's values as little-endian fp32, from its payload (docs/formats.md).

    Raises:
        LogError: The layout's dtype is not known here.
    """
    if layout.dtype == "fp32" and live == (1 << layout.chunks) - 1:
        return payload
    if layout.dtype == "bf16":
        values = (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif layout.dtype in _SCALED and payload:
        scale = np.frombuffer(payload[:4], "<f4")[0]
        steps = np.frombuffer(payload[4:], "i1")
        if layout.dtype == "int4":  # two a byte, the first in the low half
            steps = np.stack((steps << 4 >> 4, steps >> 4), axis=-1).ravel()
        values = steps.astype(np.float32) * scale
        if layout.dtype == "int4":
            values += np.float32(0)  # no -0 of a negative scale
    elif layout.dtype in _DTYPES:
        values = np.frombuffer(payload, _DTYPES[layout.dtype]).astype(np.float32)
    else:
        raise LogError(f"rows of dtype {layout.dtype} cannot be decoded here")
    chunks = np.zeros((layout.chunks, layout.chunk_dim), np.float32)
    held = [c for c in range(layout.chunks) if live >> c & 1]
    chunks[held] = values.reshape(len(held), layout.chunk_dim)
    return chunks.tobytes()


def _default_row(layout: _store.RowLayout, values: Sequence[float]) -> bytes:
    return np.array(values or np.zeros(layout.dim), "<f4").tobytes()


def _payload_bytes(layout: _store.RowLayout, live: int) -> int:
    if not live:
        return 0
    values = live.bit_count() * layout.chunk_dim
    bits = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}[layout.dtype]
    return values * bits // 8 + (4 if layout.dtype in _SCALED else 0)


def read_records(layout: _store.RowLayout, records: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (key, live mask, kind, payload) of row records."""
    at = 0
    while at < len(records):
        key, live, kind, _ = _RECORD.unpack_from(records, at)
        at += _RECORD.size
        end = at + _payload_bytes(layout, live)
        yield key, live, kind, records[at:end]
        at = end


class Replay:
    """The rows of every version so far. Safe from many threads.

    Attributes:
        features: The table of each feature of a request, in the order of KEYS.
    """

    def __init__(self, publication: Path) -> None:
        """Read the first snapshot.

        Raises:
            LogError: There is none, or it is not the first version.
        """
        self._deltas = publication / "deltas"
        self._lock = threading.Lock()
        self._known: set[str] = set()  # folders of deltas that were read
        self.commits: dict[int, Commit] = {}
        self.newest = 0
        self._load(min((publication / "snapshots").glob("*/manifest.json"), default=None))

    def _load(self, manifest: Path | None) -> None:
        if manifest is None:
            raise LogError("the publication holds no snapshot yet")
        files = Files(manifest.parent)
        said = files.manifest
        self._tables = {}
        for config in files.tables.values():
            default = _default_row(config.layout, config.default_row)
            self._tables[config.id] = _Table(config, default)
        ids = {table.config.name: id for id, table in self._tables.items()}
        by_name = {name: self._tables[id] for name, id in ids.items()}
        self.features = [ids[each["table"]] for each in said["features"]]
        if any(each["pooling"] == "none" for each in said["features"]):
            raise LogError(f"{manifest} has sequences, whose answers are not checked here")
        self.newest = said["version"]
        for table, bucket in files.buckets:
            self._apply(by_name[table], self.newest, files.records(table, bucket))
        line = self._note_of(manifest.parents[2] / "versions.jsonl", self.newest)
        self.commits[self.newest] = Commit(
            number=self.newest,
            lineage=said["lineage"],
            watermark_ms=said["watermark_ms"],
            committed_ms=line.get("committed_ms", 0),
            rows=0,
            bytes=0,
        )

    @staticmethod
    def _note_of(log: Path, number: int) -> dict[str, int]:
        with contextlib.suppress(OSError, ValueError):
            for line in log.read_text().splitlines():
                said: dict[str, int] = json.loads(line)
                if said["number"] == number:
                    return said
        return {}

    def dims(self) -> list[int]:
        """Return the width of each feature in an answer."""
        return [self._tables[id].config.layout.dim for id in self.features]

    def tables(self) -> dict[int, str]:
        """Return the tables' names by id."""
        return {id: table.config.name for id, table in self._tables.items()}

    def keys(self, table: int) -> list[int]:
        """Return the keys that ever had a row; the list grows while it is used."""
        return self._tables[table].keys

    def _apply(self, table: _Table, version: int, records: bytes) -> int:
        count = 0
        for key, live, kind, payload in read_records(table.config.layout, records):
            row = None if kind else decode_row(table.config.layout, live, payload)
            history = table.rows.get(key)
            if history is None:
                history = table.rows[key] = ([], [])
                table.keys.append(key)
            versions, rows = history
            versions.append(version)
            rows.append(row)
            if len(versions) > 1 and versions[1] < version - _KEPT_VERSIONS:
                old = bisect.bisect_right(versions, version - _KEPT_VERSIONS) - 1
                del versions[:old], rows[:old]
            count += 1
        return count

    def advance(self) -> int:
        """Read what was published since, and return the newest version.

        Raises:
            LogError: A version's files are not what its commit says.
        """
        with self._lock:
            try:
                found = sorted({each.name for each in self._deltas.iterdir()} - self._known)
            except FileNotFoundError:
                return self.newest
            for name in found:
                if not (self._deltas / name / "commit.pb").is_file():
                    continue  # not published yet, or never
                if int(name.partition("-")[0]) > self.newest:
                    self._read(self._deltas / name)
                self._known.add(name)
            return self.newest

    def _read(self, folder: Path) -> None:
        file = self._commit_file(folder / "commit.pb")
        commit, rows, size = file.commit, 0, 0
        for partition in file.partitions:
            data = (folder / partition.delta_path).read_bytes()
            if data[:8] != _DELTA_MAGIC or _store.crc32c(data) != partition.delta_crc32c:
                raise LogError(f"{folder / partition.delta_path} fails its checksum")
            at, size = len(_DELTA_MAGIC), size + len(data)
            while at < len(data):
                (length,) = struct.unpack_from("<I", data, at)
                batch = update_pb2.RowBatch.FromString(data[at + 4 : at + 4 + length])
                rows += self._apply(
                    self._tables[batch.table_id], commit.version.number, batch.records
                )
                at += 4 + length
        for default in commit.default_rows:
            table = self._tables[default.table_id]
            table.default = _default_row(table.config.layout, default.values)
        number = commit.version.number
        self.commits[number] = Commit(
            number=number,
            lineage=commit.version.lineage,
            watermark_ms=commit.watermark_ms,
            committed_ms=commit.committed_ms,
            rows=rows,
            bytes=size,
        )
        self.newest = number

    @staticmethod
    def _commit_file(path: Path) -> update_pb2.CommitFile:
        data = path.read_bytes()
        message = data[16:]
        if data[:16] != _COMMIT_MAGIC + struct.pack("<II", len(message), _store.crc32c(message)):
            raise LogError(f"{path} fails its checksum")
        try:
            return update_pb2.CommitFile.FromString(message)
        except DecodeError as error:
            raise LogError(f"{path}: {error}") from error

    def default(self, table: int) -> bytes:
        """Return what a key without a row reads as."""
        return self._tables[table].default

    def row(self, table: int, key: int, version: int) -> bytes | None:
        """Return a key's row at a version, as fp32; None: it has none."""
        history = self._tables[table].rows.get(key)
        if history is None:
            return None
        versions, rows = history
        if versions[-1] <= version:
            return rows[-1]
        at = bisect.bisect_right(versions, version) - 1
        return rows[at] if at >= 0 else None
