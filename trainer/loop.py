"""The training loop: score, train, publish; stop anywhere, go on as if never stopped.

Versions are counted in event time: version 1 is the untrained model, version n is published when
the stream reaches origin + (n - 1) * publish_every_s and has learned from every event before that.
So a run that was killed and resumed publishes the versions of a run that was not: it trains again
what its checkpoint lacks without publishing, until it passes the newest version that is out.

Shapes: B events of a batch, F features, D dense columns.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from embertide.trainer.aside import SetAside
from embertide.trainer.checkpoint.settings import settings
from embertide.trainer.config import RunConfig
from embertide.trainer.data.ahead import read_ahead
from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.data.crosses import crossed
from embertide.trainer.data.history import extend
from embertide.trainer.data.limit import blocks, where
from embertide.trainer.data.shared import SharedEvents
from embertide.trainer.forking import Fork
from embertide.trainer.learner import NotFiniteError, Prepared
from embertide.trainer.model.export import export_dense
from embertide.trainer.model.own import check_program
from embertide.trainer.progress import Progress, added_up
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.promotion import PromotionRecord
from embertide.trainer.publish.snapshot import keep_program
from embertide.trainer.resuming import Resuming
from embertide.trainer.sync.channel import check_same
from embertide.trainer.sync.ranks import Ranks
from embertide.trainer.versions import Versions

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
        fork: Whose state a run begins with that has none of its own; None: nobody's.
        change_model: Let the run go on with another model than its checkpoint's, with what it has
            learned carried over.

    Attributes:
        state: What is learned, and up to where; of this rank, its rows.
        versions: What publishes it.
        stopped: Whether `fit` came to its end because `stop` was called.
        forked: What this run began with of another run or model; None: nothing.

    Raises:
        CheckpointError: The publication holds a run of another configuration, or versions and no
            checkpoint that is whole.
        ConfigurationError: `allow_change` names no setting, or one that cannot change; or a net of
            one's own is not what it should be, or not what it was.
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
        fork: Fork | None = None,
        change_model: bool = False,
    ) -> None:
        """Open store and net, resume a checkpoint, take the lineage."""
        self.run = run
        self.ranks = ranks or Ranks.alone()
        # Opened here, by all ranks in one order, so that none waits for one that has failed since.
        self._channel, saving, publishing, self._events, *_ = [
            self.ranks.channel(name)
            for name in ("loop", "saver", "publish", "events", "keys", "rows", "dense")
        ]
        check_same(
            self._channel, "configuration", settings(run) | {"folder": str(publication.path)}
        )
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="keys")
        self.stopped = self._stop = False
        self._asked: Future[Prepared] | None = None  # the batch to learn next
        self.publication = publication
        self.set_aside = SetAside(publication.set_aside, run.most_set_aside)
        self.undone_events = 0  # passed over, as a rollback undid what was learned from them
        self._skipped = PromotionRecord(publication).read().undone if skip_undone else ()
        self._source: EventSource | None = None  # of this `fit`
        beginning = Resuming(
            run=run,
            publication=publication,
            ranks=self.ranks,
            channel=self._channel,
            allow_change=allow_change,
            plan_file=plan_file,
            fork=fork,
            change_model=change_model,
        ).begin()
        self.state = beginning.state
        self.forked = beginning.forked
        self._changed = beginning.changed  # and no version is out since
        self.learner = self.state.learner
        with self._channel.together():
            if self.ranks.first and beginning.changed:
                publication.program.unlink(missing_ok=True)
            elif self.ranks.first and beginning.version is not None:
                keep_program(publication, beginning.version)
            if self.ranks.first and not publication.program.exists():
                export_dense(
                    self.learner.served,
                    publication.program,
                    dense_features=run.model.dense_columns,
                    embedding_dim=self.state.rows.embedding_dim,
                    cpu=run.cpu,
                    cache=program_cache,
                )
            if self.ranks.first and run.model.is_own_net:
                check_program(self.learner.served, publication.program, run.model, run.cpu)
        self.versions = Versions(
            publication,
            beginning,
            bus=bus,
            channel=self._channel,
            publishing=publishing,
            saving=saving,
            checkpointed=self._checkpointed,
        )

    def figures(self) -> dict[str, Any]:
        """Return what all ranks hold and did, added up; all of them call it together."""
        mine = {
            "pruning": self.state.rows.pruning(),
            "store": self.state.rows.stats(),
            "rows": self.versions.publisher.stats.rows,
            "bytes": self.versions.publisher.stats.bytes,
            "traffic": {kind: dataclasses.asdict(t) for kind, t in self.ranks.traffic.items()},
        }
        every = self._channel.gather(mine)
        added = added_up(every)
        published = self.versions.counters() | {name: added.pop(name) for name in ("rows", "bytes")}
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

        Batches are read and prepared by a thread of their own, `ahead_bytes` at most. A version is
        written and sent by another, one at a time, while the events after it are learned. When this
        returns, every version and checkpoint is there; when it raises, none is being written.

        Raises:
            CheckpointError: A checkpoint could not be written.
            SupersededError: Another publisher runs.
        """
        self.stopped, self._asked = False, None
        shared = None
        if self.ranks.size > 1:
            source = shared = SharedEvents(source, self._events)
        self._source = source = crossed(source, self.run.model)
        batches = source.batches(batch_size=self.run.batch_size, start=self.state.offset)

        def ends() -> bool:
            """What is done while there are no events; whether the run is to end."""
            self._finish()
            self.versions.arrive()
            stopping = self._is_stopping()
            if shared is None:
                return stopping
            if self.ranks.first:
                shared.stop() if stopping else shared.idle()
            return False

        with self.versions.saver, read_ahead(batches, self.run.ahead_bytes, ends) as ahead:
            try:
                self._fit(ahead, source, gate, progress, every_s)
            finally:
                self.versions.settle()

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
        self.versions.transforms_are_fitted()
        began, begun_at, shown = time.monotonic(), self.state.events, 0.0
        total = source.total_events() if self.ranks.first else None

        def show(ts_ms: int, now: float, *, last: bool = False) -> None:
            rate = (self.state.events - begun_at) / max(now - began, 1e-9)
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
            self.state.offset = batch.first
            self._begin(int(batch.ts_ms_B[0]))
            every_ms = self.run.publish_every_s * 1000
            # Cut where it crosses into a new version.
            for _, part in blocks(batch, origin_ms=self.state.origin_ms, every_ms=every_ms):
                if part.first < self.state.done:
                    continue  # the checkpoint fell within this batch
                self.versions.saver.check()
                self._reach(int(part.ts_ms_B[0]))
                if gate is not None:
                    self._finish()
                    if self.ranks.first:
                        gate.wait(int(part.event_B[-1]) + 1)
                if self._is_undone(part):
                    self._finish()
                    self.undone_events += len(part)
                    self.state.done = part.next_offset
                else:
                    self._train(extend(self.state.histories, part))
            now = time.monotonic()
            if now - shown >= every_s:
                shown = now
                show(batch.watermark_ms, now)
            last_ms = batch.watermark_ms
            if self.learner.stopping:
                self.stopped = True
                break
            self.state.offset = batch.next_offset
        self._finish()
        self.versions.arrive()
        self.stopped |= self._stop
        if self.state.events > begun_at:
            self.state.offset = (
                max(self.state.offset, self.state.done) if self.stopped else self.state.offset
            )
            self.versions.publish(self.state.number + 1, last_ms, snapshot=True, last=True)
            show(last_ms, time.monotonic(), last=True)

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
            dropped={name: stats[name] for name in _DROPS}
            | {"uncounted_keys": self.learner.counters.uncounted},
            missing=self.learner.missing,
            set_aside=dataclasses.asdict(self.set_aside.stats),
            quality=self.state.monitor.quality(self.state.prequential) | self.state.heads.quality(),
            slices=self.state.monitor.slices(),
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
            self.versions.publish(1, first_ms - 1, snapshot=True)
        elif self.versions.publisher.newest is None and self.forked is not None:
            assert self.forked.watermark_ms is not None  # a fork that keeps its place
            self.versions.publish(self.state.number, self.forked.watermark_ms, snapshot=True)
        elif self._changed and self.forked is not None:
            assert self.forked.watermark_ms is not None
            self._changed = False
            self.versions.publish_change(self.forked.watermark_ms)

    def _reach(self, ts_ms: int) -> None:
        """Publish the version whose time has come; all events before it are learned."""
        number = self.state.number_at(ts_ms)
        if number <= self.state.number:
            return
        self._finish()
        watermark_ms = self.state.origin_ms + (number - 1) * self.run.publish_every_s * 1000 - 1
        every = self.run.snapshot_every
        snapshot = number // every > self.state.number // every
        self.versions.publish_if_room(number, watermark_ms, snapshot=snapshot)

    def _train(self, batch: Batch) -> None:
        """Score a batch and learn from it; of many ranks, the one before it while its keys travel.

        So it is where its rows may come from an SSD.

        What is asked for has no part in what is learned: the order of learning is that of events.
        """
        held_B = self.state.monitor.is_held_out(batch)
        if held_B.any():
            self._finish()
            held = where(batch, held_B)
            self.state.monitor.hold_out(held, self.learner.score(held))
            if held_B.all():
                self.state.done = batch.next_offset
                return
            batch = where(batch, ~held_B)
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
        self.state.done = batch.next_offset
        try:
            scores = self.learner.learn(ready, then)
        except NotFiniteError as error:
            self.set_aside.add(batch, str(error), kept=self.ranks.first)
            return
        self.set_aside.learned()
        score_B = scores if scores.ndim == 1 else scores[:, 0]
        self.state.prequential.add(batch.ts_ms_B, batch.label_B, score_B)
        self.state.heads.add(batch, scores)
        self.state.monitor.add(batch, score_B)
        self.state.events += len(batch)

    def _checkpointed(self, offset: int) -> None:
        """Let the source forget what lies before `offset`. Also called by the saver's thread."""
        if self._source is not None and self.ranks.first:
            self._source.checkpointed(offset)
