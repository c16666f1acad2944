"""AUC against bytes on Criteo's ads: `python -m bench.train criteo --data ads.parquet`.

The first four fifths of the events are learned, once; the last fifth is scored and not learned.
Its keys come again for as long as the file goes, so utilities fade slowly.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bench import report
from bench.criteo import criteo, schema
from bench.servers import BUILD, BenchError
from bench.train import pruning
from bench.train.runs import (
    Case,
    Experiment,
    FoldedLearner,
    Outcome,
    Stream,
    mean_row,
    outcomes,
)
from embertide.trainer.config import OptimizerConfig, PruneConfig, RowDtype, RunConfig, Utility
from embertide.trainer.data.base import EventSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.errors import DataError
from embertide.trainer.eval.metrics import auc, log_loss

_CURVE = BUILD / "bench" / "train_criteo_curve.svg"
_SHARES = (2, 5, 11, 20, 50)
# The best of the utilities and of the types of rows on the fourth fifth. These targets come to ten
# times of the store's account.
_BARRED, _MAX_LOST = {("FIITED, rows", 11), ("FIITED, int8", 13)}, 0.002
# That of a factorisation machine of four factors, tuned, over the same events.
_REFERENCE = 0.767
# Chosen on the fourth fifth, after three were learned.
DLRM = RunConfig(
    model=criteo(),
    optimizer=OptimizerConfig(sparse_learning_rate=0.02, dense_learning_rate=0.001),
    batch_size=64,
)
# Pruned keys, too, train the value that keys without a row read as.
_DEFAULTS = dataclasses.replace(
    DLRM,
    model=dataclasses.replace(
        DLRM.model,
        features=tuple(
            dataclasses.replace(each, learned_default=True) for each in DLRM.model.features
        ),
    ),
)
_HALF_LIFE = 20_000
_LINES: dict[str, Utility] = {
    "FIITED, rows": "norms",
    "fisher": "fisher",
    "squares": "squares",
    "frequency": "accesses",
}
_INT8_SHARES = (10, 13, 24)
# Columns of fewer keys are never hashed.
_FEWEST_HASHED = 100


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ads(Experiment):
    """Events without a time: those before an index are learned, the others scored.

    Attributes:
        stream: The events.
        learned: The number of events that are learned.
    """

    stream: Stream
    learned: int

    def measure(self, case: Case, seed: int) -> Outcome:
        """See `Experiment`."""
        source, learner = self.stream.source(case), FoldedLearner(case, seed)
        first = FirstEvents(source, self.learned).batches(batch_size=case.run.batch_size)
        for batch in learner.warm_up(first):
            learner.learn(batch)
        learner.rows.forget_changes()
        learner.note_bytes()
        label_B, score_B = [], []
        for batch in source.batches(batch_size=4096, start=self.learned):
            label_B.append(batch.label_B)
            score_B.append(learner.score(batch))
        labels_B, scores_B = np.concatenate(label_B), np.concatenate(score_B)
        series = {"log_loss": [log_loss(labels_B, scores_B)]}
        return learner.outcome(auc(labels_B, scores_B), series)


def ads_of(stream: Stream) -> Ads:
    """Return the experiment over a file's events.

    Raises:
        BenchError: The file is not of Criteo's ads.
    """
    stream = dataclasses.replace(stream, schema=schema)
    try:
        events = stream.source(Case(name="", run=DLRM)).total_events()
    except DataError as error:
        raise BenchError(f"{error}; give Criteo's ads") from error
    if events is None:
        raise BenchError(f"{stream.path} does not tell how many events it has: give Parquet")
    return Ads(stream=stream, learned=events * 4 // 5)


def _distinct(source: EventSource) -> dict[str, int]:
    """Return how many keys each feature has."""
    keys_BF = np.concatenate([batch.keys_BF for batch in source.batches(batch_size=65_536)])
    names = [feature.name.lower() for feature in DLRM.model.features]
    return {name: len(np.unique(keys_B)) for name, keys_B in zip(names, keys_BF.T, strict=True)}


def _pruned(
    line: str,
    share: int,
    whole: int,
    utility: Utility,
    *,
    base: RunConfig = _DEFAULTS,
    dtype: RowDtype = "fp32",
) -> pruning.Point:
    prune = PruneConfig(bytes=whole // share, utility=utility, half_life=_HALF_LIFE)
    case = pruning.case_of(f"{line} {share}x", base, prune, dtype=dtype)
    lost = _MAX_LOST if (line, share) in _BARRED else 0.0
    return pruning.Point(line=line, share=share, case=case, most_lost=lost)


def _points(whole: int, seen: dict[str, int]) -> list[pruning.Point]:
    """Return each utility and hashing at each share of `whole` bytes."""
    many = {name: keys for name, keys in seen.items() if keys >= _FEWEST_HASHED}
    few = sum(seen.values()) - sum(many.values())
    points = []
    for share in _SHARES:
        points += [_pruned(line, share, whole, utility) for line, utility in _LINES.items()]
        left = whole // share // pruning.row_bytes(DLRM.model.tables[0].dim) - few
        fold = tuple((n, max(1, left * keys // sum(many.values()))) for n, keys in many.items())
        case = dataclasses.replace(pruning.case_of(f"hashing {share}x", DLRM), fold=fold)
        points.append(pruning.Point(line="hashing", share=share, case=case, taken=whole // share))
    points += [
        _pruned("FIITED, int8", share, whole, "norms", dtype="int8") for share in _INT8_SHARES
    ]
    points.append(_pruned("FIITED, rows, zeros without a row", 11, whole, "norms", base=DLRM))
    case = pruning.case_of("all rows, learned defaults", _DEFAULTS)
    points.append(pruning.Point(line="all rows, learned defaults", share=1, case=case))
    return points


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return rows of each case against the unpruned model, paired by seed.

    Raises:
        BenchError: The file is not of Criteo's ads.
    """
    ads = ads_of(stream)
    source = ads.stream.source(Case(name="", run=DLRM))
    base = pruning.case_of("ads, unpruned", DLRM)
    plain = outcomes([base], seeds, ads, jobs=jobs)[base.name]
    points = _points(pruning.whole(plain), _distinct(source))
    groups = {base.name: (plain, points)}
    aucs, peer = [outcome.auc for outcome in plain], "a factorisation machine"
    reference = mean_row("DLRM, unpruned", aucs, _REFERENCE, peer, bar=_REFERENCE)
    return [reference, *pruning.compare(groups, seeds, ads, jobs=jobs, picture=_CURVE)]
