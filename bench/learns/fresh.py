"""AUC by how old the model is that serves: presets of the news, half a minute to half an hour.

A block of T is scored with the weights of the end of the block before, so a score is made by a
model that is T old at most. Counts and histories are as old.
"""

import argparse
import dataclasses
from collections.abc import Iterator

from bench import report
from bench.learns.presets import FIRST_SEED, news_of
from bench.train.quality import CROSSED, DLRM
from bench.train.runs import Case, mean_row, outcomes
from embertide.trainer.config import RunConfig

_CLAIM = "H.7"
_BLOCKS_S = (60, 30, 300, 600, 1800)
_SMALL_S = 600  # blocks as short as this are learned in small steps
_BATCH = 128
_BARRED, _BAR = ("news-crossed", 60), 0.905


def _case(name: str, run: RunConfig, block_s: int) -> Case:
    if block_s <= _SMALL_S:
        run = dataclasses.replace(run, batch_size=_BATCH)
    return Case(name=f"{name}, {block_s} s old at most", run=run, block_s=block_s)


def run(given: argparse.Namespace) -> Iterator[report.Row]:
    """Yield the AUC of days 4 to 9 of each preset at each age."""
    stream = news_of(given)
    seeds = range(FIRST_SEED, FIRST_SEED + given.seeds)
    for name, preset in (("news-crossed", CROSSED), ("news", DLRM)):
        for block_s in _BLOCKS_S:
            case = _case(name, preset, block_s)
            bar = _BAR if (name, block_s) == _BARRED else 0.0
            yield mean_row(
                case.name,
                [each.auc for each in outcomes([case], seeds, stream, jobs=given.jobs)[case.name]],
                _BAR,
                "0.905",
                bar=bar,
                metric="AUC of days 4 to 9",
                claim=_CLAIM if bar else "",
            )
