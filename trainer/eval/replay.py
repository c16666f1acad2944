"""Replay: every impression is scored by the served model, before the trainer may learn from it.

Replay runs faster than life, so it is paced by event time: a request waits while the newest served
version is older than `max_staleness_ms` behind its events. What was scored is told to the trainer
through Redis (`data/limit.py`), so the two go hand in hand and neither cheats.

Requests hold whole groups of one ts, so no click is split over a batch or a version. They span a
third of the allowed staleness at most; with versions at least as often, scorer and trainer cannot
wait for each other: the trainer's unfinished batch begins at most one version interval before the
first event that is not scored, and the version before it is out.
"""

import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.data.limit import take
from embertide.trainer.errors import TrainerError
from embertide.trainer.eval.checks import Check, Checks, Scorer
from embertide.trainer.eval.compare import EQUAL, Copy
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.eval.records import REQUESTS, SCORES, Records, RecordWriter
from embertide.trainer.eval.served import Answer

SPAN = 3
"""A request spans at most 1 / SPAN of the allowed staleness."""

_POLL_S = 0.005
_PATIENCE_S = 600.0
_RECENT = 512


class Scored(Protocol):
    """Is told how far scoring is."""

    def tell(self, end: int) -> None:
        """Events before index `end` are scored."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """How a stream is replayed."""

    batch_size: int = 256  # events of a request, at least
    in_flight: int = 3  # requests at a time
    max_staleness_ms: int | None = 1_800_000  # event time; None: do not wait for versions
    compare_from: int = 0  # with a copy: before this event, wait until it is loaded
    events_per_s: float | None = None  # at most; None: as fast as it goes
    checks_per_s: float = 0.0  # with a copy: beside the requests (checks.py), at most; 0: none

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        for name in ("batch_size", "in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.checks_per_s < 0:
            raise ValueError(f"checks_per_s is {self.checks_per_s}; it must be 0 or more")
        if self.events_per_s is not None and self.events_per_s <= 0:
            raise ValueError(f"events_per_s is {self.events_per_s}; it must be above 0")
        if self.max_staleness_ms is not None and self.max_staleness_ms < SPAN:
            raise ValueError(f"max_staleness_ms is {self.max_staleness_ms}; give {SPAN} or more")


@dataclasses.dataclass(slots=True)
class ReplayStats:
    """Counters of a replay."""

    events: int = 0
    skipped: int = 0  # events that the model had learned before the replay began
    requests: int = 0
    probes: int = 0  # requests of one sample that only ask how fresh the served version is
    failed_probes: int = 0
    failed_requests: int = 0  # of those that score events
    compared: int = 0  # answers that a copy was asked for too
    checks: int = 0  # of few events that were scored, asked again to compare more
    check_events: int = 0
    failed_checks: int = 0
    changed: int = 0  # of compared answers and checks, not equal to the copy's
    waited_s: float = 0.0  # for a fresher version


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplayProgress:
    """Where a replay is."""

    events: int
    total_events: int | None
    ts_ms: int
    version: int
    staleness_s: float  # event time
    auc: float  # of the current day, served
    p50_ms: float  # of the last requests
    p99_ms: float
    events_per_s: float
    compared: int = 0
    checks: int = 0
    changed: int = 0
    awaits_copy: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Landed:
    """An answer, and how far it is from the copy's."""

    answer: Answer
    compared: bool = False
    difference: float | None = None


