"""The gain that a plan is predicted to bring, and how far the cost model can be trusted."""

from collections.abc import Sequence
from typing import Any

from embertide._common.terminal import say
from embertide.v1 import control_pb2


def gain_facts(before: control_pb2.PlanCost, after: control_pb2.PlanCost) -> dict[str, Any]:
    """Return two costs and the share that is saved, for JSON."""
    return {
        "busiest_us": [round(before.busiest_us), round(after.busiest_us)],
        "mean_us": [round(before.mean_us), round(after.mean_us)],
        "asked_keys": [round(before.asked_keys), round(after.asked_keys)],
        "gain": round(_saved(before.busiest_us, after.busiest_us), 4),
    }


def _saved(before: float, after: float) -> float:
    return 1 - after / before if before else 0.0


def _line(what: str, before: float, after: float) -> str:
    # A share of what reads as 0 says nothing.
    share = f" ({-100 * _saved(before, after):+.1f} %)" if before >= 0.5 else ""
    return f"{what} {before:,.0f} -> {after:,.0f}{share}"


def show_gain(before: control_pb2.PlanCost, after: control_pb2.PlanCost) -> None:
    """Print what a plan is predicted to gain, a second."""
    say(
        "predicted, a second: "
        + "; ".join(
            (
                _line("busiest device, us", before.busiest_us, after.busiest_us),
                _line("mean device, us", before.mean_us, after.mean_us),
                _line("keys asked of peers", before.asked_keys, after.asked_keys),
            )
        )
    )


def model_line(model: control_pb2.CostModel) -> str:
    """Say how far the cost model is off."""
    if not model.windows:
        return "cost model: nothing measured yet, its prices are defaults"
    text = (
        f"cost model: {model.windows:,} load windows, error {model.error_median:.1%} (median), "
        f"{model.error_p90:.1%} (p90); of latencies {model.latency_error_median:.1%} (median)"
    )
    return text if model.trusted else text + "; NOT TRUSTED: it starts nothing by these prices"


def correction_text(correction: control_pb2.GainCorrection) -> str:
    """Say how predicted gains of a kind are corrected."""
    text = f"x{correction.factor:.2f} by {correction.operations:,} operations"
    if correction.operations > 1:
        text += f" (half of them within x{correction.spread:.2f} of their median)"
    return text + (f", {correction.left_out:,} left out" if correction.left_out else "")


def corrections_line(corrections: Sequence[control_pb2.GainCorrection]) -> str:
    """Say how predicted gains are corrected; empty: a control plane of a build before."""
    if not corrections:
        return ""
    of_all = corrections[0]
    if not of_all.operations and not of_all.left_out:
        return "gains: none measured yet, predictions are taken as they are"
    return "gains, measured over predicted: " + "; ".join(
        f"{each.kind or 'all'} {correction_text(each)}" for each in corrections
    )
