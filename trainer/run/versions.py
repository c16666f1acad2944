"""A run's versions: its state goes out as deltas, and some versions have a snapshot.

A version that has no snapshot is written and sent by a thread of its own while the events after it
are learned; at most one is on its way. Its rows are copied before, so that what is learned
meanwhile has no part in it. `checkpointer.py` makes snapshots and checkpoints.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.data.base import EventSchema
from embertide.trainer.embedding.histories import put_histories
from embertide.trainer.model.export import tensor_bytes
from embertide.trainer.publish.folder import (
    PARTITIONS,
    NoRoomError,
    Publication,
    PublicationError,
    VersionId,
)
from embertide.trainer.publish.image import PublishedImage
from embertide.trainer.publish.publisher import Change, Publisher
from embertide.trainer.publish.snapshot import dense_id
from embertide.trainer.publish.snapshot_rows import read_buckets
from embertide.trainer.publish.threads import Workers
from embertide.trainer.run.checkpointer import Checkpointer
from embertide.trainer.run.resume import StartState
from embertide.trainer.sync.channel import Channel

log = logging.getLogger(__name__)

_SAID_EVERY_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _InFlightVersion:
    """A version on its way out.

    Attributes:
        number: The number of the version.
        before: The number that the state had before.
        newest: The version before it.
        changes: The changes that it carries, for the image of the nodes' rows.
        taken: Keys whose rows it carries, by table and bucket: for the next one, if it fails.
    """

    number: int
    before: int
    newest: VersionId
    changes: Iterable[Change]
    taken: list[tuple[int, int, NDArray[np.uint64]]]


class Versions:
    """Publishes the state of a run. Used by one thread; of many ranks, all make the same calls.

    Attributes:
        publisher: Writes deltas and sends them.
        checkpointer: Makes snapshots and checkpoints.
        saver: Its thread, which writes them.
        image: The nodes' rows, where versions have a byte budget; else it is those that are
            trained.
    """

    def __init__(
        self,
        publication: Publication,
        start: StartState,
        *,
        bus: str | None,
        channel: Channel,
        publishing: Channel,
        saving: Channel,
        checkpointed: Callable[[int], None],
        floor: int = 0,
    ) -> None:
        """Take the lineage, and owe what other publishers sent since the state's checkpoint.

        Args:
            publication: Where versions go.
            start: The state that is published.
            bus: Redis URL; None publishes to files alone.
            channel: Channel of the training thread.
            publishing: Channel of the thread that writes and sends versions.
            saving: Channel of the thread that writes checkpoints.
            checkpointed: Called with a state's read offset once its checkpoint is there, also by
                that thread.
            floor: A lineage that others have had, though the folder may not show it.

        Raises:
            BusError: Redis cannot be reached.
        """
        self.publication = publication
        self._state, self._rows = start.state, start.state.rows
        run = start.state.run
        self._channel = channel
        self._copy: tuple[int, Path] | None = None
        self._reduced_refused = 0
        self._reduced_why: str | None = None  # said last in the log
        self._without = 0  # versions since the newest that had no room
        self._said_s = -_SAID_EVERY_S
        self._workers = Workers("publish")
        self._in_flight: tuple[_InFlightVersion, Future[VersionId]] | None = None
        self.image: PublishedImage | None = None
        if run.publish_budget is not None:
            self.image = PublishedImage(
                self._rows,
                run.publish_budget,
                publish_every_s=run.publish_every_s,
                channel=channel,
            )
            if start.version is not None:
                with channel.together():
                    self.image.load(publication.snapshot_path(start.version), start.version.number)
        self.checkpointer = Checkpointer(
            publication,
            start,
            self.image,
            channel=channel,
            saving=saving,
            checkpointed=checkpointed,
        )
        self.saver = self.checkpointer.saver
        self.publisher = Publisher(
            publication,
            bus=bus,
            model=run.model.name,
            schema_id=self.checkpointer.schema_id(),
            bus_bytes=run.bus_bytes,
            floor=floor,
            channel=publishing,
        )
        # The next version has one, whatever its number. Nothing else leads to another model.
        self._owes_snapshot = start.changed or self._follows_another_model()
        if not self._owes_snapshot:
            self._owe()

    def _follows_another_model(self) -> bool:
        """Whether the newest version is of a change of the model that came to nothing."""
        newest = self.publisher.newest
        if newest not in self.publication.deltas():
            return False
        try:
            commit = self.publication.read_commit(newest).commit
        except PublicationError:  # its rows go out again, as those of any harmed file
            return False
        return bool(commit.schema_id != self.publisher.schema_id)

    def _owe(self) -> None:
        """Mark what other publishers sent after our checkpoint: the next version makes it good.

        Of a damaged file only the partition is known, so all rows of that are marked; and nodes get
        a snapshot, which leads those past the file that need it.
        """
        index = {table.id: t for t, table in enumerate(self._rows.tables)}
        owed = self.publisher.owed(self._state.number)
        mine = {(table.id, bucket) for _, table, bucket in self._rows.places()}
        for (table_id, bucket), batches in owed.batches.items():
            for batch in batches if (table_id, bucket) in mine else ():
                self._rows.mark_changed(index[table_id], bucket, batch.records)
        if not owed.damaged:
            return
        self.publisher.stats.damaged_partitions += len(owed.damaged)
        self._owes_snapshot = True
        log.warning(
            "the next version has all rows of %d partitions with damaged files, and a snapshot",
            len(owed.damaged),
        )
        for t, _, bucket in self._rows.places():
            if bucket % PARTITIONS in owed.damaged:
                self._rows.mark_changed(t, bucket, self._rows.served_bucket(t, bucket))

    def keep_copy(self, after: int, directory: Path) -> None:
        """Write the first version that has learned the events before index `after` as a snapshot.

        It goes to `directory` alone. If that exists, it was kept by the run that we go on from.
        """
        if not directory.exists():
            self._copy = (after, directory)

    def counters(self) -> dict[str, int]:
        """Return the counters of what was sent, and of what a budget or the drive left out."""
        left_out = {} if self.image is None else dataclasses.asdict(self.image.stats)
        sent = dataclasses.asdict(self.publisher.stats)
        reduced = (
            {} if self._state.precision is None else {"reduced_refused": self._reduced_refused}
        )
        return sent | self.checkpointer.counters() | left_out | reduced

    def take_columns(self, schema: EventSchema) -> None:
        """Have snapshots say which columns clients make of theirs; all ranks call it together.

        Raises:
            ConfigurationError: The newest snapshot has other edges for one of them.
        """
        self.checkpointer.take_columns(schema)

    def transforms_are_fitted(self) -> None:
        """Have versions name the schema that the state has now: transforms are a part of it."""
        self.publisher.schema_id = self.checkpointer.schema_id()

    def publish_if_room(self, number: int, watermark_ms: int, *, snapshot: bool) -> None:
        """Publish a version as `publish`; where the drive has no room, the next one has its rows.

        So has the next one the snapshot. The first version needs its room.

        Raises:
            SupersededError: Another publisher runs.
        """
        try:
            self.publish(number, watermark_ms, snapshot=snapshot)
        except NoRoomError as error:
            if self.publisher.newest is None:
                raise
            self._go_without(number, error)
            self._owes_snapshot |= snapshot

    def publish(
        self, number: int, watermark_ms: int, *, snapshot: bool, last: bool = False
    ) -> None:
        """Publish the state as a version; one with a snapshot, or the last, is out on return.

        Any other is written and sent while training goes on: `wait_published` waits for it.
        """
        self.wait_published()
        before, self._state.number = self._state.number, number
        self._state.learner.refresh(watermark_ms)
        put_histories(self._state.histories, self._rows)
        self._state.learner.check_finite()
        dense = tensor_bytes(self._state.learner.served, self._measured())
        if self._copy is not None and self._state.done >= self._copy[0]:
            self.checkpointer.write_copy(
                self._copy[1], VersionId(number, self.publisher.lineage), watermark_ms, dense
            )
            self._copy = None
        newest = self.publisher.newest
        if newest is None:
            if self.image is not None:
                self.image.apply(number, self._changes())
            self.publisher.adopt(number, watermark_ms=watermark_ms, dense=dense)
            self._snapshot(VersionId(number, self.publisher.lineage), watermark_ms, dense)
            # No later version without it: nothing else holds the first one.
            self.saver.wait(needed=True)
            return
        if number <= newest.number:
            # Out already, by the run that we resumed: only the state moves on. That run may have
            # been killed before the snapshot was there, some versions ago.
            if self.image is not None:
                self.image.follow(self.publication, number)
            if not snapshot:
                return
            if self._snapshot_again(number, watermark_ms, dense):
                return
            log.warning("version %d was published with another state than this run's", number)
            if number < newest.number or not last:
                return
            self._state.number = number = newest.number + 1
        snapshot |= self._owes_snapshot
        changes: Iterable[Change] = self._changes()
        if self.image is not None:
            self.image.follow(self.publication, newest.number)
            changes = self.image.choose(number, everything=last)
        taken: list[tuple[int, int, NDArray[np.uint64]]] = []
        noted = self._noted(changes, taken)
        self._rows.forget_changes(of_others=True)
        in_flight = _InFlightVersion(
            number=number, before=before, newest=newest, changes=changes, taken=taken
        )
        try:
            outgoing = self.publisher.begin(
                number, watermark_ms=watermark_ms, changes=noted, dense=dense
            )
        except BaseException:
            if self.image is not None:
                for _ in noted:
                    pass  # all of them were taken
            self._take_back(in_flight)
            raise
        self._in_flight = (
            in_flight,
            self._workers.submit(functools.partial(self.publisher.finish, outgoing)),
        )
        if snapshot or last:
            self.wait_published(needed=True)
        if snapshot:
            version = VersionId(number, self.publisher.lineage)
            self._snapshot(version, watermark_ms, dense, full=last or self._owes_snapshot)
            self._owes_snapshot = False  # the next version has one, whatever its number

    def _measured(self) -> dict[str, str] | None:
        """Return what the next version says of reduced precision; None: nothing."""
        if self._state.precision is None:
            return None
        measured = self._state.precision.measured()
        if not measured.taken:
            self._reduced_refused += 1
        if measured.why != self._reduced_why:
            self._reduced_why = measured.why
            if measured.taken:
                log.info(
                    "versions are served in %s: the AUC is %.6f lower",
                    measured.type,
                    measured.auc_loss,
                )
            else:
                log.warning(
                    "versions are served in fp32, as %s is refused: %s",
                    measured.type,
                    measured.why,
                )
        return measured.metadata()

    def publish_change(self, watermark_ms: int) -> None:
        """Publish the first version of a changed model; it and its checkpoint are out on return."""
        newest = self.publisher.newest
        assert newest is not None  # of the model before
        self.publish(newest.number + 1, watermark_ms, snapshot=True)
        self.saver.wait(needed=True)

    def wait_published(self, *, needed: bool = False) -> None:
        """Return once the version on its way is out.

        Where the drive has no room for it, training goes on, and the next version has its rows.

        Args:
            needed: Whether a drive without room is an error.
        """
        if self._in_flight is None:
            return
        (in_flight, finished), self._in_flight = self._in_flight, None
        try:
            finished.result()
        except BaseException as error:
            self._take_back(in_flight)
            if needed or not isinstance(error, NoRoomError):
                raise
            self._go_without(in_flight.number, error)
            return
        if self.image is not None:
            self.image.apply(in_flight.number, in_flight.changes)
        if self._without:
            log.warning(
                "version %d is out, with the rows of %d before it that had no room",
                in_flight.number,
                self._without,
            )
            self._without, self._said_s = 0, -_SAID_EVERY_S

    def _go_without(self, number: int, error: NoRoomError) -> None:
        self._without += 1
        self.publisher.stats.versions_without_room += 1
        self._state.number = number
        now = time.monotonic()
        if now >= self._said_s + _SAID_EVERY_S:
            self._said_s = now
            log.error("version %d is not published, the next has its rows: %s", number, error)

    def _take_back(self, in_flight: _InFlightVersion) -> None:
        """If a version that failed is not out, have the next one carry its rows."""
        if self.publisher.newest != in_flight.newest:
            return
        self._state.number = in_flight.before
        for t, bucket, keys in in_flight.taken:
            self._rows.store.mark_changed(t, bucket, keys)

    def settle(self) -> None:
        """Return once nothing is being written and sent, whatever became of it."""
        if self._in_flight is not None:
            wait([self._in_flight[1]])

    def _snapshot_again(self, number: int, watermark_ms: int, dense: bytes) -> bool:
        """Make the snapshot of a version that is out, if it is of the state that we are in."""
        self.saver.wait()
        published = next((v for v in self.publication.deltas() if v.number == number), None)
        if published is None:
            return False
        with self._channel.together():
            same = self._is_state_of(published, watermark_ms, dense)
        if not all(self._channel.gather(same)):
            return False
        if published == self.publisher.newest and self.image is None:
            self._rows.forget_changes()  # all of it is in that version
        self._snapshot(published, watermark_ms, dense)
        return True

    def _is_state_of(self, version: VersionId, watermark_ms: int, dense: bytes) -> bool:
        """Prove that a version's files lead from our checkpoint to the bytes that we hold now."""
        base = self.checkpointer.base
        if base is None:
            return False
        commit = self.publication.read_commit(version).commit
        if (commit.watermark_ms, commit.dense_id) != (watermark_ms, dense_id(dense)):
            return False
        if self.image is not None:
            # A snapshot is the image, which has read that version's own files.
            return self.image.is_known
        owed = self.publisher.owed(base.number, version.number)
        if owed.damaged:
            return False
        snapshot = self.publication.snapshot_path(base)
        for t, table, bucket, records in read_buckets(self._rows, snapshot):
            changed = [batch.records for batch in owed.batches.get((table.id, bucket), [])]
            mine = self._rows.served_bucket(t, bucket)
            # Rows, their slots' slack and the index, with room to spare.
            budget = (64 << 20) + 4 * (len(records) + sum(map(len, changed)))
            theirs = _store.ServingStore(tables=[table], ddr_budget_bytes=budget)
            for each in (records, *changed):
                theirs.stage_records(1, 0, bucket, each)
            theirs.commit(1)
            if theirs.export_bucket(0, bucket) != mine:
                return False
        return True

    def _changes(self) -> Iterator[Change]:
        for t, _, bucket in self._rows.places():
            records = self._rows.take_changes(t, bucket)
            if records:
                yield self._rows.served_tables[t], bucket, records

    def _noted(
        self, changes: Iterable[Change], taken: list[tuple[int, int, NDArray[np.uint64]]]
    ) -> Iterator[Change]:
        """Yield the changes; note what to mark again if they are not published."""
        index = {table.id: t for t, table in enumerate(self._rows.tables)}
        for table, bucket, records in changes:
            keys = _store.record_keys(table.layout, records)
            taken.append((index[table.id], bucket, keys))
            self.checkpointer.note_changed((index[table.id], bucket), keys)
            yield table, bucket, records

    def _snapshot(
        self, version: VersionId, watermark_ms: int, dense: bytes, *, full: bool = True
    ) -> None:
        """Have a version's snapshot and checkpoint written, as our state is now."""
        committed_ms = self.publisher.committed_ms(version)
        self.checkpointer.save(version, watermark_ms, dense, committed_ms=committed_ms, full=full)
