"""Versions under a byte budget: what serving fewer rows of each version costs in AUC.

One model learns; beside it stand the images that nodes would hold under several budgets, and one
without. Each block of events is scored with the newest net and each image's rows, then learned.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from bench import plot, report
from bench.servers import BUILD
from bench.train.quality import DLRM
from bench.train.runs import DAY_S, Case, FoldedLearner, Outcome, Stream, mean_row, outcomes
from embertide import _store
from embertide.trainer.config import PublishBudget
from embertide.trainer.data.base import Batch
from embertide.trainer.eval.blocks import BlockQuality
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.publish.image import PublishedImage

_CASE = Case(name="versions under budgets", run=DLRM)
# Bytes a second. A version of every changed row takes about 150; 10^9 leaves nothing out.
_PLAIN = 10**9
_BUDGETS = (75, 30, 15, 7)
_WEEK = 7 * DAY_S // _CASE.block_s
_WORST_LOSS, _MIN_RATIO = 0.001, 10.0


class _Served(BlockQuality):
    """Scores each block with the rows of every image, from a day on."""

    def __init__(
        self, learner: FoldedLearner, stream: Stream, images: dict[int, PublishedImage]
    ) -> None:
        super().__init__(learner, stream.source(_CASE), seen_by=stream.seen_by)
        self._images = images
        self._rows = learner.rows
        self._first_ms = stream.days[0] * DAY_S * 1000
        self.by_budget = {budget: Prequential() for budget in images}

    @contextlib.contextmanager
    def _looking_up(self, store: _store.ServingStore) -> Iterator[None]:
        own = self._rows.store
        # Scoring asks for nothing but lookups, which both faces have.
        self._rows.store = cast(_store.TrainingStore, store)
        try:
            yield
        finally:
            self._rows.store = own

    def _block(self, parts: list[Batch]) -> None:
        for part in parts if parts and parts[0].ts_ms_B[0] >= self._first_ms else ():
            for budget, image in self._images.items():
                with self._looking_up(image.store):
                    score_B = self._learner.score(part)
                self.by_budget[budget].add(part.ts_ms_B, part.label_B, score_B)
        for part in parts:
            self._learner.learn(part)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Budgets(Stream):
    """A stream whose blocks are scored as nodes under each budget would.

    The AUC is that without a budget. Series: by budget, (mean daily AUC, bytes a version); `full`,
    the bytes of all rows, by version.
    """

    def measure(self, case: Case, seed: int) -> Outcome:
        """See `Experiment`."""
        learner = FoldedLearner(case, seed)
        rows = learner.rows
        images = {
            budget: PublishedImage(
                rows,
                PublishBudget(bytes_per_s=budget, max_age_versions=_WEEK, image_bytes=1 << 29),
                publish_every_s=case.block_s,
            )
            for budget in (_PLAIN, *_BUDGETS)
        }
        quality = _Served(learner, self, images)
        sent = {budget: list[int]() for budget in images}
        full = list[int]()

        def publish(block: int) -> None:
            counts = block * case.block_s >= self.days[0] * DAY_S
            taken = {
                (t, bucket): _store.record_keys(table.layout, rows.store.take_changes(t, bucket))
                for t, table, bucket in rows.places()
            }
            for budget, image in images.items():
                for (t, bucket), keys in taken.items():  # each image takes them by itself
                    rows.store.mark_changed(t, bucket, keys)
                changes = image.choose(block + 2, everything=False)
                image.apply(block + 2, changes)
                if counts:
                    sent[budget].append(sum(len(records) for *_, records in changes))
            if counts:
                row_bytes = 12 + 4 * rows.tables[0].layout.dim
                full.append(rows.stats()["rows"] * row_bytes)

        quality.run(block_s=case.block_s, batch_size=case.run.batch_size, after_block=publish)
        series = {
            str(budget): [
                quality.by_budget[budget].mean_daily(*self.days),
                float(np.mean(sent[budget])),
            ]
            for budget in images
        }
        learner.note_bytes()
        auc = series[str(_PLAIN)][0]
        return learner.outcome(auc, series | {"full": [float(np.mean(full))]})


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return, for each budget, what it costs in AUC and how many fewer bytes versions take."""
    fields = {f.name: getattr(stream, f.name) for f in dataclasses.fields(stream)}
    found = outcomes([_CASE], seeds, Budgets(**fields), jobs=jobs)[_CASE.name]
    rows = list[report.Row]()
    points = list[tuple[float, float, float]]()
    for budget in (_PLAIN, *_BUDGETS):
        name = "no budget" if budget == _PLAIN else f"{budget} bytes/s"
        losses = [each.series[str(budget)][0] - each.auc for each in found]
        plain, sent, full = (
            float(np.mean([each.series[key][at] for each in found]))
            for key, at in ((str(_PLAIN), 1), (str(budget), 1), ("full", 0))
        )
        rows.append(
            report.measure(
                (name, "AUC, less that without a budget", ""),
                losses,
                better="higher",
                target=-_WORST_LOSS if budget != _PLAIN else 0.0,
                claim="18.6",
            )
        )
        for peer, peer_name, bar in (
            (full, "the whole model", _MIN_RATIO),
            (plain, "every changed row", 0.0),
        ):
            rows.append(
                mean_row(
                    name,
                    [peer / each.series[str(budget)][1] for each in found],
                    1.0,
                    peer_name,
                    bar=bar,
                    metric="bytes a version, fewer by",
                    claim="18.6",
                )
            )
        error = float(np.std(losses, ddof=1) / len(losses) ** 0.5) if len(losses) > 1 else 0.0
        points.append((full / sent, float(np.mean(losses)), error))
    plot.curves(
        "Versions under a byte budget",
        ("fewer bytes than the whole model, times", "AUC, against every changed row"),
        {"rows that moved farthest": points},
        BUILD / "bench" / "train_budget_curve.svg",
    )
    return rows
