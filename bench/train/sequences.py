"""AUC of nets that look back, with equally many parameters: HSTU, target attention, a mean.

All are the best model of the news (counters and crosses) and differ in what they make of a user's
last articles.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench import report
from bench.train.quality import CROSSED
from bench.train.runs import Case, Stream, difference_row, mean_row, outcomes
from embertide.trainer.config import ModelConfig, RunConfig, SequenceConfig
from embertide.trainer.model.history import SequenceNet
from embertide.trainer.presets import news_hstu

_BEST = 0.9004  # of `quality`: target attention over ten articles
_CLAIM = "F.5"


class _Mean(nn.Module):
    """The mean of the items that there are."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("place", torch.arange(length), persistent=False)

    def forward(
        self, _target_Bd: Tensor, items_BLd: Tensor, length_B: Tensor, _gap_BT: Tensor
    ) -> Tensor:
        taken_BL = self.get_buffer("place") < length_B.unsqueeze(1)
        items_BLd = torch.where(taken_BL.unsqueeze(2), items_BLd, torch.zeros_like(items_BLd))
        return items_BLd.sum(1) / length_B.clamp_min(1).unsqueeze(1)


class MeanNet(SequenceNet):
    """The mean of each sequence."""

    @staticmethod
    def pooling(_dim: int, sequence: SequenceConfig, _config: ModelConfig) -> nn.Module:
        """See `SequenceNet`."""
        return _Mean(sequence.length)


def _changed(run: RunConfig, **changes: Any) -> RunConfig:
    return dataclasses.replace(run, model=dataclasses.replace(run.model, **changes))


def _with_sequence(run: RunConfig, **changes: Any) -> RunConfig:
    (sequence,) = run.model.sequences
    return _changed(run, sequences=(dataclasses.replace(sequence, **changes),))


# 377,634 to 378,329 parameters: the others have a wider attention or top for HSTU's layers.
HSTU = _with_sequence(dataclasses.replace(CROSSED, model=news_hstu()), published=False)
ATTENTION = _changed(CROSSED, attention_mlp=(80,))
MEAN = _changed(CROSSED, net=MeanNet, top_mlp=(527, 128))
CASES = (
    Case(name="HSTU over 20 articles with times", run=HSTU),
    Case(name="target attention over 10 articles", run=ATTENTION),
    Case(name="mean of 10 articles", run=MEAN),
    Case(
        name="HSTU over 20 articles without times",
        run=_with_sequence(dataclasses.replace(CROSSED, model=news_hstu()), times=False),
    ),
)


def run(stream: Stream, seeds: Sequence[int], jobs: int) -> list[report.Row]:
    """Return a row a case, and HSTU's differences to the others by seed."""
    found = outcomes(CASES, seeds, stream, jobs=jobs)
    aucs = {name: [each.auc for each in by_seed] for name, by_seed in found.items()}
    first, *others = aucs
    rows = [
        mean_row(name, auc, _BEST, "the best of before", claim=_CLAIM) for name, auc in aucs.items()
    ]
    rows += [
        difference_row(
            f"{first}, over {other}",
            "AUC",
            [ours - theirs for ours, theirs in zip(aucs[first], aucs[other], strict=True)],
            better="higher",
            target=0.0,
            claim=_CLAIM,
        )
        for other in others
    ]
    return rows
