"""A fleet in virtual time: the real core of the control plane, and nodes that only report load.

Nodes obey each plan at once. Every five seconds they report reads drawn from a demand that the
caller gives, as Poisson counts under the plan that holds then, and CPU time by prices of their own.

Shapes: N nodes, B buckets of all tables in order.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from embertide.server.core.control import Control, ControlOptions, Memory
from embertide.server.core.drift.options import DriftOptions
from embertide.server.core.errors import RefusedError
from embertide.server.core.plan.prices import Prices
from embertide.server.core.state import SavedState
from embertide.v1 import control_pb2, node_pb2, plan_pb2, update_pb2

TICK_MS = 500
_ROW_BYTES = 64
WINDOW_S = 5
Floats = NDArray[np.float64]
Demand = Callable[[float], Floats]  # seconds since the start -> wanted_NB, keys a second


def make_nodes(count: int, budget_bytes: int) -> list[plan_pb2.Node]:
    """Return nodes of one CPU device each."""
    tier = plan_pb2.TierBudget(tier=plan_pb2.TIER_DDR, budget_bytes=budget_bytes)
    device = plan_pb2.Device(index=0, kind=plan_pb2.DEVICE_KIND_CPU, budgets=[tier])
    return [
        plan_pb2.Node(name=f"node-{n}", address=f"node-{n}:7000", devices=[device])
        for n in range(count)
    ]


def make_tables(bits: Sequence[int]) -> list[plan_pb2.PlannedTable]:
    """Return tables of so many buckets, as powers of two."""
    return [
        plan_pb2.PlannedTable(id=id, name=f"table-{id}", bucket_bits=each, chunks=1)
        for id, each in enumerate(bits)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Work of nodes: keys looked up here, for peers, asked and copied; requests; keys by peer."""

    here_NB: Floats
    peers_NB: Floats
    asked_NB: Floats
    hot_NB: Floats
    requests_N: Floats
    asked_of_NN: Floats

    def busy_us_N(self, prices: Prices, seconds: float) -> Floats:
        """Return the time that it takes each node."""
        # A request needs a peer if one of its keys falls to that peer.
        requests_N1 = np.maximum(self.requests_N[:, None], 1e-9)
        needed_NN = requests_N1 * -np.expm1(-self.asked_of_NN / requests_N1)
        busy_N: Floats = (
            self.here_NB.sum(axis=1) * prices.hit_us[1]
            + self.peers_NB.sum(axis=1) * (prices.hit_us[1] + prices.answered_us)
            + self.asked_NB.sum(axis=1) * prices.asked_row_us
            + self.hot_NB.sum(axis=1) * prices.copied_us
            + self.requests_N * prices.request_us
            + needed_NN.sum(axis=1) * prices.call_us
            + needed_NN.sum(axis=0) * prices.called_us
            + (self.here_NB + self.peers_NB).sum(axis=1) * prices.read_kib_us * _ROW_BYTES / 1024
            + seconds * prices.base_us
        )
        return busy_N


