"""Groups of partial all-reduce: served, disjoint in time, connected, and agreed on by all."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from embertide.trainer.sync.groups import Group, GroupError, GroupGenerator, static_group

OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_lag": 4},
    {"division": False},
    {"division": False, "max_lag": 4},
    {"buffer": False},
    {"buffer": False, "division": False},
]


class Watched(GroupGenerator):
    """Keeps what each group was made in: its members, and who had to be connected then."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.made: list[tuple[tuple[int, ...], int, frozenset[int]]] = []
        self.cores: dict[int, frozenset[int]] = {}
        super().__init__(*args, **options)

    def _append(self, members: tuple[int, ...], asking: int) -> None:
        self.cores[self.epoch] = frozenset(self._core)
        self.made.append((members, self.epoch, self.cores[self.epoch]))
        super()._append(members, asking)


class Ranks:
    """Ranks of different speeds that ask, run groups and go on, in a random order."""

    def __init__(self, groups: GroupGenerator, seed: int, slow: float = 1.0) -> None:
        self.groups = groups
        self.steps = [0] * groups.size
        self.began: list[Group] = []
        self.computing = set(range(groups.size))
        self.running: list[Group] = []
        self._choose = random.Random(seed)
        self._weights = [slow, *[1.0] * (groups.size - 1)]

    def act(self) -> None:
        """Let one rank end its step, or one group end."""
        assert self.computing or self.running, "nothing can happen: a deadlock"
        choices: list[int | Group] = [*sorted(self.computing), *self.running]
        weights = [1.0 if isinstance(c, Group) else self._weights[c] for c in choices]
        (chosen,) = self._choose.choices(choices, weights)
        if isinstance(chosen, Group):
            self.running.remove(chosen)
            for rank in chosen.serves:
                self.steps[rank] += 1
                self.computing.add(rank)
            self.begin(self.groups.done(chosen))
        else:
            self.computing.remove(chosen)
            self.begin(self.groups.request(chosen))

    def begin(self, groups: list[Group]) -> None:
        """Groups run from now on."""
        for group in groups:
            assert not self.computing & {*group.members}, "a member has not asked"
            self.running.append(group)
            members = [rank for each in self.running for rank in each.members]
            assert len(members) == len({*members}), "a rank in two groups that run"
        self.began += groups

    def finish(self) -> None:
        """Let all that asked be served, with no steps more than that takes."""
        while waiting := {*range(self.groups.size)} - self.computing:
            missing = self.groups.waits_for()
            assert self.running or missing, f"{waiting} wait for nobody"
            if self.running:
                group = self.running.pop()
                self.computing |= {*group.serves}
                self.begin(self.groups.done(group))
            else:
                rank = missing.pop()
                self.computing.remove(rank)
                self.begin(self.groups.request(rank))


def unconnected(groups: list[tuple[int, ...]], ranks: frozenset[int]) -> set[int]:
    """Return the ranks that groups do not connect with the least of them."""
    if not ranks:
        return set()
    reached = {min(ranks)}
    while True:
        more = {rank for group in groups if reached & {*group} for rank in group} - reached
        if not more:
            return {*ranks} - reached
        reached |= more


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 16])
@pytest.mark.parametrize("group_size", [2, 4])
def test_every_request_is_served_and_groups_that_run_are_disjoint(
    options: dict[str, Any], size: int, group_size: int
) -> None:
    ranks = Ranks(GroupGenerator(size, group_size, seed=1, **options), seed=size, slow=0.2)
    for _ in range(800):
        ranks.act()
    assert min(ranks.steps) > 0
    if options.get("buffer", True):  # else what answers one request is another request
        ranks.finish()
    assert all(len(group.members) <= group_size + 1 for group in ranks.began)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("size", "group_size"), [(4, 2), (16, 4), (16, 2), (64, 4)])
@pytest.mark.parametrize("slow", [1.0, 0.05])
def test_groups_of_every_window_connect_all_ranks_that_are_not_behind(
    options: dict[str, Any], size: int, group_size: int, slow: float
) -> None:
    groups = Watched(size, group_size, seed=3, **options)
    assert groups.window == 50 or size == 64 or group_size == 2
    ranks = Ranks(groups, seed=7, slow=slow)
    for _ in range(2500):
        ranks.act()
    windows = len(groups.made) - groups.window
    assert windows > 20
    for at in range(0, windows, 5):
        made = groups.made[at : at + groups.window]
        whole = groups.cores[sorted({epoch for _, epoch, _ in made})[1]]
        if not options.get("max_lag"):
            assert len(whole) == size
        lost = unconnected([members for members, _, _ in made], whole)
        assert not lost, f"groups {at} to {at + groups.window} leave out {lost}"


def test_a_rank_behind_meets_one_that_is_not_whenever_it_asks() -> None:
    groups = Watched(8, 3, max_lag=3, seed=1)
    ranks = Ranks(groups, seed=2, slow=0.05)
    for _ in range(4000):
        ranks.act()
    of_slow = [({*members} - {0}, core) for members, _, core in groups.made if 0 in members]
    alone = [others for others, core in of_slow if not others & core]
    assert len(of_slow) > 20
    assert not alone


def test_the_filter_leaves_out_a_rank_that_is_behind() -> None:
    def stuck(**options: Any) -> int:
        groups = GroupGenerator(6, 2, seed=5, **options)
        for _ in range(60):  # rank 0 never asks
            began = []
            for rank in range(1, 6):
                if not groups._asks[rank]:
                    began += groups.request(rank)
            while began:
                began += groups.done(began.pop())
        return sum(groups._asks)

    assert stuck() == 5
    assert stuck(max_lag=4) == 1  # its partner when it stopped