class Replay:
    """Scores one stream with one served model. Used by one thread.

    Args:
        model: The model that scores.
        records: Where rows go.
        config: Pace and size of requests.
        scored: Is told how far scoring is; None if nobody waits for it.
        copy: A copy to compare answers with while it is loaded; None: they are not compared.
    """

    def __init__(
        self,
        model: Scorer,
        records: Records,
        config: ReplayConfig,
        scored: Scored | None = None,
        copy: Copy | None = None,
    ) -> None:
        """Nothing is sent yet."""
        self.config = config
        self.stats = ReplayStats()
        self.prequential = Prequential()
        self._model = model
        self._records = records
        self._scored = scored
        self._copy = copy
        self._checks: Checks | None = None
        if copy is not None and config.checks_per_s:
            self._checks = Checks(model, copy, config.checks_per_s)
        self._newest: Answer | None = None
        self._latency_us: deque[int] = deque(maxlen=_RECENT)
        self._due_s = 0.0

    def run(
        self,
        source: EventSource,
        *,
        progress: Callable[[ReplayProgress], None] | None = None,
        every_s: float = 0.5,
    ) -> None:
        """Score the whole stream.

        Raises:
            ServingError: The model refuses a request or is gone.
            TrainerError: No fresher version came for ten minutes.
        """
        began, shown = time.monotonic(), 0.0
        awaits = self._copy is not None
        total = source.total_events()
        with (
            RecordWriter(self._records.scores, SCORES) as scores,
            RecordWriter(self._records.requests, REQUESTS) as requests,
            RecordWriter(self._records.checks, REQUESTS) as checks,
            self._checks or contextlib.nullcontext(),
            ThreadPoolExecutor(self.config.in_flight) as pool,
        ):
            flying: deque[tuple[Batch, Future[_Landed]]] = deque()

            def land() -> None:
                batch, landed = flying[0][0], flying[0][1].result()
                flying.popleft()
                self._keep(batch, landed, scores, requests)
                if self._checks is not None:
                    self._checks.see(batch)
                    self._keep_checks(self._checks.taken(), checks)

            for batch in self._parts(source):
                while len(flying) >= self.config.in_flight:
                    land()
                # All that is under way must land first: the trainer may wait for it.
                while flying and not self._fresh_for(batch):
                    land()
                self._wait_fresh(batch)
                if self._copy is not None and awaits and batch.first >= self.config.compare_from:
                    awaits = False
                    while flying:
                        land()
                    if progress is not None and self._newest is not None:
                        said = self._progress(batch.watermark_ms, total, time.monotonic() - began)
                        progress(dataclasses.replace(said, awaits_copy=True))
                    self._copy.wait()
                self._pace(len(batch))
                flying.append((batch, pool.submit(self._ask, batch)))
                now = time.monotonic()
                if progress is not None and now - shown >= every_s and self._newest is not None:
                    shown = now
                    progress(self._progress(batch.watermark_ms, total, now - began))
            while flying:
                last_ms = flying[-1][0].watermark_ms
                land()
            if progress is not None and self._newest is not None:
                progress(self._progress(last_ms, total, time.monotonic() - began))
            if self._checks is not None:
                self._checks.stop()
                self._keep_checks(self._checks.taken(), checks)

    def _parts(self, source: EventSource) -> Iterator[Batch]:
        """Cut batches that span too long, and leave out what the model has learned already."""
        staleness = self.config.max_staleness_ms
        for batch in source.batches(batch_size=self.config.batch_size):
            cuts = [0]
            ts_ms_B = batch.ts_ms_B
            if staleness is not None:
                while ts_ms_B[-1] - ts_ms_B[cuts[-1]] > staleness // SPAN:
                    last = ts_ms_B[cuts[-1]] + staleness // SPAN
                    cuts.append(int(np.searchsorted(ts_ms_B, last, side="right")))
            for begin, end in itertools.pairwise((*cuts, len(batch))):
                part = take(batch, begin, end)
                if self._newest is None:
                    self._probe(part)
                if staleness is None and self._learned(part):
                    self.stats.skipped += len(part)
                else:
                    yield part

    def _learned(self, part: Batch) -> bool:
        assert self._newest is not None
        return int(part.ts_ms_B[0]) <= self._newest.watermark_ms

    # --- pace -------------------------------------------------------------------------------------

    def _pace(self, count: int) -> None:
        """Wait until so many events are due."""
        if self.config.events_per_s is None:
            return
        now_s = time.monotonic()
        # A delay by a pause is not made up for.
        self._due_s = max(self._due_s, now_s)
        time.sleep(self._due_s - now_s)
        self._due_s += count / self.config.events_per_s

    def _fresh_for(self, batch: Batch) -> bool:
        staleness = self.config.max_staleness_ms
        if staleness is None:
            return True
        return (
            self._newest is not None and self._newest.watermark_ms + staleness >= batch.watermark_ms
        )

    def _probe(self, batch: Batch) -> None:
        """Ask how fresh the served version is, with the first sample."""
        answer = self._model.score(take(batch, 0, 1))
        self.stats.failed_probes += answer.failures
        self.stats.probes += 1
        self._see(answer)

    def _see(self, answer: Answer) -> None:
        if self._newest is None or answer.version > self._newest.version:
            self._newest = answer

    def _wait_fresh(self, batch: Batch) -> None:
        if self._fresh_for(batch):
            return
        began = time.monotonic()
        while True:
            self._probe(batch)
            if self._fresh_for(batch):
                break
            if time.monotonic() - began > _PATIENCE_S:
                version = None if self._newest is None else self._newest.version
                raise TrainerError(
                    f"version {version} is still the newest served after {_PATIENCE_S:.0f} s, and "
                    f"too old for events of ts {batch.watermark_ms} ms: is the trainer running?"
                )
            time.sleep(_POLL_S)
        self.stats.waited_s += time.monotonic() - began

    # --- asking and keeping -----------------------------------------------------------------------

    def _ask(self, batch: Batch) -> _Landed:
        """Have a batch scored, and compare; runs in the pool's threads."""
        compared = self._copy is not None and self._copy.loaded()
        answer = self._model.score(batch)
        if self._copy is None or not compared:
            return _Landed(answer)
        return _Landed(answer, compared, self._copy.difference(batch, answer))

    def _keep(
        self, batch: Batch, landed: _Landed, scores: RecordWriter, requests: RecordWriter
    ) -> None:
        answer = landed.answer
        self.stats.failed_requests += answer.failures
        self._see(answer)
        self.stats.compared += landed.compared
        self.stats.changed += landed.difference is not None and landed.difference > EQUAL
        size = len(batch)
        self.stats.events += size
        self.stats.requests += 1
        self._latency_us.append(answer.latency_us)
        answered_ms = answer.sent_ms + answer.latency_us // 1000
        scores.add(
            {
                "event": batch.event_B,
                "ts_ms": batch.ts_ms_B,
                "score": answer.score_B,
                "version": np.full(size, answer.version),
                "plan_epoch": np.full(size, answer.plan_epoch),
                "node": [answer.node] * size,
                "answered_ms": np.full(size, answered_ms),
            }
        )
        made = Check(batch.first, size, batch.watermark_ms, answer, landed.difference)
        requests.add(_row(made, compared=landed.compared))
        self.prequential.add(batch.ts_ms_B, batch.label_B, answer.score_B)
        if self._scored is not None:
            self._scored.tell(batch.next_offset)

    def _keep_checks(self, checks: list[Check], records: RecordWriter) -> None:
        for each in checks:
            self.stats.checks += 1
            self.stats.check_events += each.events
            self.stats.failed_checks += each.answer.failures
            self.stats.changed += each.difference is not None and each.difference > EQUAL
            records.add(_row(each, compared=True))

    def _progress(self, ts_ms: int, total: int | None, seconds: float) -> ReplayProgress:
        assert self._newest is not None
        daily = self.prequential.daily()
        latency = np.percentile(self._latency_us, (50, 99)) if self._latency_us else (0.0, 0.0)
        return ReplayProgress(
            events=self.stats.events,
            total_events=total,
            ts_ms=ts_ms,
            version=self._newest.version,
            staleness_s=max(0, ts_ms - self._newest.watermark_ms) / 1000,
            auc=daily[max(daily)] if daily else float("nan"),
            p50_ms=float(latency[0]) / 1000,
            p99_ms=float(latency[1]) / 1000,
            events_per_s=self.stats.events / max(seconds, 1e-9),
            compared=self.stats.compared,
            checks=self.stats.checks,
            changed=self.stats.changed,
        )


def _row(made: Check, *, compared: bool) -> dict[str, list[Any]]:
    """Return the record of a request."""
    answer = made.answer
    return {
        "first": [made.first],
        "events": [made.events],
        "ts_ms": [made.ts_ms],
        "sent_ms": [answer.sent_ms],
        "latency_us": [answer.latency_us],
        "version": [answer.version],
        "node": [answer.node],
        "failures": [answer.failures],
        "compared": [compared],
        "difference": [made.difference],
    }
