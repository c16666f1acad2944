"""Planners against what can be known: the optimum by trying all, and what nodes measure.

* `oper` and `auto` on 200 small problems, against the best of all plans.
* `oper` on four real nodes whose clients want different buckets: keys asked of peers, the busy time
  of nodes and the load of owners, as predicted for the plan and as measured under it.
* `ldm` against greedy division, alone and as planners.
"""

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench import models, report
from bench.drift.local import FOLDER
from bench.drift.optimum import Shape as Drawn
from bench.drift.optimum import make_problem, optimum, ratio
from bench.nodes import Node, make_plan, publication_of, start_nodes
from bench.report import CONSOLE
from bench.servers import BUILD
from bench.shapes import Shape
from embertide.server.core.demand import Demand
from embertide.server.core.plan.cost import busy_us_D, score
from embertide.server.core.plan.differencing import difference
from embertide.server.core.plan.greedy import Greedy
from embertide.server.core.plan.instance import Bools, Instance, instances, owned_after, rates
from embertide.server.core.plan.layout import Layout, layout_of, owner
from embertide.server.core.plan.ldm import Ldm
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.planners import planner
from embertide.server.core.plan.prices import Prices
from embertide.server.core.price_fit import CostFit
from embertide.trainer.data.keys import buckets_of
from embertide.v1 import node_pb2, plan_pb2

_SMALL_CASES = 200
_OF_OPTIMUM = 1.05
_ASKED_ERROR = 0.05
_LDM_WINS, _LDM_RATIO = 0.85, 1.002
_NODES = 4
_SHAPE = Shape(name="planners", rows=50_000, tables=4, buckets=64)
_SAMPLES = 8
_ROOMS = (1.1, 1.3, 1.6, 2.0, 3.0)  # copies of the model that all memory holds, one a repetition
_WINDOW_S = 5.0


def _small() -> list[report.Row]:
    """Return the rows of oper and auto against the optimum."""
    rows = []
    ratios: dict[str, list[float]] = {"oper": [], "auto": []}
    for seed in range(_SMALL_CASES):
        problem = make_problem(seed)
        [instance] = instances(problem)
        least = optimum(instance, problem.prices)
        for name, found in ratios.items():
            found.append(ratio(problem, planner(name), least))
        if seed % 20 == 19:
            worst = {name: round(max(each), 4) for name, each in ratios.items()}
            CONSOLE.print(f"[dim]{seed + 1} small problems: at worst {worst}")
    for name, found in ratios.items():
        mean = float(np.mean(found))
        CONSOLE.print(f"[dim]{name}: mean {mean:.4f}, worst {max(found):.4f} of the least cost")
        for metric, values in (("worst", [max(found)]), ("median", found)):
            rows.append(
                report.measure(
                    (
                        f"{_SMALL_CASES} problems of 4 to 8 buckets on 2 or 3 nodes",
                        f"cost of {name} / least cost of all plans, {metric}",
                        "ratio",
                    ),
                    values,
                    better="lower",
                    target=_OF_OPTIMUM,
                    claim="19.5",
                )
            )
    return rows


