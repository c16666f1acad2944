"""Requests to move many buckets: prepared beside the ticks, and accepted if nothing has changed."""

import gc
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from simulation import Simulation, first_beat, make_node, make_registration, make_tables
from test_driver import NoNodes, StoppedClock

from embertide.server.adapters.state import MemoryState
from embertide.server.core import state
from embertide.server.core.control import ControlOptions
from embertide.server.core.errors import Code, MovedOnError, RefusedError
from embertide.server.core.operation import BATCH_BUCKETS
from embertide.server.core.plan.layout import Bucket, Codes, Holders, PackedLayout, Place
from embertide.server.core.plan.moves import Step
from embertide.server.core.plan.planner import Proposal
from embertide.server.core.plan.prices import Prices
from embertide.server.core.plan.validity import OWNERS_MAX
from embertide.server.core.plan.workload import Workload
from embertide.server.core.preparation import PreparedOperation
from embertide.server.core.reshard import PREPARED_HERE_MAX, Situation, build_moves
from embertide.server.core.state import Writes
from embertide.server.core.tasks import OperationPrepared, PrepareOperation, Result, Task
from embertide.server.services.driver import Driver
from embertide.server.services.heap import collect_seldom
from embertide.server.services.planning import Planning
from embertide.v1 import control_pb2, plan_pb2

NODES = [make_node("node-0"), make_node("node-1")]
MANY = PREPARED_HERE_MAX + 1


class Interrupted(Planning):
    """Lets something happen after a request was prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] = lambda: None
        self.made: list[PreparedOperation] = []

    def run(self, task: Task[Result]) -> Result:
        result = super().run(task)
        if isinstance(result, OperationPrepared):
            self.made.append(result.value())
        self.meanwhile()
        return result


class Watched(MemoryState):
    """Notes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[Writes] = []

    def commit(self, term: int, writes: Writes) -> None:
        self.writes.append(writes)
        super().commit(term, writes)


