"""Orders to roll back on a real Redis: who takes them, and what is told of them."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from waiting import wait_until

from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.publish.bus import Keys
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.rollback import Restored, RollbackError
from embertide.trainer.publish.rollback_orders import RollbackOrders
from embertide.v1 import update_pb2

KEYS = Keys("news")
LINEAGE = 7


class Desk:
    """A trainer's orders, and who gives them.

    Attributes:
        done: What was carried out: version and by whom.
    """

    def __init__(self, bus: RedisServer, folder: Path) -> None:
        self.bus = bus
        self.redis = redis.Redis.from_url(bus.url)
        self.done: list[tuple[int, str]] = []
        self.fails: Exception | None = None
        self._folder = folder

    def orders(self, lineage: int = LINEAGE) -> RollbackOrders:
        publication = Publication(self._folder)
        return RollbackOrders(self.bus.url, "news", publication, lineage, self._carry_out)

    def _carry_out(self, version: int, by: str) -> Restored:
        self.done.append((version, by))
        if self.fails is not None:
            raise self.fails
        figures = {"undone": 3, "buckets": 1, "rows": 1, "tombstones": 0}
        return Restored(version=99, to=version, checksum="", seconds=0.0, **figures)

    def order(self, id: str, version: int = 4) -> None:
        order = update_pb2.RollbackOrder(id=id, version=version, author="operator/anna")
        self.redis.set(KEYS.rollback_order, order.SerializeToString())

    def outcome(self) -> update_pb2.RollbackOutcome:
        message: Any = self.redis.get(KEYS.rollback_outcome)
        return update_pb2.RollbackOutcome.FromString(message or b"")

    def ended(self, id: str) -> Callable[[], bool]:
        return lambda: self.outcome().order.id == id and self.outcome().ended_ms > 0


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with RedisServer(RedisOptions(log=tmp_path / "redis.log")) as bus:
        made = Desk(bus, tmp_path)
        made.redis.set(KEYS.lineage, LINEAGE)
        yield made
        made.redis.close()


def test_an_order_is_taken_once_and_told_of(desk: Desk) -> None:
    desk.order("one")
    with desk.orders():
        wait_until(desk.ended("one"))
    assert [version for version, _ in desk.done] == [4]
    assert desk.done[0][1].startswith("operator/anna by trainer@")
    outcome = desk.outcome()
    assert (outcome.version, outcome.error, outcome.order.version) == (99, "", 4)
    assert desk.redis.get(KEYS.rollback_order) is None
    left_s = desk.redis.ttl(KEYS.rollback_outcome)
    assert isinstance(left_s, int)
    assert 0 < left_s <= 7 * 86_400


def test_a_trainer_that_was_superseded_takes_none(desk: Desk) -> None:
    desk.order("one")
    with desk.orders(LINEAGE - 1):
        time.sleep(3)
        assert desk.redis.get(KEYS.rollback_order) is not None
        with desk.orders():
            wait_until(desk.ended("one"))
    assert len(desk.done) == 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RollbackError("the delta of version 4 is gone: name a version after it"), "is gone: name"),
        (RuntimeError("odd"), "RuntimeError: odd"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_what_failed_is_told_and_the_next_order_is_taken(
    desk: Desk, error: Exception, says: str
) -> None:
    desk.fails = error
    desk.order("one")
    with desk.orders():
        wait_until(desk.ended("one"))
        assert says in desk.outcome().error
        assert not desk.outcome().version
        desk.fails = None
        desk.order("two")
        wait_until(desk.ended("two"))
    assert desk.outcome().version == 99


def test_what_is_no_order_is_left_out(desk: Desk) -> None:
    desk.redis.set(KEYS.rollback_order, b"\xff\xff")
    with desk.orders():
        wait_until(lambda: desk.redis.get(KEYS.rollback_order) is None)
        desk.order("two")
        wait_until(desk.ended("two"))
    assert len(desk.done) == 1


def test_an_order_that_is_under_way_ends_before_the_trainer_does(desk: Desk) -> None:
    carry_out = desk._carry_out

    def slowly(version: int, by: str) -> Restored:
        time.sleep(3)
        return carry_out(version, by)

    desk._carry_out = slowly  # type: ignore[method-assign]
    desk.order("one")
    with desk.orders():
        wait_until(lambda: desk.outcome().order.id == "one")
        assert not desk.outcome().ended_ms, "it is told that it is under way"
    assert desk.ended("one")()
