"""AUC against bytes: pruned models, and the ways that people have to make one smaller.

All are models of `quality.py`. A target of N x is the bytes of the unpruned store, by its own
account, over N. What a pruned store then really takes, pages and index included, is what the curve
is drawn by. Hashed tables and narrow ones are charged as arrays without an index.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from rich.console import Console

from bench import plot, report
from bench.servers import BUILD
from bench.train.quality import DLRM, HISTORY
from bench.train.runs import Case, Outcome, Stream, mean_and_error, outcomes
from embertide.trainer.config import ModelConfig, PruneConfig

_CONSOLE = Console(stderr=True, highlight=False)
_CURVE = BUILD / "bench" / "train_pruning_curve.svg"
_SHARES = (2, 5, 10, 20, 50, 200)
_HISTORY_SHARES = (20, 50)
_PEER_SHARES = (10, 50)
_MOST_LOST = 0.001
# At so much fewer bytes: the bars are 3 times and, of the history model, 20; the aims 10 and 50.
_BARRED = {"squares": (5, 10, 20), "history, squares": _HISTORY_SHARES}
_BUDGET = 256 << 20
_ACCUMULATOR_BYTES = 4
# Distinct keys of the columns that are hashed, in the file that the bars are set for; the others
# have some dozens.
_SEEN = {"user": 271_000, "prev": 24_000, "cand": 32_000}

_Utility = Literal["squares", "norms", "accesses"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """A case on the curve.

    Attributes:
        line: That it is a point of.
        share: How much fewer bytes it aims at.
        case: The runs.
        taken: Bytes, where they are not the store's account.
    """

    line: str
    share: int
    case: Case
    taken: int = 0


def _case(name: str, *, chunks: int = 1, dim: int = 16, prune: PruneConfig | None = None) -> Case:
    """Return a DLRM."""
    tables = (dataclasses.replace(each, chunks=chunks, dim=dim) for each in DLRM.model.tables)
    model: ModelConfig = dataclasses.replace(DLRM.model, tables=tuple(tables))
    run = dataclasses.replace(DLRM, model=model, prune=prune, ddr_budget_bytes=_BUDGET)
    return Case(name=name, run=run)


def _history(name: str, *, prune: PruneConfig | None = None) -> Case:
    run = dataclasses.replace(HISTORY, prune=prune, ddr_budget_bytes=_BUDGET)
    return Case(name=name, run=run)


def _history_points(whole: int) -> list[_Point]:
    return [
        _Point(
            line="history, squares",
            share=share,
            case=_history(f"history, squares {share}x", prune=PruneConfig(bytes=whole // share)),
        )
        for share in _HISTORY_SHARES
    ]


def _pruned(line: str, share: int, whole: int, utility: _Utility, chunks: int = 1) -> _Point:
    prune = PruneConfig(bytes=whole // share, utility=utility)
    case = _case(f"{line} {share}x", chunks=chunks, prune=prune)
    return _Point(line=line, share=share, case=case)


def _hashed(share: int, whole: int) -> _Point:
    """Cut the rows of the large tables alike."""
    left = whole // share // (4 * DLRM.model.tables[0].dim + _ACCUMULATOR_BYTES)
    all_seen = sum(_SEEN.values())
    fold = tuple((name, max(1, left * seen // all_seen)) for name, seen in _SEEN.items())
    case = dataclasses.replace(_case(f"hashing {share}x"), fold=fold)
    return _Point(line="hashing", share=share, case=case, taken=whole // share)


def _points(whole: int) -> list[_Point]:
    points = [_pruned("squares", share, whole, "squares") for share in _SHARES]
    for share in _PEER_SHARES:
        points += [
            _pruned("squares, 4 chunks", share, whole, "squares", 4),
            _pruned("FIITED, 4 chunks", share, whole, "norms", 4),
            _pruned("FIITED, rows", share, whole, "norms"),
            _pruned("frequency", share, whole, "accesses"),
            _hashed(share, whole),
        ]
    narrow = sum(_SEEN.values()) * (4 + _ACCUMULATOR_BYTES)
    case = _case("one dimension", dim=1)
    points.append(
        _Point(line="one dimension", share=round(whole / narrow), case=case, taken=narrow)
    )
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


def _whole(plain: Sequence[Outcome]) -> int:
    """Return bytes to a hundred kilobytes, so that targets are the same whatever the seeds."""
    return round(max(outcome.bytes for outcome in plain) / 1e5) * 100_000


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return rows of each case against its unpruned model, paired by seed."""
    bases = _case("unpruned"), _history("history, unpruned")
    found = outcomes(bases, seeds, stream, jobs=jobs)
    plains = [found[base.name] for base in bases]
    compared = [(point, plains[0]) for point in _points(_whole(plains[0]))]
    compared += [(point, plains[1]) for point in _history_points(_whole(plains[1]))]
    found = outcomes([point.case for point, _ in compared], seeds, stream, jobs=jobs)
    curve = {
        base.name: [(_whole(plain) / 1e6, *mean_and_error(_aucs(plain)))]
        for base, plain in zip(bases, plains, strict=True)
    }
    rows = []
    for point, plain in compared:
        outcome = found[point.case.name]
        taken = point.taken or max(each.bytes for each in outcome)
        lost = _MOST_LOST if point.share in _BARRED.get(point.line, ()) else 0.0
        name = f"{point.case.name}: {taken / 1e6:.2f} MB, {_whole(plain) / taken:.1f}x"
        rows.append(_row(name, _aucs(outcome), _aucs(plain), lost))
        repeated = [each.repeated_auc for each in outcome]
        theirs = [each.repeated_auc for each in plain]
        rows.append(_row(f"{name}, without first impressions", repeated, theirs, lost))
        line = curve.setdefault(point.line, [])
        line.append((taken / 1e6, *mean_and_error(_aucs(outcome))))
    plot.curves("AUC against bytes", ("MB, by the store's account", "AUC"), curve, _CURVE)
    _CONSOLE.print(f"the curve: {_CURVE}")
    return rows
