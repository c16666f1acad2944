"""The virtual clock of bench.sync: what must win wins there, and what must not does not."""

import pytest

from bench.sync import virtual
from bench.sync.clock import Clock, Link, equal, one_slow, ring
from bench.sync.replicas import Replicas, read


def _rate(name: str, ranks: int, compute: object = equal) -> float:
    clock = Clock(ranks=ranks, compute=compute, until=60)  # type: ignore[arg-type]
    return virtual.strategies(ranks)[name](clock).rate


def test_random_groups_alone_lose_and_groups_gain_from_a_slow_rank() -> None:
    all_reduce = {
        compute: Clock(ranks=16, compute=compute, until=60).all_reduce().rate
        for compute in (equal, one_slow(5))
    }
    for compute, base in all_reduce.items():
        assert _rate("random groups alone", 16, compute) < 0.8 * base
    assert _rate("groups", 16) > 0.95 * all_reduce[equal]
    assert _rate("groups", 16, one_slow(5)) > 2.5 * min(all_reduce.values())


def test_staleness_alone_ends_at_the_rate_of_the_slow_rank() -> None:
    clock = Clock(ranks=4, compute=one_slow(4), until=400)
    assert clock.hop(ring(4), max_ig=8, staleness=4).late_rate == pytest.approx(1.0, rel=0.05)


def test_a_prediction_of_all_reduce_is_what_arithmetic_says() -> None:
    link = Link(latency=0.01, transfer=0.1)
    rate = virtual.predict(lambda clock: clock.all_reduce(), [[0.5], [1.0]], link)
    assert rate == pytest.approx(2 / (1.0 + 2 * 0.01 + 0.1), rel=0.01)


@pytest.mark.parametrize("name", ["groups", "Hop", "static groups", "LocalSGD, every 8"])
def test_ranks_learn_each_event_once_and_their_nets_stay_near(name: str) -> None:
    learning = Replicas(read(None, 20_000, 1), 4, 1)
    virtual.strategies(4)[name](Clock(ranks=4, compute=equal, until=1e9, learning=learning))
    assert learning.taken.sum() % 32 == 0
    assert learning.auc() > 0.6  # which raises if an event has no score
    assert 0 < learning.disagreement < 0.2