class Fleet:
    """A driver that ticks when told, with two nodes; the first plan is written."""

    def __init__(self) -> None:
        self.store, self.clock, self.planning = Watched(), StoppedClock(), Interrupted()
        options = ControlOptions(model="news", expect_nodes=2, longest_deadline_ms=100)
        self.driver = Driver(options, self.store, NoNodes(), self.clock, self.planning)
        for node in NODES:
            self.register(node)
            self.driver.beat(first_beat(node))
        self.tick()

    def register(self, node: plan_pb2.Node) -> None:
        request = make_registration(node, make_tables(user=12))
        self.driver.call(lambda core, now_ms: core.register(request, now_ms))

    def tick(self) -> None:
        self.driver.call(lambda core, now_ms: core.tick(now_ms))

    def request(self, id: str, buckets: int) -> control_pb2.StartReshardRequest:
        plan = self.store.load().plan
        assert plan is not None
        target = control_pb2.ReshardTarget(base_epoch=plan.epoch)
        for at in [Bucket(*each) for each in plan.layout][:buckets]:
            node = 1 - plan.layout[at].owners[0].node
            target.assignments.add(
                bucket_begin=at.bucket, bucket_count=1, owners=[plan_pb2.Owner(node=node)]
            )
        return control_pb2.StartReshardRequest(operation_id=id, target=target)

    def run(self, until: Callable[[], bool]) -> None:
        """Let ticks pass, while nodes say that they have all plans there may be."""
        self.driver.start()
        beat = control_pb2.HeartbeatRequest()
        end_s = time.monotonic() + 30
        while not until():
            assert time.monotonic() < end_s
            self.clock.at_ms += 50
            beat.sequence += 1
            beat.plan_epoch = beat.held_epoch = self.driver._epoch
            for node in NODES:
                beat.node, beat.incarnation = node.name, f"{node.name}-1"
                copy = control_pb2.HeartbeatRequest()
                copy.CopyFrom(beat)
                self.driver.beat(copy)
            time.sleep(0.02)
        self.driver.stop()

    def operations(self) -> dict[str, control_pb2.OperationRecord]:
        return self.store.load().operations


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_many_moves_are_prepared_in_another_process(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = []
    run = PrepareOperation.run

    def run_here(task: PrepareOperation) -> OperationPrepared:
        here.append(task)
        return run(task)

    monkeypatch.setattr(PrepareOperation, "run", run_here)
    assert len(fleet.driver.start_reshard(fleet.request("few", 3)).moves) == 3
    assert len(here) == 1
    assert len(fleet.driver.start_reshard(fleet.request("many", MANY)).moves) == MANY
    assert len(here) == 1


@pytest.mark.parametrize("buckets", [3, MANY])
def test_nobody_waits_for_the_lock_meanwhile(fleet: Fleet, buckets: int) -> None:
    held = []
    fleet.planning.meanwhile = lambda: held.append(fleet.driver.lock.locked())
    fleet.driver.start_reshard(fleet.request("r1", buckets))
    assert held == [False]


def test_what_another_process_gets_has_no_records(fleet: Fleet) -> None:
    fleet.driver.start_reshard(fleet.request("r1", 3))
    request = fleet.request("r2", 3)
    task = fleet.driver.call(lambda core, now_ms: core.build_task(request, now_ms))
    assert task is not None
    assert not task.now.operations


def test_what_was_prepared_by_an_older_plan_is_not_accepted(fleet: Fleet) -> None:
    def grow() -> None:
        fleet.register(make_node("node-2"))
        fleet.tick()

    fleet.planning.meanwhile = grow
    with pytest.raises(RefusedError, match=r"target.base_epoch is 1; the plan is 2"):
        fleet.driver.start_reshard(fleet.request("r1", 3))
    [ready] = fleet.planning.made
    request = fleet.request("r1", 3)
    with pytest.raises(MovedOnError):
        fleet.driver.call(lambda core, now_ms: core.start(request, now_ms, ready))
    assert not fleet.operations()


def test_a_target_that_dies_meanwhile_gets_nothing(fleet: Fleet) -> None:
    def die() -> None:
        fleet.clock.at_ms += 60_000

    fleet.planning.meanwhile = die
    with pytest.raises(RefusedError, match=r"node 'node-\d' is dead; wait for it") as refused:
        fleet.driver.start_reshard(fleet.request("r1", 3))
    assert refused.value.code is Code.FAILED_PRECONDITION
    assert not fleet.operations()


def test_many_moves_are_written_once_and_read_again(fleet: Fleet) -> None:
    request = fleet.request("r1", MANY)
    answer = fleet.driver.start_reshard(request)
    fleet.tick()
    record = fleet.operations()["r1"]
    assert record.request == request
    assert list(record.moves) == list(answer.moves)
    assert record.operation.base_epoch == 1
    assert record.operation.created_ms == answer.operation.created_ms > 0
    written = [each for each in fleet.store.writes if "r1" in each.operations]
    assert len(written) > 1
    assert ["r1" in each.made for each in written] == [True] + [False] * (len(written) - 1)


def test_moves_are_made_again_beside_the_ticks_and_written_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits for another, which moves the first of its buckets."""
    done_by = []
    run = Planning.run

    def watched(self: Planning, task: Task[Result]) -> Result:
        done_by.append(threading.current_thread().name)
        return run(self, task)

    fleet.driver.start_reshard(fleet.request("r1", 1))
    request = fleet.request("r2", MANY)
    fleet.driver.start_reshard(request)
    fleet.tick()
    monkeypatch.setattr(Planning, "run", watched)
    fleet.run(lambda: bool(fleet.operations()["r2"].operation.base_epoch))
    record = fleet.operations()["r2"]
    assert record.operation.base_epoch > 1
    assert record.request == request
    # One bucket is where it is to be by now.
    assert MANY - 1 == len(record.moves) == record.operation.buckets_total
    assert set(done_by) == {"control-think"}
    assert [each.made for each in fleet.store.writes if "r2" in each.made] == [{"r2"}, {"r2"}]


def test_many_moves_are_kept_in_the_order_in_which_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch that is taken back goes behind those that arrive; an undo goes by the order."""
    monkeypatch.setattr(state, "MOVES_INSIDE_MAX", 10)
    fleet = Simulation(make_tables(user=8), expect=3, deadline_ms=2000)
    for index in range(3):
        fleet.add(make_node(f"node-{index}"))
    while not fleet.core.epoch:
        fleet.step()
    target = control_pb2.ReshardTarget(base_epoch=fleet.core.epoch)
    leaving = [at for at, held in fleet.core.layout.items() if held.owners[0].node != 1]
    for place, at in enumerate(leaving[: 3 * BATCH_BUCKETS]):
        # The first batch goes to the node that dies.
        node = 1 if place < BATCH_BUCKETS else 2 - fleet.core.layout[at].owners[0].node
        owners = [plan_pb2.Owner(node=node)]
        target.assignments.add(bucket_begin=at.bucket, bucket_count=1, owners=owners)
    fleet.core.start(
        control_pb2.StartReshardRequest(operation_id="r1", target=target), fleet.now_ms
    )
    fleet.settle()
    record = fleet.core.operations.records["r1"]
    while [each.step for each in record.batches[:2]] != [Step.LEAVING, Step.LEAVING]:
        fleet.step()
    fleet.nodes["node-1"].alive = False
    while not fleet.operation("r1").ended_ms:
        fleet.step()
    assert fleet.operation("r1").buckets_done > 0
    written = fleet.store.load().operations["r1"]
    assert list(written.moves) == list(record.moves)
    made = written.moves[: written.operation.buckets_done]
    assert 1 not in {each.target.node for each in made}


def _codes(codes: list[int]) -> Codes:
    return np.array(codes, np.int32)


def _situation(layout: PackedLayout, nodes: list[plan_pb2.Node]) -> Situation:
    topology = plan_pb2.Topology(nodes=nodes)
    return Situation(
        plan=plan_pb2.Plan(epoch=1, topology=topology, tables=make_tables(user=1)),
        layout=layout,
        workload=Workload(work={}),
        unknown=frozenset(),
        live=frozenset(node.name for node in nodes),
        operations={},
        prices=Prices(),
    )


def test_to_prepare_changes_nothing_that_ticks_share() -> None:
    owned = [Holders((Place(0, 0),)), Holders((Place(1, 0),))]
    layout = PackedLayout({0: _codes([0, 1])}, owned)
    numbered = layout.of_codes
    proposal = Proposal(owners={Bucket(0, 0): (Place(1, 0), Place(0, 0))}, explanation="")
    build_moves("reshard", "x", proposal, _situation(layout, NODES))
    with pytest.raises(IndexError):
        numbered(_codes([2]))  # no holders were added


def test_a_bucket_may_not_have_too_many_owners_while_it_moves() -> None:
    nodes = [make_node(f"node-{index}") for index in range(OWNERS_MAX + 1)]
    owners = tuple(Place(index, 0) for index in range(OWNERS_MAX))
    layout = PackedLayout({0: _codes([0, 0])}, [Holders(owners)])
    now = _situation(layout, nodes)
    wanted = {Bucket(0, 1): (*owners[1:], Place(OWNERS_MAX, 0))}
    with pytest.raises(RefusedError, match=f"bucket 1 .* would have {OWNERS_MAX + 1} owners"):
        build_moves("reshard", "x", Proposal(owners=wanted, explanation=""), now)


@pytest.fixture
def collector() -> Iterator[None]:
    """Python's garbage collector as in a process that has just begun."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_a_tick_s_work_brings_about_no_full_collection(collector: None) -> None:
    kept = [[index] for index in range(100_000)]
    full = []
    gc.collect()

    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(info)

    def work() -> int:
        full.clear()
        for _ in range(100):
            moving = [[index] for index in range(4096)]
            del moving
        return len(full)

    gc.callbacks.append(watch)
    try:
        assert work() > 0
        collect_seldom()
        assert work() == 0
    finally:
        gc.callbacks.remove(watch)
    assert len(kept) == 100_000
