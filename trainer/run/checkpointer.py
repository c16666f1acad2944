"""A run's snapshots and checkpoints: what each of them has, and what it rests on.

The caller says when one is due. Its rows are copied here, as the state is then; the saver
([saver.py](checkpoint/saver.py)) writes them in a thread of its own. One with all rows is the base
of the increments after it.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from embertide import _store
from embertide.trainer.data.base import EventSchema
from embertide.trainer.data.journal import journal_lines
from embertide.trainer.publish.chain import Place
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.image import PublishedImage
from embertide.trainer.publish.origin import FolderOrigin
from embertide.trainer.publish.request_columns import Bins, RequestColumns, check_kept
from embertide.trainer.publish.snapshot import (
    DensePart,
    SnapshotError,
    SnapshotInfo,
    read_columns,
    read_manifest,
    schema_id,
    write_snapshot,
)
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint.checkpoint import Checkpoint
from embertide.trainer.run.checkpoint.increment import (
    ChangedKeys,
    Increment,
    Keys,
    at_keys,
    increment_of,
)
from embertide.trainer.run.checkpoint.saver import BucketCopy, Saver, SaverOptions, SnapshotJob
from embertide.trainer.run.resume import StartState
from embertide.trainer.sync.channel import Channel

log = logging.getLogger(__name__)

_MAX_CHANGED = 0.5
"""Share of the rows: an increment of more would save little, and takes long to read."""


class Checkpointer:
    """Makes snapshots and checkpoints of a run's state.

    Used by one thread; of many ranks, all make the same calls.

    Attributes:
        saver: The writer of both.
        base: The version of the newest snapshot with all rows, which may be in flight; None: there
            is none yet.
    """

    def __init__(
        self,
        publication: Publication,
        start: StartState,
        image: PublishedImage | None,
        *,
        channel: Channel,
        saving: Channel,
        checkpointed: Callable[[int], None],
    ) -> None:
        """Go on from the checkpoint that the state is of, if it is of one.

        Args:
            publication: Where snapshots and checkpoints go.
            start: The state that is saved.
            image: The nodes' rows; None: they are those that are trained.
            channel: Channel of the training thread.
            saving: Channel of the thread that writes.
            checkpointed: Called with a state's read offset once its checkpoint is there, also by
                that thread.
        """
        self._publication = publication
        self._state, self._rows = start.state, start.state.rows
        self._image = image
        self._channel = channel
        self._checkpointed = checkpointed
        self._columns = RequestColumns()
        saved = start.saved
        self.base = None if saved is None else saved.snapshot
        self._changed = ChangedKeys() if saved is None else saved.changed  # since the base
        self._increments = (
            0 if saved is None or saved.increment is None else saved.increment.ordinal
        )
        self._harmed = start.harmed
        run = start.state.run
        self.saver = Saver(
            publication,
            SaverOptions(
                memory_bytes=run.checkpoint_memory_bytes,
                keep_snapshots=run.keep_snapshots,
                keep_s=run.keep_snapshots_s,
            ),
            saving,
        )

    def counters(self) -> dict[str, int]:
        """Return the counters of what was written, and of what the drive had no room for."""
        return {
            "checkpoints_without_room": self.saver.stats.without_room,
            "increments": self.saver.stats.increments,
            "snapshot_bytes_written": self.saver.stats.bytes_written,
            "snapshot_bytes_reused": self.saver.stats.bytes_reused,
            "harmed_checkpoints": self._harmed,
        }

    def schema_id(self) -> int:
        """Return the number of the model's schema, as it is now."""
        return schema_id(self._info(VersionId(0, 0), 0), self._rows.served_tables)

    def take_columns(self, schema: EventSchema) -> None:
        """Have snapshots say which columns clients make of theirs; all ranks call it together.

        Raises:
            ConfigurationError: The newest snapshot has other edges for one of them.
        """
        with self._channel.together():
            if self._channel.first:
                check_kept(self._published_bins(), schema)
        self._columns = RequestColumns.of(schema)

    def note_changed(self, place: Place, keys: Keys) -> None:
        """Note rows that a version carries: an increment has their state."""
        if self._state.run.full_snapshot_every > 1:
            self._changed.add(place, keys)

    def write_copy(
        self, directory: Path, version: VersionId, watermark_ms: int, dense: bytes
    ) -> None:
        """Write a snapshot of all rows as trained by now to a folder of its own, at once."""
        write_snapshot(
            directory,
            self._info(version, watermark_ms),
            self._rows.served_tables,
            self._rows.buckets(),
            self._dense_part(dense),
            channel=self._channel,
        )

    def save(
        self, version: VersionId, watermark_ms: int, dense: bytes, *, committed_ms: int, full: bool
    ) -> None:
        """Have a version's snapshot and checkpoint written, as the state is now.

        Returns once the rows are copied; those of a version that is there are not written again.

        Args:
            version: Which is out.
            watermark_ms: Its event time.
            dense: The tensors that are served, as bytes.
            committed_ms: When it was committed, by the publisher's clock.
            full: Whether all rows are written; else an increment may do.

        Raises:
            UnwrittenError: The checkpoint before this one could not be written.
        """
        increment = None if full else self._increment(version)
        there, incremental = self._channel.gather(
            (
                checkpoints.is_complete(self._publication, version),
                checkpoints.is_increment(self._publication, version),
            )
        )[0]
        if not there or not incremental:
            self._increments = 0 if increment is None else increment.ordinal
        if there:
            if not incremental:
                self.base, self._changed = version, ChangedKeys()
            self._checkpointed(self._state.offset)
            return
        job = SnapshotJob(
            # Copied, for it is written while training goes on.
            checkpoint=self._checkpoint(version),
            info=self._info(version, watermark_ms, committed_ms),
            tables=self._rows.served_tables,
            dense=self._dense_part(dense),
            then=functools.partial(self._checkpointed, self._state.offset),
            increment=increment,
        )
        if increment is None:
            self.base, self._changed = version, ChangedKeys()
            self.saver.save(job, self._copies())
        else:
            self.saver.save(job, self._changed_copies())

    def _published_bins(self) -> tuple[Bins, ...]:
        """Return the bins of the newest snapshot that can be read; none without one."""
        for version in reversed(self._publication.snapshots()):
            try:
                return read_columns(self._publication.snapshot_path(version)).bins
            except (SnapshotError, _store.StoreError, ValueError) as error:
                log.warning("the bins of version %d cannot be read: %s", version.number, error)
        return ()

    def _info(self, version: VersionId, watermark_ms: int, committed_ms: int = 0) -> SnapshotInfo:
        return SnapshotInfo.of(
            self._state.run.model,
            lineage=version.lineage,
            version=version.number,
            watermark_ms=watermark_ms,
            transforms=self._state.learner.transforms,
            committed_ms=committed_ms,
            generation=self._state.generation,
            former=self._state.former,
            columns=self._columns,
        )

    def _dense_part(self, dense: bytes) -> DensePart:
        return DensePart(program=self._publication.program, cpu=self._state.run.cpu, tensors=dense)

    def _copies(self) -> Iterator[BucketCopy]:
        """Yield all rows as nodes hold them now, with their state, one bucket at a time."""
        held = (self._image or self._rows).buckets()
        for (t, _, bucket), (table, _, records) in zip(self._rows.places(), held, strict=True):
            waiting, trained = b"", None
            if self._rows.is_served_otherwise(t):
                trained = self._rows.store.export_bucket(t, bucket)
            elif self._image is not None:
                waiting = self._image.waiting(t, bucket)
            yield BucketCopy(
                table=table,
                bucket=bucket,
                records=records,
                waiting=waiting,
                trained=trained,
                state=self._rows.store.bucket_state(t, bucket),
            )
        yield from self._unpruned_copies()

    def _unpruned_copies(self) -> Iterator[BucketCopy]:
        """Yield all unpruned rows, where pruning has a bound: nothing else has them."""
        unpruned = self._state.learner.unpruned
        if unpruned is None:
            return
        rows = unpruned.rows
        for t, table, bucket in rows.places():
            yield BucketCopy(
                table=table,
                bucket=bucket,
                records=b"",
                waiting=rows.store.export_bucket(t, bucket),
                state=rows.store.bucket_state(t, bucket),
                is_unpruned=True,
            )

    def _changed_copies(self) -> Iterator[BucketCopy]:
        """Yield the state of what changed since the base, as now, one bucket at a time."""
        store = self._rows.store
        for t, table, bucket in self._rows.places():
            if not len(changed_K := self._changed.of((t, bucket))):
                continue
            records = store.export_bucket(t, bucket)
            key_N = _store.record_keys(table.layout, records)
            changed_N = np.isin(key_N, changed_K, assume_unique=True)
            trained: bytes | None = None
            if self._rows.is_served_otherwise(t):
                trained = _store.restore_records(table.layout, records, key_N[changed_N])
            yield BucketCopy(
                table=table,
                bucket=bucket,
                records=b"",
                trained=trained,
                state=at_keys(store.bucket_state(t, bucket), changed_N),
                keys=key_N[changed_N],
            )
        yield from self._unpruned_copies()

    def _increment(self, version: VersionId) -> Increment | None:
        """Return what an increment of a version rests on; None: all rows are to be written."""
        ordinal = self._increments + 1
        if self.base is None or ordinal >= self._state.run.full_snapshot_every:
            return None
        self.saver.wait()  # the drive may have had no room for the base
        found: Increment | None = None
        with self._channel.together():
            if self._channel.first and checkpoints.is_complete(self._publication, self.base):
                manifest = read_manifest(self._publication.snapshot_path(self.base))
                if manifest["schema_id"] == self.schema_id():
                    max_bytes = sum(int(each["bytes"]) for each in manifest["buckets"])
                    found = increment_of(self._publication, version, self.base, ordinal, max_bytes)
        mine = (self._changed.count(), int(self._rows.stats()["rows"]), found is not None)
        changed, rows, leads = map(sum, zip(*self._channel.gather(mine), strict=True))
        if not leads or changed > _MAX_CHANGED * rows:
            return None
        return found or Increment(base=self.base, ordinal=ordinal, chain=())

    def _checkpoint(self, version: VersionId) -> Checkpoint:
        """Return the state, and what lies beside it in the folder and is needed with it."""
        checkpoint = self._state.checkpoint(version)
        if not self._channel.first:
            return checkpoint
        folder = self._publication.path
        return dataclasses.replace(
            checkpoint,
            journals=journal_lines(folder),
            origin=dataclasses.asdict(FolderOrigin.read(folder)),
        )
