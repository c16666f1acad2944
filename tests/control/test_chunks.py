"""Plans of many runs in `state`: what an epoch writes, what is kept, and what is read."""

import random
from collections.abc import Iterator

import pytest
import redis
from simulation import make_node, make_tables

from embertide.server.adapters.state import MemoryState, RedisState
from embertide.server.core.errors import RefusedError
from embertide.server.core.plan import chunks
from embertide.server.core.plan.chunks import Part, parts_of, read, written
from embertide.server.core.plan.layout import (
    Bucket,
    BucketRun,
    Holders,
    LaidPlan,
    Place,
    packed_runs,
)
from embertide.server.core.state import MOVES_INSIDE_MAX, PLANS_KEPT, StateStore, Writes
from embertide.v1 import control_pb2, plan_pb2

BITS = 6
SIZE = 16  # buckets of a chunk


@pytest.fixture(autouse=True)
def few_buckets_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BUCKETS", SIZE)
    monkeypatch.setattr(chunks, "WHOLE_MAX", 0)


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


def names(store: StateStore, redis_url: str) -> set[str]:
    """Names of the parts that a store keeps."""
    if isinstance(store, MemoryState):
        return store.part_names()
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        return {key.removeprefix("c:{news}:chunk:") for key in client.keys("*chunk*")}


def first() -> LaidPlan:
    tables = make_tables(user=BITS, item=BITS, tiny=1)
    head = plan_pb2.Plan(
        epoch=1,
        tables=tables,
        topology=plan_pb2.Topology(nodes=[make_node(f"node-{n}", devices=2) for n in range(4)]),
    )
    held = Holders((Place(0, 0),))
    return LaidPlan(
        head, packed_runs(BucketRun(each.id, 0, 1 << each.bucket_bits, held) for each in tables)
    )


def after(plan: LaidPlan, changes: dict[Bucket, Holders]) -> LaidPlan:
    head = plan_pb2.Plan()
    head.CopyFrom(plan.head)
    head.epoch += 1
    return LaidPlan(head, plan.layout.changed(changes))


def test_an_epoch_writes_what_it_changes() -> None:
    one = first()
    begun = written(one, None, [])
    assert len(begun.parts) == 1 + 4 + 4 + 1
    assert not begun.head.assignments
    two = after(one, {Bucket(1, SIZE): Holders((Place(1, 0),))})
    step = written(two, one, parts_of(begun.head))
    assert set(step.parts) == {Part("1.1", 2)}
    assert len(step.head.SerializeToString()) < 200
    three = after(two, {})
    three.head.topology.nodes[0].address = "elsewhere:1"
    assert set(written(three, two, parts_of(step.head)).parts) == {Part("machines", 3)}


@pytest.mark.parametrize("seed", range(3))
def test_each_kept_plan_is_read_as_it_was_written(
    store: StateStore, redis_url: str, seed: int
) -> None:
    dice = random.Random(seed)
    term, plans = store.take_term(), [first()]
    for step in range(2 * PLANS_KEPT):
        store.commit(term, Writes(plan=plans[-1]))
        if seed and dice.random() < 0.1:
            plans[-1] = store.load().plan or plans[-1]  # another one goes on
        at = Bucket(dice.randrange(2), dice.randrange(1 << BITS))
        plans.append(after(plans[-1], {at: Holders((Place(dice.randrange(4), step % 2),))}))
    named = set()
    for plan in plans[:-1]:
        found = store.plan(plan.epoch)
        assert (found is not None) == (plan.epoch > len(plans) - 1 - PLANS_KEPT)
        if found is not None:
            assert found.head == plan.head
            assert found.layout == plan.layout
    # No part of a plan that went is left, and none of a plan that is kept is missing.
    known: dict[str, int] = {}
    for before, plan in zip([None, *plans], plans[:-1], strict=False):
        for place in chunks._changed(plan, before) if before else chunks._places(plan.head, SIZE):
            known[place] = plan.epoch
        if plan.epoch > len(plans) - 1 - PLANS_KEPT:
            named |= {f"{place}:{epoch}" for place, epoch in known.items()}
    if not seed:
        assert named == names(store, redis_url)


def test_a_plan_that_becomes_small_is_whole_again(
    store: StateStore, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    term, plan = store.take_term(), first()
    store.commit(term, Writes(plan=plan))
    assert len(names(store, redis_url)) == 10
    monkeypatch.setattr(chunks, "WHOLE_MAX", 1 << 20)
    for _ in range(PLANS_KEPT):
        plan = after(plan, {Bucket(0, 0): Holders((Place(plan.epoch % 2, 0),))})
        store.commit(term, Writes(plan=plan))
    assert not names(store, redis_url)
    saved = store.load().plan
    assert saved is not None
    assert saved.whole() == plan.whole()


def test_a_chunk_of_other_buckets_is_refused() -> None:
    new = written(first(), None, [])
    for broken in (
        plan_pb2.PlanChunk(holders=[plan_pb2.Holders()], counts=[SIZE - 1], which=[0]),
        plan_pb2.PlanChunk(holders=[plan_pb2.Holders()], counts=[SIZE], which=[1]),
        plan_pb2.PlanChunk(holders=[plan_pb2.Holders()], counts=[SIZE, 0], which=[0, 0]),
    ):
        found = {**new.parts, Part("0.2", 1): broken.SerializeToString()}
        with pytest.raises(RefusedError, match=r"chunk 0\.2:1 does not lay out buckets 32 to 47"):
            read(new.head, found)
    new.head.chunks.epochs.pop()
    with pytest.raises(RefusedError, match="plan 1 names 9 parts; its tables have 10"):
        parts_of(new.head)


def test_moves_of_a_large_operation_are_written_once(store: StateStore) -> None:
    term = store.take_term()
    record = control_pb2.OperationRecord(operation=control_pb2.Operation(id="r1"), step=1)
    record.request.target.base_epoch = 7
    for bucket in range(MOVES_INSIDE_MAX + 1):
        record.moves.add(bucket=bucket, bytes=1)
    store.commit(term, Writes(operations={"r1": record}, made={"r1"}))
    record.step, record.moving = 2, 5
    store.commit(term, Writes(operations={"r1": record}))
    assert store.load().operations == {"r1": record}
    if isinstance(store, RedisState):
        assert len(store._redis.hget("c:{news}:operations", "r1")) < 100  # type: ignore[arg-type]
    store.commit(term, Writes(operations={"r1": None}))
    store.commit(term, Writes(operations={"r1": control_pb2.OperationRecord(step=9)}))
    assert store.load().operations["r1"] == control_pb2.OperationRecord(step=9)
