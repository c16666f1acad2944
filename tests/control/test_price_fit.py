"""Prices fitted to what nodes did: they are found, kept where nothing is seen, and not misled."""

import dataclasses

import numpy as np
import pytest
from optimum import Shape, make_problem

from embertide.server.core.plan.cost import KIB, busy_us_D, work_DF
from embertide.server.core.plan.instance import instances
from embertide.server.core.plan.prices import KINDS, Prices
from embertide.server.core.price_fit import ERROR_MAX, CostFit, work_of
from embertide.v1 import node_pb2

TRUE = Prices(
    hit_us=(0.05, 0.5, 15.0),
    default_us=0.4,
    copied_us=0.3,
    asked_row_us=2.0,
    asked_sum_us=0.8,
    answered_us=1.5,
    request_us=60.0,
    call_us=150.0,
    called_us=100.0,
    base_us=30_000.0,
)
WINDOW_MS = 5000


@dataclasses.dataclass
class Nodes:
    """Two nodes whose work is drawn anew in each window, and costs what `prices` say.

    Rows have `row_bytes`, from the least to the most.
    """

    prices: Prices = TRUE
    seed: int = 1
    noise: float = 0.03
    row_bytes: tuple[float, float] = (0.0, 0.0)
    now_ms: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        self.dice = np.random.default_rng(self.seed)
        self.sent = {"a": 0, "b": 0}
        self.wired = {"a": 0, "b": 0}

    def run(self, fit: CostFit, windows: int, *, hog: float = 1.0) -> None:
        """Let windows pass; in every third one another thing takes `hog` times the time."""
        for _ in range(windows):
            self.window += 1
            self.now_ms += WINDOW_MS
            work = {name: self._work() for name in ("a", "b")}
            for name, other in (("a", "b"), ("b", "a")):
                fit.take(name, self._load(name, other, work, hog), self.now_ms)

    def _work(self) -> dict[str, int]:
        level = 10 ** self.dice.uniform(3.5, 5)
        kinds = ("ddr", "default", "copied", "asked", "answered")
        work = {kind: int(level * self.dice.uniform(0, 5)) for kind in kinds}
        work["requests"] = int(level * self.dice.uniform(0.001, 0.02))
        work["read"] = int((work["ddr"] + work["default"]) * self.dice.uniform(*self.row_bytes))
        work["wired"] = int(work["asked"] * self.dice.uniform(*self.row_bytes))
        return work

    def _load(
        self, name: str, other: str, work: dict[str, dict[str, int]], hog: float
    ) -> node_pb2.NodeServiceGetLoadResponse:
        mine = work[name]
        self.sent[name] += mine["asked"]
        self.wired[name] += mine["wired"]
        load = node_pb2.NodeServiceGetLoadResponse(
            window=self.window, window_ms=WINDOW_MS, requests=mine["requests"]
        )
        load.buckets.add(
            reads=mine["ddr"] + mine["default"],
            peer_reads=min(mine["answered"], mine["ddr"]),
            asked=mine["asked"],
            hot_reads=mine["copied"],
            bytes_read=mine["read"],
            reads_by_source=[0, mine["ddr"], 0, 0, mine["default"]],
        )
        load.peers.add(node=other).tables.add(keys=self.sent[name], bytes=self.wired[name])
        work_F = work_of(load)
        wired = mine["wired"] + work[other]["wired"]
        work_F[KINDS.index("wire_kib")] = wired / KIB * 1000 / WINDOW_MS
        for kind, of in (("call", mine), ("called", work[other])):
            rate = 1000 * of["requests"] / WINDOW_MS
            asked = 1000 * of["asked"] / WINDOW_MS
            work_F[KINDS.index(kind)] = rate * -np.expm1(-asked / rate)
        busy_us = float(work_F @ self.prices.us_F) * (1 + self.noise * self.dice.normal())
        if self.window % 3 == 0:
            busy_us *= hog
        load.cpu_us = int(max(busy_us, 1000.0) * WINDOW_MS / 1000)
        load.request_us = int(load.requests * 400 / (1 - busy_us / 2e6)) if busy_us < 1.9e6 else 0
        return load


