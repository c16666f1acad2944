"""The driver: what a failed write leaves behind, and whose word holds afterwards."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from simulation import first_beat, make_node, make_registration, make_tables, make_versions

from embertide.server.adapters.state import MemoryState
from embertide.server.core.control import Control, ControlOptions
from embertide.server.core.errors import Code, RefusedError, StateUnavailableError, SupersededError
from embertide.server.core.state import SavedState, Writes
from embertide.server.services.clock import Clock
from embertide.server.services.driver import Driver
from embertide.v1 import control_pb2, node_pb2, plan_pb2


class BrokenState(MemoryState):
    """Fails when told to, before a write or after it (the reply is lost)."""

    def __init__(self) -> None:
        super().__init__()
        self.fail: Callable[[], str] = lambda: ""

    def commit(self, term: int, writes: Writes) -> None:
        how = self.fail()
        if how == "before":
            raise StateUnavailableError("before")
        super().commit(term, writes)
        if how == "after":
            raise StateUnavailableError("after")

    def load(self, term: int = 0) -> SavedState:
        if self.fail() == "load":
            raise StateUnavailableError("load")
        return super().load(term)


class NoNodes:
    def loads(self, addresses: dict[str, str]) -> dict[str, node_pb2.NodeServiceGetLoadResponse]:
        return {}

    def epochs(self, addresses: dict[str, str]) -> dict[str, int]:
        return dict.fromkeys(addresses, 0)


class StoppedClock(Clock):
    def __init__(self) -> None:
        self.at_ms = 1_000_000

    def now_ms(self) -> int:
        return self.at_ms


def make_driver(store: MemoryState, clock: Clock | None = None) -> Driver:
    options = ControlOptions(model="news", longest_deadline_ms=100)
    return Driver(options, store, NoNodes(), clock or StoppedClock())


def register(driver: Driver, node: plan_pb2.Node) -> control_pb2.RegisterNodeResponse:
    request = make_registration(node, make_tables(user=2))
    return driver.call(lambda core, now_ms: core.register(request, now_ms))


class Loads(NoNodes):
    """Nodes that answer with these loads."""

    def __init__(self, **loads: node_pb2.NodeServiceGetLoadResponse) -> None:
        self._loads = {name.replace("_", "-"): load for name, load in loads.items()}

    def loads(self, addresses: dict[str, str]) -> dict[str, node_pb2.NodeServiceGetLoadResponse]:
        return {name: self._loads[name] for name in addresses}


@pytest.mark.parametrize("field", ["reads", "resident_bytes", "asked", "reads_by_source"])
def test_a_load_that_cannot_be_right_is_left_out_and_the_others_are_taken(field: str) -> None:
    """Its sums would wrap around, and one node would stop what is known of all."""
    wrong, right = (node_pb2.NodeServiceGetLoadResponse(window_ms=5000) for _ in range(2))
    huge: Any = (
        {"reads_by_source": [0, 2**64 - 1]} if field == "reads_by_source" else {field: 2**64 - 1}
    )
    wrong.buckets.add(**huge)
    right.buckets.add(reads=100)
    options = ControlOptions(model="news", longest_deadline_ms=100)
    nodes = Loads(node_0=wrong, node_1=right)
    driver = Driver(options, MemoryState(), nodes, StoppedClock())
    for name in ("node-0", "node-1"):
        node = make_node(name)
        register(driver, node)
        driver.beat(first_beat(node))
    driver.call(lambda core, now_ms: core.tick(now_ms))
    driver.measure()
    assert driver.call(lambda core, now_ms: [*core.loads.by_node]) == ["node-1"]
    assert driver.counts["load_not_right"] == 1


def test_the_older_of_two_refuses_nothing_and_confirms_nothing() -> None:
    """The newer one may have accepted what the older one has never heard of."""
    store = MemoryState()
    older = make_driver(store)
    make_driver(store)
    steering = control_pb2.SteerOperationRequest(id="r1", steering=control_pb2.STEERING_PAUSE)
    with pytest.raises(SupersededError):
        older.call(lambda core, now_ms: core.steer(steering, now_ms), decides=True)
    older = make_driver(store)
    assert older.call(lambda core, now_ms: core.epoch, decides=True) == 0
    make_driver(store)
    with pytest.raises(SupersededError):
        older.call(lambda core, now_ms: core.epoch, decides=True)


def test_what_a_refusal_leaves_undone_is_forgotten() -> None:
    driver = make_driver(MemoryState())

    def half(core: Control, now_ms: int) -> None:
        core.register(make_registration(make_node("node-0"), make_tables(user=2)), now_ms)
        raise RefusedError(Code.FAILED_PRECONDITION, "no")

    with pytest.raises(RefusedError):
        driver.call(half)
    assert driver.call(lambda core, now_ms: len(core.fleet)) == 0


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_write_that_failed_is_repeated_with_the_same_id(how: str) -> None:
    store = BrokenState()
    driver = make_driver(store)
    store.fail = lambda: how
    with pytest.raises(StateUnavailableError):
        register(driver, make_node("node-0"))
    assert not driver.reachable
    assert driver.counts["state_unavailable"] == 1
    store.fail = lambda: ""
    assert register(driver, make_node("node-0")).incarnation == "node-0-1"
    assert list(store.load().nodes) == ["node-0"]


def test_the_older_of_two_writes_nothing_and_says_so() -> None:
    store = MemoryState()
    older = make_driver(store)
    make_driver(store)
    with pytest.raises(SupersededError):
        register(older, make_node("node-0"))
    assert older.superseded.is_set()
    assert store.load() == SavedState()


@pytest.mark.parametrize("seed", range(10))
def test_an_operation_survives_a_store_that_fails_at_random(seed: int) -> None:
    """Every other write fails, half of them after it was done; beats come all the time."""
    dice = random.Random(seed)
    store = BrokenState()
    clock = StoppedClock()
    driver = make_driver(store, clock)
    nodes = [make_node("node-0"), make_node("node-1")]
    for node in nodes:
        register(driver, node)
        driver.beat(first_beat(node))
    driver.call(lambda core, now_ms: core.tick(now_ms))
    target = control_pb2.ReshardTarget(base_epoch=1)
    target.assignments.add(
        table_id=0, bucket_begin=0, bucket_count=4, owners=[plan_pb2.Owner(node=1)]
    )
    start = control_pb2.StartReshardRequest(operation_id="r1", target=target)
    store.fail = lambda: dice.choice(["", "", "", "before", "after", "load"])
    accepted = False
    for sequence in range(1, 2000):
        clock.at_ms += 50
        saved = MemoryState.load(store)
        epoch = saved.plan.head.epoch if saved.plan else 0
        for node in nodes:
            driver.beat(
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
        try:
            if not accepted:
                driver.call(lambda core, now_ms: core.start(start, now_ms))
                accepted = True
            driver.call(lambda core, now_ms: core.tick(now_ms))
        except StateUnavailableError:
            continue
        except RefusedError as error:
            raise AssertionError(error.message) from error
        if MemoryState.load(store).operations["r1"].operation.ended_ms:
            break
    ended = MemoryState.load(store).operations["r1"].operation
    assert ended.state == control_pb2.OPERATION_STATE_SUCCEEDED
    assert not driver.superseded.is_set()
