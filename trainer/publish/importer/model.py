"""Importing an existing model: any tables, and a dense net if there is one, become a snapshot.

Memory is bounded: rows are read in slices, encoded, sorted by bucket and key through files beside
the output (partition.py), and handed to `write_snapshot` a bucket at a time. The snapshot appears
whole or not at all, and the files go in either case.
"""

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from embertide import _store
from embertide.trainer.embedding.records import encode_rows, record_dtype, unstorable
from embertide.trainer.presets import bucket_bits
from embertide.trainer.publish.importer.dense_folder import DenseFolder, read_dense_folder
from embertide.trainer.publish.importer.partition import Partition, Records, needed_bytes
from embertide.trainer.publish.importer.sources import ModelImportError, RowSource
from embertide.trainer.publish.importer.spec import ModelSpec, TableSpec
from embertide.trainer.publish.snapshot import DensePart, SnapshotInfo, write_snapshot

Progress = Callable[[str, int, int], None]
"""Called with a table's name, its rows done and all its rows; each row counts twice."""

LINEAGE = 0  # of what no run of ours published
_MIN_MEMORY_BYTES = 16 << 20
_MAX_BUCKET_BITS = 17
# A bucket file's header and footer and its lines of the manifest; blocks add less than 1 in 1000.
_BUCKET_OVERHEAD_BYTES = 512


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """How a model is imported."""

    version: int = 1
    watermark_ms: int = 0  # 0: what the model has learned last is not known
    memory_bytes: int = 512 << 20
    duplicates: Literal["error", "last"] = "error"
    dense: Path | None = None  # a folder that export-dense wrote

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.version < 1:
            raise ModelImportError("version", f"{self.version} is below 1; give 1 or more")
        if self.memory_bytes < _MIN_MEMORY_BYTES:
            raise ModelImportError(
                "memory", f"{self.memory_bytes} bytes; give {_MIN_MEMORY_BYTES >> 20} MiB or more"
            )
        if self.duplicates not in ("error", "last"):
            raise ModelImportError("duplicates", f"{self.duplicates!r}; use error or last")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImportedTable:
    """The import of one table."""

    name: str
    source: str
    rows: int
    duplicates: int  # rows left out for a later one of the same key
    dim: int
    dtype: str
    buckets: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """The result of an import."""

    path: str
    model: str
    version: int
    tables: tuple[ImportedTable, ...]
    features: tuple[str, ...]
    dense_features: int
    dense_id: str  # empty without a dense net
    bytes: int
    seconds: float


