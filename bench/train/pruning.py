"""AUC against bytes: pruned models, and the ways that people have to make one smaller.

All are models of `quality.py`. A target of N x is the bytes of the unpruned store, by its own
account, over N. What a pruned store then really takes, pages and index included, is what the curve
is drawn by. Hashed tables and narrow ones are charged as arrays without an index.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from bench import plot, report
from bench.servers import BUILD
from bench.train.quality import DLRM, HISTORY
from bench.train.runs import Case, Experiment, Outcome, Stream, mean_and_error, outcomes
from embertide.trainer.config import ModelConfig, PruneConfig

_CONSOLE = Console(stderr=True, highlight=False)
_CURVE = BUILD / "bench" / "train_pruning_curve.svg"
_SHARES = (2, 5, 10, 20, 50, 200)
_HISTORY_SHARES = (25, 50)  # the first comes to 22 of the store's account
_PEER_SHARES = (10, 50)
_MOST_LOST = 0.001
# At so much fewer bytes: the bars are 3 times and, of the history model, 20; the aims 10 and 50.
_BARRED = {"squares": (5, 10, 20), "history, squares": _HISTORY_SHARES}
_BUDGET = 256 << 20
_ACCUMULATOR_BYTES = 4
# Distinct keys of the columns that are hashed, in the file that the bars are set for; the others
# have some dozens.
_SEEN = {"user": 271_000, "prev": 24_000, "cand": 32_000}

Utility = Literal["squares", "norms", "accesses"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A case on the curve.

    Attributes:
        line: That it is a point of.
        share: How much fewer bytes it aims at.
        case: The runs.
        taken: Bytes, where they are not the store's account.
        most_lost: The bar of the AUC that it loses; 0: none.
    """

    line: str
    share: int
    case: Case
    taken: int = 0
    most_lost: float = 0.0


def _case(name: str, *, chunks: int = 1, dim: int = 16, prune: PruneConfig | None = None) -> Case:
    """Return a DLRM."""
    tables = (dataclasses.replace(each, chunks=chunks, dim=dim) for each in DLRM.model.tables)
    model: ModelConfig = dataclasses.replace(DLRM.model, tables=tuple(tables))
    run = dataclasses.replace(DLRM, model=model, prune=prune, ddr_budget_bytes=_BUDGET)
    return Case(name=name, run=run)


def _history(name: str, *, prune: PruneConfig | None = None) -> Case:
    run = dataclasses.replace(HISTORY, prune=prune, ddr_budget_bytes=_BUDGET)
    return Case(name=name, run=run)


def _bar(line: str, share: int) -> float:
    return _MOST_LOST if share in _BARRED.get(line, ()) else 0.0


def row_bytes(dim: int) -> int:
    """Return the bytes of a row of a plain array, with its accumulator."""
    return 4 * dim + _ACCUMULATOR_BYTES


def _history_points(whole: int) -> list[Point]:
    return [
        Point(
            line="history, squares",
            share=share,
            case=_history(f"history, squares {share}x", prune=PruneConfig(bytes=whole // share)),
            most_lost=_bar("history, squares", share),
        )
        for share in _HISTORY_SHARES
    ]


def _pruned(line: str, share: int, whole: int, utility: Utility, chunks: int = 1) -> Point:
    prune = PruneConfig(bytes=whole // share, utility=utility)
    case = _case(f"{line} {share}x", chunks=chunks, prune=prune)
    return Point(line=line, share=share, case=case, most_lost=_bar(line, share))


def _hashed(share: int, whole: int) -> Point:
    """Cut the rows of the large tables alike."""
    left = whole // share // row_bytes(DLRM.model.tables[0].dim)
    all_seen = sum(_SEEN.values())
    fold = tuple((name, max(1, left * seen // all_seen)) for name, seen in _SEEN.items())
    case = dataclasses.replace(_case(f"hashing {share}x"), fold=fold)
    return Point(line="hashing", share=share, case=case, taken=whole // share)


def _points(whole: int) -> list[Point]:
    points = [_pruned("squares", share, whole, "squares") for share in _SHARES]
    for share in _PEER_SHARES:
        points += [
            _pruned("squares, 4 chunks", share, whole, "squares", 4),
            _pruned("FIITED, 4 chunks", share, whole, "norms", 4),
            _pruned("FIITED, rows", share, whole, "norms"),
            _pruned("frequency", share, whole, "accesses"),
            _hashed(share, whole),
        ]
    narrow = sum(_SEEN.values()) * row_bytes(1)
    case = _case("one dimension", dim=1)
    points.append(Point(line="one dimension", share=round(whole / narrow), case=case, taken=narrow))
    return points


def _row(case: str, found: Sequence[float], plain: Sequence[float], loss: float) -> report.Row:
    """Compare AUC by seed; the spread is the standard error of the differences."""
    ours, _ = mean_and_error(found)
    peer, _ = mean_and_error(plain)
    _, error = mean_and_error([a - b for a, b in zip(found, plain, strict=True)])
    return report.Row(
        case=case,
        metric="AUC",
        unit="",
        ours=round(ours, 5),
        peer=round(peer, 5),
        peer_name="unpruned",
        ratio=round(ours / peer, 5),
        better="higher",
        n=len(found),
        spread=round(error, 6),
        target=round((peer - loss) / peer, 5) if loss else 0.0,
    )


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
        experiment: What is measured.
        jobs: Processes at a time.
        picture: Where the curve is drawn.
    """
    cases = [point.case for _, points in groups.values() for point in points]
    found = outcomes(cases, seeds, experiment, jobs=jobs)
    curve, rows = {}, []
    for name, (plain, points) in groups.items():
        curve[name] = [(whole(plain) / 1e6, *mean_and_error(_aucs(plain)))]
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
    _CONSOLE.print(f"the curve: {picture}")
    return rows


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return rows of each case against its unpruned model, paired by seed."""
    bases = _case("unpruned"), _history("history, unpruned")
    found = outcomes(bases, seeds, stream, jobs=jobs)
    plain, history = (found[base.name] for base in bases)
    groups = {
        "unpruned": (plain, _points(whole(plain))),
        "history, unpruned": (history, _history_points(whole(history))),
    }
    return compare(groups, seeds, stream, jobs=jobs, picture=_CURVE)
