"""Steps of ranks in virtual time: the trainer's schedule over a network of given links.

Each rank has two threads, as the trainer does. The one that learns takes for step k

    keys        wait until the exchange of step k's keys is done
    lookup      the rows that all ranks asked of this one, which are then sent
    rows        wait for the rows of its own keys from all ranks
    net         forward and backward of its samples; gradients of rows are sent, and the all-reduce
                of the net's gradients begins
    gradients   wait for those of its rows from all ranks
    update      add them up in the order of ranks, and update the rows
    dense       wait for the all-reduce
    adam        update the net

and the other, ahead, for step k+1 from when step k begins:

    events      wait for the batch, and pass it on down the tree
    route       find the distinct keys of its part and their owners
    lengths     tell every rank how many keys follow; wait for all of theirs
    keys        send them; wait for all of theirs

A stall is time in which the thread that learns waits. Computing never waits for the other thread:
a rank has a core to spare for it, and cores for the network. The all-reduce is a ring of 2 (R-1)
rounds; adding up what arrives is not charged for. Rank 0 has each batch when it is wanted.
"""

import dataclasses
import functools
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from bench.ranks.network import Inbox, Link, Network
from bench.ranks.workload import (
    KEY_BYTES,
    LENGTH_BYTES,
    Asked,
    Owners,
    Workload,
    tree_children,
)

Steps = Generator[simpy.Event, Any, None]
WAITS = ("keys", "rows", "gradients", "dense")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """What a rank's work takes: by default 16 cores of a server.

    Attributes:
        lookup_s: Of a row, found and copied: rows of 512 bytes at 25 GB/s.
        update_s: Of a gradient of one rank for one row: as much again there and back.
        route_s: Of a key of the batch: hashed, looked for among those seen.
        sample_s: Forward and backward: 14 MFLOP for MLPerf's DLRM, at 16 x 70 GFLOP/s, the rate of
            one core over this project's Criteo net.
        adam_s: Of a parameter.
    """

    lookup_s: float = 20e-9
    update_s: float = 40e-9
    route_s: float = 10e-9
    sample_s: float = 13e-6
    adam_s: float = 0.5e-9


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """What the steps took.

    Attributes:
        step_s: A step, in the mean.
        stall_R: Share of each rank's time in which it waited.
        waited: The same in the mean over ranks, by what was waited for.
    """

    step_s: float
    stall_R: NDArray[np.float64]
    waited: Mapping[str, float]


