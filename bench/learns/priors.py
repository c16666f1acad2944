"""Whether scores are probabilities from the first fifth on, and of rare labels, too.

Generated events of 0.2, 1 and 25 positives in a hundred, three seeds each. `init` guesses the run
from the file, and its events are learned as `train` learns them, each scored before; nothing is
published; then the same with a running correction (`RunConfig.correction`). The peer learns without
what a run begins with today: a bias at the label rate, and steps of rows that begin small.

Calibration is the mean score over the mean of the probability that each label was drawn by: of
400 positives a fifth, the labels themselves would be off by 5 % by chance. The same by labels
stands beside it, without a claim. How far it is off is the larger of itself and its inverse, of the
mean over the seeds. Shapes: N events.
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bench import report
from bench.generality import ours
from bench.report import CONSOLE
from bench.train.runs import difference_row, mean_and_error, mean_row
from embertide.trainer.commands.run_file import load
from embertide.trainer.config import CorrectionConfig, RunConfig
from embertide.trainer.data.base import EventSource
from embertide.trainer.eval.learned import learned
from embertide.trainer.eval.metrics import Summary, summarise
from embertide.trainer.model.learner import Learner

Array = NDArray[Any]

RATES = {0.25: 100_000, 0.01: 300_000, 0.002: 500_000}
"""Events by the share of positives."""

_CLAIM = "H.3"
_FIRST, _LAST = 1.25, 1.03  # how far calibration of a fifth may be off
_FIFTHS = 5
_EPOCH_S = 1_600_000_000
_USERS, _ITEMS = 20_000, 2_000
_BEFORE = "bias 0, first steps whole"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A run's figures by fifths.

    Attributes:
        fifths: By labels.
        true: Mean score over mean probability.
    """

    fifths: list[Summary]
    true: list[float]


def events(rate: float, rows: int, seed: int) -> tuple[dict[str, Array], Array]:
    """Return columns of events in the order of time, and the probability of each label."""
    rng = np.random.default_rng(seed)
    user_N, item_N = rng.zipf(1.2, rows) % _USERS, rng.zipf(1.3, rows) % _ITEMS
    amount_2N = rng.normal(0, 1, (2, rows))
    price_N = np.round(rng.lognormal(3, 1, rows), 2)
    effect_N = (
        0.7 * rng.normal(0, 1, _USERS)[user_N]
        + 0.9 * rng.normal(0, 1, _ITEMS)[item_N]
        + 0.5 * amount_2N[0]
        - 0.4 * amount_2N[1]
        + 0.3 * (np.log(np.maximum(price_N, 0.01)) - 3)
    )
    low, high = -20.0, 20.0
    for _ in range(50):  # the constant with which the mean probability is the rate
        constant = (low + high) / 2
        is_more = (1 / (1 + np.exp(-effect_N - constant))).mean() > rate
        low, high = (low, constant) if is_more else (constant, high)
    true_N = 1 / (1 + np.exp(-effect_N - constant))
    columns = {
        "ts": _EPOCH_S + np.sort(rng.integers(0, 10 * 86_400, rows)),
        "user": user_N,
        "item": item_N,
        "a": amount_2N[0],
        "b": amount_2N[1],
        "price": price_N,
        "clicked": (rng.random(rows) < true_N).astype(np.int64),
    }
    return columns, true_N


def guessed(columns: dict[str, Array], folder: Path) -> tuple[RunConfig, EventSource]:
    """Return the run that `init` writes for a file of these columns, and the file as its source."""
    path, out = folder / "events.parquet", folder / "run.py"
    pq.write_table(pa.table(columns), path)
    ours.guessed(path, out)
    found = load(out)
    assert found.source is not None
    return found.run, found.source


def before(run: RunConfig) -> Learner:
    """Return a learner that begins as all did: scores of a half, and whole first steps of rows."""
    optimizer = dataclasses.replace(run.optimizer, initial_accumulator=0.0)
    learner = Learner(dataclasses.replace(run, optimizer=optimizer))
    learner.is_fresh = False
    return learner


