"""The training loop: score, train, publish; stop anywhere, go on as if never stopped.

Versions are counted in event time: version 1 is the untrained model, version n is published when
the stream reaches origin + (n - 1) * publish_every_s and has learned from every event before that.
So a run that was killed and resumed publishes the versions of a run that was not: it trains again
what its checkpoint lacks without publishing, until it passes the newest version that is out.

Shapes: B events of a batch, F features, D dense columns.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from embertide import _store
from embertide._common.background import healths
from embertide._common.room import is_no_room, no_room
from embertide.trainer.config import AsynchronousSync, RunConfig
from embertide.trainer.config.sync import check_ranks
from embertide.trainer.data.ahead import read_ahead
from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.data.crosses import crossed
from embertide.trainer.data.journal import restore_journals
from embertide.trainer.data.limit import blocks
from embertide.trainer.data.shared import SharedEvents
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.export import export_dense
from embertide.trainer.model.own import check_program
from embertide.trainer.model.rewrite.package import contexts_of_model
from embertide.trainer.publish.folder import Publication, needing_room
from embertide.trainer.publish.lock import FolderLock
from embertide.trainer.publish.origin import FolderOrigin, without_user
from embertide.trainer.publish.promotion import PromotionRecord
from embertide.trainer.publish.rollback_orders import RollbackOrders
from embertide.trainer.publish.sign import Place, SignOfLife, live_quality, refuse_another
from embertide.trainer.publish.snapshot import keep_program
from embertide.trainer.publish.storage import Storage
from embertide.trainer.publish.upload import Uploader, UploadOptions
from embertide.trainer.run.apart import ASK_S, Apart, check_learner, check_supported
from embertide.trainer.run.auto_plan import AutoPlan, AutoPlanner
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint.checkpoint import saved_settings
from embertide.trainer.run.checkpoint.restoring import restore
from embertide.trainer.run.checkpoint.settings import settings
from embertide.trainer.run.defaults import PublishSchedule
from embertide.trainer.run.fork import Fork
from embertide.trainer.run.hand_out import Command
from embertide.trainer.run.progress import Progress, Teller, added_up
from embertide.trainer.run.quarantine import Quarantine
from embertide.trainer.run.resume import Resumer
from embertide.trainer.run.steps import Steps
from embertide.trainer.run.versions import Versions
from embertide.trainer.sync.channel import check_same
from embertide.trainer.sync.ranks import Ranks

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


log = logging.getLogger(__name__)


class Gate(Protocol):
    """Says how far the trainer may read: it must not learn from what is not yet scored."""

    def wait(self, end: int, is_stopping: Callable[[], bool]) -> bool:
        """Return whether the events before index `end` may be trained on.

        It waits until they may, or until `is_stopping` says that nobody waits for it any more.
        """


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
        auto_plan: Look for a plan while the run learns; None: do not. `replans` says that it ended
            for one.
        fork: The run whose state this one begins with if it has none of its own; None: nobody's.
        change_model: Let the run go on with another model than its checkpoint's, with what it has
            learned carried over.
        storage: Where the publication has a copy, from which a folder that is empty is filled.
        max_behind_s: Training waits while storage lacks something that is older.
        storage_end_s: How long the end of `fit` may wait for storage.
        publish_schedule: Gives how often the run publishes, in place of what `run` says, from the
            schedule of its checkpoint, None where there is none.

    Attributes:
        state: The learned state and how far the stream is learned; rows are this rank's alone.
        versions: The publisher of the state.
        steps: The scoring and learning of events.
        uploader: The copier of the folder to storage, on the first rank.
        stopped: Whether `fit` came to its end because `stop` was called.
        replans: Whether it did at a checkpoint, for all ranks to start again with another plan.
        forked: The state of another run or model that this run began with; None: none.
        warm_start: Folder of the run that it began with and whose place it did not keep, on the
            first rank, from `fit` on; empty: none.

    Raises:
        CheckpointError: The publication holds a run of another configuration, or versions and no
            checkpoint that is whole.
        ConfigurationError: `allow_change` names no setting, or one that cannot change; or a net of
            one's own is not what it should be, or not what it was.
        BusError: Redis cannot be reached.
        LockedError: Without a bus: another process publishes to the folder; with one, another
            trainer publishes under the model's name from another folder.
        StorageError: Storage cannot be used.
        OvertakenError: Another trainer publishes to the same storage.
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
        auto_plan: AutoPlan | None = None,
        fork: Fork | None = None,
        change_model: bool = False,
        storage: Storage | None = None,
        max_behind_s: float = 3600.0,
        storage_end_s: float = 300.0,
        publish_schedule: Callable[[PublishSchedule | None], PublishSchedule] | None = None,
    ) -> None:
        """Open store and net, resume a checkpoint, take the lineage."""
        self.ranks = ranks or Ranks.alone()
        # Opened here, by all ranks in one order, so that none waits for one that has failed since.
        self._channel, saving, publishing, self._events, *_ = [
            self.ranks.channel(name)
            for name in ("loop", "saver", "publish", "events", "keys", "rows", "dense")
        ]
        check_ranks(run.sync, self.ranks.size)
        is_apart = isinstance(run.sync, AsynchronousSync) and self.ranks.size > 1
        if is_apart:
            check_supported(run)
        check_same(
            self._channel, "configuration", settings(run) | {"folder": str(publication.path)}
        )
        self._lock: FolderLock | None = None
        with self._channel.together():
            if self.ranks.first:
                # Before anything is read: what another trainer is about to write may lie in part.
                if bus is None:
                    with needing_room(publication.path):
                        self._lock = FolderLock(publication.path)
                else:
                    refuse_another(bus, run.model.name, publication.path)
        self.stopped = self.replans = self._stop = False
        self._teller: Teller | None = None  # of this `fit`
        self.publication = publication
        self.quarantine = Quarantine(publication.set_aside, run.most_set_aside)
        self.undone_events = 0  # passed over, as a rollback undid what was learned from them
        self._skipped = PromotionRecord(publication).read().undone if skip_undone else ()
        self._source: EventSource | None = None  # of this `fit`
        self.uploader: Uploader | None = None
        with self._channel.together():
            if storage is not None and self.ranks.first:
                options = UploadOptions(
                    keep_snapshots=run.keep_snapshots,
                    max_behind_s=max_behind_s,
                    end_s=storage_end_s,
                )
                self.uploader = Uploader(storage, publication, options)
                with needing_room(publication.path):
                    restore(self.uploader, publication)
        self.run = run = self._with_schedule(run, publish_schedule)
        self._planner: AutoPlanner | None = None
        if auto_plan is not None:
            self._planner = AutoPlanner(
                run, publication, auto_plan, ranks=self.ranks, channel=self._channel
            )
        start = Resumer(
            run=run,
            publication=publication,
            ranks=self.ranks,
            channel=self._channel,
            allow_change=allow_change,
            plan_file=plan_file,
            owners=None if self._planner is None else self._planner.owners,
            fork=fork,
            change_model=change_model,
        ).begin()
        self.state = start.state
        self.forked = start.forked
        self.warm_start = ""
        self._warm_start: Path | None = None  # of this start
        if fork is not None and not fork.keep_place and self.forked is not None:
            self._warm_start = fork.publication.path
        self._changed = start.changed  # and no version is out since
        self.learner = self.state.learner
        self._apart: Apart | None = None  # of ranks that need not be at the same step
        if is_apart:
            check_learner(run, self.learner)
            self._apart = Apart(run, self.ranks, self.learner, self._channel)
        self.steps = Steps(
            run,
            self.state,
            ranks=self.ranks,
            channel=self._channel,
            quarantine=self.quarantine,
            apart=self._apart,
            is_stopping=self._is_stopping,
        )
        if self._planner is not None:
            self.steps.on_step = self._planner.step
        with self._channel.together():
            if self.ranks.first:
                for name in restore_journals(publication.path, self.state.journals):
                    log.warning("%s: %s comes from the checkpoint", publication.path, name)
        with self._channel.together():
            if self.ranks.first and start.changed:
                publication.program.unlink(missing_ok=True)
            elif self.ranks.first and start.saved is not None:
                keep_program(publication, start.saved.snapshot)
            if self.ranks.first and not publication.program.exists():
                with needing_room(publication.path):
                    export_dense(
                        self.learner.served,
                        publication.program,
                        dense_features=run.model.dense_columns,
                        embedding_dim=self.state.rows.embedding_dim,
                        heads=run.model.outputs,
                        contexts=contexts_of_model(run.model),
                        reduced_to=None if run.serve_reduced is None else run.serve_reduced.type,
                        cpu=run.cpu,
                        cache=program_cache,
                    )
            if self.ranks.first and run.model.is_own_net:
                check_program(self.learner.served, publication.program, run.model, run.cpu)
        self.versions = Versions(
            publication,
            start,
            bus=bus,
            channel=self._channel,
            publishing=publishing,
            saving=saving,
            checkpointed=self._checkpointed,
            floor=0 if self.uploader is None else self.uploader.largest_lineage(),
        )
        with self._channel.together():
            if self.uploader is not None:
                self.uploader.begin(self.versions.publisher.lineage)
        self._learned = (0, 0)  # event time of the last event learned, and when it was, in ms
        self._sign: SignOfLife | None = None
        self._orders: RollbackOrders | None = None
        if bus is not None and self.ranks.first:
            lineage = self.versions.publisher.lineage
            self._orders = RollbackOrders(bus, run.model.name, publication, lineage)
            self._sign = SignOfLife(
                bus,
                run.model.name,
                folder=publication.path,
                lineage=lineage,
                place=self._place,
                stopped=lambda: self.stopped,
            )

    def _with_schedule(
        self,
        run: RunConfig,
        choose: Callable[[PublishSchedule | None], PublishSchedule] | None,
    ) -> RunConfig:
        """Return the run with its schedule, which the first rank finds."""
        if choose is None:
            return run
        found = dict[str, int]()
        with self._channel.together():
            if self.ranks.first:
                saved = PublishSchedule.of(saved_settings(self.publication))
                found = dataclasses.asdict(choose(saved))
        return dataclasses.replace(run, **self._channel.gather(found)[0])

    def figures(self) -> dict[str, Any]:
        """Return what all ranks hold and did, added up; all of them call it together."""
        mine = {
            "pruning": self._pruning(),
            "store": self.state.rows.stats(),
            "rows": self.versions.publisher.stats.rows,
            "bytes": self.versions.publisher.stats.bytes,
            "traffic": {kind: dataclasses.asdict(t) for kind, t in self.ranks.traffic.items()},
            "apart": {} if self._apart is None else self._apart.figures(),
            "window": self.steps.window.figures(),
            "hot": self.state.rows.hot_figures(),
            "columns": self.state.rows.column_figures(),
        }
        plan = None if self._planner is None else self._planner.record.figures()
        every = self._channel.gather(mine)
        added = added_up(every)
        published = self.versions.counters() | {name: added.pop(name) for name in ("rows", "bytes")}
        return {"ranks": len(every), "published": published, "plan": plan, **added}

    def _pruning(self) -> dict[str, Any] | None:
        """Return what pruning did, and what it costs where that is measured."""
        unpruned, found = self.learner.unpruned, self.state.rows.pruning()
        if unpruned is None or found is None:
            return found
        return found | {"within": unpruned.figures()}

    def _place(self) -> Place:
        """Return where the run is; called by the thread of the sign of life."""
        newest = self.versions.publisher.newest
        lag = {} if self._source is None else self._source.lag()
        watermark_ms, learned_ms = self._learned
        return Place(
            version=0 if newest is None else newest.number,
            watermark_ms=watermark_ms,
            learned_ms=learned_ms,
            events=self.state.events,
            unread=sum(lag.values()) if lag else None,
            quality=live_quality(self.state.prequential.live()),
        )

    # --- training ---------------------------------------------------------------------------------

    def fit(
        self,
        source: EventSource,
        *,
        gate: Gate | None = None,
        progress: Callable[[Progress], None] | None = None,
        idle: Callable[[], None] = lambda: None,
        every_s: float = 0.5,
    ) -> None:
        """Read `source` from the offset to its end; publish on the way and at the end.

        Batches are read and prepared by a thread of their own, `ahead_bytes` at most. A version is
        written and sent by another, one at a time, while the events after it are learned. When this
        returns, every version and checkpoint is there; when it raises, none is being written.

        Args:
            source: The events to learn from.
            gate: Holds back events that are not to be learned yet.
            progress: Hears on the first rank, in this thread, where the run is: every `every_s`
                seconds while it learns, and at once when it waits for events.
            idle: Is called in this thread about twice a second while it waits.
            every_s: See `progress`.

        Raises:
            CheckpointError: A checkpoint could not be written.
            ConfigurationError: The events are not those of the run, or have other bins.
            SupersededError: Another publisher runs.
            OvertakenError: ... or publishes to the same storage.
            StorageError: Storage lacks what came last, after all the time it was given.
        """
        self.stopped, self._teller = False, None
        if gate is not None and self._apart is not None:
            raise ConfigurationError(
                f"sync={type(self.run.sync).__name__}() does not go with --behind-scorer, which"
                " learns one batch at a time: use sync=AllReduce()"
            )
        shared = None
        if self.ranks.size > 1 and self._apart is None:
            source = shared = SharedEvents(source, self._events)
        self._source = source = crossed(source, self.run.model)
        if source.joined != (self.run.labels is not None) or (gate is not None and source.joined):
            raise ConfigurationError(
                f"labels={self.run.labels!r}, and the events "
                f"{'come' if source.joined else 'do not come'} with feedback as a stream of its own"
                ": give RunConfig(labels=LabelJoin(...)) where they do, and there alone; and no"
                " --behind-scorer with it"
            )
        self.versions.take_columns(source.schema)
        source.remember_in(self.publication.path)
        with self._channel.together():
            if self.ranks.first:
                self._say_origin(source)
        if self._apart is not None and not self.ranks.first:
            self._follow(self._apart, source)
            return
        source.seek(self.state.cursor)
        batches = source.batches(batch_size=self.run.batch_size, start=self.state.offset)

        def ends() -> bool:
            """Publish and tell while there are no events; return whether the run is to end."""
            self.steps.finish()
            self.versions.wait_published()
            if self._teller is not None:
                self._teller.idle()
            idle()
            stopping = self._is_stopping()
            if shared is None:
                return stopping
            if self.ranks.first:
                shared.stop() if stopping else shared.idle()
            return False

        uploading = self.uploader or contextlib.nullcontext()
        with (
            self._sign or contextlib.nullcontext(),
            self._orders or contextlib.nullcontext(),
            uploading,
            self.versions.saver,
            self._planner or contextlib.nullcontext(),
            read_ahead(batches, self.run.ahead_bytes, ends, self.steps.learn_meanwhile) as ahead,
            contextlib.nullcontext() if self._apart is None else self._apart.running(),
        ):
            try:
                self._fit(ahead, source, gate, progress, every_s)
            finally:
                self.steps.window.clear()
                source.leave()
                self.versions.settle()

    def _say_origin(self, source: EventSource) -> None:
        """Have the folder say where it comes from."""
        storage = "" if self.uploader is None else self.uploader.storage.url
        warm_start = FolderOrigin.read(self.publication.path).warm_start
        if self._warm_start is not None:
            warm_start = str(self._warm_start)
        self.warm_start = warm_start
        origin = FolderOrigin(
            model=self.run.model.name,
            events=without_user(source.name),
            storage=storage,
            warm_start=warm_start,
        )
        try:
            origin.write(self.publication.path)
        except OSError as error:  # the folder is of use without it
            if not is_no_room(error):
                raise
            log.warning("%s", no_room(self.publication.path, error))

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
        is_fresh = self.learner.is_fresh
        batches = self.learner.warm_up(
            batches,
            labelled=not source.joined,
            left_out=self.state.monitor.is_held_out if self.run.evaluation.hold_out else None,
        )
        if self._apart is not None and self.learner.transforms is not None:
            self._apart.command("transforms", self.learner.transforms.text)
        if self._apart is not None and is_fresh and self.learner.prior_H is not None:
            self._apart.command("prior", self.learner.prior_H.tolist())
        self.versions.transforms_are_fitted()
        began, begun_at = time.monotonic(), self.state.events
        begun_done = self.state.done
        total = source.total_events() if self.ranks.first else None
        if self._planner is not None:
            self._planner.total_events = total

        def show(*, last: bool = False) -> None:
            rate = (self.state.events - begun_at) / max(time.monotonic() - began, 1e-9)
            seen = self._progress(source, self._learned[0], total, rate)
            others: list[dict[str, Any]] = []
            if last:  # what others have told may be half a second old
                if self._apart is not None:
                    self._apart.command("progress", None)
                others = self._channel.gather(seen.of_rank())[1:]
            elif self.ranks.first:
                others = self.ranks.told("progress")
            else:
                self.ranks.tell("progress", seen.of_rank())
            if self.ranks.first and progress is not None:
                progress(seen.with_others(others))

        self._teller = teller = Teller(show, lambda: self._mark(source), every_s)
        shut = False  # told to stop before the gate
        for batch in batches:
            self._stand(batch.first, None if batch.origin is None else batch.origin.cursor)
            self._begin(int(batch.ts_ms_B[0]))
            every_ms = self.run.publish_every_s * 1000
            # Cut where it crosses into a new version.
            for _, part in blocks(batch, origin_ms=self.state.origin_ms, every_ms=every_ms):
                if part.first < self.state.done:
                    continue  # the checkpoint fell within this batch
                self.versions.saver.check()
                self._reach(int(part.ts_ms_B[0]))
                if self.replans:
                    return
                if gate is not None:
                    self.steps.finish()
                    end = int(part.event_B[-1]) + 1
                    if self.ranks.first and not gate.wait(end, self._is_stopping):
                        # Other ranks are in the step already: with them it is learned.
                        shut = self.ranks.size == 1
                if shut:
                    break
                if self._is_undone(part):
                    self.steps.finish()
                    self.undone_events += len(part)
                    self.state.done = part.next_offset
                else:
                    self.steps.take(part)
                    if self._planner is not None:
                        self._planner.look(self.steps.finish, self.state.rows.ownership)
            if shut:
                self.stopped = True
                break
            last_ms = batch.watermark_ms
            self._learned = (last_ms, time.time_ns() // 1_000_000)
            teller.learned()
            after = None if batch.origin is None else batch.origin.next_cursor
            if self.learner.stopping:
                self.stopped = True
                self._stand(self.state.offset, after)
                break
            self._stand(batch.next_offset, after)
        self.steps.finish()
        self.versions.wait_published()
        self.stopped |= self._stop
        if self.state.done > begun_done:
            self.steps.decide_all(last_ms)
        took = self.state.waiting is not None and self.state.done > begun_done
        if self.state.events > begun_at or took:
            self.state.offset = (
                max(self.state.offset, self.state.done) if self.stopped else self.state.offset
            )
            self._publish("last", self.state.number + 1, last_ms)
            show(last=True)

    def _mark(self, source: EventSource) -> Any:
        """Return what is another once there is more to tell of this run."""
        of_this = (self.state.events, self.state.done, self.state.number, self.quarantine.stats)
        versions = (self.versions.saver.stats, self.versions.counters())
        others = self.ranks.told("progress") if self.ranks.first else []
        return copy.deepcopy((of_this, versions, source.dead_letters.by_reason, others))

    def _progress(
        self, source: EventSource, ts_ms: int, total: int | None, rate: float
    ) -> Progress:
        stats = self.state.rows.stats()
        return Progress(
            events=self.state.events,
            total_events=total,
            ts_ms=ts_ms,
            version=self.state.number,
            auc=self.state.prequential.live_auc()[0],
            events_per_s=rate,
            rows=int(stats["rows"]),
            resident_bytes={
                "ddr": stats["ddr_payload_bytes"],
                "index": stats["index_bytes"],
                "ssd": stats["ssd_bytes"],
            },
            checkpoints=self.versions.saver.stats.saved,
            checkpoint_s=self.versions.saver.stats.written_s,
            published=self.versions.counters(),
            rejected=dict(source.dead_letters.by_reason),
            source=source.counters(),
            labels={} if self.state.waiting is None else self.state.waiting.counters(),
            dropped={name: stats[name] for name in _DROPS}
            | {"uncounted_keys": self.learner.counters.uncounted}
            | {"unsampled_negatives": self.steps.unsampled}
            | {"dead_letters_lost": source.dead_letters.lost},
            missing=self.learner.missing,
            set_aside=dataclasses.asdict(self.quarantine.stats),
            quality=self.state.monitor.quality(self.state.prequential) | self.state.heads.quality(),
            slices=self.state.monitor.slices(),
            storage={} if self.uploader is None else dataclasses.asdict(self.uploader.stats),
            storage_behind_s=0.0 if self.uploader is None else self.uploader.behind_s,
            traffic={kind: dataclasses.asdict(t) for kind, t in self.ranks.traffic.items()},
            apart={} if self._apart is None else self._apart.counters(),
            window=self.steps.window.figures(),
            plan={} if self._planner is None else self._planner.record.figures(),
            hot=self.state.rows.hot_figures(),
            pruning={} if self.learner.unpruned is None else self.learner.unpruned.figures(),
            background={
                each.name: {"state": each.state, "failures": each.failures, "error": each.error}
                for each in healths()
            },
        )

    def _is_undone(self, part: Batch) -> bool:
        """Return whether only versions that a rollback undid had learned from these events."""
        return any(
            each.to_watermark_ms < int(part.ts_ms_B[0])
            and int(part.ts_ms_B[-1]) <= each.watermark_ms
            for each in self._skipped
        )

    def _begin(self, first_ms: int) -> None:
        """Publish what a fresh run begins with before its first event."""
        if not self.state.has_begun:
            self.state.begin(first_ms)
            self._publish("whole", 1, first_ms - 1)
        elif self.versions.publisher.newest is None and self.forked is not None:
            assert self.forked.watermark_ms is not None  # a fork that keeps its place
            self._publish("whole", self.state.number, self.forked.watermark_ms)
        elif self._changed and self.forked is not None:
            assert self.forked.watermark_ms is not None
            self._changed = False
            self._publish("change", 0, self.forked.watermark_ms)

    def _publish(self, how: str, number: int, watermark_ms: int) -> None:
        """Publish the state as a version, with all ranks.

        Args:
            how: "whole", with a snapshot; "last", the same, at the end; "change", of the model; or
                "snapshot" or "delta", where there is room.
            number: The version's; that of a change follows from the folder.
            watermark_ms: Its time.
        """
        if self._apart is not None:
            self.steps.finish()
            state = self.state
            origin_ms = state.origin_ms
            at = (state.done, state.offset, state.events)
            counted = self.learner.counters.waiting_sums(origin_ms)
            self._apart.command("publish", [how, number, watermark_ms, origin_ms, at], counted)
            self._apart.average(optimizers=True)
        self._publish_here(how, number, watermark_ms)

    def _publish_here(self, how: str, number: int, watermark_ms: int) -> None:
        self.state.rows.bring_rows_home()
        if how in ("whole", "last"):
            self.versions.publish(number, watermark_ms, snapshot=True, last=how == "last")
        elif how == "change":
            self.versions.publish_change(watermark_ms)
        else:
            self.versions.publish_if_room(number, watermark_ms, snapshot=how == "snapshot")
        if how != "last":
            self.state.rows.send_hot_rows_out()

    def _reach(self, ts_ms: int) -> None:
        """Publish the version whose time has come; all events before it are learned."""
        number = self.state.number_at(ts_ms)
        if number <= self.state.number:
            return
        self.steps.finish()
        if self.uploader is not None:
            self.uploader.check(self._is_stopping)
        watermark_ms = self.state.origin_ms + (number - 1) * self.run.publish_every_s * 1000 - 1
        self.steps.decide_all(watermark_ms)
        every = self.run.snapshot_every
        snapshot = number // every > self.state.number // every
        self._publish("snapshot" if snapshot else "delta", number, watermark_ms)
        if snapshot and self._planner is not None:
            self.replans = self._planner.ends(self.state.events, self._is_checkpointed)

    def _is_checkpointed(self) -> bool:
        """Return whether the newest version has a checkpoint, once none is being written."""
        self.versions.saver.wait()
        there = False
        with self._channel.together():
            if self.ranks.first:
                newest = checkpoints.newest(self.publication)
                there = newest is not None and newest.number == self.state.number
        return bool(self._channel.gather(there)[0])

    # --- ranks that are apart ---------------------------------------------------------------------

    def _follow(self, apart: Apart, source: EventSource) -> None:
        """Learn what the first rank hands out, and publish with it, until it has come to an end."""
        began_s = time.monotonic() - ASK_S

        def tell() -> None:
            nonlocal began_s
            if time.monotonic() >= began_s + ASK_S:
                began_s = time.monotonic()
                self._is_stopping()
                self.ranks.tell("progress", self._progress(source, 0, None, 0.0).of_rank())

        def obey(command: Command) -> None:
            if command.name == "transforms":
                self.learner.transforms = _store.Transforms(command.value)
                self.versions.transforms_are_fitted()
            elif command.name == "prior":
                self.learner.start_at(np.array(command.value, np.float32))
            elif command.name == "average":
                apart.average(optimizers=False)
            elif command.name == "progress":
                self._channel.gather(self._progress(source, 0, None, 0.0).of_rank())
            else:
                how, number, watermark_ms, origin_ms, at = command.value
                self.state.begin(origin_ms)
                self.state.done, self.state.offset, self.state.events = at
                self.learner.counters.put_sums(command.data)
                apart.average(optimizers=True)
                self._publish_here(how, number, watermark_ms)

        with self.versions.saver:
            try:
                with apart.running():
                    apart.follow(obey, tell)
            finally:
                source.leave()
                self.versions.settle()
        self.stopped = self._stop

    def _stand(self, offset: int, cursor: tuple[int, ...] | None) -> None:
        """Note where reading goes on."""
        self.state.offset, self.state.cursor = offset, cursor or ()

    def _checkpointed(self, offset: int) -> None:
        """Let the source forget what lies before `offset`. Also called by the saver's thread."""
        source = self._source
        if source is None or not self.ranks.first:
            return
        if self.uploader is None:
            source.checkpointed(offset)
        else:  # what storage lacks, a new machine lacks
            self.uploader.once_there(functools.partial(source.checkpointed, offset))
