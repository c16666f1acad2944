"""Hop's protocol keeps its bounds whatever the order of events, and does what its options say."""

import concurrent.futures
import multiprocessing
import os
import random

import pytest
from hop_schedules import Case, Run, bounds, ring, run_schedules

from embertide.trainer.sync import hop

LONG = 1_000_000
SHARE = 10_000


def test_gaps_and_queues_stay_within_their_bounds_and_nothing_is_stuck() -> None:
    events, skipped, stale = run_schedules(0, 3000)
    assert events == 3000 * 60
    assert skipped > 100, "schedules that skip nothing prove nothing of skipping"
    assert stale > 1000


@pytest.mark.long  # 10 to 15 minutes of one core; with more cores as many times less
def test_a_million_schedules_keep_the_bounds() -> None:
    starts = range(SHARE, SHARE + LONG, SHARE)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        done = list(pool.map(run_schedules, starts, [SHARE] * len(starts)))
    assert sum(events for events, _, _ in done) == LONG * 60


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"max_ig": 1},
        {"max_ig": 9},
        {"max_ig": 4, "staleness": 1},
        {"max_ig": 1, "staleness": 2},
        {"max_ig": 2, "backup": 1},
    ],
    ids=str,
)
def test_ranks_get_as_far_ahead_as_the_bounds_let_them(options: dict[str, int], both: bool) -> None:
    if options.get("backup") and not both:
        pytest.skip("in this ring a rank hears from one other, which cannot be a backup")
    case = Case(ring(5, both=both), **options)
    most, reached = bounds(case), [[0] * 5 for _ in range(5)]
    for seed in range(40):
        run = Run(case, random.Random(seed))
        for _ in range(500):
            assert run.step()
        for (i, j), gap in run.tight.items():
            reached[i][j] = max(reached[i][j], gap)
    pairs = [(i, j) for i in range(5) for j in range(5) if i != j]
    tight = sum(reached[i][j] == most[i][j] for i, j in pairs)
    assert tight >= len(pairs) * 3 // 4, (reached, most)


def _worker(**options: int) -> hop.HopWorker[str]:
    """Return rank 0 of a ring of 3 in both directions, started."""
    worker = hop.HopWorker[str](0, ring(3), **{"max_ig": 4, **options})
    assert worker.start() == [hop.SendUpdate((1, 2), 0, 0), hop.Compute(0)]
    return worker


def _held_by(worker: hop.HopWorker[str]) -> str:
    return worker.waits_for


def test_an_iteration_waits_for_its_gradient_for_all_nets_and_for_tokens() -> None:
    worker = hop.HopWorker[str](0, ring(3), max_ig=1)
    assert worker.update(1, 0, 0, "one") == []
    worker.start()
    assert worker.gradient_done() == []
    assert _held_by(worker) == "updates"
    (mean, tokens, sent, computed) = worker.update(2, 0, 0, "two")
    assert mean == hop.Reduce(0, 1 / 3, ((1 / 3, "one"), (1 / 3, "two")), True)
    assert (tokens, sent) == (hop.SendTokens((1, 2), 1), hop.SendUpdate((1, 2), 1, 0))
    assert computed == hop.Compute(1)
    worker.update(1, 1, 0, "one")
    worker.update(2, 1, 0, "two")
    assert len(worker.gradient_done()) == 1  # the mean
    assert _held_by(worker) == "tokens"
    assert worker.receive_tokens(1, 1) == []
    assert hop.Compute(2) in worker.receive_tokens(2, 1)


def test_a_backup_worker_is_not_waited_for_and_its_late_net_is_dropped() -> None:
    worker = _worker(backup=1)
    worker.update(1, 0, 0, "one")
    assert worker.gradient_done()[0] == hop.Reduce(0, 1 / 2, ((1 / 2, "one"),), True)
    worker.update(2, 0, 0, "late")
    assert worker.updates.size == 0


def test_a_stale_net_weighs_less_and_is_used_again() -> None:
    worker = _worker(staleness=2)
    worker.update(1, 0, 0, "old")
    worker.update(2, 0, 0, "two")
    worker.gradient_done()
    worker.update(2, 1, 0, "new")
    assert worker.gradient_done()[0] == hop.Reduce(1, 3 / 8, ((2 / 8, "old"), (3 / 8, "new")), True)
    assert worker.updates.size == 2


def test_a_rank_far_behind_skips_to_where_the_others_are() -> None:
    worker = _worker(backup=1, max_jump=10)
    for iteration in range(5):
        worker.update(1, iteration, 0, f"one {iteration}")
    for source in (1, 2):  # of which the slower one has begun iteration 3
        worker.receive_tokens(source, 2 + source)
    mean, refresh, *rest = worker.gradient_done()
    assert mean == hop.Reduce(0, 1 / 2, ((1 / 2, "one 0"),), True)
    assert refresh == hop.Reduce(3, 1 / 2, ((1 / 2, "one 3"),), False)
    assert rest == [hop.SendTokens((1, 2), 3), hop.SendUpdate((1, 2), 3, 2), hop.Compute(3)]
    assert (worker.iteration, worker.skipped, worker.tokens.least) == (3, 2, 4)


def test_nobody_waits_for_a_net_that_was_skipped() -> None:
    worker = _worker()
    worker.update(1, 0, 0, "one")
    worker.update(2, 0, 0, "two")
    worker.gradient_done()
    worker.update(2, 3, 2, "after a skip")
    worker.update(1, 1, 0, "one")
    assert worker.gradient_done()[0] == hop.Reduce(1, 1 / 2, ((1 / 2, "one"),), True)


def test_a_flood_of_nets_is_refused() -> None:
    worker = _worker(max_ig=2)
    for iteration in range(3):
        worker.update(1, iteration, 0, "one")
    with pytest.raises(hop.ProtocolError, match="further ahead than its tokens"):
        worker.update(1, 3, 0, "one")


def test_what_the_protocol_rules_out_is_refused() -> None:
    worker = hop.HopWorker[str](0, ring(4, both=False), max_ig=1)
    with pytest.raises(hop.ProtocolError, match="rank 2, which does not send"):
        worker.update(2, 0, 0, "")
    with pytest.raises(hop.ProtocolError, match="rank 3, which does not hear"):
        worker.receive_tokens(3, 1)
    with pytest.raises(hop.ProtocolError, match="computes no gradient"):
        worker.gradient_done()
    worker.start()
    with pytest.raises(hop.ProtocolError, match="begun before"):
        worker.start()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ig": 0}, "max_ig is 0"),
        ({"max_ig": 1, "backup": 2}, "backup is 2, and rank 0 hears from 2"),
        ({"max_ig": 1, "staleness": -1}, "staleness is -1"),
        ({"max_ig": 1, "max_jump": -1}, "max_jump is -1"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hop.HopWorker[str](0, ring(3), **options)


def test_a_rank_without_neighbours_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 does not both send"):
        hop.HopWorker[str](2, ((0, 1), (1, 0), (0, 2)), max_ig=1)
