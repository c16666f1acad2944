"""The training loop: score, train, publish; stop anywhere, go on as if never stopped.

Versions are counted in event time: version 1 is the untrained model, version n is published when
the stream reaches origin + (n - 1) * publish_every_s and has learned from every event before that.
So a run that was killed and resumed publishes the versions of a run that was not: it trains again
what its checkpoint lacks without publishing, until it passes the newest version that is out.

Shapes: B events of a batch, F features, D dense columns.
"""

import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embertide import _store
from embertide.trainer.aside import SetAside
from embertide.trainer.checkpoint import checkpoint as checkpoints
from embertide.trainer.checkpoint.checkpoint import Checkpoint, CheckpointError, SavedCheckpoint
from embertide.trainer.checkpoint.saver import BucketCopy, Saver, SaverOptions, SnapshotJob
from embertide.trainer.checkpoint.settings import (
    changed_from_default,
    check_allowed,
    differences,
    remember,
    settings,
)
from embertide.trainer.config import RunConfig
from embertide.trainer.data.ahead import read_ahead
from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.data.crosses import crossed
from embertide.trainer.data.history import History, extend
from embertide.trainer.data.limit import blocks
from embertide.trainer.data.shared import SharedEvents
from embertide.trainer.embedding.histories import put_histories
from embertide.trainer.eval.metrics import Prequential
from embertide.trainer.learner import Learner, NotFiniteError, Prepared
from embertide.trainer.model.export import export_dense, tensor_bytes
from embertide.trainer.publish.folder import PARTITIONS, NoRoomError, Publication, VersionId
from embertide.trainer.publish.image import PublishedImage
from embertide.trainer.publish.promotion import PromotionRecord
from embertide.trainer.publish.publisher import Change, Publisher
from embertide.trainer.publish.snapshot import (
    DensePart,
    SnapshotInfo,
    dense_id,
    schema_id,
    write_snapshot,
)
from embertide.trainer.sync import plan
from embertide.trainer.sync.channel import check_same
from embertide.trainer.sync.plan import Ownership
from embertide.trainer.sync.ranks import Ranks

log = logging.getLogger(__name__)

# Counters of the store that say what it did not do.
_DROPS = (
    "refused_rows",
    "refused_gradients",
    "dropped_gradients",
    "failed_keys",
    "unworthy_keys",
    "worthy_keys_without_room",
    "dropped_accesses",
    "reader_waits_given_up",
)


class Gate(Protocol):
    """Says how far the trainer may read: it must not learn from what is not yet scored."""

    def wait(self, end: int) -> None:
        """Return once the events before index `end` may be trained on."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run is."""

    events: int
    total_events: int | None
    ts_ms: int
    version: int
    auc: float  # of the current day, prequential; within Prequential.live_auc's bound
    events_per_s: float
    rows: int
    resident_bytes: dict[str, int]  # by tier, the index apart
    checkpoints: int
    checkpoint_s: float  # taken by all of them, their snapshots included
    published: dict[str, int]  # Trainer.published
    rejected: dict[str, int]  # events, by reason; counted where they are read, which is ahead
    source: dict[str, int]  # other counters of the source
    dropped: dict[str, int]  # by the store, by counter
    missing: int  # dense values
    set_aside: dict[str, int]  # batches that would have made the net not finite, their events
    ranks: int = 1

    def of_rank(self) -> dict[str, Any]:
        """Return what one rank has to add to the run's figures."""
        return {name: getattr(self, name) for name in ("rows", "resident_bytes", "dropped")}

    def with_others(self, others: Sequence[dict[str, Any]]) -> "Progress":
        """Return the run's: this is the first rank's, `others` are of the other ranks."""

        def total(name: str) -> dict[str, int]:
            mine: dict[str, int] = getattr(self, name)
            return {
                what: count + sum(each[name].get(what, 0) for each in others)
                for what, count in mine.items()
            }

        return dataclasses.replace(
            self,
            ranks=1 + len(others),
            rows=self.rows + sum(each["rows"] for each in others),
            resident_bytes=total("resident_bytes"),
            dropped=total("dropped"),
        )


