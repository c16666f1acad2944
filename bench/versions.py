"""A trainer's part of a benchmark: versions of a model's random rows, several a second.

Each version changes 1 % of the rows of every table, and goes out as a trainer's do: delta files
and, through Redis, row batches and commits. Which rows change, and to what, is drawn before:
that stands for the learning, whose cost is not to be measured.

Shapes: T tables, R rows a table, C rows that a version changes of it, d values a row.
"""

import itertools
import os
import shutil
import threading
import time
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from bench.models import CPU, Files, bucket_records
from bench.servers import BenchError
from bench.shapes import SEED, Shape
from embertide.trainer.data.keys import buckets_of
from embertide.trainer.embedding.records import encode_rows
from embertide.trainer.embedding.store import store_table
from embertide.trainer.errors import TrainerError
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.publisher import Change, Publisher
from embertide.trainer.publish.snapshot import (
    TENSORS,
    DensePart,
    SnapshotInfo,
    schema_id,
    write_snapshot,
)

CHANGED_SHARE = 0.01
_KEPT_SNAPSHOTS = 2
_DRAWN = 24  # versions; the next ones change the same rows again

Keys = NDArray[np.int64]
Values = NDArray[np.float32]


class Stages(NamedTuple):
    """When a version was so far; wall clock, in s."""

    number: int
    trained: float  # its rows have their values
    taken: float  # ... and are records
    written: float  # its files are there
    sent: float  # it is on the bus


class Versions:
    """A publication that grows while it is entered. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        bus: str,
        shape: Shape,
        files: Files,
        per_s: float,
        *,
        event_ms: int = 1,
    ) -> None:
        """Begin a publication at `folder` with the shape's snapshot as its first version.

        Args:
            folder: Folder of the publication; its former contents are removed.
            bus: Redis URL that versions go to.
            shape: The model's shape.
            files: Its snapshot and rows.
            per_s: Versions a second.
            event_ms: Event time from one version to the next.

        Raises:
            BusError: Redis cannot be reached.
        """
        shutil.rmtree(folder, ignore_errors=True)
        self.publication = Publication(folder)
        first = self.publication.snapshot_path(VersionId(1, 1))
        # Links to the files, not to the folder: what is pruned here must stay there.
        shutil.copytree(files.snapshot, first, copy_function=os.link)
        config = shape.config()
        self._config, self._files, self._pause_s = config, files, 1 / per_s
        self._tables = [store_table(table, i, SEED) for i, table in enumerate(config.tables)]
        self._rows_TRd = np.load(files.peer / "tables.npy")
        keys_R = np.arange(shape.rows, dtype=np.uint64)
        self._bucket_TR = [buckets_of(keys_R, table.bucket_bits) for table in self._tables]
        self._dense = (files.snapshot / TENSORS).read_bytes()
        info = SnapshotInfo.of(config, lineage=1, version=1, watermark_ms=1)
        self._event_ms = event_ms
        self._publisher = Publisher(
            self.publication, bus=bus, model=config.name, schema_id=schema_id(info, self._tables)
        )
        self._drawn = self._draw(np.random.default_rng(SEED))
        self.log: list[Stages] = []
        self._flows = threading.Event()
        self._flows.set()
        self._publishing = threading.Lock()
        self._stop = threading.Event()
        self._error: TrainerError | None = None
        self._thread = threading.Thread(target=self._run)

    @property
    def _newest(self) -> VersionId:
        assert self._publisher.newest is not None
        return self._publisher.newest

    def _draw(self, rng: np.random.Generator) -> list[list[tuple[Keys, Values]]]:
        """Return what versions change, a table each: keys by bucket, ascending, and values."""

        def table(rows_Rd: Values, bucket_R: NDArray[np.uint32]) -> tuple[Keys, Values]:
            count = int(len(rows_Rd) * CHANGED_SHARE)
            key_C = np.sort(rng.choice(len(rows_Rd), count, replace=False))
            key_C = key_C[np.argsort(bucket_R[key_C], kind="stable")]
            return key_C, rng.random((count, rows_Rd.shape[1]), np.float32)

        of_tables = list(zip(self._rows_TRd, self._bucket_TR, strict=True))
        return [[table(*each) for each in of_tables] for _ in range(_DRAWN)]

    def _learn(self, number: int) -> list[tuple[Keys, Values]]:
        drawn = self._drawn[number % _DRAWN]
        for rows_Rd, (key_C, value_Cd) in zip(self._rows_TRd, drawn, strict=True):
            rows_Rd[key_C] = value_Cd
        return drawn

    def _changes(self, drawn: list[tuple[Keys, Values]]) -> list[Change]:
        changes: list[Change] = []
        for table, bucket_R, (key_C, value_Cd) in zip(
            self._tables, self._bucket_TR, drawn, strict=True
        ):
            records = encode_rows(table.layout, key_C.astype(np.uint64), value_Cd)
            ends = np.searchsorted(bucket_R[key_C], np.arange((1 << table.bucket_bits) + 1))
            for bucket, (first, end) in enumerate(itertools.pairwise(ends)):
                changes.append((table, bucket, records[first:end].tobytes()))
        return changes

    def _publish(self) -> None:
        with self._publishing:
            number = self._newest.number + 1
            drawn = self._learn(number)
            trained = time.time()
            changes = self._changes(drawn)
            taken = time.time()
            self._publisher.publish(
                number, watermark_ms=number * self._event_ms, changes=changes, dense=self._dense
            )
            sent = time.time()
            # Its files are on the drive once this one is.
            commit = self.publication.path / "deltas" / self._newest.folder / "commit.pb"
            self.log.append(Stages(number, trained, taken, commit.stat().st_mtime, sent))

    def _run(self) -> None:
        due = time.monotonic() + self._pause_s
        try:
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                if self._flows.is_set():
                    self._publish()
                due = max(due + self._pause_s, time.monotonic())  # what was missed is not made up
        except TrainerError as error:
            self._error = error

    def snapshot(self) -> None:
        """Write a snapshot of the newest version and drop old files; no version comes meanwhile.

        Raises:
            BenchError: Publishing has failed.
        """
        if self._error:
            raise BenchError(f"publishing failed: {self._error}")
        with self._publishing:
            info = SnapshotInfo.of(
                self._config,
                lineage=self._newest.lineage,
                version=self._newest.number,
                watermark_ms=self._newest.number * self._event_ms,
            )
            part = DensePart(program=self._files.peer / "program.pt2", cpu=CPU, tensors=self._dense)
            buckets = (
                each
                for table in self._tables
                for each in bucket_records(table, self._rows_TRd[table.id])
            )
            path = self.publication.snapshot_path(self._newest)
            write_snapshot(path, info, self._tables, buckets, part)
            self.publication.prune(_KEPT_SNAPSHOTS)

    def published(self, begin: float, end: float) -> int:
        """Return how many versions were committed between two times of the wall clock."""
        with self._publishing:
            return sum(begin <= each.sent <= end for each in self.log)

    def flow(self, flows: bool) -> None:
        """Let versions come, or none."""
        if flows:
            self._flows.set()
            return
        self._flows.clear()
        with self._publishing:
            pass  # the one under way is out

    def __enter__(self) -> Self:
        """Begin to publish."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Publish no more."""
        self._stop.set()
        self._thread.join()