def seen(prices: Prices) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The prices of what takes most of the nodes' time.

    Nearly all their requests need the peer, so only the sum of those two prices is known.
    """
    kinds = ("ddr", "asked_row", "answered", "base")
    us_F = prices.us_F[[KINDS.index(kind) for kind in kinds]]
    return np.append(us_F, prices.request_us + prices.call_us)


def test_prices_are_found_and_what_is_not_seen_keeps_its_prior() -> None:
    fit, nodes = CostFit(), Nodes()
    nodes.run(fit, 300)
    assert seen(fit.prices) == pytest.approx(seen(TRUE), rel=0.15)
    assert fit.error < 0.05
    assert fit.trusted
    assert fit.windows == 2 * 298  # the first has nothing before it, the last waits for the next
    assert fit.prices.hit_us[0] == pytest.approx(Prices().hit_us[0])
    assert fit.prices.hit_us[2] == pytest.approx(Prices().hit_us[2])
    assert fit.prices.asked_sum_us == pytest.approx(Prices().asked_sum_us)


def test_prices_of_bytes_are_found_where_rows_differ() -> None:
    dear = dataclasses.replace(TRUE, read_kib_us=0.3, wire_kib_us=1.5)
    fit, nodes = CostFit(), Nodes(prices=dear, row_bytes=(16.0, 2048.0))
    nodes.run(fit, 300)
    assert fit.prices.read_kib_us == pytest.approx(0.3, rel=0.15)
    assert fit.prices.wire_kib_us == pytest.approx(1.5, rel=0.15)
    assert seen(fit.prices) == pytest.approx(seen(dear), rel=0.2)
    assert fit.error < 0.05
    said = fit.message()
    assert (said.read_kib_us, said.wire_kib_us) == (
        fit.prices.read_kib_us,
        fit.prices.wire_kib_us,
    )


def test_prices_are_never_negative() -> None:
    fit = CostFit()
    Nodes(prices=Prices(request_us=0, call_us=0, called_us=0, copied_us=0), noise=0.3).run(fit, 60)
    assert (fit.prices.us_F >= 0).all()


def test_what_else_runs_on_the_machine_misleads_little() -> None:
    fit, nodes = CostFit(), Nodes()
    nodes.run(fit, 100)
    nodes.run(fit, 200, hog=3.0)
    calm = Nodes(seed=2, noise=0.0)
    calm.now_ms, calm.window = nodes.now_ms, nodes.window
    errors = []
    for _ in range(20):
        calm.run(fit, 1)
        errors.append(fit.errors._recent[-1])
    assert np.median(errors) < 0.04  # 0.08 were all windows alike


def test_prices_follow_a_fleet_that_changes() -> None:
    fit, nodes = CostFit(), Nodes()
    nodes.run(fit, 200)
    slower = dataclasses.replace(TRUE, hit_us=(0.05, 1.0, 15.0), request_us=120.0)
    nodes.prices = slower
    nodes.run(fit, 1500)
    assert seen(fit.prices) == pytest.approx(seen(slower), rel=0.15)


def test_windows_in_which_buckets_move_do_not_count() -> None:
    fit, nodes = CostFit(), Nodes()
    nodes.run(fit, 20)
    before = fit.prices, fit.windows
    fit.disturb(nodes.now_ms + 1)
    nodes.run(fit, 2, hog=5.0)
    assert fit.windows == before[1] + 2  # the window before them
    assert seen(fit.prices) == pytest.approx(seen(before[0]), rel=0.2)
    assert fit.left_out == 4
    nodes.run(fit, 2)
    assert fit.windows == before[1] + 4


def test_a_window_counts_once_and_a_restarted_node_begins_anew() -> None:
    fit, nodes = CostFit(), Nodes()
    nodes.run(fit, 5)
    windows = fit.windows
    nodes.window -= 1
    nodes.run(fit, 1)
    assert fit.windows == windows
    nodes.window = 0
    nodes.run(fit, 1)
    assert fit.windows == windows + 2  # those that waited
    nodes.run(fit, 2)
    assert fit.windows == windows + 4


def test_prices_that_are_wrong_are_not_trusted() -> None:
    fit, nodes = CostFit(), Nodes(noise=2.0)
    nodes.run(fit, 4)
    assert fit.trusted  # nothing says otherwise yet
    nodes.run(fit, 60)
    assert fit.error > ERROR_MAX
    assert not fit.trusted
    assert not fit.message().trusted


def test_latency_rises_with_busy_time() -> None:
    fit = CostFit()
    Nodes().run(fit, 300)
    assert fit.service_us == pytest.approx(400, rel=0.1)
    assert fit.capacity_us == pytest.approx(2e6, rel=0.15)
    assert fit.latency_us(1e6) == pytest.approx(800, rel=0.15)
    assert fit.latency_errors.quantile(0.5) < 0.1


# A node's report of its work is what the model says of today's owners: else a plan's predicted cost
# could not be compared with what is measured.
@pytest.mark.parametrize("seed", range(4))
def test_work_is_counted_as_plans_are_scored(seed: int) -> None:
    loads: dict[str, node_pb2.NodeServiceGetLoadResponse] = {}
    shape = Shape(nodes=3, bits=(2, 3), room=2.0)
    problem = make_problem(seed, shape, loads)
    [instance] = instances(problem)
    predicted_NF = work_DF(instance, instance.owned_DB)
    calls = [KINDS.index("call"), KINDS.index("called")]
    for n, (name, load) in enumerate(loads.items()):
        work_F = work_of(load)
        work_F[calls] = predicted_NF[n, calls]
        wired = sum(
            table.bytes
            for asker, each in loads.items()
            for peer in each.peers
            for table in peer.tables
            if name in (asker, peer.node)
        )
        work_F[KINDS.index("wire_kib")] = wired / KIB * 1000 / WINDOW_MS
        assert work_F == pytest.approx(predicted_NF[n], rel=1e-3, abs=1)
    # A window is predicted as busy_us_D predicts it, once it is known who calls whom.
    fit = CostFit(problem.prices)
    busy_D = busy_us_D(instance, instance.owned_DB, problem.prices)
    for window in (1, 2, 3, 4):
        for n, (name, load) in enumerate(loads.items()):
            again = node_pb2.NodeServiceGetLoadResponse()
            again.CopyFrom(load)
            again.window = window
            again.cpu_us = int(busy_D[n] * WINDOW_MS / 1000) if window == 3 else 0
            for peer in again.peers:
                for table in peer.tables:
                    table.keys *= window
                    table.bytes *= window
            fit.take(name, again, window * WINDOW_MS)
    assert fit.windows == 3
    assert fit.errors.quantile(1.0) < 0.001
