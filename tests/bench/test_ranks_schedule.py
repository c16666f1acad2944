"""Costs of many ranks: counts against sets of keys, formulas against counts, time by hand."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from bench.ranks import batches, plans, schedule, steps
from bench.ranks import workload as work
from bench.ranks.network import Link
from bench.ranks.workload import KINDS, Workload
from bench.ranks.zipf import Zipf
from embertide.trainer.data.keys import buckets_of
from embertide.trainer.sync.plan import spread

ROW_BYTES = 64


@pytest.fixture
def small() -> Workload:
    laws = tuple(Zipf(rows, s) for rows, s in ((3, 1.0), (500, 1.1), (40_000, 0.8), (300_000, 1.2)))
    return Workload(laws=laws, samples=1024, row_bytes=ROW_BYTES, dense_parameters=1000)


@pytest.mark.parametrize(
    ("rows", "exponent"), [(3, 1.1), (50_000, 0.0), (50_000, 1.0), (9000, 1.3)]
)
def test_draws_follow_the_law_in_head_and_tail(rows: int, exponent: float) -> None:
    law, draws = Zipf(rows, exponent), 200_000
    share = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    share /= share.sum()
    ranks = law.draw_ranks(np.random.default_rng(1), draws)
    assert 0 <= ranks.min() <= ranks.max() < rows
    for part in np.array_split(np.arange(rows), min(rows, 10)):
        drawn = np.isin(ranks, part).mean()
        assert drawn == pytest.approx(share[part].sum(), abs=5 * math.sqrt(0.25 / draws))
    distinct = -np.expm1(draws * np.log1p(-share)).sum()
    assert law.expected_distinct(draws) == pytest.approx(distinct, rel=1e-4)


def test_a_batch_follows_from_its_arguments_and_parts_make_it_up() -> None:
    whole, again = batches.draw(7, 3, 64), batches.draw(7, 3, 64)
    for one, other in zip(dataclasses.astuple(whole), dataclasses.astuple(again), strict=True):
        assert one.tobytes() == other.tobytes()
    parts = [whole.part(rank, 4) for rank in range(4)]
    assert np.array_equal(np.concatenate([part.keys_BF for part in parts]), whole.keys_BF)
    assert not np.array_equal(batches.draw(7, 4, 64).keys_BF, whole.keys_BF)
    with pytest.raises(ValueError, match="64 samples"):
        whole.part(0, 3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_counted_keys_are_those_of_sets(small: Workload, ranks: int) -> None:
    bits = plans.bits(small, "ranks", ranks)
    asked = work.ask(small, bits, ranks, step=0)
    owner = plans.place(plans.guess(bits), ranks)
    counted = work.count(small, asked, owner)
    starts = np.cumsum([0, *(1 << each for each in bits)])
    drawn = small.draw(0)
    part = small.samples // ranks
    asks, answers = [0] * ranks, [0] * ranks
    for rank, (table, keys) in itertools.product(range(ranks), enumerate(drawn)):
        own = np.array(sorted(set(keys[rank * part : (rank + 1) * part].tolist())), np.uint64)
        buckets = buckets_of(own, bits[table])
        for to in owner[starts[table] + buckets]:
            asks[rank] += int(to != rank)
            answers[to] += int(to != rank)
    for rank in range(ranks):
        assert counted[rank]["keys"].bytes == 8 * asks[rank]
        assert counted[rank]["gradients"].bytes == ROW_BYTES * asks[rank]
        assert counted[rank]["rows"].bytes == ROW_BYTES * answers[rank]
    assert asked.distinct == sum(len(np.unique(keys)) for keys in drawn)


@pytest.mark.parametrize("events", ["tree", "parts"])
@pytest.mark.parametrize("ranks", [2, 8, 128])
def test_formulas_predict_what_is_counted(
    small: Workload, ranks: int, events: work.EventPath
) -> None:
    workload = dataclasses.replace(small, events=events)
    bits = plans.bits(workload, "ranks", ranks)
    owner = plans.place(plans.guess(bits), ranks)
    each = [work.count(workload, work.ask(workload, bits, ranks, step), owner) for step in range(6)]
    counted, predicted = (
        work.mean([work.mean(step) for step in each]),
        work.predict(workload, ranks),
    )
    for kind in KINDS:
        assert counted[kind].bytes == pytest.approx(predicted[kind].bytes, rel=0.03), kind


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 13, 128])
def test_events_reach_every_rank_once_by_the_tree(ranks: int) -> None:
    reached = [to for rank in range(ranks) for to in work.tree_children(rank, ranks)]
    assert sorted(reached) == list(range(1, ranks))
    assert len(work.tree_children(0, ranks)) == math.ceil(math.log2(ranks))


def test_balanced_plans_are_even_if_no_unit_is_large() -> None:
    costs = np.random.default_rng(3).pareto(1.5, 2000) + 1
    load = np.bincount(spread(costs.tolist(), 16), weights=costs, minlength=16)
    assert load.max() <= max(1.01 * load.mean(), costs.max())


def test_without_a_network_to_wait_for_a_step_is_its_computing(small: Workload) -> None:
    asked, owner = _case(small, 2)
    compute = steps.Compute(sample_s=1e-4)
    quick = Link(gbit_per_s=1e6, latency_s=0, message_s=0)
    times = steps.simulate(small, asked, owner, quick, compute=compute)
    load = np.mean([np.bincount(owner, each.load_P).mean() for each in asked[2:]])
    least = small.samples / 2 * 1e-4 + load * 60e-9 + small.dense_parameters * compute.adam_s
    assert times.step_s == pytest.approx(least, rel=0.01)
    assert times.stall_R.max() < 0.01


def test_on_a_slow_network_a_step_is_the_bytes_of_its_rank(small: Workload) -> None:
    asked, owner = _case(small, 2)
    link = Link(gbit_per_s=1e-3, latency_s=0, message_s=0)
    times = steps.simulate(small, asked, owner, link)
    sent = work.mean([work.mean(work.count(small, each, owner)) for each in asked[2:]])
    # The gradients of rows and of the net share the link; the next batch passes beside both.
    assert times.step_s >= sum(
        sent[kind].bytes for kind in ("rows", "gradients", "dense")
    ) * 0.95 / (link.bytes_per_s)
    assert times.stall_R.min() > 0.9


def test_a_run_that_sends_a_tenth_more_is_told_from_the_model() -> None:
    workload = schedule.synthetic(256, row_bytes=ROW_BYTES, dense_parameters=1000)
    predicted = work.predict(workload, 2)
    right: dict[str, tuple[float, float]] = {
        kind: (sent.messages * 10, sent.bytes * 10) for kind, sent in predicted.items()
    }
    wrong = right | {"rows": (10.0, predicted["rows"].bytes * 11)}
    assert all(row.met for row in schedule.compare_counts(workload, 10, [right, right]))
    told = [
        row.case for row in schedule.compare_counts(workload, 10, [wrong, wrong]) if not row.met
    ]
    assert told == ["rows, 2 ranks"]


def _case(workload: Workload, ranks: int) -> tuple[list[work.Asked], work.Owners]:
    bits = plans.bits(workload, "ranks", ranks)
    asked = [work.ask(workload, bits, ranks, step) for step in range(5)]
    return asked, plans.place(plans.guess(bits), ranks)
