"""The state store: the twin in memory and a real Redis keep the same promises."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from simulation import make_node, make_registration, make_tables

from embertide.server.adapters.process import free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.adapters.state import MemoryState, RedisState
from embertide.server.core.errors import (
    StateLostError,
    StateUnavailableError,
    SupersededError,
)
from embertide.server.core.plan.bootstrap import first_plan
from embertide.server.core.plan.layout import LaidPlan
from embertide.server.core.state import PLANS_KEPT, SavedState, StateStore, Writes
from embertide.v1 import control_pb2


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, redis_url: str) -> Iterator[StateStore]:
    if request.param == "memory":
        yield MemoryState()
        return
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    kept = RedisState(redis_url, "news")
    yield kept
    kept.close()


def lose(store: StateStore) -> None:
    """Lose all keys."""
    if isinstance(store, MemoryState):
        store.lose()
    elif isinstance(store, RedisState):
        store._redis.flushall()


def make_plan(epoch: int) -> LaidPlan:
    plan = first_plan([make_node("node-0")], make_tables(user=1))
    plan.epoch = epoch
    return LaidPlan.of(plan)


def make_record(id: str) -> control_pb2.OperationRecord:
    return control_pb2.OperationRecord(operation=control_pb2.Operation(id=id))


def test_an_empty_store_has_nothing(store: StateStore) -> None:
    assert store.load() == SavedState()
    assert store.term() == 0
    assert store.plan(1) is None


def test_what_is_written_is_read(store: StateStore) -> None:
    term = store.take_term()
    node = make_registration(make_node("node-0"), make_tables(user=1))
    decision = control_pb2.Decision(id="d1", why="nothing moved")
    settings = control_pb2.DriftSettings(mode=control_pb2.DRIFT_MODE_AUTO)
    event = control_pb2.FleetEvent(number=3, name="node_died")
    writes = Writes(
        plan=make_plan(1),
        nodes={"node-0": node},
        operations={"r1": make_record("r1")},
        decisions={"d1": decision},
        settings=settings,
        events={"3": event},
    )
    store.commit(term, writes)
    saved = store.load()
    assert saved.decisions == {"d1": decision}
    assert saved.settings == settings
    assert saved.events == {"3": event}
    assert saved.plan == make_plan(1)
    assert saved.nodes == {"node-0": node}
    assert saved.operations == {"r1": make_record("r1")}
    store.commit(
        term,
        Writes(
            nodes={"node-0": None},
            operations={"r1": None},
            decisions={"d1": None},
            events={"3": None},
        ),
    )
    assert store.load() == SavedState(plan=make_plan(1), settings=settings)


def test_an_older_term_writes_nothing(store: StateStore) -> None:
    old = store.take_term()
    new = store.take_term()
    assert (new, store.term()) == (old + 1, new)
    with pytest.raises(SupersededError, match=f"term {new}"):
        store.commit(old, Writes(plan=make_plan(1), operations={"r1": make_record("r1")}))
    assert store.load() == SavedState()


def test_an_epoch_follows_the_one_before(store: StateStore) -> None:
    term = store.take_term()
    store.commit(term, Writes(plan=make_plan(1)))
    for epoch in (1, 3):
        with pytest.raises(StateLostError, match=f"its plan is 1, and was {epoch - 1}"):
            store.commit(term, Writes(plan=make_plan(epoch), operations={"r1": make_record("r1")}))
    assert store.load() == SavedState(plan=make_plan(1))


def test_a_store_without_our_keys_is_noticed_and_restored(store: StateStore) -> None:
    """Whoever wrote before says that its keys are gone, and never that another took over."""
    term = store.take_term()
    store.commit(term, Writes(plan=make_plan(1), operations={"r1": make_record("r1")}))
    lose(store)
    for ask in (
        lambda: store.renew(term, ""),
        lambda: store.check(term),
        lambda: store.commit(term, Writes(operations={"r2": make_record("r2")})),
    ):
        with pytest.raises(StateLostError):
            ask()
    everything = Writes(plan=make_plan(1001), operations={"r1": make_record("r1")}, jumps=True)
    new = store.restore(term, "a:1", everything)
    assert new == term + 1
    assert store.load() == SavedState(plan=make_plan(1001), operations={"r1": make_record("r1")})
    store.commit(new, Writes(plan=make_plan(1002)))
    assert store.renew(new, "a:1")


def test_nobody_restores_what_another_has_begun_anew(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        old, other = RedisState(redis_url, "news"), RedisState(redis_url, "news")
        term = old.take_term("a:1")
        client.flushall()
        assert other.take_term("b:1") == term, "terms count anew: they do not tell the two apart"
        for ask in (
            lambda: old.renew(term, "a:1"),
            lambda: old.commit(term, Writes(plan=make_plan(1))),
        ):
            with pytest.raises(StateLostError, match="begun anew"):
                ask()
        with pytest.raises(SupersededError):
            old.restore(term, "a:1", Writes(plan=make_plan(1), jumps=True))
        other.commit(term, Writes(plan=make_plan(1)))
        old.close()
        other.close()


def test_a_plan_that_is_gone_alone_is_no_plan(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        store = RedisState(redis_url, "news")
        term = store.take_term()
        store.commit(term, Writes(plan=make_plan(1)))
        client.delete("c:{news}:plan:1")
        assert store.load().plan is None
        client.delete("c:{news}:epoch")
        with pytest.raises(StateLostError, match="its plan is 0, and was 1"):
            store.commit(term, Writes(plan=make_plan(2)))
        store.close()


def test_the_newest_16_plans_are_kept(store: StateStore) -> None:
    term = store.take_term()
    for epoch in range(1, PLANS_KEPT + 3):
        store.commit(term, Writes(plan=make_plan(epoch)))
    kept = [epoch for epoch in range(1, PLANS_KEPT + 3) if store.plan(epoch)]
    assert kept == list(range(3, PLANS_KEPT + 3))


def test_keys_are_those_of_the_formats(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        store = RedisState(redis_url, "news")
        node = make_registration(make_node("node-0"), make_tables(user=1))
        store.commit(
            store.take_term(),
            Writes(plan=make_plan(1), nodes={"node-0": node}, operations={"r1": make_record("r1")}),
        )
        store.close()
        assert sorted(client.keys()) == [
            b"c:{news}:epoch",
            b"c:{news}:id",
            b"c:{news}:lease",
            b"c:{news}:nodes",
            b"c:{news}:operations",
            b"c:{news}:plan:1",
            b"c:{news}:term",
        ]
        assert client.get("c:{news}:epoch") == b"1"


def test_an_absent_redis_is_named() -> None:
    store = RedisState(f"redis://127.0.0.1:{free_ports(1)[0]}/0", "news")
    with pytest.raises(StateUnavailableError, match="state Redis cannot be reached"):
        store.load()
    store.close()


def test_an_append_only_redis_keeps_what_was_answered(tmp_path: Path) -> None:
    options = RedisOptions(log=tmp_path / "log", append_only=tmp_path / "state")
    with RedisServer(options) as server:
        store = RedisState(server.url, "news")
        store.commit(store.take_term(), Writes(plan=make_plan(1)))
        store.close()
        server.process.kill()
    with RedisServer(options) as server:
        store = RedisState(server.url, "news")
        assert store.load().plan == make_plan(1)
        store.close()
