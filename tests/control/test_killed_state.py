"""SIGKILL to the state Redis around every write of a move; it starts again from its file.

A write is killed before it reaches Redis, after it was done, or between: it was done and its reply
is lost. The control plane then knows no more than the file says, and nodes read no plans meanwhile.
"""

import contextlib
from pathlib import Path

import grpc
import pytest
from control_bench import Bench, Client
from fake_node import FakeNode
from waiting import wait_until

from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.adapters.state import RedisState
from embertide.server.core.control import ControlOptions
from embertide.server.core.drift.options import DriftOptions
from embertide.server.core.errors import StateUnavailableError
from embertide.server.core.plan.layout import Bucket, Place, layout_of
from embertide.server.core.plan.moves import Step
from embertide.server.core.plan.validity import check_plan
from embertide.server.core.state import SavedState, Writes
from embertide.server.services.control_server import ControlServer, ServerOptions
from embertide.v1 import control_pb2, plan_pb2

WAYS = ["before", "reply lost", "after"]
TABLE = 1  # has four buckets
ENDS_WITHIN_S = 30.0


class Killing(RedisState):
    """The state store; `kill` is done around each write of an operation, once a write."""

    def __init__(self, folder: Path, way: str) -> None:
        self._options = RedisOptions(log=folder / "redis.log", append_only=folder / "state")
        self._redis_server = RedisServer(self._options)
        super().__init__(self._redis_server.url, "news")
        self._way = way
        self._killed: set[str] = set()
        self.killing = False
        self.steps: set[tuple[int, ...]] = set()  # of the batches, as they were being written
        self.plans: dict[int, bytes] = {}

    def commit(self, term: int, writes: Writes) -> None:
        name = _name(writes)
        kill = self.killing and bool(name) and name not in self._killed
        if kill:
            self._killed.add(name)
            self.steps |= {
                tuple(each.step for each in record.batches)
                for record in writes.operations.values()
                if record is not None
            }
        if kill and self._way == "before":
            self.kill()
        super().commit(term, writes)
        if writes.plan is not None:
            self.note_plan()
        if kill and self._way != "before":
            self.kill()
        if kill and self._way == "reply lost":
            raise StateUnavailableError("the reply was lost")

    def kill(self) -> None:
        """End Redis at once, and start it again from what it wrote."""
        self._redis_server.process.kill()
        self._redis_server.process.wait(10)
        if self._way == "before":  # while it is away
            with contextlib.suppress(StateUnavailableError):
                self.term()
        self._redis_server = RedisServer(self._options)

    @property
    def kills(self) -> int:
        return len(self._killed)

    def note_plan(self) -> None:
        """Prove that the newest plan is valid, and that no plan has become another one."""
        found = self.load().plan
        assert found is not None
        plan = found.whole()
        check_plan(plan, previous_epoch=plan.epoch - 1)
        assert self.plans.setdefault(plan.epoch, plan.SerializeToString()) == (
            plan.SerializeToString()
        )

    def end(self) -> None:
        self.close()
        self._redis_server.stop()


def _name(writes: Writes) -> str:
    """Return a write's name, the same when it is repeated. Empty: no part of an operation."""
    names = []
    for id, record in writes.operations.items():
        if record is not None:
            told, batches = record.operation, [(each.moves, each.step) for each in record.batches]
            ended = told.ended_ms > 0
            names.append(f"{id} {told.state} {told.buckets_done} {ended} {batches} {record.step}")
    return "; ".join(names)


