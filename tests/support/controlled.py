"""A fleet under a control plane, all of it real processes that can be put to sleep and killed, and
clients that ask every node all the time and know which requests may fail.

A request may fail, or read zeros, for one reason: a bucket of it has, by a plan in force, no owner
but such that are away. Doubts are judged when a case is over, by the plans that were written and
the times at which processes were away, so that no client has to know anything in time. On a machine
that is busy elsewhere a living peer may take longer than it is given, or be taken for dead; that is
counted apart, and only few may.
"""

import contextlib
import dataclasses
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc
import numpy as np
import redis
from checker import bucket_of
from fleet import CONFIG, KEYS, TABLES, Model, NodeProcess, is_right, keys_of
from repeated import Repeated
from waiting import wait_until

from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.adapters.state import RedisState
from embertide.server.cli.control_client import Caller
from embertide.server.core.plan.layout import Bucket, LaidPlan, Layout, Place, layout_of, owner
from embertide.v1 import control_pb2, node_pb2, plan_pb2, update_pb2

# max_degraded_share of the nodes; the first two are never killed.
SHARES = (0, 1, 0, 0)
NODES, DEVICES = len(SHARES), 2
BEAT_MS = 200
DEADLINE_MS = 100
_DEFAULT = 4  # Source of a key without a row
_UNANSWERED = 6  # Source of a key that no owner answered
_PACE_S = 0.02  # from an answer to the next question
_PUBLISH_EVERY_S = 0.2
_PEER_TIMEOUT_S = 0.1  # of embertide_node
_CLOCKS_APART_S = 0.01  # the control plane's, which counts whole milliseconds, and ours
# The command, but with another time that nodes are given to find a new control plane.
_PATIENT_FOR = """
from embertide.server.core import lost_state
from embertide.server.cli import main
lost_state.FOUND_AGAIN_MS = {}
main()
"""
_EVERY_KEY = [bag for key in range(KEYS) for bag in ([key], [key], [], [key])]
Keys = Sequence[tuple[int, int]]  # table, key


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Doubt:
    """A request that failed, or keys that read as zeros though they have rows."""

    asker: int
    epoch: int  # of the plan that the asker acted by before it
    keys: Keys
    begun_s: float
    ended_s: float
    what: str


@dataclasses.dataclass
class Seen:
    """The observations of a client, in one case or in all."""

    answers: int = 0
    while_away: int = 0  # of the answers, while a process was away
    defaulted: int = 0  # keys
    doubts: list[Doubt] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)  # wrong, or a version went back

    def add(self, other: "Seen") -> None:
        self.answers += other.answers
        self.while_away += other.while_away
        self.defaulted += other.defaulted
        self.doubts += other.doubts
        self.faults += other.faults


class Control(Child):
    """`embertide control`, ready once made, and calls of it."""

    def __init__(
        self,
        address: str,
        url: str,
        log: Path,
        expect: int = NODES,
        *,
        beat_ms: int = BEAT_MS,
        found_again_ms: int | None = None,
    ) -> None:
        words = ["control", "--state", url, "--model", CONFIG.name, "--listen", address]
        words += ["--expect-nodes", str(expect), "--heartbeat-ms", str(beat_ms)]
        words += ["--longest-deadline-ms", str(DEADLINE_MS), "--directory", str(log.parent)]
        command = [sys.executable, "-m", "embertide.server.cli"]
        if found_again_ms is not None:
            command = [sys.executable, "-c", _PATIENT_FOR.format(found_again_ms)]
        super().__init__([*command, *words], log=log)
        wait_until(lambda: "control plane of model" in self.log_text() or not self.alive())
        assert self.alive(), self.log_text()
        self.caller = Caller(address, None)

    def start(self, request: control_pb2.StartReshardRequest) -> control_pb2.StartReshardResponse:
        answer: control_pb2.StartReshardResponse = self.caller.call("StartReshard", request)
        return answer

    def steer(self, id: str, steering: control_pb2.Steering.ValueType) -> None:
        request = control_pb2.SteerOperationRequest(id=id, steering=steering)
        self.caller.call("SteerOperation", request)

    def kill(self) -> None:
        super().kill()
        self.caller.close()

    def stop(self) -> int:
        self.caller.close()
        return super().stop()


