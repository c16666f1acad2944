"""How far a measured gain is off by chance: gains of operations that never were.

A fleet keeps its plan while customs are exchanged as in `pays`, at a fixed rate of requests. What
it spends at one time and half a minute later is compared as the control plane compares it before
and after an operation, by the same parts of it. The gain is 0 by definition, so what comes out is
the error of a measurement. Measured gains of real operations with such errors added once more say
what the best of all predictions could reach against them.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from bench import report
from bench.drift import gains
from bench.servers import BenchError
from embertide.server.cli.control_client import Caller
from embertide.server.core.demand import Demand
from embertide.server.core.drift.look import spent_us
from embertide.server.core.plan.cost import fleet_cost
from embertide.server.core.plan.instance import instances
from embertide.server.core.plan.layout import layout_of
from embertide.server.core.plan.planner import Problem
from embertide.server.core.plan.prices import Prices
from embertide.v1 import control_pb2

HALF_LIFE_S = 600
APART_S = 30.0  # from the decision to the measurement of its gain, about
_EVERY_S = 1.0
_DRAWS = 1000
_SEED = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Time that a fleet spends, as measured and by the cost model, in us a second."""

    at_s: float
    spent: float
    model: float


class Watcher:
    """Takes a sample a second of a fleet whose plan does not change.

    Attributes:
        samples: Those taken.
    """

    def __init__(self) -> None:
        """Watch nothing yet."""
        self.samples: list[Sample] = []
        self._demand = Demand("event")
        self._epoch = 0

    def watch(self, caller: Caller, seconds: float) -> None:
        """Watch a fleet, the same each time, for some seconds.

        Raises:
            BenchError: Its plan changed.
        """
        until = time.monotonic() + seconds
        plan = caller.plan()
        if self._epoch not in (0, plan.epoch):
            raise BenchError(
                f"plan {self._epoch} was to stay, and is {plan.epoch}: see control.log"
            )
        self._epoch = plan.epoch
        layout = layout_of(plan.assignments)
        while (now := time.monotonic()) < until:
            loads = caller.call("GetFleetLoad", control_pb2.GetFleetLoadRequest(hot_keys=1))
            for node in loads.nodes:
                self._demand.take(node.node, node.load, plan.tables, int(1000 * now))
            workload = self._demand.workload(plan.topology, layout, HALF_LIFE_S)
            asked = control_pb2.ListDecisionsRequest(page_size=1)
            prices = _prices(caller.call("ListDecisions", asked).model)
            problem = Problem(plan=plan, layout=layout, workload=workload, prices=prices)
            if workload.asking is not None and (spent := spent_us(problem)):
                owned = [(each, each.owned_DB) for each in instances(problem)]
                self.samples.append(Sample(now, spent, fleet_cost(owned, prices).value))
            time.sleep(max(0.0, min(now + _EVERY_S, until) - time.monotonic()))


def _prices(model: control_pb2.CostModel) -> Prices:
    names = [field.name for field in dataclasses.fields(Prices) if field.name != "hit_us"]
    hbm, ddr, ssd = model.hit_us
    return Prices(hit_us=(hbm, ddr, ssd), **{name: getattr(model, name) for name in names})


def null_gains(samples: Sequence[Sample]) -> list[float]:
    """Return the gains of no operation, one after the other."""
    found, before = [], samples[0]
    for sample in samples:
        if sample.at_s >= before.at_s + APART_S:
            # As Autopilot.compare has it; the plan that was is the plan that is.
            found.append(1 - sample.spent / (before.spent * sample.model / before.model))
            before = sample
    return found


def best_possible(measured: Sequence[float], null: Sequence[float]) -> tuple[float, float]:
    """Return the median Spearman and median error of true gains against such measurements.

    Measured gains stand in for true ones, and are measured once more with a chance error each.
    """
    chance = np.random.default_rng(_SEED)
    true_G = np.array(measured)
    ranks, errors = [], []
    for _ in range(_DRAWS):
        again_G = 1 - (1 - true_G) * (1 - chance.choice(null, len(true_G)))
        ranks.append(float(stats.spearmanr(true_G, again_G).statistic))
        pairs = zip(true_G.tolist(), again_G.tolist(), strict=True)
        errors.append(float(np.median([gains.error(*pair) for pair in pairs])))
    return float(np.median(ranks)), float(np.median(errors))


def rows(samples: Sequence[Sample], recorded: Path) -> list[report.Row]:
    """Return the rows of a watched fleet, and of operations that were recorded, if there are any.

    Raises:
        BenchError: The fleet was watched too briefly.
    """
    null = null_gains(samples) if samples else []
    if len(null) < report.MIN_REPETITIONS:
        raise BenchError(f"{len(null)} times half a minute were watched: too few")
    case = f"gains of {len(null)} operations that never were"
    made = [
        report.measure((case, name, "share"), values, better="lower", target=0)
        for name, values in (
            ("largest but a tenth, either way", [float(np.quantile(np.abs(null), 0.9))]),
            ("either way", [abs(each) for each in null]),
        )
    ]
    if recorded.exists():
        measured = [each.measured for each in gains.gains(gains.read(recorded))]
        rank, error = best_possible(measured, null)
        case = f"true gains against {len(measured)} measured with such an error"
        made += [
            report.measure((case, "Spearman", "1"), [rank], better="higher", target=0),
            report.measure((case, "median error", "share"), [error], better="lower", target=0),
        ]
    return made
