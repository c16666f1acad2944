"""A change re-times what it touches, and the times are those of a simulation of everything."""

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embertide.trainer.sync.placing import timeline as timeline_module
from embertide.trainer.sync.placing.timeline import Task, Timeline


def _random_tasks(chance: random.Random, count: int, devices: int) -> list[Task]:
    """Tasks of which many take no time, or as long as others: ties are what orders break at."""
    tasks = []
    for number in range(count):
        after = tuple(
            sorted(
                {number - 1 - chance.randrange(min(number, 12)) for _ in range(chance.randrange(4))}
            )
            if number
            else ()
        )
        seconds, lead = _random_times(chance)
        tasks.append(Task(f"t{number}", chance.randrange(devices), seconds, after, lead))
    return tasks


def _random_times(chance: random.Random) -> tuple[float, float]:
    seconds = chance.choice((0.0, 1.0, 2.0, chance.random(), chance.random() * 3))
    return seconds, seconds * chance.choice((0.0, 0.0, 0.5, 1.0))


def _times(timeline: Timeline) -> tuple[object, ...]:
    order = [list(each) for each in timeline._order]
    return list(timeline._ready), list(timeline._begin), list(timeline._end), order


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have changes followed to their end, however many tasks they touch."""
    monkeypatch.setattr(timeline_module, "_MAX_VISITS", 100.0)


@pytest.mark.usefixtures("unbounded")
def test_ten_thousand_random_changes_give_the_times_of_a_whole_simulation() -> None:
    changes = 0
    for seed in range(50):
        chance = random.Random(seed)
        tasks = _random_tasks(chance, chance.randrange(1, 80), chance.randrange(1, 6))
        timeline = Timeline(tasks)
        for _ in range(200):
            touched = chance.sample(range(len(tasks)), min(len(tasks), chance.randrange(1, 4)))
            timeline.retime({number: _random_times(chance) for number in touched})
            changes += 1
            found = _times(timeline)
            timeline.simulate_all()
            assert found == _times(timeline)
    assert changes == 10_000


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 30), st.integers(1, 4))
def test_a_change_that_is_taken_back_leaves_nothing(
    chance: random.Random, count: int, devices: int
) -> None:
    timeline = Timeline(_random_tasks(chance, count, devices))
    before = _times(timeline)
    number = chance.randrange(count)
    was = timeline.seconds_of(number)
    timeline.retime({number: _random_times(chance)})
    timeline.retime({number: was})
    assert _times(timeline) == before


def test_a_change_that_touches_most_tasks_is_a_whole_simulation() -> None:
    tasks = [Task(f"{n}", 0, 1.0, (n - 1,) if n else ()) for n in range(100)]
    timeline = Timeline(tasks)
    timeline.retime({0: (2.0, 0.0)})
    assert timeline.makespan_s == 101
    assert timeline.visits < 20


def test_a_device_takes_what_is_ready_first() -> None:
    # 2 is ready at 3 and 3 at 1, on one device: 3 goes first, though its number is larger.
    timeline = Timeline(
        [Task("a", 0, 3.0), Task("b", 1, 1.0), Task("c", 2, 5.0, (0,)), Task("d", 2, 4.0, (1,))]
    )
    assert [(each.begin_s, each.end_s) for each in timeline.spans()] == [
        (0, 3),
        (0, 1),
        (5, 10),
        (1, 5),
    ]
    assert timeline.critical_path() == [1, 3, 2]
    # With b longer, c is ready first.
    timeline.retime({1: (4.0, 0.0)})
    assert timeline.makespan_s == 12
    assert timeline.critical_path() == [0, 2, 3]


def test_a_message_is_received_while_it_is_sent() -> None:
    sent = Task("sent", 0, 2.0)
    received = Task("received", 1, 2.0, (0,), lead=2.0)
    # An idle receiver has it when the sender is done; a busy one takes as long again.
    assert Timeline([sent, received]).makespan_s == 2
    busy = Timeline([Task("sent", 0, 2.0), Task("other", 1, 1.0), received])
    assert busy.end_s([2]) == 3


@pytest.mark.parametrize(
    "task", [Task("a", 0, -1.0), Task("a", 0, 1.0, (), 2.0), Task("a", 0, 1.0, (0,))]
)
def test_a_task_that_cannot_be_is_refused(task: Task) -> None:
    with pytest.raises(ValueError, match="task 0"):
        Timeline([task])


def test_a_change_visits_few_of_many_tasks() -> None:
    # Lanes that do not meet, as ranks between two exchanges; each task waits for the one before it.
    tasks = [
        Task(f"{step} {lane}", lane, 1.0, (20 * (step - 1) + lane,) if step else ())
        for step in range(20)
        for lane in range(20)
    ]
    timeline = Timeline(tasks)
    chance = random.Random(1)
    visits = []
    for _ in range(100):
        timeline.retime({chance.randrange(len(tasks)): (chance.random() * 5, 0.0)})
        visits.append(timeline.visits)
    assert statistics.median(visits) <= len(tasks) / 20