class Plans(Repeated):
    """Keeps every plan that is written, with the time at which it was made, by epoch from 1 on.

    Not the time at which this thread saw it: a node may act by a plan before a busy test looks.
    """

    def __init__(self, state: RedisState) -> None:
        super().__init__(every_s=0.005)
        self._state = state
        self._seen: list[tuple[float, Layout]] = []
        self._wall_s = time.time() - time.monotonic()
        self.newest = 0  # epoch

    def act(self) -> None:
        while (plan := self._state.plan(self.newest + 1)) is not None:
            made_s = plan.head.created_ms / 1000 - self._wall_s
            self._seen.append((min(made_s, time.monotonic()), plan.layout))
            self.newest += 1

    def in_force(self, epoch: int, ended_s: float) -> list[Layout]:
        """The plans from an epoch on that were made by a time. Requires: `act` since then."""
        seen = self._seen[epoch - 1 :]
        return [layout for made_s, layout in seen if made_s <= ended_s + _CLOCKS_APART_S]


class Last(NamedTuple):
    """The last answer of a node since it was started."""

    node: NodeProcess | None
    version: int = 0
    epoch: int = 1


class Asker(Repeated):
    """Asks one node, whether it lives or not, and compares each answer with the model."""

    def __init__(self, site: "ControlledSite", node: int) -> None:
        super().__init__(every_s=_PACE_S)
        self._site, self._node = site, node
        self._rng = np.random.default_rng(node)
        self._last = Last(None)
        self.seen = Seen()

    def _draw(self) -> list[list[int]]:
        bags = self._site.model.draw(self._rng, samples=2)
        if self._rng.random() < 0.5:
            return bags
        # Only what has a living owner: it must be answered, whoever was killed.
        sure = iter([self._site.is_sure(at) for at in keys_of(bags)])
        return [[key for key in bag if next(sure)] for bag in bags]

    def act(self) -> None:
        site, node, seen = self._site, self._site.nodes[self._node], self.seen
        if self._last.node is not node:
            self._last = Last(node)
        bags = self._draw()
        begun_s = time.monotonic()

        def doubt(keys: Keys, what: str) -> Doubt:
            return Doubt(
                asker=self._node,
                epoch=self._last.epoch,
                keys=keys,
                begun_s=begun_s,
                ended_s=time.monotonic(),
                what=what,
            )

        try:
            answer = node.read(bags)
        except (grpc.RpcError, ValueError) as error:  # ValueError: its channel was closed
            what = f"{error.code()}: {error.details()}" if isinstance(error, grpc.Call) else "gone"
            seen.doubts.append(doubt(keys_of(bags), what))
            return
        seen.answers += 1
        seen.while_away += any(away != self._node for away in site.away_now())
        rows = site.model.versions[answer.version.number]
        lost = {
            at
            for at, source in zip(keys_of(bags), answer.sources, strict=True)
            if source == _UNANSWERED and at in rows
        }
        if any(
            source == _DEFAULT and at in rows
            for at, source in zip(keys_of(bags), answer.sources, strict=True)
        ):
            seen.faults.append(f"{node.name}: a key with a row is said to have none: {answer}")
        seen.defaulted += len(lost)
        seen.doubts += [doubt([at], "reads as zeros") for at in sorted(lost)]
        if not is_right(site.model, bags, answer, lost):
            seen.faults.append(f"{node.name}: {bags}, {answer}")
        if answer.version.number < self._last.version:
            seen.faults.append(
                f"{node.name}: version {answer.version.number} after {self._last.version}"
            )
        self._last = Last(node, answer.version.number, answer.plan_epoch)

    def take(self) -> Seen:
        """Return the observations since the last call."""
        taken, self.seen = self.seen, Seen()
        return taken


