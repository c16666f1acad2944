"""Planners may be slow, fail or die: nobody waits for them but who asked, and nothing changes."""

import functools
import threading
import time
from pathlib import Path

import pytest
from odd_planners import Dying, Failing, Slow
from simulation import first_beat, make_node, make_registration, make_tables, make_versions
from waiting import wait_until

from embertide.server.adapters.state import MemoryState
from embertide.server.core.control import Control, ControlOptions
from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan import planners
from embertide.server.core.plan.planner import Planner
from embertide.server.services.clock import Clock
from embertide.server.services.driver import Driver
from embertide.server.services.planning import Planning
from embertide.v1 import control_pb2, node_pb2, plan_pb2

NODES = [make_node("node-0"), make_node("node-1")]
TABLES = make_tables(user=2)


class Loads:
    """Node 0 is read, node 1 is not."""

    def loads(self, addresses: dict[str, str]) -> dict[str, node_pb2.NodeServiceGetLoadResponse]:
        answers = {name: node_pb2.NodeServiceGetLoadResponse(window_ms=5000) for name in addresses}
        for bucket in (0, 1):
            answers["node-0"].buckets.add(bucket=bucket, reads=100, resident_bytes=10)
        return answers

    def epochs(self, addresses: dict[str, str]) -> dict[str, int]:
        return dict.fromkeys(addresses, 0)


def _register(
    request: control_pb2.RegisterNodeRequest, core: Control, now_ms: int
) -> control_pb2.RegisterNodeResponse:
    return core.register(request, now_ms)


class Running:
    """A driver that ticks, with nodes that beat."""

    def __init__(self, limit_s: float) -> None:
        options = ControlOptions(model="news", expect_nodes=2, longest_deadline_ms=100)
        self.store = MemoryState()
        self.driver = Driver(options, self.store, Loads(), Clock(), Planning(limit_s))
        for node in NODES:
            self.driver.call(functools.partial(_register, make_registration(node, TABLES)))
            self.driver.beat(first_beat(node))
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat)
        self.longest_beat_s = 0.0

    def _beat(self) -> None:
        sequence = 0
        while not self._ended.wait(0.02):
            sequence += 1
            saved = self.store.load()
            epoch = saved.plan.epoch if saved.plan else 0
            for node in NODES:
                began_s = time.monotonic()
                self.driver.beat(
                    control_pb2.HeartbeatRequest(
                        node=node.name,
                        incarnation=f"{node.name}-1",
                        sequence=sequence,
                        versions=make_versions(5),
                        plan_epoch=epoch,
                        held_epoch=epoch,
                        held_since=5,
                    )
                )
                self.driver.call(lambda core, now_ms: core.status(now_ms))
                self.longest_beat_s = max(self.longest_beat_s, time.monotonic() - began_s)

    def start(self, id: str, planner: str = "odd") -> control_pb2.StartReshardResponse:
        return self.driver.start_reshard(
            control_pb2.StartReshardRequest(operation_id=id, planner=planner)
        )

    def move(self, id: str, node: int) -> None:
        plan = self.store.load().plan
        assert plan is not None
        target = control_pb2.ReshardTarget(base_epoch=plan.epoch)
        target.assignments.add(bucket_begin=3, bucket_count=1, owners=[plan_pb2.Owner(node=node)])
        self.driver.start_reshard(control_pb2.StartReshardRequest(operation_id=id, target=target))

    def operation(self, id: str) -> control_pb2.Operation:
        copy = control_pb2.Operation()
        self.driver.call(lambda core, now_ms: copy.CopyFrom(core.operations.find(id).operation))
        return copy

    def wait(self, id: str) -> control_pb2.Operation:
        wait_until(lambda: bool(self.operation(id).ended_ms))
        return self.operation(id)

    def __enter__(self) -> "Running":
        self.driver.start()
        self._beats.start()
        wait_until(lambda: self.store.load().plan is not None)
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._beats.join()
        self.driver.stop()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> dict[str, Planner]:
    """Name a planner "odd"."""
    odd: dict[str, Planner] = {}
    named = {**planners.PLANNERS, "odd": lambda: odd["odd"]}
    monkeypatch.setattr(planners, "PLANNERS", named)
    return odd


def test_nobody_waits_for_a_planner(use: dict[str, Planner], tmp_path: Path) -> None:
    use["odd"] = Slow(2.0, tmp_path / "marks")
    with Running(limit_s=20) as running:
        began_s = time.monotonic()
        answer = running.start("r1")
        assert time.monotonic() - began_s >= 2.0
        assert len(answer.moves) == 1
        assert running.longest_beat_s < 1.0
        assert running.wait("r1").state == control_pb2.OPERATION_STATE_SUCCEEDED


@pytest.mark.parametrize(
    ("planner", "code", "says"),
    [
        (Slow(60.0, Path("/dev/null")), Code.DEADLINE_EXCEEDED, "no answer within 1 s"),
        (Failing(), Code.INTERNAL, "planner 'odd' failed"),
        (Dying(), Code.INTERNAL, "planner 'odd' failed"),
    ],
    ids=["slow", "failing", "dying"],
)
def test_a_planner_without_an_answer_changes_nothing(
    use: dict[str, Planner], planner: Planner, code: Code, says: str
) -> None:
    use["odd"] = planner
    with Running(limit_s=1.0) as running:
        before = running.store.load()
        with pytest.raises(RefusedError) as refused:
            running.start("r1")
        assert refused.value.code is code
        assert says in refused.value.message
        after = running.store.load()
        assert after.plan == before.plan
        assert not after.operations
        assert len(running.start("r2", "greedy").moves) == 1  # the next one is asked as ever


def test_a_plan_that_moves_on_meanwhile_is_planned_for_anew(
    use: dict[str, Planner], tmp_path: Path
) -> None:
    use["odd"] = Slow(1.5, tmp_path / "marks")
    with Running(limit_s=20) as running:
        answers = []
        asking = threading.Thread(target=lambda: answers.append(running.start("r1")))
        asking.start()
        wait_until(lambda: (tmp_path / "marks").exists(), every_s=0.01)
        running.move("by-hand", 0)
        running.wait("by-hand")
        asking.join()
        epochs = [int(line) for line in (tmp_path / "marks").read_text().split()]
        assert len(epochs) == 2
        assert epochs[0] < epochs[1]
        assert len(answers) == 1
        assert running.wait("r1").state == control_pb2.OPERATION_STATE_SUCCEEDED


# Two wait; the first one changes the plan that the second was planned from.
def test_an_operation_that_waited_is_planned_anew_beside_the_ticks(
    use: dict[str, Planner], tmp_path: Path
) -> None:
    use["odd"] = Slow(0.5, tmp_path / "marks")
    with Running(limit_s=20) as running:
        running.start("r1", "greedy")
        running.start("r2")
        assert running.wait("r1").state == control_pb2.OPERATION_STATE_SUCCEEDED
        assert running.wait("r2").state == control_pb2.OPERATION_STATE_SUCCEEDED
        epochs = [int(line) for line in (tmp_path / "marks").read_text().split()]
        assert epochs[-1] == running.operation("r2").base_epoch
        assert epochs[-1] > epochs[0]
        assert running.longest_beat_s < 1.0
