"""The figures that bench.sync.ranks makes of the times at which ranks learned."""

import pytest

from bench.servers import BenchError
from bench.sync.ranks import kept_rate, off_by


def test_others_that_go_on_keep_their_rate() -> None:
    others = [(n / 10, 4) for n in range(1, 200)]
    stops = [(0.5, 4), (1.0, 4), (11.1, 4)]
    assert kept_rate([others, others, stops], 10.0) == pytest.approx(1.0)


def test_others_that_wait_lose_it() -> None:
    others = [*((n / 10, 4) for n in range(1, 11)), (11.2, 4)]
    stops = [(1.0, 4), (11.1, 4)]
    assert kept_rate([others, stops], 10.0) == 0


@pytest.mark.parametrize("last", [[(1.0, 4), (2.0, 4)], [(1.0, 4), (30.0, 4)], []])
def test_a_run_that_shows_nothing_is_an_error(last: list[tuple[float, int]]) -> None:
    others = [(n / 10, 4) for n in range(1, 100)]
    with pytest.raises(BenchError, match="paused"):
        kept_rate([others, last], 10.0)


def test_a_run_is_held_to_what_the_clock_foretells_of_its_steps() -> None:
    # Three ranks that take 0.1 s and one that takes 0.5 s, and none that waits.
    steps_s = [[0.1] * 200] * 3 + [[0.5] * 40]
    found = {"steps_s": steps_s, "took_s": 20.0, "traffic": {}}
    assert off_by(found, lambda clock: clock.local_sgd(1000)) < 0.05
    # All that wait for the slow one in each step are not what ran.
    assert off_by(found, lambda clock: clock.all_reduce()) > 1
    waited = found | {"traffic": {"models": {"messages": 10, "waits_s": 0.5}}}
    # A net that takes 0.05 s between two would have slowed them.
    assert off_by(waited, lambda clock: clock.partial_all_reduce(2, max_lag=4)) > 0.2
