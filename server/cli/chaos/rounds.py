"""Rounds: faults, the time until the fleet is well again, and the proof of its state.

A round has failed if an answer was wrong in any way, a request failed though nothing had happened
to nodes or to what they ask each other, a process ended by itself, bits were flipped and nobody
noticed, the fleet was not well again in time, or a node's state is not that of the log.
"""

import dataclasses
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from embertide._common import kserve
from embertide.server.cli.chaos.faults import BUS_LINKS, NODES, PEER_LINKS, Fault, draw
from embertide.server.cli.chaos.fleet import Ending, Fleet
from embertide.server.cli.chaos.inject import Flip, Injector
from embertide.server.cli.chaos.options import ChaosError, ChaosOptions
from embertide.server.cli.chaos.replay import Replay
from embertide.server.cli.chaos.traffic import MODEL, Asked, Traffic, ask, every_key, faults_of

_TICK_S = 0.02
_START_S = 600.0  # nothing is harmed yet, and nothing is judged
_LOOK_S = 0.25  # between looks at nodes' metrics, and the width of a bin of the timeline
_SLOW_S = 0.1
_QUIET_S = 0.4  # no version for so long: the trainer has learned what there is
_STATE_SAMPLES = 1024
_DELTAS_KEPT = 50  # of a round that failed
_KEPT = 20  # violations and endings of a round, at most
_OF_KEY = re.compile(r"(?P<who>.*node-\d): key \S+ of \S+ at \d+: (?P<what>.*)")
# The counters of nodes for bytes that differ from those sent.
_NOTICED = ("corrupt", "gap", "reconnect")
# Faults that may cost a request: something happened to a node, to what it asks of its peers, or to
# the machine.
_OF_MACHINE = ("busy-cpu", "clock")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """The outcome of requests in a part of a round."""

    at_s: float  # from the begin of the run
    answered: int = 0
    failed: int = 0
    degraded: int = 0  # answers with keys that were not answered for
    slow: int = 0
    longest_ms: float = 0.0
    published: int = 0  # newest version
    versions: Sequence[int] = ()  # newest that each node answered with


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A round and what came of it; times are in s, from the begin of the run."""

    seed: int
    began_s: float
    faults: Sequence[Fault]
    skipped: Sequence[str]
    faults_s: float  # how long the faults lasted
    heal_s: float  # from the last fault's end until all was well
    answers: int  # keys answered for and compared
    requests: int
    failed: dict[str, int]  # by gRPC code
    slow: int
    degraded_requests: int
    degraded_keys: int
    wrong_s: float  # from the last fault's end to the last failed or degraded request; 0: none
    late_s: float  # the same from when all nodes that were started again were ready; 0: none was
    versions: int  # published
    lineages: int
    state_rows: int  # rows compared at the end, at each node
    flipped_messages: dict[str, int]
    flipped_files: Sequence[Flip]
    noticed: dict[str, int]  # by the nodes that lived through the round
    starts: dict[str, int]
    endings: Sequence[Ending]
    violations: Sequence[str]
    bins: Sequence[Bin]


def may_fail(fault: Fault) -> bool:
    """Return whether a fault may cost a request."""
    return fault.target in (*NODES, *PEER_LINKS) or fault.kind in _OF_MACHINE


def _bins(asked: Sequence[Asked], looks: Sequence[Bin], begun_s: float) -> list[Bin]:
    by_bin: dict[int, list[Asked]] = {}
    for each in asked:
        by_bin.setdefault(int((each.sent_s - begun_s) / _LOOK_S), []).append(each)
    versions = {int(look.at_s / _LOOK_S): look for look in looks}
    bins = []
    for n in sorted(by_bin.keys() | versions.keys()):
        inside, look = by_bin.get(n, []), versions.get(n)
        bins.append(
            Bin(
                at_s=round(n * _LOOK_S, 2),
                answered=sum(not each.failure for each in inside),
                failed=sum(bool(each.failure) for each in inside),
                degraded=sum(bool(each.degraded) for each in inside),
                slow=sum(each.took_s > _SLOW_S for each in inside),
                longest_ms=round(max((each.took_s for each in inside), default=0.0) * 1e3, 1),
                published=look.published if look else 0,
                versions=look.versions if look else (),
            )
        )
    return bins


class Chaos:
    """A fleet, its traffic and its rounds. A context manager that ends all of it.

    Attributes:
        begun_s: The time when traffic began, on the monotonic clock.
    """

    def __init__(self, options: ChaosOptions, show: Callable[[str], None]) -> None:
        """Start the fleet and its traffic.

        Raises:
            ProcessError: A process does not start.
        """
        self.options = options
        self._show = show
        show("starting trainer, control plane, two nodes and two Redis")
        self.fleet = Fleet(options)
        try:
            self.replay = Replay(options.publication)
            self.traffic = Traffic(self.fleet.grpc, self.replay, options)
            self.begun_s = time.monotonic()
            self._looks: list[Bin] = []
            self._looked_s = 0.0
            self._starts: dict[str, int] = {}  # at the begin of the round
            self._ready_s: dict[str, float] = {}  # when nodes that were started again were ready
            self.traffic.__enter__()
            self._await_well("the fleet is not well at the start", _START_S)
            self._lines = [kserve.Line(address) for address in self.fleet.grpc]
        except BaseException:
            self.fleet.close()
            raise

    def __enter__(self) -> Self:
        """Return it, running."""
        return self

    def __exit__(self, *error: object) -> None:
        """End all of it."""
        self.traffic.__exit__()
        self.fleet.close()

    def _now_s(self) -> float:
        return time.monotonic() - self.begun_s

    # --- a round ----------------------------------------------------------------------------------

    def run(self, seed: int, faults: Sequence[Fault] | None = None) -> Round:
        """Run the round of a seed, or of faults that are given.

        Raises:
            ChaosError: The events are used up.
        """
        faults = draw(seed, self.options.without) if faults is None else faults
        self.traffic.take()
        self._looks, self.fleet.endings, self._ready_s = [], [], {}
        begun_s, commits = self._now_s(), set(self.replay.commits)
        starts = {name: self.fleet.starts(name) for name in self.fleet.names}
        self._starts = starts
        flipped, noticed = self.fleet.links.flipped(), self._noticed()
        injector = Injector(self.fleet, self.replay, faults, time.monotonic())
        violations: list[str] = []
        try:
            while injector.step():
                self.tick()
        finally:
            injector.end()
        over_s = self._now_s()
        healed = self._heal(violations)
        heal_s = self._now_s() - over_s
        rows = self._check_state(violations) if healed else 0
        asked, wrong = self.traffic.take()
        violations += wrong
        after = {name: self.fleet.starts(name) for name in self.fleet.names}
        lived = [node for node in NODES if after[node] == starts[node]]
        now = self._noticed()
        seen = {
            name: sum(now[node].get(name, 0) - noticed[node].get(name, 0) for node in lived)
            for name in _NOTICED
        }
        flips = {
            name: count - flipped[name]
            for name, count in self.fleet.links.flipped().items()
            if count > flipped[name]
        }
        violations += self._unnoticed(flips, lived, seen)
        violations += self._ended()
        violations += self._failed(faults, asked)
        published = [c for n, c in self.replay.commits.items() if n not in commits]
        bad = [each for each in asked if each.failure or each.degraded]
        last_bad_s = max((each.sent_s + each.took_s for each in bad), default=0.0) - self.begun_s
        done = Round(
            seed=seed,
            began_s=round(begun_s, 3),
            faults=faults,
            skipped=injector.skipped,
            faults_s=round(over_s - begun_s, 3),
            heal_s=round(heal_s, 3),
            answers=sum(each.keys for each in asked) + rows * len(NODES),
            requests=len(asked),
            failed=_count(each.failure for each in asked if each.failure),
            slow=sum(each.took_s > _SLOW_S for each in asked),
            degraded_requests=sum(bool(each.degraded) for each in asked),
            degraded_keys=sum(each.degraded for each in asked),
            wrong_s=round(max(0.0, last_bad_s - over_s), 3),
            late_s=round(max(0.0, last_bad_s - max(self._ready_s.values())), 3)
            if self._ready_s
            else 0.0,
            versions=len(published),
            lineages=len({commit.lineage for commit in published}),
            state_rows=rows,
            flipped_messages=flips,
            flipped_files=injector.flips,
            noticed=seen,
            starts={name: count - starts[name] for name, count in after.items()},
            endings=self.fleet.endings[:_KEPT],
            violations=_grouped(violations)[:_KEPT],
            bins=_bins(asked, self._looks, self.begun_s),
        )
        if violations:
            self._keep_evidence(seed)
        return done

    def tick(self) -> None:
        """Keep the fleet going, and look at it; called often while nothing else is.

        Raises:
            ChaosError: The events are used up.
        """
        self.fleet.step()
        newest = self.replay.advance()
        now_s = self._now_s()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            versions = [
                max(
                    (c.last.version for c in self.traffic.clients if c.node == n and c.last),
                    default=0,
                )
                for n in range(len(NODES))
            ]
            for node in NODES:
                again = self.fleet.starts(node) > self._starts.get(node, 1)
                if again and node not in self._ready_s and self.fleet.ready(node):
                    self._ready_s[node] = now_s
            self._looks.append(Bin(at_s=now_s, published=newest, versions=versions))
        if self.fleet.feed.exhausted:
            raise ChaosError("all events have happened: give a longer file, or fewer rounds")
        time.sleep(_TICK_S)

    # --- well again -------------------------------------------------------------------------------

    def _heal(self, violations: list[str]) -> bool:
        """Wait until all is well; return whether it came in time."""
        try:
            self._await_well("not well again", self.options.heal_s)
        except ChaosError as error:
            violations.append(str(error))
            return False
        return True

    def _await_well(self, otherwise: str, within_s: float) -> None:
        """Wait until a version that was published from now on is answered with by every client.

        Raises:
            ChaosError: It takes longer than it may; the message says what is missing.
        """
        begun_s, newest = time.monotonic(), self.replay.advance()
        looked_s = 0.0
        while True:
            self.tick()
            missing = self._missing(begun_s, newest)
            if not missing and time.monotonic() - looked_s >= _LOOK_S:
                looked_s = time.monotonic()
                missing = self._missing_of_nodes()
                if not missing:
                    return
            if time.monotonic() - begun_s > within_s:
                reasons = missing or "nodes do not reach each other or the bus"
                raise ChaosError(f"{otherwise} after {within_s:.0f} s: {reasons}")

    def _missing(self, since_s: float, before: int) -> str:
        down = [name for name in self.fleet.names if self.fleet.child(name) is None]
        if down:
            return f"{', '.join(down)} not running"
        later = [number for number in self.replay.commits if number > before]
        if not later:
            return f"the trainer publishes nothing after version {before}"
        wanted = min(later)
        for each in self.traffic.clients:
            last = each.last
            if last is None or last.sent_s < since_s:
                return f"node-{each.node} has answered nothing"
            if last.failure:
                return f"node-{each.node}: {last.failure}: {last.reason}"
            if last.degraded:
                return f"node-{each.node} leaves {last.degraded} keys unanswered"
            if last.version < wanted:
                return f"node-{each.node} is at version {last.version}, and {wanted} is out"
        return ""

    def _missing_of_nodes(self) -> str:
        for node in NODES:
            page = self.fleet.page(node)
            if page is None:
                return f"{node} shows no metrics"
            if page.least("embertide_bus_connected", model=MODEL) < 1:
                return f"{node} is not connected to the bus"
            if page.least("embertide_peers_alive", model=MODEL) < 1:
                return f"{node} does not reach its peer"
        return ""

    # --- checks -----------------------------------------------------------------------------------

    def _check_state(self, violations: list[str]) -> int:
        """Read every key at every node, and compare; return the number of keys."""
        self.fleet.feed.flow(False)
        try:
            newest, since_s = self.replay.advance(), time.monotonic()
            while time.monotonic() - since_s < _QUIET_S:
                self.tick()
                if self.replay.newest > newest:
                    newest, since_s = self.replay.newest, time.monotonic()
            self._await_version(newest)
            return max(self._compare(n, newest, violations) for n in range(len(NODES)))
        except ChaosError as error:
            violations.append(str(error))
            return 0
        finally:
            self.fleet.feed.flow(True)

    def _await_version(self, newest: int) -> None:
        deadline = time.monotonic() + self.options.heal_s
        while any(each.last and each.last.version < newest for each in self.traffic.clients):
            self.tick()
            if time.monotonic() > deadline:
                raise ChaosError(f"a node does not come to version {newest}, the newest")

    def _compare(self, node: int, newest: int, violations: list[str]) -> int:
        """Compare all that a node answers with the replay of the log; return the keys compared."""
        keys = 0
        for keys_BF in every_key(self.replay, _STATE_SAMPLES):
            try:
                answer = ask(self._lines[node], keys_BF)
            except kserve.CallError as error:
                violations.append(f"state of node-{node}: {error.status}: {error.details}")
                return keys
            wrong, degraded = faults_of(self.replay, keys_BF, answer)
            if answer.version < newest:
                wrong.append(f"version {answer.version}, and {newest} is out")
            if degraded:
                wrong.append(f"{degraded} keys were not answered for")
            violations += [f"state of node-{node}: {each}" for each in wrong[:_KEPT]]
            keys += len(answer.sources)
        return keys

    def _noticed(self) -> dict[str, dict[str, int]]:
        pages = {node: self.fleet.page(node) for node in NODES}
        return {
            node: {
                name: int(page.sum("embertide_bus_events_total", model=MODEL, event=name))
                for name in _NOTICED
            }
            if page
            else {}
            for node, page in pages.items()
        }

    @staticmethod
    def _unnoticed(flips: dict[str, int], lived: Sequence[str], seen: dict[str, int]) -> list[str]:
        """Return what nobody noticed of messages that were harmed on their way to nodes."""
        readers = {
            link: [node for node in NODES if link == BUS_LINKS[0] or link.startswith(node)]
            for link in flips
        }
        if not flips or any(seen.values()):
            return []
        if any(set(nodes) - set(lived) for nodes in readers.values()):
            return []  # what counted it was killed
        return [f"{sum(flips.values())} flipped bits of messages were noticed by nobody: {flips}"]

    def _ended(self) -> list[str]:
        """Return which processes ended by themselves that must not."""
        return [
            f"{each.name} ended by itself with {each.code}: {each.log[-300:]}"
            for each in self.fleet.endings
            if each.name != "trainer" and each.code != -1
        ]

    @staticmethod
    def _failed(faults: Sequence[Fault], asked: Sequence[Asked]) -> list[str]:
        """Return the requests that nothing excuses."""
        if any(map(may_fail, faults)):
            return []
        failed = [
            each for each in asked if each.failure not in ("", "DEADLINE_EXCEEDED") or each.degraded
        ]
        if not failed:
            return []
        first = failed[0]
        what = f"{first.failure}: {first.reason}" if first.failure else f"{first.degraded} degraded"
        return [
            f"{len(failed)} requests failed or were degraded for no reason; "
            f"node-{first.node}: {what}"
        ]

    def _keep_evidence(self, seed: int) -> None:
        """Keep the newest deltas, which the publication will drop."""
        folder = self.options.directory / "evidence" / f"seed-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        deltas = sorted((self.options.publication / "deltas").glob("*"))[-_DELTAS_KEPT:]
        for each in deltas:
            shutil.copytree(each, folder / each.name)


def _grouped(violations: Sequence[str]) -> list[str]:
    """Return the violations, those that say the same of several keys as one with their number."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in violations:
        key = _OF_KEY.fullmatch(each)
        group = (key["who"], key["what"]) if key else (each, "")
        groups.setdefault(group, []).append(each)
    return [
        f"{who}: {len(texts)} keys have {what}; first: {texts[0]}" if what else who
        for (who, what), texts in groups.items()
    ]


def _count(values: Iterator[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for each in values:
        counts[each] = counts.get(each, 0) + 1
    return counts


def line(done: Round) -> str:
    """Describe a round for people."""
    failed = sum(done.failed.values())
    return (
        f"seed {done.seed}: {'; '.join(fault.line() for fault in done.faults) or 'no fault'} | "
        f"healed in {done.heal_s:.1f} s, {done.versions} versions, {done.answers:,} answers, "
        f"{failed} failed, {done.degraded_requests} degraded, {done.slow} slow; "
        f"state of {done.state_rows:,} keys"
        + (f" | {len(done.violations)} VIOLATIONS" if done.violations else "")
    )
