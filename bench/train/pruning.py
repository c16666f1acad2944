"""AUC against bytes: pruned models, and the ways that people have to make one smaller.

All are models of `quality.py`. A target of N x is the bytes of the unpruned store, by its own
account, over N. What a pruned store then really takes, pages and index included, is what the curve
is drawn by. Hashed tables and narrow ones are charged as arrays without an index.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import plot, report
from bench.report import CONSOLE
from bench.servers import BUILD
from bench.train.quality import COUNTERS, CROSSED, DLRM, HISTORY
from bench.train.runs import (
    Case,
    Experiment,
    Outcome,
    Stream,
    mean_and_error,
    mean_row,
    outcomes,
)
from embertide.trainer.config import ModelConfig, PruneConfig, RunConfig, Utility

_CURVE = BUILD / "bench" / "train_pruning_curve.svg"
_SHARES = (2, 5, 10, 20, 50, 200)
_PEER_SHARES = (10, 50)
_MAX_LOST = 0.001
# At so much fewer bytes: the bars are 3 times and, of the best model, 20; the aims 10 and 50. What
# the store really takes is a tenth and more above a target of so few bytes.
_BARRED = {
    "ours": (5, 10),
    "ours, fp16": (12,),
    "history, ours": (25,),
    "history, ours, fp16": (25, 58),
    "counters, ours": (24,),
    "crosses, ours": (24,),
    "crosses, ours, fp16": (57,),
    "crosses, FIITED, fp16": (57,),
}
_BUDGET = 64 << 20
_WHOLE_BUDGET = {CROSSED: 448 << 20}  # else 256 MiB
_ACCUMULATOR_BYTES = 4
# Popularity fades sooner, and that of pairs sooner still; chosen on days 2 and 3.
_COUNTERS_HALF_LIFE = 1000
_CROSSES_HALF_LIFE = 500
# Distinct keys of the tables that are hashed, in the file that the bars are set for; the others
# have some dozens.
_SEEN = {"user": 271_000, "prev": 24_000, "cand": 32_000}
_CROSSES_SEEN = {
    "user": 271_000,
    "article": 32_000,
    "prev_cand": 1_633_000,
    "ref_cand": 117_000,
    "device_cand": 144_000,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A case on the curve.

    Attributes:
        line: That it is a point of.
        share: The number of times fewer bytes that it aims at.
        case: The runs.
        taken: Bytes, where they are not the store's account.
        most_lost: The bar of the AUC that it loses; 0: none.
    """

    line: str
    share: int
    case: Case
    taken: int = 0
    most_lost: float = 0.0


def case_of(name: str, base: RunConfig = DLRM, prune: PruneConfig | None = None, **of: Any) -> Case:
    """Return a model whose tables are changed as `of` says, but those that need rows of fp32."""
    tables = (
        each if "dtype" in of and each.counters is not None else dataclasses.replace(each, **of)
        for each in base.model.tables
    )
    model: ModelConfig = dataclasses.replace(base.model, tables=tuple(tables))
    budget = _WHOLE_BUDGET.get(base, 256 << 20) if prune is None else _BUDGET
    run = dataclasses.replace(base, model=model, prune=prune, ddr_budget_bytes=budget)
    return Case(name=name, run=run)


def row_bytes(dim: int) -> int:
    """Return the bytes of a row of a plain array, with its accumulator."""
    return 4 * dim + _ACCUMULATOR_BYTES


