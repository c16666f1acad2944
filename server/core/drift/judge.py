"""The verdict on a proposal: a function of numbers alone."""

import dataclasses

from embertide.server.core.drift.options import DriftOptions
from embertide.v1 import control_pb2

Outcome = control_pb2.DecisionOutcome
DAY_MS = 24 * 3600 * 1000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The facts that a verdict goes by.

    Attributes:
        mode: The control plane's treatment of drift now.
        gain: Share of the cost that the plan is expected to save.
        saved_us: Time that its moves save a second.
        bytes: Bytes that it moves.
        changes: Whether it moves or changes anything at all.
        bytes_per_s: Speed of former moves, as measured.
        us_per_byte: Cost of a moved byte for the nodes.
        trusted: Whether the cost model's predictions may be acted on.
        model_error: Their median relative error; 0: not known.
        agreed: Looks in a row that found such a gain, this one included.
        quiet_ms: Since the last operation began; None: there was none.
        measuring: Whether the gain of the last operation is still being measured.
        acted: Operations of the last 24 hours that were started for drift.
        moved_bytes: Bytes that they moved.
        frozen: Why nothing may begin now; empty: it may.
        must: A reason that needs no gain, as a node that joined; empty: none.
        predicted: The cost model's prediction that `gain` is made of; None: it is `gain`.
        learned_from: Operations by which it was corrected.
        probe: Whether only a part of the plan is to move, to learn what it gains.
    """

    mode: "control_pb2.DriftMode.ValueType"
    gain: float
    saved_us: float
    bytes: int
    changes: bool
    bytes_per_s: float
    us_per_byte: float
    trusted: bool = True
    model_error: float = 0.0
    agreed: int = 1
    quiet_ms: int | None = None
    measuring: bool = False
    acted: int = 0
    moved_bytes: int = 0
    frozen: str = ""
    must: str = ""
    predicted: float | None = None
    learned_from: int = 0
    probe: bool = False

    @property
    def gain_text(self) -> str:
        """The gain for people."""
        if self.predicted is None or not self.learned_from:
            return f"predicted gain {self.gain:.1%}"
        return (
            f"expected gain {self.gain:.1%} (predicted {self.predicted:.1%}, corrected by "
            f"{self.learned_from} operations)"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The outcome of a look, and why.

    Attributes:
        outcome: The outcome.
        why: For people, with the numbers that decided.
        move_s: Time that the move takes.
        cost_us: Cost of the move for the nodes.
        horizon_gain_us: Time that the new plan saves until the horizon, once it holds.
    """

    outcome: "control_pb2.DecisionOutcome.ValueType"
    why: str
    move_s: float
    cost_us: float
    horizon_gain_us: float


def judge(case: Case, options: DriftOptions) -> Verdict:
    """Return the verdict: the first rule that forbids the move says so, else it is made."""
    move_s = case.bytes / case.bytes_per_s if case.bytes_per_s else 0.0
    cost_us = case.bytes * case.us_per_byte
    gain_us = case.saved_us * max(0.0, options.horizon_s - move_s)
    outcome, why = _first_rule(case, options, cost_us, gain_us)
    return Verdict(
        outcome=outcome, why=why, move_s=move_s, cost_us=cost_us, horizon_gain_us=gain_us
    )


def _first_rule(
    case: Case, options: DriftOptions, cost_us: float, gain_us: float
) -> tuple["control_pb2.DecisionOutcome.ValueType", str]:
    gain = case.gain_text
    if not case.changes:
        return Outcome.DECISION_OUTCOME_NO_GAIN, "the planner keeps today's plan"
    if not case.must:
        if case.gain < options.min_gain:
            return (
                Outcome.DECISION_OUTCOME_NO_GAIN,
                f"{gain}, less than the {options.min_gain:.1%} that a plan must save",
            )
        if gain_us <= cost_us:
            return (
                Outcome.DECISION_OUTCOME_TOO_COSTLY,
                f"{gain}: saves {gain_us / 1e6:,.1f} s of the nodes' time over the horizon of "
                f"{options.horizon_s:,.0f} s; moving {case.bytes:,} bytes costs "
                f"{cost_us / 1e6:,.1f} s",
            )
        if not case.trusted:
            return (
                Outcome.DECISION_OUTCOME_UNSURE,
                f"{gain}, but the cost model's median error is {case.model_error:.0%}",
            )
        if case.agreed < options.confirmations:
            return (
                Outcome.DECISION_OUTCOME_UNCONFIRMED,
                f"{gain}; look {case.agreed} of the {options.confirmations} that must agree",
            )
    gained = case.must or gain
    if case.mode != control_pb2.DRIFT_MODE_AUTO:
        return Outcome.DECISION_OUTCOME_ADVISED, f"{gained}; in mode auto it would be done"
    return _held_back(case, options, gained) or (
        Outcome.DECISION_OUTCOME_ACTED,
        f"{gained}: {'a probe ' if case.probe else ''}moves {case.bytes:,} bytes",
    )


def _held_back(
    case: Case, options: DriftOptions, gained: str
) -> tuple["control_pb2.DecisionOutcome.ValueType", str] | None:
    """Return what forbids to act now, though it would pay."""
    if case.frozen:
        return Outcome.DECISION_OUTCOME_FROZEN, f"{gained}; {case.frozen}"
    cooling_ms = options.cooldown_s * 1000
    if not case.must and case.quiet_ms is not None and case.quiet_ms < cooling_ms:
        return (
            Outcome.DECISION_OUTCOME_COOLING_DOWN,
            f"{gained}; the last operation began {case.quiet_ms / 1000:,.0f} s ago, the cool-down "
            f"is {options.cooldown_s:,.0f} s",
        )
    if not case.must and case.measuring:
        return (
            Outcome.DECISION_OUTCOME_COOLING_DOWN,
            f"{gained}; the gain of the last operation is still being measured",
        )
    if case.acted >= options.operations_per_day:
        return (
            Outcome.DECISION_OUTCOME_OVER_BUDGET,
            f"{gained}; {case.acted} operations in 24 hours, as many as allowed",
        )
    if options.bytes_per_day and case.moved_bytes + case.bytes > options.bytes_per_day:
        return (
            Outcome.DECISION_OUTCOME_OVER_BUDGET,
            f"{gained}; it would move {case.bytes:,} bytes, and {case.moved_bytes:,} of the "
            f"{options.bytes_per_day:,} allowed in 24 hours are spent",
        )
    return None