@dataclasses.dataclass(kw_only=True)
class VirtualFleet:
    """Nodes, their demand, and the control plane that follows it.

    Attributes:
        nodes: The nodes; those added later join at the next step.
        tables: The tables.
        demand: The demand of the nodes' own requests.
        bytes_B: Bytes of a copy of each bucket.
        copied: Share of the keys of others' buckets that copies of hot rows answer.
        drift: How the control plane decides.
        seed: Seed of the counts.
        prices: The true costs of a node's work; the cost model has to find them out.
        noise: Relative standard deviation of a window's CPU time.
        keys_a_request: Keys that a request of a client has.
    """

    nodes: list[plan_pb2.Node]
    tables: list[plan_pb2.PlannedTable]
    demand: Demand
    bytes_B: NDArray[np.int64]
    copied: float = 0.3
    drift: DriftOptions = dataclasses.field(default_factory=DriftOptions)
    seed: int = 1
    prices: Prices = dataclasses.field(default_factory=Prices)
    noise: float = 0.02
    keys_a_request: float = 100.0

    def __post_init__(self) -> None:
        """Register the nodes."""
        self.random = np.random.default_rng(self.seed)
        options = ControlOptions(
            model="virtual",
            expect_nodes=len(self.nodes),
            heartbeat_ms=TICK_MS,
            longest_deadline_ms=1000,
            drift=self.drift,
        )
        self.began_ms = 1_750_000_000_000 // 86_400_000 * 86_400_000  # midnight
        self.now_ms = self.began_ms
        self.core = Control(options, SavedState(), self.now_ms, Memory(options))
        self.silent: set[str] = set()  # nodes that do not report their load
        self._registered: set[str] = set()
        self._sequence = 0
        self._window = 0
        self._starts_B = [
            (table.id, bucket) for table in self.tables for bucket in range(1 << table.bucket_bits)
        ]

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return (self.now_ms - self.began_ms) / 1000

    def run(self, seconds: float) -> None:
        """Let time pass."""
        for _ in range(int(seconds * 1000) // TICK_MS):
            self._step()

    def _step(self) -> None:
        self.now_ms += TICK_MS
        for node in self.nodes:
            if node.name not in self._registered:
                self._register(node)
        self._sequence += 1
        for node in self.nodes:
            self.core.fleet.beat(self._beat(node), self.now_ms)
        if self.now_ms % (WINDOW_S * 1000) == 0 and self.core.plan is not None:
            self._report()
        self.core.tick(self.now_ms)
        if (task := self.core.tasks.first()) is not None:
            try:
                self.core.tasks.finish(task.run())
            except RefusedError as error:
                self.core.tasks.finish(task.refused(error))
        self.core.take()
        self.core.written()

    def _register(self, node: plan_pb2.Node) -> None:
        self._registered.add(node.name)
        self.core.register(
            control_pb2.RegisterNodeRequest(
                request_id=f"{node.name}-1", node=node, model="virtual", tables=self.tables
            ),
            self.now_ms,
        )

    def _beat(self, node: plan_pb2.Node) -> control_pb2.HeartbeatRequest:
        version = update_pb2.Version(lineage=1, number=1)
        return control_pb2.HeartbeatRequest(
            node=node.name,
            incarnation=f"{node.name}-1",
            sequence=self._sequence,
            versions=update_pb2.VersionRange(oldest=version, newest=version),
            plan_epoch=self.core.epoch,
            held_epoch=self.core.epoch,
            held_since=1,
        )

    def held_NB(self) -> NDArray[np.bool_]:
        """Return which nodes own which buckets."""
        held = np.zeros((len(self.nodes), len(self._starts_B)), np.bool_)
        for at, (_, holders) in enumerate(sorted(self.core.layout.items())):
            for place in holders.owners:
                held[place.node, at] = True
        return held

    def _work(self, wanted_NB: Floats, held_NB: NDArray[np.bool_], hot_NB: Floats) -> "Work":
        """Return what a plan makes of what is wanted."""
        here_NB = np.where(held_NB, wanted_NB, 0)
        asked_NB = np.where(held_NB, 0, wanted_NB) - hot_NB
        owner_NB = held_NB / np.maximum(held_NB.sum(axis=0), 1)
        return Work(
            here_NB=here_NB,
            peers_NB=owner_NB * asked_NB.sum(axis=0),
            asked_NB=asked_NB,
            hot_NB=hot_NB,
            requests_N=wanted_NB.sum(axis=1) / self.keys_a_request,
            asked_of_NN=asked_NB @ owner_NB.T,
        )

    def _report(self) -> None:
        self._window += 1
        wanted_NB = self.random.poisson(self.demand(self.seconds) * WINDOW_S).astype(np.float64)
        held_NB = self.held_NB()
        elsewhere_NB = np.where(held_NB, 0, wanted_NB).astype(np.int64)
        hot_NB = self.random.binomial(elsewhere_NB, self.copied).astype(np.float64)
        work = self._work(wanted_NB, held_NB, hot_NB)
        busy_N = work.busy_us_N(self.prices, WINDOW_S)
        busy_N *= 1 + self.noise * self.random.standard_normal(len(busy_N))
        here_NB, peers_NB, asked_NB = (
            np.round(each).astype(np.int64) for each in (work.here_NB, work.peers_NB, work.asked_NB)
        )
        for n, node in enumerate(self.nodes):
            if node.name in self.silent:
                self.core.loads.forget(node.name)
                continue
            load = node_pb2.NodeServiceGetLoadResponse(
                window_ms=WINDOW_S * 1000,
                window=self._window,
                cpu_us=max(1, round(busy_N[n])),
                requests=round(work.requests_N[n]),
            )
            for at in np.flatnonzero(held_NB[n] | (wanted_NB[n] > 0)):
                table, bucket = self._starts_B[at]
                reads = int(here_NB[n, at] + peers_NB[n, at])
                load.buckets.add(
                    table_id=table,
                    bucket=bucket,
                    reads=reads,
                    peer_reads=int(peers_NB[n, at]),
                    asked=int(asked_NB[n, at]),
                    hot_reads=int(hot_NB[n, at]),
                    bytes_read=_ROW_BYTES * reads,
                    reads_by_source=[0, reads, 0, 0, 0, 0, 0, 0],
                    resident_bytes=int(self.bytes_B[at]) if held_NB[n, at] else 0,
                    held=bool(held_NB[n, at]),
                )
            self.core.load(node.name, load, self.now_ms)

    def busy_us_N(self, held_NB: NDArray[np.bool_] | None = None) -> Floats:
        """Return what each node's time a second is in the mean under a plan, today's by default."""
        held_NB = self.held_NB() if held_NB is None else held_NB
        wanted_NB = self.demand(self.seconds)
        hot_NB = np.where(held_NB, 0.0, wanted_NB) * self.copied
        return self._work(wanted_NB, held_NB, hot_NB).busy_us_N(self.prices, 1)

    def acted(self) -> list[control_pb2.Decision]:
        """Return the decisions that started operations, oldest first."""
        outcome = control_pb2.DECISION_OUTCOME_ACTED
        return [each for each in self.core.autopilot.decisions if each.outcome == outcome][::-1]


def zipf_demand(
    tables: Sequence[plan_pb2.PlannedTable],
    nodes: int,
    keys_per_s: float,
    *,
    seed: int,
    skew: float = 0.5,
) -> Floats:
    """Return a stationary demand: tables and buckets by Zipf weights, all nodes alike."""
    random = np.random.default_rng(seed)
    shares_T = random.permutation(1 / np.arange(1, len(tables) + 1))
    shares_T /= shares_T.sum()
    parts = []
    for table, share in zip(tables, shares_T, strict=True):
        weights = random.permutation(1 / np.arange(1, (1 << table.bucket_bits) + 1) ** skew)
        parts.append(share * weights / weights.sum())
    return np.tile(np.concatenate(parts) * keys_per_s / nodes, (nodes, 1))