def test_a_rank_far_ahead_meets_those_alone_that_are_not_behind_it() -> None:
    for seed in range(20):
        groups = GroupGenerator(4, 2, max_lag=2, seed=seed)
        groups.request(0)
        (other,) = groups.waits_for()
        (group,) = groups.request(other)
        groups.done(group)
        groups.request(0)
        assert groups.waits_for() == {other}


def test_a_rank_that_stood_still_for_some_steps_is_not_behind_for_ever() -> None:
    groups = GroupGenerator(4, 2, max_lag=4, seed=1)

    def steps(count: int, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        met: list[tuple[int, ...]] = []
        for _ in range(count):
            began: list[Group] = []
            for rank in ranks:
                if not groups._asks[rank]:
                    began += groups.request(rank)
            while began:
                group = began.pop()
                met.append(group.members)
                began += groups.done(group)
        return met

    steps(40, (0, 1, 2))
    assert 3 in groups.behind
    steps(40, (0, 1, 2, 3))
    assert not groups.behind
    met = steps(60, (0, 1, 2, 3))
    assert sum(3 in members for members in met) > 50


def test_no_rank_is_left_alone_by_a_division() -> None:
    groups = Watched(5, 2, seed=1)
    groups.request(0)
    assert sorted(len(members) for members, _, _ in groups.made) == [2, 3]


def test_division_gives_disjoint_groups_at_once_and_the_buffer_keeps_them() -> None:
    groups = Watched(12, 4, seed=1)
    for rank in range(12):
        groups.request(rank)
    assert sorted(rank for members, _, _ in groups.made for rank in members) == [*range(12)]


def test_without_a_buffer_each_request_makes_a_group_of_its_own() -> None:
    groups = Watched(12, 4, seed=1, buffer=False, division=False)
    for rank in range(12):
        groups.request(rank)
    assert len(groups.made) == 12


def test_the_same_seed_gives_the_same_groups() -> None:
    def made(seed: int) -> list[Group]:
        ranks = Ranks(GroupGenerator(8, 3, max_lag=4, seed=seed), seed=1)
        for _ in range(500):
            ranks.act()
        return ranks.began

    assert made(1) == made(1) != made(2)


def test_nobody_waits_for_a_rank_that_left_and_it_can_come_again() -> None:
    groups = GroupGenerator(4, 4, seed=1)
    for rank in (0, 1, 2):
        assert groups.request(rank) == []
    assert groups.waits_for() == {3}
    (group,) = groups.leave(3)
    assert group.members == group.serves == (0, 1, 2)
    assert groups.done(group) == []
    groups.join(3)
    for rank in range(4):
        began = groups.request(rank)
    assert began[0].members == (0, 1, 2, 3)


def test_a_running_group_of_a_rank_that_left_stays_locked_until_it_is_done() -> None:
    groups = GroupGenerator(2, 2, seed=1)
    groups.request(0)
    (group,) = groups.request(1)
    assert groups.leave(1) == []
    with pytest.raises(GroupError, match="still runs"):
        groups.join(1)
    groups.done(group)
    groups.join(1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ranks_that_leave_and_join_at_random_hold_up_nobody(options: dict[str, Any]) -> None:
    for seed in range(20):
        choose = random.Random(seed)
        groups = GroupGenerator(6, 3, seed=seed, **options)
        ranks = Ranks(groups, seed)
        away: set[int] = set()
        for _ in range(300):
            if choose.random() < 0.1 and len(away) < 4:
                rank = choose.choice(sorted({*range(6)} - away))
                away.add(rank)
                ranks.computing.discard(rank)
                ranks.begin(groups.leave(rank))
            elif away and choose.random() < 0.1:
                rank = choose.choice(sorted(away))
                if all(rank not in group.members for group in ranks.running):
                    away.remove(rank)
                    groups.join(rank)
                    ranks.computing.add(rank)
            else:
                ranks.act()
                ranks.computing -= away


def test_callers_that_ask_twice_or_end_what_does_not_run_are_refused() -> None:
    groups = GroupGenerator(2, 2)
    groups.request(0)
    with pytest.raises(GroupError, match="rank 0 asks for a group"):
        groups.request(0)
    with pytest.raises(GroupError, match="rank 2 is not one of those present"):
        groups.request(2)
    (group,) = groups.request(1)
    groups.done(group)
    with pytest.raises(GroupError, match="does not run"):
        groups.done(group)
    groups.leave(0)
    with pytest.raises(GroupError, match="rank 0 is not"):
        groups.leave(0)
    with pytest.raises(GroupError, match="rank 1 joins"):
        groups.join(1)


@pytest.mark.parametrize("options", [{"size": 0}, {"group_size": 1}, {"max_lag": -1}], ids=str)
def test_numbers_that_make_no_groups_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="or more"):
        GroupGenerator(**{"size": 4, "group_size": 2, **options})


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 15, 16, 32])
def test_all_members_of_a_static_group_agree_and_four_steps_connect_all(size: int) -> None:
    for first in range(4):
        groups = []
        for step in range(first, first + 4):
            for rank in range(size):
                group = static_group(step, rank, size)
                assert rank in group
                assert all(static_group(step, member, size) == group for member in group)
                groups.append(group)
        assert not unconnected(groups, frozenset(range(size)))


def test_the_static_schedule_of_two_nodes() -> None:
    def groups(step: int) -> list[tuple[int, ...]]:
        return sorted({static_group(step, rank, 8) for rank in range(8)})

    nodes = [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups(0) == [(0, 4), (1,), (2, 3), (5,), (6, 7)]
    assert groups(1) == groups(3) == groups(5) == nodes
    assert groups(2) == [(0, 3), (1, 5), (2,), (4, 7), (6,)]
