"""The correction of predicted gains by the gains that operations had: a factor, and why it is so.

A plan that saves the share g of the cost leaves 1 - g of it. Savings of plans multiply, so gains
are compared by s = -ln(1 - g), which is g where g is small. An operation's ratio is s as measured
over s as predicted; a prediction that a factor f corrects is

    expected = 1 - (1 - predicted) ** f

It grows with the prediction, has its sign, and is never the whole cost. f is found in two steps:

    f of a kind = its median ratio, drawn towards that of all kinds as if PRIOR operations had it
    f of all    = the median ratio of all operations, drawn in the same way towards 1

More than PRIOR where ratios are far apart: what varies more is believed later.

A measured gain is off by about as much whether it is large or small, so an operation that was to
save little says little: weights grow with s up to FULL_SAVING. They halve in HALF_LIFE_MS, so that
a fleet which nothing moves, because of what was measured once, is trusted again. Ratios are bounded
by RATIO_MIN and RATIO_MAX, and so is f. The order of the records does not matter.

A kind says what the plan saves, and when it was decided. It saves work in all, or the time of the
busiest device above the mean: prices that are wrong hurt these differently. An operation that
begins as soon as looks agree is planned while some of the counted reads are from before the change,
so it gains more than they say; one that was held back meanwhile is planned by settled counts.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from embertide.server.core.plan.instance import Floats
from embertide.v1 import control_pb2

Outcome = control_pb2.DecisionOutcome
WORK, BALANCE = "work", "balance"
_HELD_BACK = ", held back"
KINDS = (WORK, BALANCE, WORK + _HELD_BACK, BALANCE + _HELD_BACK)
PRIOR = 2.0  # operations
SPREAD_USUAL = 1.5  # up to this factor
# An operation that saved nothing, or cost something, has the lower one.
RATIO_MIN, RATIO_MAX = 0.1, 4.0
FULL_SAVING = 0.1
# Beyond these a gain is no measurement: the whole cost saved, or the cost more than doubled.
GAIN_MIN, GAIN_MAX = -1.0, 0.99
# The trigger of a look that repeats one which came to a plan, and something forbade to begin.
HELD_BACK = "held_back"
HALF_LIFE_MS = 7 * 24 * 3600 * 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """An operation whose gain was measured.

    Attributes:
        kind: One of KINDS.
        predicted: Share of the cost that it was to save.
        measured: Share that it did save.
        age_ms: Time since the measurement.
    """

    kind: str
    predicted: float
    measured: float
    age_ms: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether these are numbers that a ratio can be made of."""
        return 0 < self.predicted <= GAIN_MAX and GAIN_MIN <= self.measured <= GAIN_MAX

    @property
    def ratio(self) -> float:
        """Its measured gain over its predicted one, within the bounds. Requires: it is sound."""
        ratio = math.log1p(-self.measured) / math.log1p(-self.predicted)
        return min(max(ratio, RATIO_MIN), RATIO_MAX)

    @property
    def weight(self) -> float:
        """The share of an operation that it counts as, at most 1. Requires: it is sound."""
        full = min(1.0, -math.log1p(-self.predicted) / FULL_SAVING)
        return full * math.exp2(-max(0, self.age_ms) / HALF_LIFE_MS)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """The correction of one kind of gain.

    Attributes:
        kind: The kind; empty: of all operations together.
        value: The factor; 1 changes nothing.
        operations: Operations that it was learned from.
        spread: Half of these are within this factor of their median; 1: there is none.
        left_out: Operations whose numbers were refused.
    """

    kind: str = ""
    value: float = 1.0
    operations: int = 0
    spread: float = 1.0
    left_out: int = 0

    def expected(self, predicted: float) -> float:
        """Return a predicted gain, corrected. One that is no share below 1 stays as it is."""
        if not predicted < 1:
            return predicted
        return -math.expm1(self.value * math.log1p(-predicted))

    def message(self) -> control_pb2.GainCorrection:
        """Write it."""
        return control_pb2.GainCorrection(
            kind=self.kind,
            factor=self.value,
            operations=self.operations,
            spread=self.spread,
            left_out=self.left_out,
        )


def factors(records: Iterable[Measured]) -> dict[str, Factor]:
    """Return the correction of each kind; that of all operations is under the empty name."""
    known = list(records)
    whole = _factor("", known, 1.0)
    found = {"": whole}
    for kind in KINDS:
        found[kind] = _factor(kind, [each for each in known if each.kind == kind], whole.value)
    return found


def _factor(kind: str, known: Sequence[Measured], towards: float) -> Factor:
    sound = [each for each in known if each.is_sound]
    left_out = len(known) - len(sound)
    if not sound:
        return Factor(kind=kind, value=towards, left_out=left_out)
    logs = np.log([each.ratio for each in sound])
    weights = np.array([each.weight for each in sound])
    median, total = _median(logs, weights), math.fsum(weights)
    spread = _median(np.abs(logs - median), weights)
    prior = PRIOR * max(1.0, spread / math.log(SPREAD_USUAL)) ** 2
    drawn = (total * median + prior * math.log(towards)) / (total + prior)
    return Factor(
        kind=kind,
        value=math.exp(drawn),
        operations=len(sound),
        spread=math.exp(spread),
        left_out=left_out,
    )


def _median(values: Floats, weights: Floats) -> float:
    """Return the weighted median: the middle between the two where the weights fall in halves."""
    order = np.lexsort((weights, values))
    values, sums = values[order], np.cumsum(weights[order])
    low, high = (int(np.searchsorted(sums, sums[-1] / 2, side)) for side in ("left", "right"))
    return float(values[low] + values[min(high, len(values) - 1)]) / 2


def kind_of(
    before: control_pb2.PlanCost, after: control_pb2.PlanCost, triggers: Iterable[str]
) -> str:
    """Return the kind of a plan's gain, by its costs and by what led to the look that made it."""
    return _saving(before, after) + _HELD_BACK * (HELD_BACK in triggers)


def _saving(before: control_pb2.PlanCost, after: control_pb2.PlanCost) -> str:
    """Return what a plan saves more of; BALANCE where the costs are not known."""
    if not min(before.busiest_us, before.mean_us, after.busiest_us, after.mean_us) > 0:
        return BALANCE
    work = math.log(before.mean_us) - math.log(after.mean_us)
    balance = math.log(before.busiest_us) - math.log(after.busiest_us) - work
    return WORK if work >= balance else BALANCE


def measured_of(decisions: Iterable[control_pb2.Decision], now_ms: int) -> list[Measured]:
    """Return the operations whose gains decisions record."""
    return [
        Measured(
            kind_of(each.before, each.after, each.triggers),
            each.predicted_gain,
            each.measured_gain,
            now_ms - each.measured_ms,
        )
        for each in decisions
        if is_measured(each)
    ]


def is_measured(decision: control_pb2.Decision) -> bool:
    """Whether a decision has started an operation whose gain was measured."""
    return decision.outcome == Outcome.DECISION_OUTCOME_ACTED and decision.measured_ms > 0