class Trainer:
    """One run, or of many ranks one rank's part of it. Used by one thread.

    All ranks read the same events, each learns from a part of every batch and owns some buckets;
    which, depends on the plan, and nothing that is learned does. The state beside rows and parts is
    the same on all. What needs one writer, the first rank does.

    Args:
        run: The configuration.
        publication: Where versions go; a checkpoint there is resumed.
        bus: Redis URL; None publishes to files alone.
        program_cache: Folder of compiled dense programs; compiling takes half a minute.
        allow_change: Paths of settings that may differ from the checkpoint's.
        skip_undone: Pass over the events from which only versions that a rollback undid have
            learned.
        ranks: Those of the run; None: this process alone.
        plan_file: Who owns which bucket; None: as much for each rank, by what was measured.

    Attributes:
        changes: Settings that were changed on the way, oldest first, as the checkpoint has them.
        stopped: Whether `fit` came to its end because `stop` was called.

    Raises:
        CheckpointError: The publication holds a run of another configuration, or versions and no
            checkpoint that is whole.
        ConfigurationError: `allow_change` names no setting, or one that cannot change.
        BusError: Redis cannot be reached.
    """

    def __init__(
        self,
        run: RunConfig,
        publication: Publication,
        *,
        bus: str | None = None,
        program_cache: Path | None = None,
        allow_change: Sequence[str] = (),
        skip_undone: bool = False,
        ranks: Ranks | None = None,
        plan_file: Path | None = None,
    ) -> None:
        """Open store and net, resume a checkpoint, take the lineage."""
        check_allowed(allow_change)
        self.run = run
        self.ranks = ranks or Ranks.alone()
        # Opened here, by all ranks in one order, so that none waits for one that has failed since.
        self._channel, saving, self._events, *_ = [
            self.ranks.channel(name)
            for name in ("loop", "saver", "events", "keys", "rows", "dense")
        ]
        check_same(
            self._channel, "configuration", settings(run) | {"folder": str(publication.path)}
        )
        self._plan_file = plan_file
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="keys")
        self.stopped = self._stop = False
        self._asked: Future[Prepared] | None = None  # the batch to learn next
        self.publication = publication
        self.set_aside = SetAside(publication.set_aside, run.most_set_aside)
        self.undone_events = 0  # passed over, as a rollback undid what was learned from them
        self._skipped = PromotionRecord(publication).read().undone if skip_undone else ()
        self._harmed_checkpoints = 0
        self._source: EventSource | None = None  # of this `fit`
        self._copy: tuple[int, Path] | None = None
        self._since: VersionId | None = None  # of the newest checkpoint, which may be in flight
        self.saver = Saver(
            publication,
            SaverOptions(
                memory_bytes=run.checkpoint_memory_bytes,
                keep_snapshots=run.keep_snapshots,
                keep_s=run.keep_snapshots_s,
            ),
            saving,
        )
        self._open(allow_change)
        with self._channel.together():
            if self.ranks.first and not publication.program.exists():
                export_dense(
                    self.served,
                    publication.program,
                    dense_features=run.model.dense_columns,
                    embedding_dim=self.rows.embedding_dim,
                    cpu=run.cpu,
                    cache=program_cache,
                )
        self.publisher = Publisher(
            publication,
            bus=bus,
            model=run.model.name,
            schema_id=self._schema_id(),
            bus_bytes=run.bus_bytes,
            channel=self._channel,
        )
        self._owes_snapshot = False  # the next version has one, whatever its number
        self._owe()

    # --- resuming ---------------------------------------------------------------------------------

    def _open(self, allow_change: Sequence[str]) -> None:
        """Resume the newest checkpoint; harmed ones are put aside, and the one before is taken."""
        while True:
            harmed: tuple[int, int, str] | None = None
            # The first says which: on a network's file system others may not see it yet.
            with self._channel.together():
                newest = checkpoints.newest(self.publication) if self.ranks.first else None
            named = self._channel.gather(newest)[0]
            version = None if named is None else VersionId(*named)
            with self._channel.together():
                try:
                    self._resume(version, allow_change)
                except checkpoints.HarmedCheckpointError as error:
                    harmed = (*error.version, str(error))
            # What one rank finds harmed, none goes on from.
            found = [each for each in self._channel.gather(harmed) if each is not None]
            if not found:
                return
            number, lineage, words = found[0]
            self._harmed_checkpoints += 1
            with self._channel.together():
                if self.ranks.first:
                    aside = checkpoints.put_aside(self.publication, VersionId(number, lineage))
                    log.error(
                        "%s: the checkpoint of version %d is put aside as %s, and the run goes on "
                        "from the one before, with what came after it",
                        words,
                        number,
                        aside,
                    )

    def _owners(self, saved: Checkpoint | None) -> Ownership:
        """Return who owns what: as the plan says, or by what was measured up to a checkpoint."""
        if self._plan_file is not None:
            return plan.read(self._plan_file, self.run.model, self.ranks.size)
        if saved is not None and self.run.prune is not None:
            # What pruning remembers is by rank.
            before = plan.parsed(saved.plan, self.run.model, self.ranks.size)
            if before is not None:
                return before
        load = saved.load if saved is not None and saved.load else None
        return plan.balanced(self.run.model, self.ranks.size, load)

    def _begin_state(self, saved: Checkpoint | None) -> None:
        """Make the state of a run that has learned nothing; `saved` says who owns what."""
        run = self.run
        self.changes: list[dict[str, Any]] = []
        self.learner = Learner(run, self.ranks, self._owners(saved))
        self.rows, self.served = self.learner.rows, self.learner.served
        self.prequential = Prequential()
        names = [feature.name for feature in run.model.features]
        self.histories = [History(each, names) for each in run.model.sequences]
        self.offset = 0  # of the batch to read first: batches depend on where one starts
        self.done = 0  # events before this index are learned
        self.events = 0
        self.number = 0  # version that the state is at or past
        self.origin_ms: int | None = None
        self._asked_of: list[list[int]] = []  # keys, by table and bucket
        # What nodes hold, where versions have a byte budget; else it is what is trained.
        self.image: PublishedImage | None = None
        if run.publish_budget is not None:
            self.image = PublishedImage(
                self.rows,
                run.publish_budget,
                publish_every_s=run.publish_every_s,
                channel=self._channel,
            )

    def _resume(self, version: VersionId | None, allow_change: Sequence[str]) -> None:
        if version is not None and not checkpoints.is_complete(self.publication, version):
            raise CheckpointError(
                f"the first rank goes on from the checkpoint of version {version.number}, which is "
                f"not in {self.publication.path} here: give all ranks one folder"
            )
        found = None if version is None else SavedCheckpoint(self.publication, version)
        self._begin_state(None if found is None else found.checkpoint)
        if found is None:
            if self.publication.versions():
                raise CheckpointError(
                    f"{self.publication.path} holds versions but no checkpoint to go on from: bring"
                    " its checkpoints/ back (harmed ones end in .harmed), or train in a new folder;"
                    " nodes serve this one as it is, so keep it until they follow the new one"
                )
            return
        saved = found.checkpoint
        differing = differences(saved.config, self.run, saved.changed)
        for each in differing:
            if each.path not in allow_change:
                raise CheckpointError(f"{self.publication.path} was trained with {each}")
            log.warning(
                "%s changes from %r to %r after version %d",
                each.path,
                each.saved,
                each.value,
                saved.version.number,
            )
        self.changes = remember(saved.changes, saved.version.number, differing)
        found.restore_rows(self.rows)
        if self.image is not None:
            self.image.load(self.publication.snapshot_path(saved.version), saved.version.number)
        self.learner.transforms = found.transforms()
        self.learner.net.load_state_dict(saved.net)
        self.learner.load_optimizer(saved.optimizer)
        self.prequential = saved.prequential
        self._asked_of = saved.load
        for history, state in zip(self.histories, saved.histories, strict=True):
            history.restore(state)
        self.offset, self.done, self.events = saved.offset, saved.done, saved.events
        self.number, self.origin_ms = saved.version.number, saved.origin_ms
        self.learner.origin_ms = saved.origin_ms
        self._since = saved.version
        log.info("resumed at event %d, version %d", self.offset, self.number)

    def _owe(self) -> None:
        """Mark what other publishers sent after our checkpoint: the next version makes it good.

        Of a damaged file only the partition is known, so all rows of that are marked; and nodes get
        a snapshot, which leads those past the file that need it.
        """
        index = {table.id: t for t, table in enumerate(self.rows.tables)}
        owed = self.publisher.owed(self.number)
        mine = {(table.id, bucket) for _, table, bucket in self.rows.places()}
        for (table_id, bucket), batches in owed.batches.items():
            for batch in batches if (table_id, bucket) in mine else ():
                self.rows.mark_changed(index[table_id], bucket, batch.records)
        if not owed.damaged:
            return
        self.publisher.stats.damaged_partitions += len(owed.damaged)
        self._owes_snapshot = True
        log.warning(
            "the next version has all rows of %d partitions with damaged files, and a snapshot",
            len(owed.damaged),
        )
        for t, _, bucket in self.rows.places():
            if bucket % PARTITIONS in owed.damaged:
                self.rows.mark_changed(t, bucket, self.rows.store.export_bucket(t, bucket))

    def keep_copy(self, after: int, directory: Path) -> None:
        """Write the first version that has learned the events before index `after` as a snapshot.

        It goes to `directory` alone. If that exists, it was kept by the run that we go on from.
        """
        if not directory.exists():
            self._copy = (after, directory)

    def figures(self) -> dict[str, Any]:
        """Return what all ranks hold and did, added up; all of them call it together."""
        mine = {
            "pruning": self.rows.pruning(),
            "store": self.rows.stats(),
            "rows": self.publisher.stats.rows,
            "bytes": self.publisher.stats.bytes,
            "traffic": {kind: dataclasses.asdict(t) for kind, t in self.ranks.traffic.items()},
        }
        every = self._channel.gather(mine)
        added = _added(every)
        published = self.published() | {name: added.pop(name) for name in ("rows", "bytes")}
        return {"ranks": len(every), "published": published, **added}

    # --- training ---------------------------------------------------------------------------------

    def fit(
        self,
        source: EventSource,
        *,
        gate: Gate | None = None,
        progress: Callable[[Progress], None] | None = None,
        every_s: float = 0.5,
    ) -> None:
        """Read `source` from the offset to its end; publish on the way and at the end.

        Batches are read and prepared by a thread of their own, `ahead_bytes` at most. When this
        returns, every checkpoint is written; when it raises, none is being written.

        Raises:
            CheckpointError: A checkpoint could not be written.
            SupersededError: Another publisher runs.
        """
        self.stopped, self._asked = False, None
        shared = None
        if self.ranks.size > 1:
            source = shared = SharedEvents(source, self._events)
        self._source = source = crossed(source, self.run.model)
        batches = source.batches(batch_size=self.run.batch_size, start=self.offset)

        def ends() -> bool:
            """What is done while there are no events; whether the run is to end."""
            self._finish()
            stopping = self._is_stopping()
            if shared is None:
                return stopping
            if self.ranks.first:
                shared.stop() if stopping else shared.idle()
            return False

        with self.saver, read_ahead(batches, self.run.ahead_bytes, ends) as ahead:
            self._fit(ahead, source, gate, progress, every_s)

    def stop(self) -> None:
        """Have `fit` come to an end soon, as if the events ended: with a version and a checkpoint.

        Of many ranks, all stop. May be called by any thread, and by a signal's handler.
        """
        self._stop = self.learner.stops = True

    def _is_stopping(self) -> bool:
        """Whether this rank is to stop; the first one asks what others have told."""
        if self._stop and not self.ranks.first:
            self.ranks.tell("stop", True)
        elif self.ranks.first and not self._stop:
            self._stop = any(self.ranks.told("stop"))
        return self._stop

    def _fit(
        self,
        batches: Iterator[Batch],
        source: EventSource,
        gate: Gate | None,
        progress: Callable[[Progress], None] | None,
        every_s: float,
    ) -> None:
        batches = self.learner.warm_up(batches)
        self.publisher.schema_id = self._schema_id()  # transforms that were fitted are a part of it
        began, begun_at, shown = time.monotonic(), self.events, 0.0
        total = source.total_events() if self.ranks.first else None

        def show(ts_ms: int, now: float, *, last: bool = False) -> None:
            rate = (self.events - begun_at) / max(now - began, 1e-9)
            seen = self._progress(source, ts_ms, total, rate)
            others: list[dict[str, Any]] = []
            if last:  # what others have told may be half a second old
                others = self._channel.gather(seen.of_rank())[1:]
            elif self.ranks.first:
                others = self.ranks.told("progress")
            else:
                self.ranks.tell("progress", seen.of_rank())
            if self.ranks.first and progress is not None:
                progress(seen.with_others(others))

        for batch in batches:
            self.offset = batch.first
            self._begin(int(batch.ts_ms_B[0]))
            every_ms = self.run.publish_every_s * 1000
            assert self.origin_ms is not None
            # Cut where it crosses into a new version.
            for _, part in blocks(batch, origin_ms=self.origin_ms, every_ms=every_ms):
                if part.first < self.done:
                    continue  # the checkpoint fell within this batch
                self.saver.check()
                self._reach(int(part.ts_ms_B[0]))
                if gate is not None:
                    self._finish()
                    if self.ranks.first:
                        gate.wait(int(part.event_B[-1]) + 1)
                if self._is_undone(part):
                    self._finish()
                    self.undone_events += len(part)
                    self.done = part.next_offset
                else:
                    self._train(extend(self.histories, part))
            now = time.monotonic()
            if now - shown >= every_s:
                shown = now
                show(batch.watermark_ms, now)
            last_ms = batch.watermark_ms
            if self.learner.stopping:
                self.stopped = True
                break
            self.offset = batch.next_offset
        self._finish()
        self.stopped |= self._stop
        if self.events > begun_at:
            self.offset = max(self.offset, self.done) if self.stopped else self.offset
            self._publish(self.number + 1, last_ms, snapshot=True, last=True)
            show(last_ms, time.monotonic(), last=True)

    def _progress(
        self, source: EventSource, ts_ms: int, total: int | None, rate: float
    ) -> Progress:
        stats = self.rows.stats()
        return Progress(
            events=self.events,
            total_events=total,
            ts_ms=ts_ms,
            version=self.number,
            auc=self.prequential.live_auc()[0],
            events_per_s=rate,
            rows=int(stats["rows"]),
            resident_bytes={
                "ddr": stats["ddr_payload_bytes"],
                "index": stats["index_bytes"],
                "ssd": stats["ssd_bytes"],
            },
            checkpoints=self.saver.stats.saved,
            checkpoint_s=self.saver.stats.written_s,
            published=self.published(),
            rejected=dict(source.dead_letters.by_reason),
            source=source.counters(),
            dropped={name: stats[name] for name in _DROPS}
            | {"uncounted_keys": self.learner.counters.uncounted},
            missing=self.learner.missing,
            set_aside=dataclasses.asdict(self.set_aside.stats),
        )

    def _is_undone(self, part: Batch) -> bool:
        """Return whether only versions that a rollback undid had learned from these events."""
        return any(
            each.to_watermark_ms < int(part.ts_ms_B[0])
            and int(part.ts_ms_B[-1]) <= each.watermark_ms
            for each in self._skipped
        )

    def published(self) -> dict[str, int]:
        """Return the counters of what was sent, and of what a budget or the drive left out."""
        left_out = {} if self.image is None else dataclasses.asdict(self.image.stats)
        checkpoint_counters = {
            "checkpoints_without_room": self.saver.stats.without_room,
            "harmed_checkpoints": self._harmed_checkpoints,
        }
        return dataclasses.asdict(self.publisher.stats) | checkpoint_counters | left_out

    def _begin(self, first_ms: int) -> None:
        """Publish the untrained model before the first event of a fresh run."""
        if self.origin_ms is None:
            self.origin_ms = self.learner.origin_ms = first_ms
            self._publish(1, first_ms - 1, snapshot=True)

    def _number_at(self, ts_ms: int) -> int:
        assert self.origin_ms is not None
        return 1 + (ts_ms - self.origin_ms) // (self.run.publish_every_s * 1000)

    def _reach(self, ts_ms: int) -> None:
        """Publish the version whose time has come; all events before it are learned.

        Where the drive has no room, training goes on, and the next version has its rows.
        """
        number = self._number_at(ts_ms)
        if number <= self.number:
            return
        self._finish()
        assert self.origin_ms is not None
        watermark_ms = self.origin_ms + (number - 1) * self.run.publish_every_s * 1000 - 1
        every = self.run.snapshot_every
        snapshot = number // every > self.number // every
        try:
            self._publish(number, watermark_ms, snapshot=snapshot)
        except NoRoomError as error:
            if self.publisher.newest is None:
                raise
            log.error("version %d is not published: %s", number, error)
            self.publisher.stats.versions_without_room += 1
            self._owes_snapshot |= snapshot
            self.number = number

    def _train(self, batch: Batch) -> None:
        """Score a batch and learn from it; of many ranks, the one before it while its keys travel.

        So it is where its rows may come from an SSD.

        What is asked for has no part in what is learned: the order of learning is that of events.
        """
        if self.ranks.size == 1 and not self.run.ssd_budget_bytes:
            self._learn(self.learner.prepare(batch))
        elif self._asked is None:
            self._ask(batch)
        else:
            self._finish(lambda: self._ask(batch))

    def _ask(self, batch: Batch) -> None:
        self._asked = self._ahead.submit(self.learner.prepare, batch)

    def _finish(self, then: Callable[[], None] = lambda: None) -> None:
        """Learn the batch whose keys were asked for, if there is one; `then` as of `learn`."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._learn(asked.result(), then)

    def _learn(self, ready: Prepared, then: Callable[[], None] = lambda: None) -> None:
        """Score a batch, then learn from it; or put it aside, and nothing but histories have it."""
        batch = ready.batch
        self.done = batch.next_offset
        try:
            score_B = self.learner.learn(ready, then)
        except NotFiniteError as error:
            self.set_aside.add(batch, str(error), kept=self.ranks.first)
            return
        self.set_aside.learned()
        self.prequential.add(batch.ts_ms_B, batch.label_B, score_B)
        self.events += len(batch)

    # --- publishing -------------------------------------------------------------------------------

    def _publish(
        self, number: int, watermark_ms: int, *, snapshot: bool, last: bool = False
    ) -> None:
        before, self.number = self.number, number
        self.learner.refresh(watermark_ms)
        put_histories(self.histories, self.rows)
        self.learner.check_finite()
        dense = tensor_bytes(self.served)
        if self._copy is not None and self.done >= self._copy[0]:
            write_snapshot(
                self._copy[1],
                self._info(VersionId(number, self.publisher.lineage), watermark_ms),
                self.rows.tables,
                self.rows.buckets(),
                self._dense_part(dense),
                channel=self._channel,
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
            self.number = number = newest.number + 1
        snapshot |= self._owes_snapshot
        changes: Iterable[Change] = self._changes()
        if self.image is not None:
            self.image.follow(self.publication, newest.number)
            changes = self.image.choose(number, everything=last)
        taken: list[tuple[int, int, NDArray[np.uint64]]] = []
        noted = self._noted(changes, taken)
        self.rows.forget_changes(of_others=True)
        try:
            version = self.publisher.publish(
                number, watermark_ms=watermark_ms, changes=noted, dense=dense
            )
        except BaseException:
            if self.publisher.newest == newest:  # it is not out: the next version has its rows
                self.number = before
                if self.image is not None:
                    for _ in noted:
                        pass  # all of them were taken
                for t, bucket, keys in taken:
                    self.rows.store.mark_changed(t, bucket, keys)
            raise
        if self.image is not None:
            self.image.apply(number, changes)
        if snapshot:
            self._snapshot(version, watermark_ms, dense)
            self._owes_snapshot = False

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
            self.rows.forget_changes()  # all of it is in that version
        self._snapshot(published, watermark_ms, dense)
        return True

    def _is_state_of(self, version: VersionId, watermark_ms: int, dense: bytes) -> bool:
        """Prove that a version's files lead from our checkpoint to the bytes that we hold now."""
        if self._since is None:
            return False
        commit = self.publication.read_commit(version).commit
        if (commit.watermark_ms, commit.dense_id) != (watermark_ms, dense_id(dense)):
            return False
        if self.image is not None:
            # A snapshot is the image, which has read that version's own files.
            return self.image.is_known
        owed = self.publisher.owed(self._since.number, version.number)
        if owed.damaged:
            return False
        snapshot = self.publication.snapshot_path(self._since)
        for t, table, bucket, records in self.rows.read_buckets(snapshot):
            changed = [batch.records for batch in owed.batches.get((table.id, bucket), [])]
            mine = self.rows.store.export_bucket(t, bucket)
            # Rows, their slots' slack and the index, with room to spare.
            budget = (64 << 20) + 4 * (len(records) + sum(map(len, changed)))
            theirs = _store.Store(tables=[table], ddr_budget_bytes=budget)
            for each in (records, *changed):
                theirs.stage_records(1, 0, bucket, each)
            theirs.commit(1)
            if theirs.export_bucket(0, bucket) != mine:
                return False
        return True

    def _changes(self) -> Iterator[Change]:
        for t, table, bucket in self.rows.places():
            records = self.rows.store.take_changes(t, bucket)
            if records:
                yield table, bucket, records

    def _noted(
        self, changes: Iterable[Change], taken: list[tuple[int, int, NDArray[np.uint64]]]
    ) -> Iterator[Change]:
        """Yield the changes; note what to mark again if they are not published."""
        index = {table.id: t for t, table in enumerate(self.rows.tables)}
        for table, bucket, records in changes:
            taken.append((index[table.id], bucket, _store.record_keys(table.layout, records)))
            yield table, bucket, records

    def _info(self, version: VersionId, watermark_ms: int, committed_ms: int = 0) -> SnapshotInfo:
        return SnapshotInfo.of(
            self.run.model,
            lineage=version.lineage,
            version=version.number,
            watermark_ms=watermark_ms,
            transforms=self.learner.transforms,
            committed_ms=committed_ms,
        )

    def _schema_id(self) -> int:
        return schema_id(self._info(VersionId(0, 0), 0), self.rows.tables)

    def _dense_part(self, dense: bytes) -> DensePart:
        return DensePart(program=self.publication.program, cpu=self.run.cpu, tensors=dense)

    def _published(self) -> Iterator[tuple[_store.TableConfig, int, bytes]]:
        """Yield all rows as nodes hold them at the newest version, one bucket at a time."""
        return (self.image or self.rows).buckets()

    def _copies(self) -> Iterator[BucketCopy]:
        for (t, table, bucket), (_, _, records) in zip(
            self.rows.places(), self._published(), strict=True
        ):
            yield BucketCopy(
                table=table,
                bucket=bucket,
                records=records,
                waiting=b"" if self.image is None else self.image.waiting(t, bucket),
                state=self.rows.store.bucket_state(t, bucket),
            )

    def _snapshot(self, version: VersionId, watermark_ms: int, dense: bytes) -> None:
        """Have a version's snapshot and checkpoint written, as our state is now."""
        assert self.origin_ms is not None
        self._since = version
        if self._channel.gather(checkpoints.is_complete(self.publication, version))[0]:
            self._checkpointed(self.offset)
            return
        # Copied, for it is written while training goes on.
        checkpoint = Checkpoint(
            version=version,
            config=settings(self.run),
            changed=changed_from_default(self.run),
            changes=self.changes,
            offset=self.offset,
            done=self.done,
            events=self.events,
            origin_ms=self.origin_ms,
            net=copy.deepcopy(self.learner.net.state_dict()),
            optimizer=copy.deepcopy(self.learner.optimizer.state_dict()),
            rows=self.rows.progress(),
            prequential=copy.deepcopy(self.prequential),
            histories=[history.state() for history in self.histories],
            plan=plan.text(self.run.model, self.rows.ownership),
            load=self._load(),
        )
        job = SnapshotJob(
            checkpoint=checkpoint,
            info=self._info(version, watermark_ms, self.publisher.committed_ms(version)),
            tables=self.rows.tables,
            dense=self._dense_part(dense),
            then=functools.partial(self._checkpointed, self.offset),
        )
        self.saver.save(job, self._copies())

    def _load(self) -> list[list[int]]:
        """Return how many keys were asked of each bucket, by table; of late counts most."""
        if self.rows.exchange is None:
            return self._asked_of
        mine = self.rows.exchange.router.take_load().astype(np.float64)
        total = self.rows.exchange.summed(mine, "load").astype(np.int64).tolist()
        buckets = [1 << table.bucket_bits for table in self.run.model.tables]
        begins = [sum(buckets[:t]) for t in range(len(buckets))]
        fresh = [total[begin : begin + n] for begin, n in zip(begins, buckets, strict=True)]
        before = self._asked_of or [[0] * n for n in buckets]
        self._asked_of = [
            [new + old // 2 for new, old in zip(*each, strict=True)]
            for each in zip(fresh, before, strict=True)
        ]
        return self._asked_of

    def _checkpointed(self, offset: int) -> None:
        """Let the source forget what lies before `offset`. Also called by the saver's thread."""
        if self._source is not None and self.ranks.first:
            self._source.checkpointed(offset)


def _added(every: Sequence[Any]) -> Any:
    """Add up what ranks say, number by number; other things are the first one's."""
    first = every[0]
    if isinstance(first, dict):
        return {name: _added([each[name] for each in every if name in each]) for name in first}
    return sum(every) if isinstance(first, int | float) and not isinstance(first, bool) else first