class Clients(threading.Thread):
    """Asks each node for keys of the buckets that its clients want."""

    def __init__(self, nodes: Sequence[Node], seed: int, pause_s: float = 0.0) -> None:
        """Draw what each node's clients want."""
        super().__init__(daemon=True)
        self._nodes, self._pause_s = nodes, pause_s
        self._random = np.random.default_rng(seed)
        buckets = 1 << _SHAPE.config().tables[0].bucket_bits
        of_key = buckets_of(np.arange(_SHAPE.rows, dtype=np.uint64), buckets.bit_length() - 1)
        self._keys = [np.flatnonzero(of_key == bucket) for bucket in range(buckets)]
        shape = (_NODES, _SHAPE.tables, buckets)
        weight = self._random.lognormal(0, 0.8, shape[1:]) * self._random.lognormal(0, 1.2, shape)
        self._share = weight / weight.sum(axis=2, keepdims=True)
        self._ended = threading.Event()
        self.failed = 0

    def _request(self, node: int) -> node_pb2.ReadRequest:
        request = node_pb2.ReadRequest(lengths=[1] * (_SAMPLES * _SHAPE.tables))
        keys: NDArray[np.int64] = np.zeros((_SAMPLES, _SHAPE.tables), np.int64)
        for table in range(_SHAPE.tables):
            drawn = self._random.choice(len(self._keys), _SAMPLES, p=self._share[node, table])
            keys[:, table] = [self._random.choice(self._keys[bucket]) for bucket in drawn]
        request.keys.extend(keys.ravel().tolist())
        return request

    def run(self) -> None:
        """Send."""
        # Drawing takes longer than answering: requests are drawn before and sent again and again.
        requests = [[self._request(node) for _ in range(400)] for node in range(_NODES)]
        waiting = []
        turn = 0
        while not self._ended.is_set():
            for node, mine in zip(self._nodes, requests, strict=True):
                waiting.append(node.stub.Read.future(mine[turn % len(mine)], timeout=10))
                if len(waiting) > _NODES:
                    self.failed += waiting.pop(0).exception() is not None
            turn += 1
            time.sleep(self._pause_s)

    def end(self) -> None:
        """Send no more."""
        self._ended.set()
        self.join()


class Fleet:
    """What nodes said in some windows under a plan."""

    def __init__(self, plan: plan_pb2.Plan, fit: CostFit) -> None:
        """Begin with none."""
        self.plan, self.layout = plan, layout_of(plan.assignments)
        self.demand = Demand()
        self.fit = fit
        self.loads: dict[str, node_pb2.NodeServiceGetLoadResponse] = {}

    def watch(self, nodes: Sequence[Node], windows: int) -> None:
        """Take windows as they come, after one that is thrown away."""
        time.sleep(_WINDOW_S + 0.5)
        for _ in range(windows):
            time.sleep(_WINDOW_S + 0.2)
            now_ms = round(time.monotonic() * 1000)
            for node in nodes:
                self.loads[node.name] = node.load()
                self.demand.take(node.name, self.loads[node.name], self.plan.tables, now_ms)
                self.fit.take(node.name, self.loads[node.name], now_ms)

    def problem(self, prices: Prices) -> Problem:
        """Return the planning problem that these windows pose."""
        workload = self.demand.workload(self.plan.topology, self.layout)
        return Problem(plan=self.plan, layout=self.layout, workload=workload, prices=prices)


def _with_owners(plan: plan_pb2.Plan, layout: Layout) -> plan_pb2.Plan:
    """Return a plan with other owners."""
    changed = plan_pb2.Plan()
    changed.CopyFrom(plan)
    del changed.assignments[:]
    for at, held in sorted(layout.items()):
        changed.assignments.add(
            table_id=at.table,
            bucket_begin=at.bucket,
            bucket_count=1,
            owners=[owner(place) for place in held.owners],
        )
    return changed


def _budgeted(fleet: Fleet, room: float) -> None:
    """Give devices memory for so many copies of the model in all."""
    asking = fleet.demand.workload(fleet.plan.topology, fleet.layout).asking
    assert asking is not None
    for node in fleet.plan.topology.nodes:
        budget = max(room * asking.bytes_B.sum() / _NODES, 1.02 * asking.bytes_B.sum() / _NODES)
        node.devices[0].budgets[0].budget_bytes = int(budget)


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """A plan's prediction against what was measured under it; keys are for each key wanted."""

    asked: tuple[float, float]
    asked_before: float
    busy: tuple[float, float]
    owner_error: float


