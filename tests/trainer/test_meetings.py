"""Ranks that meet in groups: none is in two at once, and nobody waits for one that stands still."""

import threading
from collections.abc import Callable

from threaded import in_threads

from embertide.trainer.sync.groups import GroupGenerator
from embertide.trainer.sync.meetings import Meetings


def meet(meetings: Meetings, me: int, times: int, met: Callable[[], None] = lambda: None) -> None:
    """Meet a group after each of some steps."""
    for _ in range(times):
        meetings.ask(me)
        while (group := meetings.wait(me)) is not None:
            met()
            meetings.done(me, group.number)
            if me in group.serves:
                break


def until_all_ended(meetings: Meetings, ranks: int, does: Callable[[int], None]) -> None:
    """As when a version ends: those who wait for ranks that ask no more are let go."""
    ended = threading.Barrier(ranks + 1)

    def run(me: int) -> None:
        if me < ranks:
            does(me)
        while me == ranks and ended.n_waiting < ranks:
            meetings.release()
        ended.wait()

    in_threads(ranks + 1, run)


def test_no_rank_is_in_two_groups_at_once_and_each_request_is_served() -> None:
    meetings = Meetings(GroupGenerator(4, 2, max_lag=4, seed=3), lambda _: False)
    until_all_ended(meetings, 4, lambda me: meet(meetings, me, 100))
    # A rank that is in a group does not ask, so a second one would have met nobody.
    assert sum(meetings.sizes.values()) > 0
    assert meetings.left == 0


def test_who_waits_goes_on_without_a_rank_that_stands_still_and_it_comes_back() -> None:
    still = {2}
    meetings = Meetings(GroupGenerator(3, 3, seed=1), lambda rank: rank in still)
    in_threads(2, lambda me: meet(meetings, me, 20))
    assert meetings.left == 1
    still.clear()
    meetings.ask(2)  # takes part again
    meetings.ask(0)
    meetings.ask(1)
    group = meetings.wait(2)
    assert group is not None
    assert len(group.members) > 1


def test_a_lost_rank_wakes_those_that_wait() -> None:
    meetings = Meetings(GroupGenerator(2, 2), lambda _: False)
    meetings.ask(0)
    raised = list[str]()

    def wait() -> None:
        try:
            meetings.wait(0)
        except RuntimeError as error:
            raised.append(str(error))

    waits = threading.Thread(target=wait)
    waits.start()
    meetings.fail(RuntimeError("rank 1 is gone"))
    waits.join(10)
    assert raised == ["rank 1 is gone"]