def scored(learner: Learner, source: EventSource, true_N: Array) -> Scored:
    """Learn all events; return their figures by fifths."""
    parts = [(batch.label_B, score_B) for batch, score_B in learned(learner, source)]
    label_N, score_N = (np.concatenate(column) for column in zip(*parts, strict=True))
    cuts = np.array_split(np.arange(len(true_N)), _FIFTHS)
    return Scored(
        fifths=[summarise(label_N[cut], score_N[cut]) for cut in cuts],
        true=[float(score_N[cut].mean() / true_N[cut].mean()) for cut in cuts],
    )


def _off(calibration: float) -> float:
    """Return by which factor a calibration is off, 1 or more."""
    return max(calibration, 1 / calibration)


def rows_of(
    case: str, ours_S: Sequence[Scored], before_S: Sequence[Scored]
) -> Iterator[report.Row]:
    """Yield the rows of a share of positives: of runs by seed, and of the peer's."""
    for n, name, bar in ((0, "first", _FIRST), (_FIFTHS - 1, "last", _LAST)):
        true, peer = ([each.true[n] for each in of] for of in (ours_S, before_S))
        yield mean_row(
            case,
            true,
            mean_and_error(peer)[0],
            _BEFORE,
            metric=f"calibration of the {name} fifth, by true probabilities",
            better="lower",
        )
        off = _off(mean_and_error(true)[0])
        yield report.measure(
            (case, f"calibration of the {name} fifth is off by", "times"),
            [off],
            better="lower",
            target=bar,
            claim=_CLAIM,
        )
        by_labels, peer = ([each.fifths[n].calibration for each in of] for of in (ours_S, before_S))
        yield mean_row(
            case,
            by_labels,
            mean_and_error(peer)[0],
            _BEFORE,
            metric=f"calibration of the {name} fifth, by labels",
            better="lower",
        )
    for metric, name in (("auc", "AUC"), ("log_loss", "log loss")):
        better: Literal["higher", "lower"] = "higher" if metric == "auc" else "lower"
        mine, peer = (
            [getattr(each.fifths[-1], metric) for each in of] for of in (ours_S, before_S)
        )
        yield mean_row(
            case,
            mine,
            mean_and_error(peer)[0],
            _BEFORE,
            metric=f"{name} of the last fifth",
            better=better,
        )
        yield difference_row(
            case,
            f"{name} of the last fifth, less before",
            [a - b for a, b in zip(mine, peer, strict=True)],
            better=better,
            target=0.0,
            claim="",
        )


def run(given: argparse.Namespace) -> Iterator[report.Row]:
    """Yield the rows of each share of positives."""
    for rate, rows in RATES.items():
        mine, corrected, peer = list[Scored](), list[Scored](), list[Scored]()
        for seed in range(1, given.seeds + 1):
            columns, true_N = events(rate, rows, seed)
            with tempfile.TemporaryDirectory() as folder:
                config, source = guessed(columns, Path(folder))
                config = dataclasses.replace(config, seed=seed)
                mine.append(scored(Learner(config), source, true_N))
                with_it = dataclasses.replace(config, correction=CorrectionConfig())
                corrected.append(scored(Learner(with_it), source, true_N))
                peer.append(scored(before(config), source, true_N))
            last = mine[-1].fifths[-1]
            CONSOLE.print(
                f"{rate}, seed {seed}: calibration by fifths "
                + " ".join(f"{each:.3f}" for each in mine[-1].true)
                + ", corrected "
                + " ".join(f"{each:.3f}" for each in corrected[-1].true)
                + f"; AUC of the last {last.auc:.4f} ± {last.auc_interval:.4f}, "
                f"before {peer[-1].fifths[-1].auc:.4f}"
            )
        yield from rows_of(f"{100 * rate:g} % positives", mine, peer)
        yield from rows_of(f"{100 * rate:g} % positives, corrected", corrected, peer)