class Versions(Repeated):
    """Publishes five versions a second, a snapshot every eighth."""

    def __init__(self, model: Model) -> None:
        super().__init__(every_s=_PUBLISH_EVERY_S)
        self._model = model

    def act(self) -> None:
        if self._model.publish() % 8 == 0:
            self._model.snapshot(self._model.newest)


class ControlledSite:
    """Redis, a model that changes, a control plane and four nodes. A context manager.

    Nodes 0 and 1 live on, where none and all keys of a request may be degraded; 2 and 3 may be
    killed.
    """

    def __init__(self, directory: Path, cache: Path) -> None:
        self.directory = directory
        self._stack = contextlib.ExitStack()
        self._starts = 0
        self._away: dict[int, float] = {}
        self._was_away: list[tuple[int, float, float]] = []
        self._all, self._late, self._kills = Seen(), 0, 0
        self._control_port, *self._ports = free_ports(1 + NODES)
        server = RedisServer(RedisOptions(log=directory / "redis.log"))
        self.url = self._stack.enter_context(server).url
        self.state = RedisState(self.url, CONFIG.name)
        self._stack.callback(self.state.close)
        self._redis = self._stack.enter_context(redis.Redis.from_url(self.url))
        self.model = Model(directory / "publication", self.url, cache, seed=5)
        self.control = self._new_control()
        self._stack.callback(lambda: self.control.stop())
        self.nodes = [self._new_node(n) for n in range(NODES)]
        self._stack.callback(lambda: [node.stop() for node in self.nodes])
        wait_until(self.is_whole)
        names = [node.name for node in self.plan().topology.nodes]
        assert names == [node.name for node in self.nodes]
        self.plans = Plans(self.state)
        self.plans.act()
        self._askers = [Asker(self, n) for n in range(NODES)]
        self._threads: list[Repeated] = [self.plans, Versions(self.model), *self._askers]
        for each in self._threads:
            each.start()
            self._stack.callback(each.stop)
        self.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for each in (self.control, *(node.process for node in self.nodes)):
            self.wake(each)
        self._stack.close()

    # Processes.

    def _log(self, name: str) -> Path:
        self._starts += 1
        return self.directory / f"{self._starts:03}-{name}.log"

    def _new_control(self) -> Control:
        return Control(f"127.0.0.1:{self._control_port}", self.url, self._log("control"))

    def _new_node(self, n: int) -> NodeProcess:
        name = f"node-{n}"
        options = {
            "publication": self.directory / "publication",
            "state": self.url,
            "bus": self.url,
            "control": f"127.0.0.1:{self._control_port}",
            "devices": DEVICES,
            "ddr_bytes": 32 << 20,
            "plan_file": self.directory / f"plan-{n}.bin",
            "max_degraded_share": SHARES[n],
        }
        return NodeProcess(name, self._ports[n], self._log(name), **options)

    @staticmethod
    def sleep(process: Child) -> None:
        """Stop a process as a scheduler could, until `wake`; returns when it stands still."""
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: _is_asleep(process.pid), every_s=0)

    @staticmethod
    def wake(process: Child) -> None:
        if process.alive():
            os.kill(process.pid, signal.SIGCONT)

    def put_away(self, n: int) -> None:
        """From now on requests may miss the node."""
        self._away.setdefault(n, time.monotonic())

    def sleep_node(self, n: int) -> None:
        self.put_away(n)
        self.sleep(self.nodes[n].process)

    def kill(self, n: int) -> None:
        self.put_away(n)
        self._kills += 1
        self.nodes[n].process.kill()

    def knows(self, dead: int | None) -> bool:
        """Whether the control plane has heard every node but one, and counts that one as dead."""
        status = self.control.caller.call("GetStatus", control_pb2.ControlServiceGetStatusRequest())
        return all(
            node.state == control_pb2.NODE_STATE_DEAD
            if n == dead
            else node.plan_epoch == status.plan_epoch
            for n, node in enumerate(status.nodes)
        )

    def go_on(self) -> None:
        """Start the control plane again, or wake it."""
        if not self.control.alive():
            self.control = self._new_control()
        self.wake(self.control)

    def mend(self) -> None:
        """Start what was killed again, wake what sleeps, and wait until all is well.

        A node that is back before it was missed counts as alive all the time, though a peer may
        not have connected to it again: it is away until every node has its rows.
        """
        self.go_on()
        for n, node in enumerate(self.nodes):
            if not node.process.alive():
                node.channel.close()
                self.nodes[n] = self._new_node(n)
            self.wake(self.nodes[n].process)
        wait_until(self.is_whole)
        for node in self.nodes:
            wait_until(functools.partial(_answers_every_key, node))
        now_s = time.monotonic()
        self._was_away += [(n, since_s, now_s) for n, since_s in self._away.items()]
        self._away.clear()

    # The true state.

    def plan(self) -> plan_pb2.Plan:
        plan = self.state.load().plan
        assert plan is not None
        return plan.whole()

    def layout(self) -> Layout:
        return layout_of(self.plan().assignments)

    def record(self, id: str) -> control_pb2.OperationRecord:
        written: Any = self._redis.hget(f"c:{{{CONFIG.name}}}:operations", id)
        return control_pb2.OperationRecord.FromString(written)

    def held(self, n: int) -> dict[Bucket, int]:
        """The buckets that a node holds in truth, and on which device."""
        request = node_pb2.NodeServiceGetLoadRequest()
        load = self.nodes[n].stub.GetLoad(request, timeout=2.0)
        return {
            Bucket(each.table_id, each.bucket): each.device for each in load.buckets if each.held
        }

    def is_whole(self) -> bool:
        """Whether all nodes live, reach each other and have a version in common, act by the newest
        plan and hold what it says, and nothing else."""
        saved = self.state.load()
        if saved.plan is None:
            return False
        try:
            ranges = [self._range_if_whole(n, saved.plan) for n in range(NODES)]
        except grpc.RpcError:
            return False
        found = [each for each in ranges if each is not None]
        if len(found) < NODES:
            return False
        return max(each.oldest.number for each in found) <= min(
            each.newest.number for each in found
        )

    def _range_if_whole(self, n: int, plan: LaidPlan) -> update_pb2.VersionRange | None:
        """The versions of a node that does as the plan says."""
        node, given = self.nodes[n], {}
        for at, held in plan.layout.items():
            for place in (*held.leaving, *held.owners, *held.joining):
                if place.node == n:
                    given[at] = place.device
        status = node.status()
        whole = (
            status.plan_epoch == plan.epoch
            and node.acts_by(plan.epoch)
            and node.reaches_all(NODES)
            and status.counters["buckets_held"] == len(given)
            and self.held(n) == given
        )
        return status.versions if whole else None

    def degraded_keys(self) -> list[int]:
        """Keys that no owner answered, as the two nodes that live on count them."""
        return [
            sum(count for name, count in counters.items() if name.startswith("degraded_keys_"))
            for counters in (node.status().counters for node in self.nodes[:2])
        ]

    def away_now(self) -> list[int]:
        return list(self._away)

    def is_sure(self, at: tuple[int, int]) -> bool:
        """Whether, by the plans of late, an owner of a key lives."""
        away = set(self._away)
        if not away:
            return True
        layouts = self.plans.in_force(max(self.plans.newest - 1, 1), time.monotonic())
        return all(self._has_owner(layout, at, away) for layout in layouts)

    def _has_owner(self, layout: Layout, at: tuple[int, int], away: set[int]) -> bool:
        held = layout[Bucket(TABLES[at[0]].id, bucket_of(TABLES[at[0]], at[1]))]
        # Where no owner answers, the node is asked that the bucket leaves.
        return any(place.node not in away for place in (*held.owners, *held.leaving))

    # The traffic.

    def _excused(self, doubt: Doubt) -> bool:
        away = {
            n
            for n, since_s, until_s in [
                *self._was_away,
                *((n, since_s, float("inf")) for n, since_s in self._away.items()),
            ]
            if since_s <= doubt.ended_s and until_s >= doubt.begun_s
        }
        if doubt.asker in away:
            return True
        return any(
            not self._has_owner(layout, at, away)
            for layout in self.plans.in_force(doubt.epoch, doubt.ended_s)
            for at in doubt.keys
        )

    def forget(self) -> None:
        """Begin a case: what was seen before does not count."""
        self._was_away.clear()
        for asker in self._askers:
            asker.take()
        self._degraded_keys = self.degraded_keys()
        self._deaths = self._peer_deaths()

    def _peer_deaths(self) -> list[int]:
        """How often each of the two nodes that live on has taken a peer for dead."""
        return [node.status().counters["peer_death"] for node in self.nodes[:2]]

    def judge(self) -> list[Seen]:
        """Prove that every answer since `forget` was right, and every doubt has its reason; what
        the askers saw."""
        for each in self._threads:
            assert each.error is None, each.error
        epoch = self.plan().epoch
        wait_until(lambda: self.plans.newest >= epoch)
        all_seen = [asker.take() for asker in self._askers]
        # More deaths than there were: a living peer said nothing for five beats.
        deaths = zip(self._peer_deaths(), self._deaths, strict=True)
        away = len(self._was_away) + len(self._away)
        mistaken = [now - before > away for now, before in deaths]
        for n, seen in enumerate(all_seen):
            assert not seen.faults, seen.faults[:3]
            strange = [doubt for doubt in seen.doubts if not self._excused(doubt)]
            late = [
                each
                for each in strange
                if each.ended_s - each.begun_s >= _PEER_TIMEOUT_S
                # A node that may have been killed counts its peers' deaths anew.
                or (" dead" in each.what and (n >= len(mistaken) or mistaken[n]))
            ]
            assert len(late) == len(strange), f"{len(strange)} of {len(seen.doubts)}: {strange[:3]}"
            self._late += len(late)
            self._all.add(seen)
            if SHARES[n] == 0:
                assert seen.defaulted == 0
        failed = [doubt.what for doubt in all_seen[1].doubts if "zeros" not in doubt.what]
        assert not failed, f"any share may be degraded, and yet: {failed[:3]}"
        # Each that was refused or defaulted is counted, where it was asked.
        counted = [
            now - before
            for now, before in zip(self.degraded_keys(), self._degraded_keys, strict=True)
        ]
        assert counted[0] >= len(all_seen[0].doubts)
        assert (counted[0] > 0) == (len(all_seen[0].doubts) > 0)
        assert counted[1] >= all_seen[1].defaulted
        return all_seen

    def sum_up(self) -> None:
        """Prove, at the end, that enough was asked, and that few living peers took too long."""
        all_ = self._all
        print(
            f"{all_.answers} answers, {all_.while_away} while a node was away, {len(all_.doubts)} "
            f"doubts, {all_.defaulted} keys by default, {self._late} not in time"
        )
        assert min(all_.while_away, all_.defaulted, len(all_.doubts)) >= 5 * self._kills
        assert self._late <= all_.answers / 20

    def check_every_row(self) -> None:
        """Read every key at every node, at the newest version or a later one."""
        newest = self.model.newest

        def is_new_and_right(node: NodeProcess) -> bool:
            answer = node.read(_EVERY_KEY)
            assert is_right(self.model, _EVERY_KEY, answer), node.name
            return answer.version.number >= newest

        for node in self.nodes:
            wait_until(functools.partial(is_new_and_right, node))


def stays(condition: Callable[[], bool], for_s: float) -> bool:
    """Whether a condition holds all the time for a while."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        if not condition():
            return False
    return True


def _answers_every_key(node: NodeProcess) -> bool:
    """Whether a node answers all keys, its own and its peers'."""
    try:
        answer = node.read(_EVERY_KEY)
    except grpc.RpcError:
        return False
    return _UNANSWERED not in answer.sources


def _is_asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def target_of(epoch: int, moves: dict[Bucket, Place]) -> control_pb2.ReshardTarget:
    """A target that gives each bucket one owner."""
    target = control_pb2.ReshardTarget(base_epoch=epoch)
    for at, place in moves.items():
        target.assignments.add(
            table_id=at.table, bucket_begin=at.bucket, bucket_count=1, owners=[owner(place)]
        )
    return target
