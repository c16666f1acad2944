"""Alerts against chaos: is every fault that hurts users alerted, and is quiet time quiet?

A real Prometheus with the rules that users load scrapes a fleet of chaos: two nodes under Triton, a
trainer, a control plane, two Redis and clients. A round holds one fault of one kind, until an alert
fires and at least as long as a death takes to be noticed, or for HOLD_S; then the fleet heals, is
compared with the log, and all alerts must end.

Users are hurt in a round if in some 10 s of it one request in a hundred failed, or had keys that no
owner answered. Such a fault must be alerted 30 s after the first of these requests. An alert is
deserved if the fault's kind may cause it (CASES), or if it is one of answers and users were hurt or
had to wait. What the timeline must tell of a fault is checked, too.

Rounds go to a file as they end; --resume FILE goes on there, so that a run can have any length, and
docs/results/alerts_rounds.jsonl has those of several machines.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import parts, report
from bench.monitored import Monitored
from bench.report import CONSOLE, Row, measure
from bench.servers import BUILD, ROOT
from embertide.server.cli.chaos.faults import NODES, Fault
from embertide.server.cli.chaos.inject import Injector
from embertide.server.cli.chaos.traffic import Asked
from embertide.server.cli.common_options import DEFAULT_BACKENDS
from embertide.server.cli.control_client import Caller, CallError
from embertide.v1 import control_pb2

HOLD_S = 45.0
_HELD_S = 12.0  # a fault lasts so long, though it was alerted before
_ALERTED_S = 30.0
_TOLD_S = 20.0  # from a fault's end until the timeline must tell of it
_BIN_S = 10.0
_HURT_SHARE = 0.01
_WAIT_S = 0.1  # a request that takes longer made its caller wait: the bound of the alert
_WELL_S = 60.0  # until a fleet is well again, as chaos has it
_ENDED_S = 180.0  # until alerts have ended; their windows are a minute
_LOOK_S = 0.5
_ANSWERS = {"EmbertideRequestsFail", "EmbertideAnswersDegraded", "EmbertideAnswersSlow"}
_NODE = {
    *("EmbertideNodeDead", "EmbertideBucketsUnowned", "EmbertideNotScraped"),
    *("EmbertideNodeBehind", "EmbertideBusAway", "EmbertideVersionsStale", "EmbertideTaskFails"),
}
_FOLLOWING = {
    *("EmbertideBusAway", "EmbertideNodeBehind", "EmbertideVersionsStale", "EmbertideTaskFails"),
    "EmbertideVersionsRefused",
}
_TRAINING = {
    *("EmbertideTrainerDown", "EmbertideTrainerLags", "EmbertideVersionsStale"),
    "EmbertideTaskFails",
}
_CONTROL = {
    *("EmbertideControlPlaneAway", "EmbertideNotScraped", "EmbertideTaskFails"),
    "EmbertidePlansNotFollowed",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A fault, what may be alerted for it, and what the timeline must tell.

    Attributes:
        kind: As chaos names it.
        target: The same.
        alerts: Names of alerts that it may cause.
        events: Names of events of which one must be told; empty: none must.
        amount: Its strength.
    """

    kind: str
    target: str
    alerts: frozenset[str]
    events: tuple[str, ...] = ()
    amount: float = 0.0

    @property
    def name(self) -> str:
        """Its name, for people."""
        return f"{self.kind} {self.target}".strip()


def _case(kind: str, target: str, alerts: Iterable[str], *events: str, amount: float = 0.0) -> Case:
    return Case(kind=kind, target=target, alerts=frozenset(alerts), events=events, amount=amount)


