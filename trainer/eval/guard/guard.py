"""The guard's loop: take the newest undecided version, judge it, write the decision.

All that it must remember is in the promotion record, so it may be killed at any point, and two may
run: a decision names the revision that it was made on, and is dropped if there is a newer one.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from embertide.trainer.data.base import Batch
from embertide.trainer.data.limit import take
from embertide.trainer.eval.guard.finite import FiniteScan
from embertide.trainer.eval.guard.judge import Limits, Side, Verdict, judge
from embertide.trainer.eval.served import Answer, ServingError, VersionNotHeldError
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.promotion import (
    Promotion,
    PromotionRecord,
    StaleDecisionError,
    maker,
)
from embertide.trainer.publish.snapshot import manifest_tables, read_manifest

log = logging.getLogger(__name__)


class Model(Protocol):
    """The served model."""

    def score(self, batch: Batch, *, version: int | None = None) -> Answer:
        """Score events at the version that ordinary requests see, or at the one given."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """How a guard works."""

    limits: Limits = dataclasses.field(default_factory=Limits)
    events: int = 4000  # that a version is judged by
    least_events: int = 1000  # at the end of the input; with fewer there is no decision

    def __post_init__(self) -> None:
        """Refuse what decides nothing."""
        if not 1 <= self.least_events <= self.events:
            raise ValueError(
                f"least_events is {self.least_events}, events {self.events}; give 1 to events"
            )


@dataclasses.dataclass(slots=True)
class GuardStats:
    """Counters since the start."""

    promoted: int = 0
    withdrawn: dict[str, int] = dataclasses.field(default_factory=dict)  # by reason
    stale: int = 0  # decisions dropped, as the record had changed
    not_held: int = 0  # versions that the node did not hold when asked
    short_of_events: int = 0  # looks at a version that had too few labelled events
    unreachable: int = 0  # looks at which the node did not answer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A decision on a version."""

    version: int
    verdict: Verdict
    revision: int


