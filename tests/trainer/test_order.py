"""Which events are accepted by their time: one from the future costs itself, a gap nothing."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embertide.trainer.data.base import EventTimes
from embertide.trainer.data.order import (
    _MAX_LATE,
    AHEAD,
    LATE,
    MAX_WAITING,
    UNKNOWN_MS,
    Decision,
    Order,
)

HOUR, DAY = 3_600_000, 86_400_000
NOW = 1_800_000_000_000
IN_2033 = 1_999_999_999_000
Ints = NDArray[np.int64]


def feed(
    order: Order, ts_ms: Ints, came_ms: Ints | None = None, at_once: int = 1 << 30
) -> Decision:
    """Decide all, given some at a time, as chunks come."""
    came_ms = np.full(len(ts_ms), UNKNOWN_MS) if came_ms is None else came_ms
    faults, times, begin, end = [], [], 0, 0
    while end < len(ts_ms):
        end = min(end + at_once, len(ts_ms))
        found = order.decide(ts_ms[begin:end], came_ms[begin:end], last=end == len(ts_ms))
        faults.append(found.fault_N)
        times.append(found.ts_ms_N)
        begin += len(found.fault_N)
        assert end - begin < MAX_WAITING
    return Decision(np.concatenate(faults), np.concatenate(times))


def decide(
    ts_ms: Ints,
    times: EventTimes | None = None,
    came_ms: Ints | None = None,
    at_once: int = 1 << 30,
) -> Decision:
    return feed(Order(times or EventTimes()), np.asarray(ts_ms), came_ms, at_once)


def rejected(decision: Decision) -> list[Any]:
    rejected_rows: list[Any] = np.flatnonzero(decision.fault_N).tolist()
    return rejected_rows


@pytest.mark.parametrize(
    ("events", "place", "at_once"),
    [(5000, place, 5000) for place in (0, 1, 100, 4095, 4096, 4990, 4999)]
    + [(300, place, at_once) for place in (0, 150, 299) for at_once in (1, 7, 100)],
)
def test_one_event_from_the_future_is_rejected_alone(events: int, place: int, at_once: int) -> None:
    ts = NOW + 500 * np.arange(events)
    ts[place] = IN_2033
    found = decide(ts, at_once=at_once)
    assert rejected(found) == [place]
    assert found.fault_N[place] == AHEAD


def test_a_producer_with_a_wrong_clock_loses_its_own_events_alone() -> None:
    rng = np.random.default_rng(3)
    ts = NOW + 500 * np.arange(20_000)
    wrong = rng.random(20_000) < 0.2
    ts[wrong] += rng.integers(2 * HOUR, 300 * DAY, int(wrong.sum()))
    found = decide(ts)
    lost = np.flatnonzero((found.fault_N != 0) & ~wrong)
    assert len(lost) == 0
    assert (found.fault_N[wrong] == AHEAD).mean() > 0.999


@pytest.mark.parametrize("at_once", [7, 64, 1000])
def test_days_without_events_reject_nothing(at_once: int) -> None:
    ts = (
        NOW
        + np.sort(np.random.default_rng(5).integers(0, HOUR, 900))
        + np.repeat([0, DAY, 40 * DAY], 300)
    )
    assert rejected(decide(ts, at_once=at_once)) == []


def test_the_first_event_after_a_gap_may_be_false_and_the_gap_true() -> None:
    ts = NOW + 500 * np.arange(300)
    ts[100:] += DAY
    ts[100] = IN_2033
    ts[102] += 5 * HOUR
    assert rejected(decide(ts)) == [100, 102]


def test_events_an_hour_apart_and_more_confirm_one_another() -> None:
    found = decide(NOW + 3 * HOUR * np.arange(40))
    assert rejected(found) == [39]  # nothing is after it


def test_what_the_events_around_do_not_tell_costs_an_hour_at_most() -> None:
    ts = NOW + 10_000 * np.arange(2000)
    ts[1000] += HOUR - 1
    found = decide(ts)
    assert found.fault_N[1000] == 0
    assert rejected(found) == list(range(1001, 1360))
    assert rejected(decide(ts, EventTimes(max_jump_s=60))) == [1000]


def test_a_late_event_is_accepted_when_it_comes_if_so_said() -> None:
    ts = np.array([10_000, 20_000, 15_000, 21_000, 10_999, 11_000, 22_000])
    assert rejected(decide(ts)) == [2, 4, 5]
    found = decide(ts, EventTimes(max_lateness_s=10))
    assert rejected(found) == [4]
    assert found.fault_N[4] == LATE
    assert found.ts_ms_N.tolist() == [10_000, 20_000, 20_000, 21_000, 21_000, 21_000, 22_000]


@pytest.mark.parametrize("at_once", [1000, 1 << 30])
def test_late_events_of_one_time_have_a_bound(at_once: int) -> None:
    ts = np.full(_MAX_LATE + 1000, NOW - 500)
    ts[0] = NOW
    found = decide(ts, EventTimes(max_lateness_s=1), at_once=at_once)
    assert rejected(found) == list(range(_MAX_LATE, _MAX_LATE + 1000))


# --- streams that say when events came ------------------------------------------------------------


def test_an_event_that_its_clock_vouches_for_waits_for_no_other() -> None:
    order = Order(EventTimes())
    ts = np.array([NOW, NOW + DAY])
    assert len(order.decide(ts, ts + 100, last=False).fault_N) == 2
    alone = Order(EventTimes())
    assert len(alone.decide(ts[:1], np.array([UNKNOWN_MS]), last=False).fault_N) == 0


def test_an_event_some_minutes_ahead_of_the_clock_is_rejected_alone() -> None:
    came = NOW + 500 * np.arange(2000)
    ts = came - 20
    ts[700] += 10 * 60_000  # less than max_jump_s
    assert len(rejected(decide(ts))) > 1000
    assert rejected(decide(ts, came_ms=came)) == [700]


def test_a_stream_that_is_ahead_of_the_clock_as_a_whole_is_accepted() -> None:
    ts = NOW + 500 * np.arange(3000)
    assert rejected(decide(ts, came_ms=ts - 3 * DAY)) == []
    stepped = ts - 20  # the clock of Redis goes back two hours
    stepped[1000:] -= 2 * HOUR
    assert rejected(decide(ts, came_ms=stepped)) == []


# --- reading again --------------------------------------------------------------------------------


@pytest.mark.parametrize("lateness_s", [0, 30])
@pytest.mark.parametrize("clock", [False, True])
def test_whoever_reads_again_from_a_batch_decides_the_same(lateness_s: int, clock: bool) -> None:
    rng = np.random.default_rng(11)
    ts = NOW + np.cumsum(rng.integers(0, 2000, 6000)) + np.repeat([0, DAY, 3 * DAY], 2000)
    came = ts + rng.integers(0, 100, 6000)
    ts -= np.where(rng.random(6000) < 0.1, rng.integers(0, 60_000, 6000), 0)
    ts += np.where(rng.random(6000) < 0.02, rng.integers(0, 30 * DAY, 6000), 0)
    came_ms = came if clock else None
    times = EventTimes(max_lateness_s=lateness_s)
    whole = decide(ts, times, came_ms)
    assert 100 < len(rejected(whole)) < 3000
    accepted = np.flatnonzero(whole.fault_N == 0)
    out = whole.ts_ms_N[accepted]
    assert (np.diff(out) >= 0).all()
    # Batches begin where the time of accepted events rises.
    begins = accepted[1:][np.diff(out) > 0]
    for begin in rng.choice(begins, 12).tolist():
        assert whole.ts_ms_N[begin] == ts[begin]
        order = Order(times, trusts_next=True)
        again = feed(order, ts[begin:], None if came_ms is None else came_ms[begin:], 999)
        assert np.array_equal(again.fault_N, whole.fault_N[begin:])
        stand = again.fault_N == 0
        assert np.array_equal(again.ts_ms_N[stand], whole.ts_ms_N[begin:][stand])


def test_the_first_event_of_a_batch_is_no_suspect_again() -> None:
    # After it come events of a backlog, all late: they would speak against it.
    ts = NOW + np.append(1000 * np.arange(100), np.zeros(50, np.int64) - 3 * HOUR)
    whole = decide(ts)
    assert rejected(whole) == list(range(100, 150))
    again = feed(Order(EventTimes(), trusts_next=True), ts[99:])
    assert rejected(again) == list(range(1, 51))


@pytest.mark.parametrize("name", ["max_lateness_s", "max_jump_s", "max_future_s"])
@pytest.mark.parametrize("value", [-1, float("nan"), 1e12])
def test_what_is_no_length_of_time_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        EventTimes(**{name: value})