CASES = (
    _case("kill", "node-0", _NODE, "node_died"),
    _case("stop", "node-1", _NODE, "node_died"),
    _case("cut", "peers>node-0", _NODE),
    _case("stall", "peers>node-1", _NODE),
    _case("kill", "control", _CONTROL, "leader_began"),
    _case("stop", "control", _CONTROL),
    _case("kill", "trainer", _TRAINING, "trainer_silent", "trainer_started"),
    _case("stop", "trainer", _TRAINING, "trainer_silent"),
    _case("kill", "bus", _FOLLOWING | _TRAINING),
    _case("stall", "node-0>bus", _FOLLOWING),
    _case("cut", "trainer>bus", _TRAINING | _FOLLOWING),
    _case("kill", "state", _CONTROL | _TRAINING | _FOLLOWING),
    _case("cut", "nodes>control", _NODE | _CONTROL, "node_died"),
    _case("cut", "control>state", _CONTROL),
    _case("loss", "peers>node-0", _NODE, amount=0.4),
    _case("flush", "bus", _FOLLOWING | _TRAINING),
    _case("full", "bus", _FOLLOWING | _TRAINING),
    _case("busy-cpu", "", _NODE | _TRAINING | _FOLLOWING | _CONTROL, amount=4),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A round, or a stretch of quiet time; times are in s.

    Attributes:
        case: What was done; "quiet": nothing.
        lasted_s: How long.
        asked: Requests.
        bad: Those that failed or had keys unanswered.
        hurt: Whether users were hurt.
        waited: Whether more than one request in a hundred took long.
        alerted_s: By alert that fired, from the first bad request (the fault's begin where nobody
            was hurt); negative: before.
        undeserved: Alerts that neither the case nor the answers deserve.
        told: Whether the timeline told what it must; None: it need not.
        wrong: What the comparison with the log found.
        commit: The code.
        machine: Where it ran.
    """

    case: str
    lasted_s: float
    asked: int
    bad: int
    hurt: bool
    waited: bool
    alerted_s: dict[str, float]
    undeserved: list[str]
    told: bool | None = None
    wrong: list[str] = dataclasses.field(default_factory=list)
    commit: str = ""
    machine: str = ""

    @property
    def alerted(self) -> bool:
        """Whether an alert came in time."""
        return any(each <= _ALERTED_S for each in self.alerted_s.values())


def is_bad(asked: Asked) -> bool:
    """Whether a request failed, or had keys that no owner answered."""
    return bool(asked.failure or asked.degraded)


def hurts(asked: Sequence[Asked]) -> bool:
    """Whether in some 10 s one request in a hundred was bad. Requests are in the order of time."""
    for _, group in itertools.groupby(asked, lambda each: int(each.sent_s / _BIN_S)):
        inside = [is_bad(each) for each in group]
        if sum(inside) >= _HURT_SHARE * len(inside) > 0 and any(inside):
            return True
    return False


def outcome(
    case: Case | None,
    asked: Sequence[Asked],
    fired_s: dict[str, float],
    span_s: tuple[float, float],
    *,
    told: bool | None = None,
    wrong: Sequence[str] = (),
) -> Outcome:
    """Judge a round; `fired_s` and `span_s` are of the monotonic clock."""
    bad = [each for each in asked if is_bad(each)]
    hurt = hurts(asked)
    slow = sum(each.took_s > _WAIT_S for each in asked)
    waited = slow > _HURT_SHARE * len(asked)
    since_s = min((each.sent_s for each in bad), default=span_s[0]) if hurt else span_s[0]
    deserved = set(case.alerts) if case is not None else set()
    if hurt or waited:
        deserved |= _ANSWERS
    return Outcome(
        case=case.name if case is not None else "quiet",
        lasted_s=round(span_s[1] - span_s[0], 1),
        asked=len(asked),
        bad=len(bad),
        hurt=hurt,
        waited=waited,
        alerted_s={name: round(at_s - since_s, 1) for name, at_s in fired_s.items()},
        undeserved=sorted(set(fired_s) - deserved),
        told=told,
        wrong=list(wrong),
    )


class Site:
    """A monitored fleet on which rounds are run. Used by one thread."""

    def __init__(self, site: Monitored) -> None:
        """Take it, running."""
        self._site = site
        self._chaos = site.chaos
        self._caller = Caller(site.chaos.fleet.control, None)

    def close(self) -> None:
        """Ask the control plane no more."""
        self._caller.close()

    def calm(self) -> bool:
        """Wait until no alert fires or is about to; return whether that came in time.

        One that a round leaves pending would fire in the next one, which did not cause it.
        """
        return self._site.holds(lambda: not self._site.prometheus.alerts(), _ENDED_S)

    def quiet(self, for_s: float) -> Outcome:
        """Do nothing for a time."""
        self._chaos.traffic.take()
        began_s, fired_s = time.monotonic(), dict[str, float]()
        while time.monotonic() < began_s + for_s:
            self._look(fired_s, _LOOK_S)
        asked, wrong = self._chaos.traffic.take()
        return outcome(None, asked, fired_s, (began_s, time.monotonic()), wrong=wrong)

    def run(self, case: Case, seed: int) -> Outcome:
        """Run a round."""
        self._chaos.traffic.take()
        fault = Fault(
            at_s=0.0, kind=case.kind, target=case.target, for_s=HOLD_S, amount=case.amount
        )
        before, began_s = self._newest_event(), time.monotonic()
        fired_s: dict[str, float] = {}
        injector = Injector(self._chaos.fleet, self._chaos.replay, [fault], began_s)
        try:
            # A fault that lasts no time is watched for a while, too.
            while injector.step() or time.monotonic() < began_s + _HELD_S:
                self._look(fired_s, _LOOK_S)
                if fired_s and time.monotonic() > began_s + _HELD_S and self._may_end(case):
                    break
        finally:
            injector.end()
        # Who alerts by a rate over a minute may do so after a short fault, too.
        asked, wrong = self._chaos.traffic.take()
        if hurts(asked) and not fired_s:
            until_s = time.monotonic() + _ALERTED_S
            while time.monotonic() < until_s and not fired_s:
                self._look(fired_s, _LOOK_S)
        over_s = time.monotonic()
        # Requests that fail until all is well again belong to the fault, not to the round after it.
        self._site.holds(self._answers, _WELL_S)
        healed = self._chaos.run(seed, ())
        told = self._told(case, before) if case.events else None
        return outcome(
            case,
            asked,
            fired_s,
            (began_s, over_s),
            told=told,
            wrong=[*wrong, *healed.violations],
        )

    def _answers(self) -> bool:
        """Whether all nodes are ready, and what every client asked last was answered in full."""
        ready = all(map(self._chaos.fleet.ready, NODES))
        last = [each.last for each in self._chaos.traffic.clients]
        return ready and all(each is not None and not is_bad(each) for each in last)

    @staticmethod
    def _may_end(case: Case) -> bool:
        """Whether a fault can be ended before its time; a process sleeps for as long as it must."""
        return case.kind not in ("kill", "stop")

    def _look(self, fired_s: dict[str, float], for_s: float) -> None:
        """Keep the fleet going for a moment, and note the alerts that fire."""
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            self._chaos.tick()
        for name in self._site.prometheus.firing():
            fired_s.setdefault(name, time.monotonic())

    def _events(self) -> list[control_pb2.FleetEvent]:
        """Return the newest events; none while no control plane answers."""
        try:
            request = control_pb2.ListEventsRequest(page_size=100)
            return list(self._caller.call("ListEvents", request).events)
        except CallError:
            return []

    def _newest_event(self) -> int:
        return max((each.number for each in self._events()), default=0)

    def _told(self, case: Case, before: int) -> bool:
        """Whether the timeline tells of a fault in an event after that of a number."""
        return self._site.holds(
            lambda: any(
                each.number > before and each.name in case.events for each in self._events()
            ),
            _TOLD_S,
        )


def rows_of(rounds: Sequence[Outcome]) -> list[Row]:
    """Return the rows of a run."""
    faults = [each for each in rounds if each.case != "quiet"]
    quiet = [each for each in rounds if each.case == "quiet"]
    hurt = [each for each in faults if each.hurt]
    rows = []

    def add(case: str, metric: str, unit: str, values: Sequence[float], **more: Any) -> None:
        if values:
            rows.append(measure((case, metric, unit), values, **more))

    for name in sorted({each.case for each in hurt}):
        alerted = [each for each in hurt if each.case == name and each.alerted_s]
        times = [min(each.alerted_s.values()) for each in alerted]
        add(name, "from harm to alert", "s", times, better="lower", target=_ALERTED_S)
    more: Any = {"claim": "G.4"}
    add("all kinds", "rounds", "count", [len(faults)], better="higher", target=50, **more)
    share = [float(each.alerted) for each in hurt]
    add(
        "rounds that hurt users",
        "alerted within 30 s",
        "share",
        [sum(share) / len(share)] if share else [],
        better="higher",
        target=1,
        **more,
    )
    deserved = [float(name not in each.undeserved) for each in faults for name in each.alerted_s]
    add(
        "alerts in rounds",
        "deserved",
        "share",
        [sum(deserved) / len(deserved)] if deserved else [],
        better="higher",
        target=1,
        **more,
    )
    told = [float(each.told) for each in faults if each.told is not None]
    add(
        "rounds that the timeline must tell of",
        "told",
        "share",
        [sum(told) / len(told)] if told else [],
        better="higher",
        target=1,
        **more,
    )
    hours = sum(each.lasted_s for each in quiet) / 3600
    add("quiet time", "hours", "h", [hours] if quiet else [], better="higher", target=3, **more)
    alerts = [float(sum(len(each.alerted_s) for each in quiet))] if quiet else []
    add("quiet time", "alerts", "count", alerts, better="lower", target=0, **more)
    wrong = [float(sum(len(each.wrong) for each in rounds))]
    add("all rounds", "violations of chaos's own checks", "count", wrong, better="lower", target=0)
    return rows


def _measure(given: argparse.Namespace) -> Iterator[Row]:
    file = given.resume or given.directory / "rounds.jsonl"
    before = file.read_text().splitlines() if given.resume and file.exists() else []
    here = {"commit": report.commit(ROOT), "machine": report.machine()}
    done = [Outcome(**json.loads(line)) for line in before]
    cases = [case for case in CASES if case.kind not in given.without]
    until_s = time.monotonic() + 60 * given.minutes
    with Monitored(given.directory / "site", given.backends) as monitored:
        site = Site(monitored)
        file.write_text("".join(f"{line}\n" for line in before))

        def note(result: Outcome) -> None:
            done.append(result)
            with file.open("a") as rounds:
                rounds.write(json.dumps(dataclasses.asdict(result) | here) + "\n")
            CONSOLE.print(f"{len(done)}: {result}")

        try:
            site.calm()
            if given.quiet_minutes:
                note(site.quiet(60 * given.quiet_minutes))
            faults = sum(each.case != "quiet" for each in done)
            for number in range(faults, given.rounds):
                if time.monotonic() > until_s:
                    break
                had = collections.Counter(each.case for each in done)
                order = random.Random(number).sample(cases, len(cases))
                note(site.run(min(order, key=lambda case: had[case.name]), number))
                if not site.calm():
                    CONSOLE.print(f"not calm: {sorted(monitored.prometheus.alerts())}")
        finally:
            site.close()
    yield from rows_of(done)


if __name__ == "__main__":
    parser = parts.options("alerts", __doc__)
    parser.add_argument("--rounds", type=int, default=54, help="three of each kind by default")
    parser.add_argument("--minutes", type=float, default=180.0, help="no round begins after them")
    parser.add_argument("--quiet-minutes", type=float, default=180.0, help="before the rounds")
    parser.add_argument("--directory", type=Path, default=BUILD / "alerts")
    parser.add_argument("--backends", type=Path, default=DEFAULT_BACKENDS)
    parser.add_argument("--without", nargs="*", default=[], help="kinds of faults to leave out")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on after the rounds in it")
    parts.command("Alerts against chaos", _measure, parser)