class NewestEvents:
    """The events of a stream after a moving mark; bounded by what is asked for.

    Args:
        batches: Labelled events in time order.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        """Nothing is read yet."""
        self._batches = batches
        self._held: deque[Batch] = deque()
        self.ended = False

    def any(self) -> Batch | None:
        """Return one sample, whatever its time; None if the stream is empty."""
        if not self._held:
            self.after(-1, 1)
        return take(self._held[0], 0, 1) if self._held else None

    def after(self, watermark_ms: int, count: int) -> list[Batch]:
        """Return batches of about `count` events that are all newer; fewer where the stream ends.

        The mark must not fall.
        """
        while self._held and int(self._held[0].ts_ms_B[0]) <= watermark_ms:
            self._held.popleft()
        found = sum(map(len, self._held))
        while found < count and not self.ended:
            batch = next(self._batches, None)
            if batch is None:
                self.ended = True
            elif int(batch.ts_ms_B[0]) > watermark_ms:
                self._held.append(batch)
                found += len(batch)
        return list(self._held)


class Guard:
    """Decides on the versions of one publication. Used by one thread.

    Args:
        publication: Its folder.
        record: Where decisions go.
        model: The model that serves it.
        events: Labelled events.
        config: Limits.
    """

    def __init__(
        self,
        publication: Publication,
        record: PromotionRecord,
        model: Model,
        events: NewestEvents,
        config: GuardConfig,
    ) -> None:
        """Nothing is read yet."""
        self.stats = GuardStats()
        self._publication, self._record, self._model = publication, record, model
        self._events, self._config = events, config
        self._name = maker("guard")
        self._scan: FiniteScan | None = None
        self._scanned = 0

    def step(self) -> Decision | None:
        """Decide on one version, if there is one to decide on and all that it takes.

        Raises:
            TrainerError: The record or a delta file is not what it should be.
        """
        record = self._record.read()
        try:
            version = self._newest_held(self._candidates(record))
            if version is None:
                return None
            verdict = self._judge(version, record)
        except VersionNotHeldError:
            self.stats.not_held += 1
            return None
        except ServingError as error:
            self.stats.unreachable += 1
            log.warning("the node does not answer: %s", error)
            return None
        if verdict is None:
            self.stats.short_of_events += 1
            return None
        return self._decide(version, verdict, record)

    def _newest_held(self, versions: Sequence[VersionId]) -> VersionId | None:
        """Return the newest version that the node holds: it may hold later ones back."""
        probe = self._events.any() if versions else None
        if probe is None:
            return None
        for version in reversed(versions):
            try:
                self._model.score(probe, version=version.number)
            except VersionNotHeldError:
                self.stats.not_held += 1
                continue
            return version
        return None

    def _candidates(self, record: Promotion) -> list[VersionId]:
        deltas = set(self._publication.deltas())
        return [
            version
            for version in self._publication.versions()
            if not record.is_decided(version.number) and (version in deltas or record.promoted == 0)
        ]

    def _decide(self, version: VersionId, verdict: Verdict, record: Promotion) -> Decision | None:
        number, revision = version.number, record.revision
        try:
            if verdict.reason is None:
                made = self._record.promote(number, by=self._name, revision=revision)
                self.stats.promoted += 1
            else:
                made = self._record.withdraw(
                    number,
                    reason=verdict.reason,
                    detail=verdict.detail,
                    by=self._name,
                    revision=revision,
                )
                before = self.stats.withdrawn.get(verdict.reason, 0)
                self.stats.withdrawn[verdict.reason] = before + 1
        except StaleDecisionError:
            self.stats.stale += 1
            return None
        what = "promoted" if verdict.reason is None else f"withdrawn for {verdict.reason}"
        log.info("version %d %s: %s", number, what, verdict.detail)
        return Decision(version=number, verdict=verdict, revision=made.revision)

    # --- judging ----------------------------------------------------------------------------------

    def _judge(self, version: VersionId, record: Promotion) -> Verdict | None:
        """Judge a version; None: there are too few events yet."""
        if found := self._not_finite(version, record):
            log.warning("version %d holds %s that are not finite", version.number, found)
            return Verdict(reason="not_finite", figures={"not_finite": 1.0})
        batches = self._events.after(self._watermark_ms(version), self._config.events)
        if sum(map(len, batches)) < self._config.least_events:
            return None
        verdict = self._compare(version, batches)
        if verdict.reason == "latency":  # once may be the machine
            verdict = self._compare(version, batches)
        return verdict

    def _compare(self, version: VersionId, batches: Sequence[Batch]) -> Verdict:
        candidate: list[Answer] = []
        served: list[Answer] = []
        for turn, batch in enumerate(batches):
            # In turns, so that whatever slows the machine slows both.
            for asks_candidate in (True, False) if turn % 2 else (False, True):
                answers = candidate if asks_candidate else served
                asked = version.number if asks_candidate else None
                answers.append(self._model.score(batch, version=asked))
        label_B = np.concatenate([batch.label_B for batch in batches])
        before = _side(served)
        # A node without a promoted version, or past its timeout, serves the candidate itself.
        comparable = len({each.version for each in served}) == 1 and before.version < version.number
        return judge(label_B, _side(candidate), before if comparable else None, self._config.limits)

    def _watermark_ms(self, version: VersionId) -> int:
        if version in self._publication.deltas():
            return int(self._publication.read_commit(version).commit.watermark_ms)
        return int(read_manifest(self._publication.snapshot_path(version))["watermark_ms"])

    def _not_finite(self, version: VersionId, record: Promotion) -> str:
        """Say what of a version's state, as it changed since the promoted one, is not finite."""
        if version not in self._publication.deltas():
            return ""
        newest = version.number
        if self._scan is None or newest < self._scanned:
            snapshot = self._publication.snapshots()[-1]
            manifest = read_manifest(self._publication.snapshot_path(snapshot))
            self._scan = FiniteScan(self._publication, manifest_tables(manifest))
            self._scanned = 0
        if self._scanned <= record.promoted:
            self._scan.restart()
            self._scanned = record.promoted
        for each in self._publication.deltas():
            if self._scanned < each.number <= newest:
                self._scan.read(each)
                self._scanned = each.number
        return self._scan.found()


def _side(answers: Sequence[Answer]) -> Side:
    return Side(
        version=answers[0].version,
        score_B=np.concatenate([answer.score_B for answer in answers]),
        latency_us=np.array([answer.latency_us for answer in answers], np.int64),
    )