def _pruned(
    line: str,
    share: int,
    whole: int,
    utility: Utility = "fisher",
    base: RunConfig = DLRM,
    half_life: int = 2000,
    **of: Any,
) -> Point:
    prune = PruneConfig(bytes=whole // share, utility=utility, half_life=half_life)
    case = case_of(f"{line} {share}x", base, prune, **of)
    most_lost = _MAX_LOST if share in _BARRED.get(line, ()) else 0.0
    return Point(line=line, share=share, case=case, most_lost=most_lost)


def _history_points(whole: int) -> list[Point]:
    points = [_pruned("history, ours", share, whole, base=HISTORY) for share in (25, 50)]
    for share in (25, 58):
        points.append(_pruned("history, ours, fp16", share, whole, base=HISTORY, dtype="fp16"))
    return points


def _counters_points(whole: int) -> list[Point]:
    return [
        _pruned("counters, ours", share, whole, base=COUNTERS, half_life=_COUNTERS_HALF_LIFE)
        for share in (24, 50)
    ]


def _crosses_points(whole: int) -> list[Point]:
    def point(line: str, share: int, utility: Utility, **of: Any) -> Point:
        line, half_life = f"crosses, {line}", _CROSSES_HALF_LIFE
        return _pruned(line, share, whole, utility, CROSSED, half_life, **of)

    points = [point("ours", share, "fisher") for share in (24, 50, 200)]
    points.append(point("ours, fp16", 57, "fisher", dtype="fp16"))
    points.append(point("FIITED, fp16", 57, "norms", dtype="fp16"))
    for share in _PEER_SHARES:
        points += [
            point("FIITED, rows", share, "norms"),
            point("frequency", share, "accesses"),
            _hashed("crosses, hashing", share, whole, CROSSED, _CROSSES_SEEN),
        ]
    points.append(_narrow("crosses, one dimension", whole, CROSSED, _CROSSES_SEEN))
    return points


def _hashed(line: str, share: int, whole: int, base: RunConfig, seen: Mapping[str, int]) -> Point:
    """Cut the rows of the large tables alike."""
    left = whole // share // row_bytes(base.model.tables[0].dim)
    rows = {table: max(1, left * keys // sum(seen.values())) for table, keys in seen.items()}
    fold = tuple((c.name, rows[c.table]) for c in base.model.columns if c.table in rows)
    case = dataclasses.replace(case_of(f"{line} {share}x", base), fold=fold)
    return Point(line=line, share=share, case=case, taken=whole // share)


def _narrow(line: str, whole: int, base: RunConfig, seen: Mapping[str, int]) -> Point:
    """Leave one dimension of each row, and counts."""
    taken = sum(seen.values()) * row_bytes(1)
    for table in base.model.tables:
        if table.counters is not None:
            taken += seen[table.name] * table.counters.values * 4
    case = case_of(line, base, dim=1, chunks=1)
    return Point(line=line, share=round(whole / taken), case=case, taken=taken)


def _points(whole: int) -> list[Point]:
    points = [_pruned("ours", share, whole) for share in _SHARES]
    points += [_pruned("ours, fp16", share, whole, dtype="fp16") for share in (12, 58)]
    for share in _PEER_SHARES:
        points += [
            _pruned("ours, 4 chunks", share, whole, chunks=4),
            _pruned("squares", share, whole, "squares"),
            _pruned("FIITED, 4 chunks", share, whole, "norms", chunks=4),
            _pruned("FIITED, rows", share, whole, "norms"),
            _pruned("frequency", share, whole, "accesses"),
            _hashed("hashing", share, whole, DLRM, _SEEN),
        ]
    points.append(_narrow("one dimension", whole, DLRM, _SEEN))
    return points


def _row(case: str, found: Sequence[float], plain: Sequence[float], loss: float) -> report.Row:
    """Compare AUC by seed; the spread is the standard error of the differences."""
    peer, _ = mean_and_error(plain)
    _, error = mean_and_error([a - b for a, b in zip(found, plain, strict=True)])
    bar = peer - loss if loss else 0.0
    return mean_row(case, found, peer, "unpruned", bar=bar, error=error)


def _aucs(found: Sequence[Outcome]) -> list[float]:
    return [outcome.auc for outcome in found]


def whole(plain: Sequence[Outcome]) -> int:
    """Return bytes to a hundred kilobytes, so that targets are the same whatever the seeds."""
    return round(max(outcome.bytes for outcome in plain) / 1e5) * 100_000


def compare(
    groups: Mapping[str, tuple[Sequence[Outcome], Sequence[Point]]],
    seeds: Sequence[int],
    experiment: Experiment,
    *,
    jobs: int,
    picture: Path,
) -> list[report.Row]:
    """Return rows of each point against the unpruned model of its group, paired by seed.

    Args:
        groups: Unpruned outcomes and points, by the unpruned model's name.
        seeds: Those of the unpruned outcomes.
        experiment: The experiment to measure.
        jobs: Processes at a time.
        picture: Where the curve is drawn.
    """
    cases = [point.case for _, points in groups.values() for point in points]
    found = outcomes(cases, seeds, experiment, jobs=jobs)
    curve, rows = {}, []
    for plain, points in groups.values():
        # A group's first line begins at its unpruned model.
        curve[points[0].line] = [(whole(plain) / 1e6, *mean_and_error(_aucs(plain)))]
        for point in points:
            outcome = found[point.case.name]
            taken = point.taken or max(each.bytes for each in outcome)
            said = f"{point.case.name}: {taken / 1e6:.2f} MB, {whole(plain) / taken:.1f}x"
            rows.append(_row(said, _aucs(outcome), _aucs(plain), point.most_lost))
            if "repeated" in outcome[0].series:
                ours, theirs = (
                    [run.series["repeated"][0] for run in runs] for runs in (outcome, plain)
                )
                said = f"{said}, without first impressions"
                rows.append(_row(said, ours, theirs, point.most_lost))
            line = curve.setdefault(point.line, [])
            line.append((taken / 1e6, *mean_and_error(_aucs(outcome))))
    plot.curves("AUC against bytes", ("MB, by the store's account", "AUC"), curve, picture)
    CONSOLE.print(f"the curve: {picture}")
    return rows


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return rows of each case against its unpruned model, paired by seed."""
    models = {
        "unpruned": (DLRM, _points),
        "history, unpruned": (HISTORY, _history_points),
        "counters, unpruned": (COUNTERS, _counters_points),
        "crosses, unpruned": (CROSSED, _crosses_points),
    }
    bases = [case_of(name, base) for name, (base, _) in models.items()]
    found = outcomes(bases, seeds, stream, jobs=jobs)
    groups = {
        name: (found[name], points(whole(found[name]))) for name, (_, points) in models.items()
    }
    return compare(groups, seeds, stream, jobs=jobs, picture=_CURVE)
