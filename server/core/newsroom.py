"""Turns news from outside the core into facts of the timeline.

A version that follows the one before within ten minutes of a run of them makes that event longer
instead of a new one: trainers publish every second, and people ask when it stopped.
"""

from collections.abc import Iterable
from typing import NamedTuple

from embertide.server.core.events import FleetEvent
from embertide.server.core.news import SILENT_MS, News, Promotion, Rollback, trainer_state
from embertide.server.core.timeline import Timeline
from embertide.v1 import control_pb2, node_pb2, update_pb2

Kind = control_pb2.EventKind
RUN_MS = 600_000
_AGAIN_MS = 10_000  # from one write of an event that goes on to the next


class _Run(NamedTuple):
    """Versions of one lineage and schema that came one after the other."""

    first: int
    last: update_pb2.Version
    first_ms: int
    last_ms: int
    schema_id: int
    versions: int = 1
    event: int = 0  # number of its event; 0: it has none yet
    told: int = 0  # the last version that the event has
    told_ms: int = 0


class Newsroom:
    """Turns news into facts. Used by one thread at a time, that of the timeline."""

    def __init__(self, timeline: Timeline) -> None:
        """Write to a timeline, which also says what was known before a restart."""
        self._timeline = timeline
        self._run: _Run | None = None
        self._heard: Promotion | None = None
        self._failing: dict[str, str] = {}

    @property
    def newest(self) -> tuple[int, int]:
        """Number and lineage of the newest version that it knows. (0, 0): none."""
        if self._run is not None:
            return self._run.last.number, self._run.last.lineage
        before = self._last(Kind.EVENT_KIND_VERSION, "version_published")
        if before is None:
            return 0, 0
        number, _, lineage = before.subject.partition("-")
        return int(number), int(lineage)

    def _last(self, kind: int, *names: str, subject: str = "") -> FleetEvent | None:
        return next(
            (
                each
                for each in self._timeline.known(kind)
                if each.name in names and subject in ("", each.subject)
            ),
            None,
        )

    def hear(self, news: News, now_ms: int) -> None:
        """Note all that is new."""
        for commit in news.commits:
            self._commit(commit, now_ms)
        self._tell_run(now_ms)
        if news.promotion is not None and news.promotion != self._heard:
            self._promotion(news.promotion)
            self._heard = news.promotion
        if news.rollback.outcome is not None:
            self._outcome(news.rollback.outcome)
        if news.trainer is not None:
            self._trainer(news.trainer, now_ms)
        for each in reversed(news.refused):
            self._refused(each)
        self._tasks(news.tasks, now_ms)

    # Versions.

    def _commit(self, commit: update_pb2.GlobalCommit, now_ms: int) -> None:
        version, at_ms, run = commit.version, commit.committed_ms, self._run
        number, lineage = self.newest
        if version.number <= number and version.lineage <= lineage:
            return
        before_id = run.schema_id if run is not None else self._schema_before()
        if before_id not in (0, commit.schema_id):
            self._note(
                at_ms,
                Kind.EVENT_KIND_SCHEMA,
                "schema_changed",
                f"the schema is {commit.schema_id:#x} from version {version.number:,} on",
                why=f"it was {before_id:#x}",
                subject=f"{commit.schema_id:#x}",
            )
        if commit.rollback_to:
            self._rolled_back(Rollback(version.number, commit.rollback_to, "", at_ms))
        goes_on = (
            run is not None
            and run.last.lineage == version.lineage
            and run.schema_id == commit.schema_id
            and not commit.rollback_to
            and at_ms - run.first_ms < RUN_MS
        )
        if run is not None and goes_on:
            self._run = run._replace(last=version, last_ms=at_ms, versions=run.versions + 1)
            return
        if run is not None:
            self._tell_run(now_ms, ended=True)
        self._run = _Run(version.number, version, at_ms, at_ms, commit.schema_id)
        self._tell_run(now_ms)

    def _schema_before(self) -> int:
        before = self._last(Kind.EVENT_KIND_VERSION, "version_published")
        return int(before.why.rpartition("0x")[2], 16) if before is not None and before.why else 0

    def _tell_run(self, now_ms: int, *, ended: bool = False) -> None:
        run = self._run
        if run is None or run.told == run.last.number:
            return
        if not ended and now_ms - run.told_ms < _AGAIN_MS:
            return
        first, last = run.first, run.last.number
        event = FleetEvent(
            at_ms=run.last_ms,
            first_ms=run.first_ms,
            times=run.versions,
            kind=Kind.EVENT_KIND_VERSION,
            name="version_published",
            text=f"version {last:,} was published"
            if first == last
            else f"versions {first:,} to {last:,} were published",
            why=f"lineage {run.last.lineage}, schema {run.schema_id:#x}",
            subject=f"{last}-{run.last.lineage}",
        )
        self._timeline.note(event, replaces=run.event)
        self._run = run._replace(event=event.number, told=last, told_ms=now_ms)

    def _promotion(self, promotion: Promotion) -> None:
        known = {
            (each.subject, each.first_ms)
            for each in self._timeline.known(Kind.EVENT_KIND_VERSION)
            if each.name == "version_withdrawn"
        }
        for each in promotion.withdrawn:
            subject = f"{each.first}-{each.last}"
            if each.reason == "rollback" or (subject, each.at_ms) in known:
                continue
            which = (
                f"version {each.first:,} was"
                if each.first == each.last
                else f"versions {each.first:,} to {each.last:,} were"
            )
            self._note(
                each.at_ms,
                Kind.EVENT_KIND_VERSION,
                "version_withdrawn",
                f"{which} withdrawn: {each.reason}",
                why=each.detail,
                author=each.by,
                subject=subject,
            )
        for undone in promotion.undone:
            self._rolled_back(undone)

    def _rolled_back(self, undone: Rollback) -> None:
        kind = Kind.EVENT_KIND_VERSION
        before = self._last(kind, "version_rolled_back", subject=str(undone.number))
        if before is not None and (before.author or not undone.by):
            return
        self._note(
            undone.at_ms,
            kind,
            "version_rolled_back",
            f"version {undone.number:,} restores the state of version {undone.to:,}",
            author=undone.by,
            subject=str(undone.number),
            replaces=before.number if before is not None else 0,
        )

    def _outcome(self, outcome: update_pb2.RollbackOutcome) -> None:
        """Note an order that failed; the record of promotions tells of the others."""
        order, kind = outcome.order, Kind.EVENT_KIND_VERSION
        name = "rollback_failed"
        if not outcome.error or self._last(kind, name, subject=order.id) is not None:
            return
        self._note(
            outcome.ended_ms,
            kind,
            name,
            f"version {order.version:,} was not restored",
            why=outcome.error,
            author=order.author,
            subject=order.id,
        )

    # The trainer, refused nodes, tasks.

    def _trainer(self, status: control_pb2.TrainerStatus, now_ms: int) -> None:
        sign = status.sign
        where = f"the trainer on {sign.host} (pid {sign.pid})"
        subject = f"{sign.host}:{sign.pid}:{sign.started_ms}"
        names = ("trainer_started", "trainer_silent", "trainer_returned", "trainer_ended")
        last = self._last(Kind.EVENT_KIND_TRAINER, *names, subject=subject)
        if last is None:
            self._of_trainer("started", subject, sign.started_ms, f"{where} started", sign.folder)
        state = last.name if last is not None else "trainer_started"
        if sign.ended_ms:
            if state != "trainer_ended":
                text = f"{where} ended with exit status {sign.exit_status}"
                self._of_trainer("ended", subject, sign.ended_ms, text, sign.error)
        elif trainer_state(status) == "silent":
            if state != "trainer_silent":
                why = "it was killed, or cannot reach the bus"
                text = f"{where} is silent: this was its last sign"
                self._of_trainer("silent", subject, now_ms - status.age_ms, text, why)
        elif state == "trainer_silent" and last is not None and status.age_ms <= SILENT_MS:
            text = f"{where} is back after {(now_ms - last.at_ms) / 1000:,.0f} s"
            self._of_trainer("returned", subject, now_ms, text)

    def _of_trainer(self, name: str, subject: str, at_ms: int, text: str, why: str = "") -> None:
        kind = Kind.EVENT_KIND_TRAINER
        self._note(at_ms, kind, f"trainer_{name}", text, why=why, subject=subject)

    def _refused(self, refused: control_pb2.RefusedRegistration) -> None:
        subject = f"{refused.node} {refused.address}"
        last = self._last(Kind.EVENT_KIND_REFUSED, "node_refused", subject=subject)
        same = last is not None and last.why == refused.message
        if last is not None and same and refused.last_ms - last.at_ms < _AGAIN_MS:
            return
        goes_on = same and last is not None and refused.last_ms - last.first_ms < RUN_MS
        times = f"{refused.count:,} times" if refused.count > 1 else "once"
        event = FleetEvent(
            at_ms=refused.last_ms,
            first_ms=last.first_ms if goes_on and last is not None else refused.last_ms,
            times=refused.count,
            kind=Kind.EVENT_KIND_REFUSED,
            name="node_refused",
            text=f"node {refused.node} at {refused.address} was refused, {times} since the "
            "control plane started",
            why=refused.message,
            subject=subject,
        )
        self._timeline.note(event, replaces=last.number if goes_on and last is not None else 0)

    def _tasks(self, tasks: Iterable[node_pb2.TaskHealth], now_ms: int) -> None:
        for task in tasks:
            fails = task.state in ("failing", "no thread")
            if fails == (task.name in self._failing):
                continue
            if fails:
                self._failing[task.name] = task.error
                text = f"the control plane's {task.name} is {task.state}"
                at_ms, why = task.since_ms, task.error
            else:
                text, at_ms = f"the control plane's {task.name} works again", now_ms
                why = self._failing.pop(task.name)
            name = "task_failing" if fails else "task_recovered"
            self._note(at_ms, Kind.EVENT_KIND_TASK, name, text, why=why, subject=task.name)

    def _note(
        self,
        at_ms: int,
        kind: "control_pb2.EventKind.ValueType",
        name: str,
        text: str,
        *,
        why: str = "",
        author: str = "",
        subject: str = "",
        replaces: int = 0,
    ) -> None:
        event = FleetEvent(
            at_ms=at_ms,
            first_ms=at_ms,
            kind=kind,
            name=name,
            text=text,
            why=why,
            author=author,
            subject=subject,
        )
        self._timeline.note(event, replaces=replaces)
