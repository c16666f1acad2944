"""How well gains are predicted, from recorded operations: as the cost model does, and corrected.

Each operation is predicted from those alone whose gains had been measured before it was decided, as
the control plane does. `pays` records operations of real nodes, as JSON, a decision a line.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from google.protobuf import json_format
from scipy import stats

from bench import plot, report
from bench.servers import BUILD, BenchError
from embertide.server.core.drift.correction import factors, is_measured, kind_of, measured_of
from embertide.v1 import control_pb2

RECORDED = BUILD / "bench" / "drift_operations.jsonl"
PACED = BUILD / "bench" / "drift_operations_paced.jsonl"
_SPEARMAN, _ERROR = 0.9, 0.25
_GAIN_MIN = 1e-3  # relative errors of less say nothing


class Gains(NamedTuple):
    """The gains of an operation, as shares of the cost."""

    predicted: float
    expected: float
    measured: float


def write(path: Path, acted: Sequence[control_pb2.Decision]) -> None:
    """Record operations."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json_format.MessageToJson(each, indent=None) for each in acted]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read(path: Path) -> list[control_pb2.Decision]:
    """Return recorded operations.

    Raises:
        BenchError: There are none.
    """
    if not path.exists():
        raise BenchError(f"{path} is missing: `make bench-drift PARTS=pays` records operations")
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json_format.Parse(line, control_pb2.Decision()) for line in lines]


def gains(acted: Sequence[control_pb2.Decision]) -> list[Gains]:
    """Return the gains of the measured ones; corrected by those alone that were measured before."""
    measured = [each for each in acted if is_measured(each)]
    found = []
    for each in measured:
        before = [other for other in measured if other.measured_ms <= each.at_ms]
        kind = kind_of(each.before, each.after, each.triggers)
        factor = factors(measured_of(before, each.at_ms))[kind]
        expected = factor.expected(each.predicted_gain)
        found.append(Gains(each.predicted_gain, expected, each.measured_gain))
    return found


def error(predicted: float, measured: float) -> float:
    """Return the relative error of a predicted gain."""
    return abs(predicted - measured) / max(abs(measured), _GAIN_MIN)


def rows(of: str, acted: Sequence[control_pb2.Decision]) -> list[report.Row]:
    """Return the rows that compare predicted gains with measured ones.

    Raises:
        BenchError: Too few were measured.
    """
    found = gains(acted)
    if len(found) < report.MIN_REPETITIONS:
        raise BenchError(f"{of}: {len(found)} of {len(acted)} operations measured: too few")
    measured = [each.measured for each in found]
    made = []
    for name in ("predicted", "expected"):
        values = [getattr(each, name) for each in found]
        rank = float(stats.spearmanr(values, measured).statistic)
        case = f"{of}, {len(found)} of {len(acted)} measured: {name}"
        made += [
            report.measure(
                (case, "Spearman of this and the measured gain", "1"),
                [rank] * len(found),
                better="higher",
                target=_SPEARMAN,
                claim="E.7",
            ),
            report.measure(
                (case, "median error of this gain", "share"),
                [error(*pair) for pair in zip(values, measured, strict=True)],
                better="lower",
                target=_ERROR,
                claim="E.7",
            ),
        ]
    plot.scatter(
        "What each operation saves",
        ("expected share of the cost", "measured share of the cost"),
        [(each.expected, each.measured) for each in found],
        BUILD / "bench" / "drift_gains.png",
    )
    return made


def measure(path: Path) -> list[report.Row]:
    """Return the rows of E.7 of recorded operations."""
    return rows("recorded operations", read(path))