def _compare(before: Fleet, after: Fleet, owned_DB: Bools, prices: Prices) -> _Found:
    [planned] = instances(before.problem(prices))
    [found] = instances(after.problem(prices))
    wanted = planned.wanted_NB.sum(), found.wanted_NB.sum()
    predicted, measured = rates(planned, owned_DB), rates(found, found.owned_DB)
    peer_reads = np.array(
        [
            sum(bucket.peer_reads for bucket in load.buckets) * 1000 / load.window_ms
            for load in after.loads.values()
        ]
    )
    share_D = predicted.for_peers_DT.sum(axis=1)
    even = share_D / max(share_D.sum(), 1e-9)
    busy_us = sum(1000 * load.cpu_us / load.window_ms for load in after.loads.values())
    return _Found(
        asked=(predicted.asked_NT.sum() / wanted[0], measured.asked_NT.sum() / wanted[1]),
        asked_before=rates(planned, planned.owned_DB).asked_NT.sum() / wanted[0],
        busy=(float(busy_us_D(planned, owned_DB, prices).sum()) / wanted[0], busy_us / wanted[1]),
        owner_error=float(np.abs(peer_reads / max(peer_reads.sum(), 1e-9) - even).max() * _NODES),
    )


def _nodes(repetitions: int) -> list[report.Row]:
    """Return the rows of oper's predictions against real nodes."""
    files = models.make(_SHAPE, BUILD)
    publication = publication_of(files.snapshot, FOLDER / "planners-publication")
    off = {table.name: 0 for table in _SHAPE.config().tables}
    fit = CostFit()
    found: list[_Found] = []
    for at in range(repetitions):
        room = _ROOMS[at % len(_ROOMS)]
        before = _run(publication, off, at, fit, None)
        _budgeted(before, room)
        prices = fit.prices
        problem = before.problem(prices)
        proposal = planner("oper").propose(problem)
        layout = {
            bucket: held._replace(owners=proposal.owners.get(bucket, held.owners))
            for bucket, held in before.layout.items()
        }
        after = _run(publication, off, at, fit, _with_owners(before.plan, layout))
        [instance] = instances(problem)
        owned_DB = owned_after(instance, proposal.owners)
        found.append(_compare(before, after, owned_DB, prices))
        CONSOLE.print(f"[dim]room for {room} copies: {found[-1]}; {proposal.explanation}")
    CONSOLE.print(
        f"[dim]fit: {fit.windows} windows, error {fit.error:.3f}, p90 "
        f"{fit.errors.quantile(0.9):.3f}; latency error "
        f"{fit.latency_errors.quantile(0.5):.3f}; {fit.prices}"
    )
    case = f"{_NODES} nodes, {_SHAPE.tables} x 64 buckets, memory for {_ROOMS} copies"
    return [
        report.measure(
            (case, "keys asked of peers: |predicted / measured - 1|, oper", "share"),
            [abs(each.asked[0] / each.asked[1] - 1) for each in found],
            better="lower",
            target=_ASKED_ERROR,
            claim="19.5",
        ),
        report.compare(
            (case, "keys asked of peers for a key wanted: oper / today's plan", "keys"),
            [each.asked[1] for each in found],
            [each.asked_before for each in found],
            peer_name="today's plan",
            better="lower",
            target=0,
            claim="19.5",
        ),
        report.measure(
            (case, "CPU time for a key wanted: |predicted / measured - 1|, oper", "share"),
            [abs(each.busy[0] / each.busy[1] - 1) for each in found],
            better="lower",
            target=0,
            claim="19.5",
        ),
        report.measure(
            (case, "share of an owner in what peers ask, off an even split, at most", "share"),
            [each.owner_error for each in found],
            better="lower",
            target=0,
        ),
        report.measure(
            (case, "error of CPU time one window ahead, median of the last 240", "share"),
            [fit.error] * len(found),
            better="lower",
            target=0.3,
            claim="19.5",
        ),
        report.measure(
            (case, "error of CPU time one window ahead, p90 of the last 240", "share"),
            [fit.errors.quantile(0.9)] * len(found),
            better="lower",
            target=0,
            claim="19.5",
        ),
    ]


