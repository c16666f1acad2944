"""Rows that are served: every gradient counts once, and no batch lacks more than the bound."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rankpool import RankPool, rank_pool
from servedjobs import served_sums

from embertide.trainer.sync.row_server import LostGradientsError, RowServer

BAGS: Any = [(0, np.zeros(1, np.int64), None, np.ones((1, 4), np.float32))]


class Served:
    """A server whose store only counts steps."""

    def __init__(self, max_staleness: int) -> None:
        self.steps = 0
        self.server = RowServer(max_staleness, lambda _: None, self._step)

    def _step(self, bags: Any) -> None:
        self.steps += len(bags)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool() as made:
        yield made


def test_gradients_that_come_twice_count_once() -> None:
    served = Served(4)
    for number in (1, 1, 2, 1, 2):
        served.server.gather(number, [], follows=True)
        served.server.apply(7, number, number, BAGS)
    assert served.steps == 2
    assert served.server.stats.applied == Counter({7: 2})
    assert served.server.stats.repeated == 3


def test_a_number_that_is_missing_is_named() -> None:
    served = Served(4)
    served.server.gather(0, [], follows=True)
    with pytest.raises(LostGradientsError, match=r"rank 3 sends its gradients number 2, and those"):
        served.server.apply(3, 2, 0, BAGS)
    assert served.steps == 0


def test_a_batch_that_is_not_learned_holds_nobody_back() -> None:
    served = Served(0)
    served.server.gather(0, [], follows=True)
    assert served.server.apply(0, 1, 0, [])
    assert served.steps == 0
    served.server.gather(1, [], follows=False)  # is scored alone
    served.server.gather(2, [], follows=True)
    served.server.apply(0, 2, 2, BAGS)
    assert served.server.stats.staleness == Counter({0: 1})


def test_gradients_wait_for_the_batch_that_would_lack_too_many() -> None:
    served = Served(1)
    server = served.server
    server.gather(0, [], follows=True)
    server.gather(1, [], follows=True)
    server.apply(1, 1, 1, BAGS)  # batch 0 lacks one now
    server.gather(2, [], follows=True)
    late = threading.Thread(target=server.apply, args=(1, 2, 2, BAGS))
    late.start()
    late.join(0.1)
    assert late.is_alive()
    assert server.apply(0, 1, 0, BAGS)
    late.join(10)
    assert not late.is_alive()
    assert max(server.stats.staleness) == 1


@pytest.mark.parametrize("bound", [0, 1, 3, 8])
def test_no_order_of_ranks_passes_the_bound_or_stands_still(bound: int) -> None:
    """At most bound + 1 batches are open, as the hand-out sees to; any of them may end first."""
    for seed in range(60):
        rng, served = random.Random(seed), Served(bound)
        server, sent, at = served.server, Counter[int](), 0
        open_ = list[int]()
        threads = list[threading.Thread]()
        while at < 40 or open_:
            if at < 40 and len(open_) + sum(t.is_alive() for t in threads) <= bound:
                server.gather(at, [], follows=True)
                open_.append(at)
                at += 1
                if rng.random() < 0.6:
                    continue
            if not open_:
                continue
            batch = open_.pop(rng.randrange(len(open_)))
            sent[batch] += 1
            apply = threading.Thread(target=server.apply, args=(batch, 1, batch, BAGS))
            apply.start()
            threads.append(apply)
        for apply in threads:
            apply.join(10)
            assert not apply.is_alive()
        assert served.steps == 40
        assert max(server.stats.staleness) <= bound


def test_a_lost_rank_wakes_those_that_are_held_back() -> None:
    served = Served(0)
    server = served.server
    server.gather(0, [], follows=True)
    server.gather(1, [], follows=True)
    raised = list[Exception]()

    def apply() -> None:
        try:
            server.apply(1, 1, 1, BAGS)
        except RuntimeError as error:
            raised.append(error)

    held = threading.Thread(target=apply)
    held.start()
    server.fail(RuntimeError("rank 0 is gone"))
    held.join(10)
    assert [str(error) for error in raised] == ["rank 0 is gone"]


@pytest.mark.parametrize("bound", [2, 16])
def test_what_is_sent_is_applied_once_whatever_the_delays(pool: RankPool, bound: int) -> None:
    found = pool.run(3, served_sums, bound, 60)
    sent, came = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for each in found:
        sent.update(each["sent"])
        owned = set(came) & set(each["came"])
        assert not owned, "two ranks own a key"
        came.update(each["came"])
    assert came == sent
    for each in found:
        assert max(each["stats"].staleness) <= bound
        assert sum(each["stats"].applied.values()) == 3 * 60
        assert each["stats"].repeated == 0
