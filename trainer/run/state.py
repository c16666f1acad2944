"""A run's learned state, and its place in the stream: all that a checkpoint holds."""

import copy
from typing import Any

import numpy as np

from embertide.trainer.config import RunConfig
from embertide.trainer.data.history import History
from embertide.trainer.data.labels import DelayedLabelBuffer
from embertide.trainer.eval.heads import Heads
from embertide.trainer.eval.monitor import Monitor
from embertide.trainer.eval.precision import PrecisionCheck
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.model.learner import Learner
from embertide.trainer.model.own import check_fit
from embertide.trainer.publish.folder import VersionId
from embertide.trainer.publish.snapshot import Layout
from embertide.trainer.run.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointError,
    SavedCheckpoint,
)
from embertide.trainer.run.checkpoint.settings import changed_from_default, settings
from embertide.trainer.sync import plan
from embertide.trainer.sync.plan import Ownership
from embertide.trainer.sync.ranks import Ranks


class RunState:
    """A run's state, or of many ranks one rank's: beside its rows, all have the same.

    Used by one thread.

    Attributes:
        run: The configuration.
        learner: Net, optimizer and rows.
        rows: The learner's.
        prequential: The scores that events got before they were learned.
        heads: Figures of the heads beside the first.
        precision: What reduced precision costs; None: the run did not choose it.
        monitor: Figures by user and slice, and of events that are held out.
        histories: The users' past events, by sequence.
        waiting: Impressions whose labels are to come; None: events have theirs.
        changes: Settings that were changed on the way, oldest first.
        offset: The offset of the batch to read first: batches depend on where one starts.
        cursor: For merged inputs: where each stands at `offset`; else empty.
        generation: The first version of this model, where a change brought it; 0: none did.
        journals: Those of the checkpoint that the state is of, for a folder that lacks them.
        former: The request layouts from before changes of the model, newest first.
        done: Events before this index are learned; where labels come later, taken.
        events: That were learned.
        number: The version that the state is at or past.
    """

    def __init__(self, run: RunConfig, ranks: Ranks, owners: Ownership) -> None:
        """Begin with nothing learned."""
        self.run = run
        self.learner = Learner(run, ranks, owners)
        self.rows = self.learner.rows
        self.prequential = Prequential()
        names = [feature.name for feature in run.model.features]
        self.heads = Heads(run.model.heads)
        self.precision: PrecisionCheck | None = None
        if run.serve_reduced is not None:
            self.precision = PrecisionCheck(run.serve_reduced, run.batch_size)
        self.monitor = Monitor(run.evaluation, names)
        self.histories = [History(each, names) for each in run.model.sequences]
        self.waiting = None if run.labels is None else DelayedLabelBuffer(run.labels)
        self.changes: list[dict[str, Any]] = []
        self.offset = 0
        self.cursor: tuple[int, ...] = ()
        self.generation = 0
        self.former: tuple[Layout, ...] = ()
        self.journals: dict[str, list[str]] = {}
        self.done = 0
        self.events = 0
        self.number = 0
        self._origin_ms: int | None = None
        self._asked_of: list[list[int]] = []  # keys, by table and bucket

    @property
    def origin_ms(self) -> int:
        """The time that versions are counted from; `has_begun` says whether it is known."""
        assert self._origin_ms is not None
        return self._origin_ms

    @property
    def has_begun(self) -> bool:
        """Whether the run, or the one it goes on from, has seen an event."""
        return self._origin_ms is not None

    def begin(self, first_ms: int) -> None:
        """Count versions from the time of the first event."""
        self._origin_ms = self.learner.origin_ms = first_ms

    def number_at(self, ts_ms: int) -> int:
        """Return the number of the newest version that is out when an event of that time comes."""
        return 1 + (ts_ms - self.origin_ms) // (self.run.publish_every_s * 1000)

    def restore(self, found: SavedCheckpoint) -> None:
        """Take the state of a checkpoint, where nothing is learned yet.

        Raises:
            HarmedCheckpointError: A file of it is not what was written.
            ConfigurationError: The net has other tensors.
            CheckpointError: It lacks the unpruned rows that a bound needs.
        """
        saved = found.checkpoint
        check_fit(self.run.model, self.learner.net, saved.net)
        found.restore_rows(self.rows)
        self.learner.transforms = found.transforms()
        self.learner.net.load_state_dict(saved.net)
        self.learner.is_fresh = False
        if self.learner.unpruned is not None:
            if saved.unpruned is None:
                raise CheckpointError(
                    f"the checkpoint of version {saved.version.number} has no unpruned rows, so"
                    " prune.within cannot be measured: leave it out, or train in a new folder"
                )
            self.learner.unpruned.restore(saved.unpruned)
            found.restore_unpruned(self.learner.unpruned.rows)
        self.learner.load_optimizer(saved.optimizer)
        if saved.config.get("sync", {}).get("strategy") == self.run.sync.strategy:
            self.learner.sync.restore(found.sync_states())
        self.prequential = saved.prequential
        self.monitor.restore(*saved.monitor)
        self.heads.restore(*saved.heads)
        if self.precision is not None:
            self.precision.restore(saved.precision)
        self._asked_of = saved.load
        for history, state in zip(self.histories, saved.histories, strict=True):
            history.restore(state)
        if self.waiting is not None and saved.waiting is not None:
            self.waiting.restore(saved.waiting)
        self.cursor = tuple(saved.cursor)
        self.generation = saved.generation
        self.journals = saved.journals
        self.former = found.former()
        self.offset, self.done, self.events = saved.offset, saved.done, saved.events
        self.number = saved.version.number
        self.begin(saved.origin_ms)

    def checkpoint(self, version: VersionId) -> Checkpoint:
        """Return a copy of the state, its rows excepted; all ranks call it together."""
        return Checkpoint(
            version=version,
            config=settings(self.run),
            changed=changed_from_default(self.run),
            changes=self.changes,
            offset=self.offset,
            done=self.done,
            events=self.events,
            origin_ms=self.origin_ms,
            net=copy.deepcopy(self.learner.net.state_dict()),
            optimizer=copy.deepcopy(self.learner.optimizer_state()),
            rows=self.rows.progress(),
            prequential=self.prequential.frozen(),
            monitor=self.monitor.state(),
            heads=copy.deepcopy(self.heads.state()),
            precision={} if self.precision is None else self.precision.state(),
            histories=[history.state() for history in self.histories],
            cursor=list(self.cursor),
            generation=self.generation,
            waiting=None if self.waiting is None else self.waiting.state(),
            plan=plan.text(self.run.model, self.rows.ownership),
            load=self._load(),
            sync=self.learner.sync.state(),
            unpruned=None if self.learner.unpruned is None else self.learner.unpruned.state(),
        )

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
