"""AUC against bytes: pruned models, and the ways that people have to make one smaller.

All are the DLRM of `quality.py`. A target of N x is the bytes of the unpruned store, by its own
account, over N. What a pruned store then really takes, pages and index included, is what the curve
is drawn by. Hashed tables and narrow ones are charged as arrays without an index.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from rich.console import Console

from bench import plot, report
from bench.servers import BUILD
from bench.train.quality import DLRM
from bench.train.runs import Case, Outcome, Stream, mean_and_error, outcomes
from embertide.trainer.config import ModelConfig, PruneConfig

_CONSOLE = Console(stderr=True, highlight=False)
_CURVE = BUILD / "bench" / "train_pruning_curve.svg"
_SHARES = (2, 5, 10, 20, 50, 200)
_PEER_SHARES = (10, 50)
# What may be lost at so much fewer bytes: the bar is 3 times, the aim 10.
_BARRED = {5: 0.001, 10: 0.001, 20: 0.001}
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
    tables = (dataclasses.replace(each, chunks=chunks, dim=dim) for each in DLRM.model.tables)
    model: ModelConfig = dataclasses.replace(DLRM.model, tables=tuple(tables))
    run = dataclasses.replace(DLRM, model=model, prune=prune, ddr_budget_bytes=_BUDGET)
    return Case(name=name, run=run)


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


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return rows of each case against the unpruned model, paired by seed."""
    base = _case("unpruned")
    plain = outcomes([base], seeds, stream, jobs=jobs)[base.name]
    # To a hundred kilobytes, so that the targets are the same whatever the seeds.
    whole = round(max(outcome.bytes for outcome in plain) / 1e5) * 100_000
    points = _points(whole)
    found = outcomes([point.case for point in points], seeds, stream, jobs=jobs)
    rows = []
    curve: dict[str, list[tuple[float, float, float]]] = {
        "unpruned": [(whole / 1e6, *mean_and_error(_aucs(plain)))]
    }
    for point in points:
        outcome = found[point.case.name]
        taken = point.taken or max(each.bytes for each in outcome)
        loss = _BARRED.get(point.share, 0.0) if point.line == "squares" else 0.0
        name = f"{point.case.name}: {taken / 1e6:.2f} MB, {whole / taken:.1f}x"
        rows.append(_row(name, _aucs(outcome), _aucs(plain), loss))
        repeated = [each.repeated_auc for each in outcome]
        theirs = [each.repeated_auc for each in plain]
        rows.append(_row(f"{name}, without first impressions", repeated, theirs, loss))
        line = curve.setdefault(point.line, [])
        line.append((taken / 1e6, *mean_and_error(_aucs(outcome))))
    plot.curves("AUC against bytes", ("MB, by the store's account", "AUC"), curve, _CURVE)
    _CONSOLE.print(f"the curve: {_CURVE}")
    return rows
