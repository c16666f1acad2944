"""Hop between ranks: nets and tokens that travel by calls, and rounds that end."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from threaded import in_threads
from torch import Tensor

from embertide.trainer.config import Hop
from embertide.trainer.sync.calls import Answer
from embertide.trainer.sync.neighbours import Neighbours


class Net:
    """A net of one number, which each step makes larger by one."""

    def __init__(self) -> None:
        self.value = torch.zeros(1)

    def net(self) -> Tensor:
        return self.value.clone()

    def mix(
        self, own: float, parts: tuple[tuple[float, Tensor], ...], begun: Tensor | None = None
    ) -> None:
        step = torch.zeros(1) if begun is None else self.value - begun
        before = self.value if begun is None else begun
        mean = own * before
        for weight, net in parts:
            mean = mean + weight * net
        self.value = mean + step


class Wires:
    """Calls between threads of one process."""

    def __init__(self, answers: list[Mapping[str, Answer]], rank: int) -> None:
        self.rank = rank
        self._answers = answers

    def begin(self, rank: int, name: str, number: int, data: Tensor) -> Callable[[], Tensor]:
        answer = self._answers[rank][name](self.rank, number, data.clone())
        return lambda: answer


class Ranks:
    """Some ranks, and the round that they are in."""

    def __init__(self, sync: Hop, ranks: int) -> None:
        self.round = 0
        self.nets = [Net() for _ in range(ranks)]
        answers: list[Mapping[str, Answer]] = []
        wires: list[Any] = [Wires(answers, rank) for rank in range(ranks)]
        nets: list[Any] = self.nets
        self.all = [
            Neighbours(sync, ranks, wires[rank], nets[rank], lambda: self.round)
            for rank in range(ranks)
        ]
        answers += [each.answers() for each in self.all]

    def learn(self, rank: int, batches: int, slow_s: float = 0.0) -> None:
        """Take steps with some batches of this round."""
        for _ in range(batches):
            self.all[rank].begin(self.round)
            time.sleep(slow_s)
            self.nets[rank].value += 1
            self.all[rank].end()

    def end_round(self) -> None:
        self.round += 1
        self.all[0].go_to(self.round)


def until_all_ended(ranks: Ranks, does: Callable[[int], None]) -> None:
    """Have each rank do something; once one is done, rounds end for those that wait for it."""
    size, ended = len(ranks.all), threading.Semaphore(0)

    def run(rank: int) -> None:
        if rank < size:
            does(rank)
            ended.release()
            return
        ended.acquire()
        for _ in range(size - 1):
            while not ended.acquire(timeout=0.1):
                ranks.end_round()

    in_threads(size + 1, run)


def test_equal_ranks_end_with_the_net_of_one_that_took_all_steps() -> None:
    ranks = Ranks(Hop(max_ig=2), 4)
    in_threads(4, lambda rank: ranks.learn(rank, 30))
    for net in ranks.nets:
        assert abs(float(net.value) - 30) < 4
    assert [each.iterations for each in ranks.all] == [30] * 4
    assert all(max(each.gaps) <= 2 * 2 for each in ranks.all)


def test_the_net_is_the_mean_that_the_protocol_says_and_the_step_stays_whole() -> None:
    ranks = Ranks(Hop(), 2)
    ranks.nets[1].value += 10

    def one_step(rank: int) -> None:
        ranks.all[rank].begin(0)
        ranks.nets[rank].value += 1
        ranks.all[rank].end()

    in_threads(2, one_step)
    assert [float(net.value) for net in ranks.nets] == [6, 6]


def test_a_rank_waits_for_its_neighbours_until_the_round_ends() -> None:
    ranks = Ranks(Hop(), 3)
    came = threading.Event()

    def wait() -> None:
        ranks.learn(1, 1)
        came.set()

    waits = threading.Thread(target=wait)
    waits.start()
    assert not came.wait(0.3)
    ranks.end_round()
    assert came.wait(10)
    waits.join()
    # All begin the next round at its first iteration.
    in_threads(3, lambda rank: ranks.learn(rank, 5))
    assert ranks.all[1].iterations == 6


def test_what_a_round_before_has_sent_counts_no_more() -> None:
    ranks = Ranks(Hop(), 2)
    ranks.all[0].begin(0)
    ranks.end_round()
    ranks.all[1].begin(ranks.round)
    ends = threading.Thread(target=ranks.all[1].end)
    ends.start()
    ends.join(0.3)
    assert ends.is_alive(), "it took the net of a round that had ended"
    ranks.learn(0, 1)
    ends.join(10)
    assert not ends.is_alive()


def test_a_rank_far_behind_skips_and_holds_nobody_up() -> None:
    ranks = Ranks(Hop(max_ig=2, backup=1, max_jump=4), 3)
    takes_s = (0.001, 0.001, 0.2)
    batches = (60, 60, 4)
    until_all_ended(ranks, lambda rank: ranks.learn(rank, batches[rank], takes_s[rank]))
    assert ranks.all[2].as_json()["skipped"] > 0


def test_a_lost_rank_wakes_those_that_wait() -> None:
    ranks = Ranks(Hop(), 2)
    raised = list[str]()

    def wait() -> None:
        with pytest.raises(RuntimeError, match="rank 1 is gone") as error:
            ranks.learn(0, 1)
        raised.append(str(error.value))

    waits = threading.Thread(target=wait)
    waits.start()
    ranks.all[0].fail(RuntimeError("rank 1 is gone"))
    waits.join(10)
    assert raised == ["rank 1 is gone"]