def _run(
    publication: Path,
    off: Mapping[str, int],
    seed: int,
    fit: CostFit,
    plan: plan_pb2.Plan | None,
) -> Fleet:
    """Return what nodes say under a plan; None: the one that gives buckets in turn."""

    def make(snapshot: Path, addresses: Sequence[str]) -> plan_pb2.Plan:
        made = make_plan(snapshot, addresses, off)
        if plan is not None:
            del made.assignments[:]
            made.assignments.extend(plan.assignments)
        plans.append(made)
        return made

    plans: list[plan_pb2.Plan] = []
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(
            start_nodes(FOLDER / "planners", publication, _NODES, make=make)
        )
        clients = Clients(nodes, seed, pause_s=0.002 * (seed % 3))
        clients.start()
        fleet = Fleet(plans[0], fit)
        fleet.watch(nodes, 3)
        clients.end()
        if clients.failed:
            CONSOLE.print(f"[red]{clients.failed} requests failed")
    return fleet


def _largest_first(loads: Sequence[float], sets: int) -> float:
    sums = [0.0] * sets
    for load in sorted(loads, reverse=True):
        sums[sums.index(min(sums))] += load
    return max(sums)


def _division() -> list[report.Row]:
    """Return the rows of largest differencing against greedy division of lognormal loads."""
    rows = []
    for count, sets in ((26, 2), (26, 4), (100, 8), (856, 16)):
        dice = random.Random(count)
        wins, ours, greedy = [], [], []
        for _ in range(50):
            loads = [dice.lognormvariate(0, 1) for _ in range(count)]
            least = max(sum(loads) / sets, *loads)
            most = max(sum(loads[at] for at in part) for part in difference(loads, sets))
            first = _largest_first(loads, sets)
            wins.append(most <= first * (1 + 1e-12))
            ours.append(most / least)
            greedy.append(first / least)
        case = f"{count} lognormal loads in {sets} sets, 50 draws"
        CONSOLE.print(
            f"[dim]{case}: max / bound {np.mean(ours):.5f}, greedy {np.mean(greedy):.5f}; "
            f"as good in {np.mean(wins):.2f}"
        )
        rows += [
            report.measure(
                (case, "share of draws in which ldm is as even as greedy or more", "share"),
                [float(np.mean(wins))],
                better="higher",
                target=_LDM_WINS,
                claim="19.5",
            ),
            report.compare(
                (case, "largest set / lower bound: ldm / greedy", "ratio"),
                ours,
                greedy,
                peer_name="greedy",
                better="lower",
                target=_LDM_RATIO if (count, sets) == (26, 2) else 0,
                claim="19.5",
            ),
        ]
    return rows


def _value(instance: Instance, owned_DB: Bools, prices: Prices) -> float:
    return score(instance, owned_DB, prices).value


def _as_planners() -> list[report.Row]:
    """Return the row of ldm as a planner against greedy, by the cost model."""
    shape = Drawn(nodes=4, bits=(6, 5), room=2.0, skew=1.2, locality=0.5)
    scores: dict[str, list[float]] = {"ldm": [], "greedy": [], "oper": []}
    for seed in range(20):
        problem = make_problem(seed, shape)
        [instance] = instances(problem)
        for name, by in (("ldm", Ldm()), ("greedy", Greedy()), ("oper", planner("oper"))):
            owned_DB = owned_after(instance, by.propose(problem).owners)
            scores[name].append(_value(instance, owned_DB, problem.prices))
    case = "96 buckets on 4 nodes, owners by chance, 20 draws"
    return [
        report.compare(
            (case, f"cost of the plan: {name} / greedy", "us/s"),
            scores[name],
            scores["greedy"],
            peer_name="greedy",
            better="lower",
            target=0,
            claim="19.5",
        )
        for name in ("ldm", "oper")
    ]


def measure(repetitions: int) -> list[report.Row]:
    """Return the rows of 19.5 that are about oper, auto and ldm.

    Raises:
        BenchError: A node does not start.
    """
    return [*_division(), *_as_planners(), *_nodes(repetitions), *_small()]