class Site:
    def __init__(self, bench: Bench, folder: Path, way: str) -> None:
        self.store = Killing(folder, way)
        bench.stack.callback(self.store.end)
        control = ControlOptions(
            model="news",
            expect_nodes=2,
            heartbeat_ms=200,
            longest_deadline_ms=100,
            drift=DriftOptions(mode="off"),
        )
        server = ControlServer(ServerOptions(control=control, listen="127.0.0.1:0"), self.store)
        bench.stack.enter_context(server)
        self.client: Client = bench.client(server.address)
        self.nodes = [
            bench.stack.enter_context(FakeNode(f"node-{n}", server.address, self.store_url))
            for n in range(2)
        ]
        wait_until(lambda: all(node.held().epoch for node in self.nodes))

    @property
    def store_url(self) -> str:
        return self.store._options.url

    def start(self, id: str) -> None:
        """Give every bucket of a table to the node that it is not on, two at a time."""
        plan = self.store.load().plan
        assert plan is not None
        request = control_pb2.StartReshardRequest(operation_id=id)
        request.target.base_epoch = plan.head.epoch
        for at, held in plan.layout.items():
            if at.table == TABLE:
                request.target.assignments.add(
                    table_id=at.table,
                    bucket_begin=at.bucket,
                    bucket_count=1,
                    owners=[plan_pb2.Owner(node=1 - held.owners[0].node)],
                )
        request.budget.buckets_at_once = 2
        wait_until(lambda: self._answered("StartReshard", request), ENDS_WITHIN_S)

    def _answered(self, rpc: str, request: object) -> bool:
        """Call until it is answered: with the same id it is done once."""
        try:
            self.client.call(rpc, request)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True

    def steer(self, id: str, steering: control_pb2.Steering.ValueType) -> None:
        request = control_pb2.SteerOperationRequest(id=id, steering=steering)
        wait_until(lambda: self._answered("SteerOperation", request), ENDS_WITHIN_S)

    def loaded(self) -> SavedState:
        """The stored state, once Redis is there: its last kill may come after the last write."""
        found: list[SavedState] = []

        def answers() -> bool:
            with contextlib.suppress(StateUnavailableError):
                self.store.note_plan()
                found.append(self.store.load())
            return bool(found)

        wait_until(answers, ENDS_WITHIN_S)
        return found[0]

    def record(self, id: str) -> control_pb2.OperationRecord:
        return self.loaded().operations[id]

    def ends(self, id: str) -> control_pb2.Operation:
        wait_until(lambda: self.record(id).operation.ended_ms > 0, ENDS_WITHIN_S)
        self.store.killing = False
        return self.record(id).operation

    def owners(self) -> dict[Bucket, tuple[Place, ...]]:
        plan = self.loaded().plan
        assert plan is not None
        layout = layout_of(plan.whole().assignments)
        assert not any(held.joining or held.leaving for held in layout.values())
        return {at: held.owners for at, held in layout.items() if at.table == TABLE}


@pytest.fixture
def site(request: pytest.FixtureRequest, bench: Bench, tmp_path: Path) -> Site:
    return Site(bench, tmp_path, request.param)


@pytest.mark.parametrize("site", WAYS, indirect=True)
def test_redis_is_killed_at_every_write_of_a_move(site: Site) -> None:
    before = site.owners()
    site.store.killing = True
    site.start("r1")
    ended = site.ends("r1")
    assert ended.state == control_pb2.OPERATION_STATE_SUCCEEDED, ended
    after = site.owners()
    assert all(after[at] != owners for at, owners in before.items())
    steps = {step for batches in site.store.steps for step in batches}
    assert steps == {Step.JOINING, Step.BOTH_OWN, Step.LEAVING, Step.DROPPED}
    assert site.store.kills >= 11, "accepted, twice four steps, twice done, and ended"
    assert sorted(site.store.plans) == list(range(min(site.store.plans), max(site.store.plans) + 1))


@pytest.mark.long
@pytest.mark.parametrize("site", WAYS, indirect=True)
def test_redis_is_killed_at_every_write_of_an_abort(site: Site) -> None:
    before = site.owners()
    site.start("r1")
    wait_until(lambda: site.record("r1").step == Step.BOTH_OWN)
    site.store.killing = True
    site.steer("r1", control_pb2.STEERING_PAUSE)
    site.steer("r1", control_pb2.STEERING_ABORT)
    ended = site.ends("r1")
    assert ended.state == control_pb2.OPERATION_STATE_ABORTED
    moved = ended.buckets_done
    after = site.owners()
    assert sum(after[at] != owners for at, owners in before.items()) == moved
    assert site.store.kills >= 3


@pytest.mark.long
@pytest.mark.parametrize("site", WAYS, indirect=True)
def test_redis_is_killed_while_a_dead_target_is_taken_back(site: Site) -> None:
    before = site.owners()
    site.nodes[0].loading.clear()
    site.nodes[1].loading.clear()
    site.start("r1")
    wait_until(lambda: site.record("r1").step == Step.JOINING)
    site.store.killing = True
    dead = site.record("r1").moves[0].target.node
    site.nodes[dead].beating.clear()
    ended = site.ends("r1")
    assert ended.state == control_pb2.OPERATION_STATE_FAILED
    assert site.owners() == before
    assert any(Step.TAKEN_BACK in batches for batches in site.store.steps)
