"""A rank among its neighbours on a graph: the protocol of `hop.py`, as nets and tokens travel.

A net goes straight to the ranks that hear from this one, by a call that they answer at once
(calls.py); so do tokens. The rank's learning thread does what the protocol says: it sends, waits
for nets and tokens, and takes the mean. Whoever hands batches out ends a round of them where a
version ends, and where there are no more for now: a rank that waits then waits no longer, and all
begin the next round at iteration 0. Messages name their round. One of a later round is as good as
word that the round has ended; those of an earlier one are dropped.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from embertide.trainer.config import Hop
from embertide.trainer.sync.calls import Answer, Calls, empty
from embertide.trainer.sync.hop import Action, Compute, HopWorker, Reduce, SendTokens
from embertide.trainer.sync.replicas import Replicas
from embertide.trainer.sync.row_server import by_powers

_NET, _TOKENS = "net", "tokens"
_LOOK_S = 0.05  # who waits asks so often whether the round has ended


class Neighbours:
    """This rank's part in Hop. `begin` and `end` are for the learning thread, the rest for any.

    Args:
        sync: Graph and bounds.
        ranks: The number of ranks.
        calls: This rank's calls.
        replicas: The replicas that have its net.
        round_now: Returns the number of the round; called by the learning thread.

    Attributes:
        gaps: Nets that came, by the iterations that sender and receiver were apart.
        iterations: That this rank has ended.
        skipped: Iterations that it skipped.
        waits_s: Time in which it waited for nets and tokens.
    """

    def __init__(
        self,
        sync: Hop,
        ranks: int,
        calls: Calls,
        replicas: Replicas,
        round_now: Callable[[], int],
    ) -> None:
        """Stand before the first round."""
        self.gaps: Counter[int] = Counter()
        self.iterations = self.skipped = 0
        self.waits_s = 0.0
        self._sync, self._edges = sync, sync.edges(ranks)
        self._calls, self._replicas, self._round_now = calls, replicas, round_now
        self._changed = threading.Condition()
        self._actions: deque[Action[Tensor]] = deque()
        self._round = 0
        self._worker = self._make_worker()
        self._begun: Tensor | None = None  # the net that this iteration began with
        self._failed: Exception | None = None

    def _make_worker(self) -> HopWorker[Tensor]:
        sync = self._sync
        return HopWorker(
            self._calls.rank,
            self._edges,
            max_ig=sync.max_ig,
            backup=sync.backup,
            staleness=sync.staleness,
            max_jump=sync.max_jump,
        )

    def answers(self) -> dict[str, Answer]:
        """Return what answers the calls of others, by name."""
        return {_NET: self._take_net, _TOKENS: self._take_tokens}

    def go_to(self, number: int) -> None:
        """Be in a round; one that has ended ends here, too."""
        with self._changed:
            self._go_to(number)

    def fail(self, error: Exception) -> None:
        """Have whoever waits raise an error."""
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    # --- of the learning thread -------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Begin an iteration with a batch of a round; the net is that to learn it with.

        Raises:
            RankLostError: A rank is gone.
        """
        with self._changed:
            self._go_to(number)
            if self._worker.waits_for != "start":
                return  # begun where the last one ended
            self._actions += self._worker.start()
        self._act()

    def end(self) -> None:
        """End an iteration whose step is taken: returns once the next may begin.

        Raises:
            RankLostError: A rank is gone.
        """
        self.iterations += 1
        with self._changed:
            if self._worker.waits_for == "start":
                return  # the round has ended
            self._actions += self._worker.gradient_done()
        while not self._act():
            self._wait()

    def _act(self) -> bool:
        """Do what the protocol says; whether the rank is to compute now."""
        while True:
            with self._changed:
                if self._worker.waits_for == "start":
                    return True  # the round has ended
                if not self._actions:
                    return False
                action, number = self._actions.popleft(), self._round
            if isinstance(action, Compute):
                return True
            if isinstance(action, Reduce):
                begun = self._begun if action.with_gradient else None
                self._replicas.mix(action.own, action.parts, begun)
            elif isinstance(action, SendTokens):
                self._send(action.to, _TOKENS, [number, action.tokens], empty())
            else:
                self._begun = self._replicas.net()
                head = [number, action.iteration, action.skipped]
                self._send(action.to, _NET, head, self._begun.view(torch.uint8))

    def _send(self, to: Iterable[int], name: str, head: list[int], data: Tensor) -> None:
        message = torch.cat([torch.tensor(head).view(torch.uint8), data])
        for wait in [self._calls.begin(rank, name, 0, message) for rank in to]:
            wait()

    def _wait(self) -> None:
        """Wait for nets or tokens; ask now and then whether the round has ended."""
        began = time.monotonic()
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._failed or self._actions or self._worker.waits_for == "start", _LOOK_S
            )
            if self._failed is not None:
                raise self._failed
        if not there:
            self.go_to(self._round_now())
        self.waits_s += time.monotonic() - began

    # --- of threads that answer -------------------------------------------------------------------

    def _take_net(self, rank: int, _: int, data: Tensor) -> Tensor:
        head, net = data[:24].view(torch.int64).tolist(), data[24:].view(torch.float32)
        number, iteration, skipped = head
        with self._changed:
            if self._is_of_now(number):
                self.gaps[abs(iteration - self._worker.iteration)] += 1
                self._actions += self._worker.update(rank, iteration, skipped, net)
                self._changed.notify_all()
        return empty()

    def _take_tokens(self, rank: int, _: int, data: Tensor) -> Tensor:
        number, tokens = data.view(torch.int64).tolist()
        with self._changed:
            if self._is_of_now(number):
                self._actions += self._worker.receive_tokens(rank, tokens)
                self._changed.notify_all()
        return empty()

    def _is_of_now(self, number: int) -> bool:
        self._go_to(number)
        return number == self._round

    def _go_to(self, number: int) -> None:
        if number <= self._round:
            return
        self._round = number
        self.skipped += self._worker.skipped
        self._worker = self._make_worker()
        self._actions.clear()
        self._changed.notify_all()

    def as_json(self) -> dict[str, Any]:
        """Return counters by name; of the histogram, the counts by power of two."""
        with self._changed:
            return {
                "gaps": by_powers(self.gaps),
                "iterations": self.iterations,
                "skipped": self.skipped + self._worker.skipped,
                "waits_s": self.waits_s,
            }