class _Table:
    """A table on its way: opened and checked, not yet read."""

    def __init__(self, spec: TableSpec, table_id: int, options: ImportOptions) -> None:
        self.source: RowSource = spec.open()
        self.duplicates = 0
        self._options = options
        dim = self.source.dim
        if spec.chunks < 1 or dim % spec.chunks:
            raise ModelImportError(
                self.source.name, f"dim {dim} is no multiple of {spec.chunks} chunks"
            )
        try:
            layout = _store.RowLayout(
                dtype=spec.dtype, chunks=spec.chunks, chunk_dim=dim // spec.chunks
            )
            self.record = record_dtype(layout)
            bits = self._bucket_bits() if spec.bucket_bits is None else spec.bucket_bits
            self.config = _store.TableConfig(
                name=spec.name,
                id=table_id,
                layout=layout,
                bucket_bits=bits,
                default_row=list(spec.default_row),
            )
        except (_store.StoreError, TypeError) as error:
            raise ModelImportError(self.source.name, str(error)) from error
        if not self._fits(bits):
            raise ModelImportError(
                self.source.name,
                f"{self.source.rows} rows in {1 << bits} buckets need more than the "
                f"{options.memory_bytes >> 20} MiB of memory for one; give bucket_bits above "
                f"{bits}, or more memory",
            )

    def _fits(self, bits: int) -> bool:
        # The hash is even, and buckets of rows enough to matter hardly differ.
        rows = self.source.rows * 5 // 4 >> bits
        return needed_bytes(rows, rows, self.record.itemsize) <= self._options.memory_bytes

    def _bucket_bits(self) -> int:
        bits = min(bucket_bits(self.source.rows), _MAX_BUCKET_BITS)
        while bits < _MAX_BUCKET_BITS and not self._fits(bits):
            bits += 1
        return bits

    @property
    def disk_bytes(self) -> int:
        """Bytes of the table's records and files."""
        buckets = _BUCKET_OVERHEAD_BYTES << self.config.bucket_bits
        return self.source.rows * self.record.itemsize + buckets

    def _batches(self, progress: Progress) -> Iterator[Records]:
        # Read, as fp32 with two temporaries, encoded, and dealt into order; keys and hashes.
        source, dim = self.source, self.source.dim
        row_bytes = source.row_bytes + 12 * dim + 3 * self.record.itemsize + 64
        # More than 64 MiB at a time is no faster.
        rows = max(1, min(self._options.memory_bytes // 3, 64 << 20) // row_bytes)
        done = 0
        for keys_N, values_ND in source.slices(rows):
            if (place := unstorable(self.config.layout, values_ND)) is not None:
                raise ModelImportError(
                    source.name,
                    f"value {values_ND[place]} in row {done + place[0]} (key "
                    f"{keys_N[place[0]]}), dimension {place[1]}, cannot be stored as "
                    f"{self.config.layout.dtype}; mend the row or choose another dtype",
                )
            yield encode_rows(self.config.layout, keys_N, values_ND)
            done += len(keys_N)
            progress(self.config.name, done, 2 * source.rows)

    def buckets(self, folder: Path, progress: Progress) -> Iterator[tuple[int, bytes]]:
        """Yield (bucket, records), with files in `folder` meanwhile."""
        partition = Partition(
            folder,
            self.record,
            bucket_bits=self.config.bucket_bits,
            memory_bytes=self._options.memory_bytes,
            rows_of=self.source.rows_of,
            keep_last=self._options.duplicates == "last",
        )
        rows = done = self.source.rows
        try:
            for bucket, records in partition.buckets(self._batches(progress)):
                yield bucket, records
                done += len(records) // self.record.itemsize
                progress(self.config.name, done, 2 * rows)
        except ModelImportError as error:
            of = f"table {self.config.name!r} ({self.source.name})"
            raise ModelImportError(of, str(error)) from error
        self.duplicates = partition.duplicates
        progress(self.config.name, 2 * rows, 2 * rows)

    def report(self) -> ImportedTable:
        """Say what became of it."""
        return ImportedTable(
            name=self.config.name,
            source=self.source.name,
            rows=self.source.rows - self.duplicates,
            duplicates=self.duplicates,
            dim=self.source.dim,
            dtype=self.config.layout.dtype,
            buckets=1 << self.config.bucket_bits,
        )


def _check_dense(spec: ModelSpec, tables: Sequence[_Table], dense: DenseFolder, path: Path) -> None:
    dims = {table.config.name: table.source.dim for table in tables}
    for feature in spec.features:
        if feature.pooling == "none":
            raise ModelImportError(
                path,
                f"the net takes one vector a feature, and feature {feature.name!r} has pooling "
                "none: give it sum or mean, or leave the net out",
            )
    total = sum(dims[feature.table] for feature in spec.features)
    if dense.embedding_dim != total:
        each = " + ".join(f"{dims[f.table]} ({f.name})" for f in spec.features)
        raise ModelImportError(
            path,
            f"the net takes {dense.embedding_dim} embedding values, the features give {each} = "
            f"{total}; name the features that it was trained with",
        )
    if spec.dense_features not in (None, dense.dense_features):
        raise ModelImportError(
            path,
            f"the net takes {dense.dense_features} dense features, the model says "
            f"{spec.dense_features}",
        )


def _check_disk(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ModelImportError(
            directory,
            f"the import needs {needed >> 20} MiB of disk, {free >> 20} MiB are free; free some "
            "or give another output",
        )


def import_model(
    spec: ModelSpec,
    directory: Path,
    options: ImportOptions | None = None,
    progress: Progress = lambda name, done, total: None,
) -> ImportReport:
    """Write a model as a snapshot to `directory`, which must not exist.

    Beside the output and the interpreter this takes `options.memory_bytes` of memory at most,
    and about 1 KiB for each bucket, which is named in the manifest.

    Raises:
        ModelImportError: An input is not what it should be, or there is no room; it says which.
    """
    options = options or ImportOptions()
    begun_s = time.monotonic()
    if directory.exists():
        raise ModelImportError(
            directory, "exists; a snapshot is never overwritten: give another output"
        )
    tables = [_Table(table, i, options) for i, table in enumerate(spec.tables)]
    dense = None if options.dense is None else read_dense_folder(options.dense)
    if dense is not None and options.dense is not None:
        _check_dense(spec, tables, dense, options.dense)
    info = SnapshotInfo(
        model=spec.name,
        lineage=LINEAGE,
        version=options.version,
        watermark_ms=options.watermark_ms,
        dense_features=spec.dense_features or (dense.dense_features if dense else 0),
        features=spec.features,
        heads=dense.heads if dense else (),
    )
    parent = directory.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # Records lie once on disk, for a file goes as soon as it is read; 2 % for blocks and luck.
        _check_disk(parent, sum(table.disk_bytes for table in tables) * 102 // 100)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=parent) as folder:
            part = dense.part if dense else None
            _write(Path(folder), directory, info, tables, part, progress)
    except OSError as error:
        raise ModelImportError(directory, f"cannot be written: {error}") from error
    except _store.StoreError as error:
        raise ModelImportError(directory, str(error)) from error
    return ImportReport(
        path=str(directory),
        model=spec.name,
        version=options.version,
        tables=tuple(table.report() for table in tables),
        features=tuple(feature.name for feature in spec.features),
        dense_features=info.dense_features,
        dense_id=dense.part.id if dense else "",
        bytes=sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
        seconds=round(time.monotonic() - begun_s, 3),
    )


def _write(
    folder: Path,
    directory: Path,
    info: SnapshotInfo,
    tables: Sequence[_Table],
    dense: DensePart | None,
    progress: Progress,
) -> None:
    spill = folder / "spill"
    spill.mkdir()
    buckets = (
        (table.config, bucket, records)
        for table in tables
        for bucket, records in table.buckets(spill, progress)
    )
    configs = [table.config for table in tables]
    write_snapshot(folder / "snapshot", info, configs, buckets, dense)
    (folder / "snapshot").rename(directory)