class _Run:
    """Ranks that take some steps."""

    def __init__(
        self,
        workload: Workload,
        asked: Sequence[Asked],
        owner_P: Owners,
        link: Link,
        compute: Compute,
    ) -> None:
        self.clock = simpy.Environment()
        self.ranks = len(asked[0].asked_RP)
        self._workload, self._asked, self._compute = workload, asked, compute
        self._to_SRR = [each.matrix(owner_P) for each in asked]
        self._network = Network(self.clock, self.ranks, link)
        self._inboxes: dict[tuple[str, int, int], Inbox] = {}
        steps = len(asked)
        self._may_ask = [[self.clock.event() for _ in range(steps + 1)] for _ in range(self.ranks)]
        self._asked_for = [[self.clock.event() for _ in range(steps)] for _ in range(self.ranks)]
        self.began = np.zeros((self.ranks, steps + 1))
        self.waits = {name: np.zeros((self.ranks, steps)) for name in WAITS}

    def run(self) -> None:
        """Take all steps."""
        learning = [self.clock.process(self._learn(rank)) for rank in range(self.ranks)]
        for rank in range(self.ranks):
            self.clock.process(self._ask_ahead(rank))
            self._may_ask[rank][0].succeed()
        self.clock.run(self.clock.all_of(learning))

    # --- the thread that learns ---

    def _learn(self, rank: int) -> Steps:
        work, others = self._compute, self.ranks - 1
        samples = self._workload.samples / self.ranks
        row_bytes = self._workload.row_bytes
        for step, to_RR in enumerate(self._to_SRR):
            self.began[rank, step] = self.clock.now
            self._may_ask[rank][step + 1].succeed()
            load = int(to_RR[:, rank].sum())
            yield from self._wait("keys", rank, step, self._asked_for[rank][step])
            yield self.clock.timeout(load * work.lookup_s)
            self._send_all("rows", rank, step, to_RR[:, rank] * row_bytes, "learner")
            yield from self._wait("rows", rank, step, self._take("rows", rank, step, others))
            yield self.clock.timeout(samples * work.sample_s)
            self._send_all("gradients", rank, step, to_RR[rank] * row_bytes, "learner")
            summed = self.clock.process(self._all_reduce(rank, step))
            came = self._take("gradients", rank, step, others)
            yield from self._wait("gradients", rank, step, came)
            yield self.clock.timeout(load * work.update_s)
            yield from self._wait("dense", rank, step, summed)
            yield self.clock.timeout(self._workload.dense_parameters * work.adam_s)
        self.began[rank, -1] = self.clock.now

    def _wait(self, name: str, rank: int, step: int, event: simpy.Event) -> Steps:
        began = self.clock.now
        yield event
        self.waits[name][rank, step] = self.clock.now - began

    def _all_reduce(self, rank: int, step: int) -> Steps:
        chunk = self._workload.dense_bytes / self.ranks
        to = (rank + 1) % self.ranks
        for turn in range(2 * (self.ranks - 1)):
            kind = f"dense {turn}"
            self._network.send(rank, to, chunk, "dense", self._inbox(kind, to, step, 1))
            yield self._take(kind, rank, step, 1)

    # --- the thread ahead ---

    def _ask_ahead(self, rank: int) -> Steps:
        work, others = self._compute, self.ranks - 1
        tables = len(self._workload.laws)
        keys = self._workload.samples / self.ranks * tables
        for step, to_RR in enumerate(self._to_SRR):
            yield self._may_ask[rank][step]
            yield from self._pass_events(rank, step)
            yield self.clock.timeout(keys * work.route_s)
            lengths = np.full(self.ranks, LENGTH_BYTES * tables)
            for kind, size_R in (("lengths", lengths), ("keys", to_RR[rank] * KEY_BYTES)):
                self._send_all(kind, rank, step, size_R, "ahead")
                yield self._take(kind, rank, step, others)
            self._asked_for[rank][step].succeed()

    def _pass_events(self, rank: int, step: int) -> Steps:
        """Wait for a rank's events, and give others theirs."""
        if rank > 0:
            yield self._take("events", rank, step, 1)
        for to, size in self._events(rank, step):
            inbox = self._inbox("events", to, step, 1)
            self._network.send(rank, to, size, "ahead", inbox)

    def _events(self, rank: int, step: int) -> list[tuple[int, float]]:
        workload, asked = self._workload, self._asked[step]
        if workload.events == "tree":
            size = workload.event_bytes(workload.samples, asked.distinct)
            return [(to, size) for to in tree_children(rank, self.ranks)]
        if rank > 0:
            return []
        samples = workload.samples // self.ranks
        return [
            (to, workload.event_bytes(samples, int(asked.asked_RP[to].sum())))
            for to in range(1, self.ranks)
        ]

    # --- messages ---

    def _send_all(self, kind: str, rank: int, step: int, size_R: NDArray[Any], flow: str) -> None:
        """Send every other rank its part, the next rank first, as gloo does."""
        for after in range(1, self.ranks):
            to = (rank + after) % self.ranks
            inbox = self._inbox(kind, to, step, self.ranks - 1)
            self._network.send(rank, to, float(size_R[to]), flow, inbox)

    def _inbox(self, kind: str, rank: int, step: int, expected: int) -> Inbox:
        name = (kind, rank, step)
        if name not in self._inboxes:
            self._inboxes[name] = Inbox(self.clock, expected)
        return self._inboxes[name]

    def _take(self, kind: str, rank: int, step: int, expected: int) -> simpy.Event:
        return self._inbox(kind, rank, step, expected).ready


def simulate(
    workload: Workload,
    asked: Sequence[Asked],
    owner_P: Owners,
    link: Link,
    *,
    compute: Compute | None = None,
    warmup: int = 2,
) -> Times:
    """Take a step for each batch in virtual time; the first `warmup` of them do not count."""
    run = _Run(workload, asked, owner_P, link, compute or Compute())
    run.run()
    lasted_R = run.began[:, -1] - run.began[:, warmup]
    waited = {name: waits_RS[:, warmup:].sum(axis=1) for name, waits_RS in run.waits.items()}
    stall_R = functools.reduce(np.add, waited.values()) / lasted_R
    return Times(
        step_s=float(lasted_R.mean()) / (len(asked) - warmup),
        stall_R=stall_R,
        waited={name: float((waits_R / lasted_R).mean()) for name, waits_R in waited.items()},
    )
