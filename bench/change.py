"""A feature that comes on day 5 of a model, and goes again: `python -m bench.change`.

Four runs of DLRM over the same news, each event scored before it is learned from:

    whole     has every feature from day 0
    small     lacks one to the end
    changed   small until day 5, then whole by `--change-model`
    back      changed until day 7, then small again

`changed` is to be as good as `whole` on the days after the change, `back` as `small`.
"""

import argparse
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

from bench import parts, report
from bench.report import CONSOLE
from bench.servers import BUILD
from bench.train.runs import mean_and_error, mean_row
from embertide.trainer.config import ModelConfig, RunConfig
from embertide.trainer.data import open_events
from embertide.trainer.data.base import Batch, DerivedSource, EventSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.presets import news_model, news_rates
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer

_DAY_MS = 86_400_000
_COMES, _GOES = 5, 7  # days
_LOSS = 0.001


class Without(DerivedSource):
    """Events without one of their features."""

    def __init__(self, source: EventSource, name: str) -> None:
        """Name the feature."""
        features = source.schema.features
        self._kept = [f for f, feature in enumerate(features) if feature.name != name]
        left = tuple(features[f] for f in self._kept)
        super().__init__(source, dataclasses.replace(source.schema, features=left))

    def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """Yield batches as the source does, with the columns that are left."""
        for batch in self._source.batches(batch_size=batch_size, start=start):
            yield dataclasses.replace(batch, keys_BF=batch.keys_BF[:, self._kept])


def without(model: ModelConfig, name: str) -> ModelConfig:
    """Return a model without a feature and its table."""
    return dataclasses.replace(
        model,
        tables=tuple(table for table in model.tables if table.name != name),
        features=tuple(feature for feature in model.features if feature.name != name),
    )


class Runs:
    """The runs of one seed, each in a folder of its own."""

    def __init__(self, data: str, feature: str, seed: int, folder: Path) -> None:
        """Name the events and the feature that comes."""
        self._folder = folder
        self._events = open_events(data)
        self._fewer = Without(self._events, feature)
        schema = self._events.schema
        ts_N = parquet.read_table(data, columns=[schema.ts])[0].to_numpy().astype(np.int64)
        days_N = ts_N * schema.ts_unit_ms // _DAY_MS
        self._day = int(days_N[0])
        days_N -= self._day
        self._first = [int(np.searchsorted(days_N, day)) for day in range(int(days_N[-1]) + 2)]
        self.days = len(self._first) - 1
        self._whole = RunConfig(
            model=news_model(),
            optimizer=news_rates(),
            seed=seed,
            publish_every_s=1800,
            snapshot_every=1000,
        )
        self._small = dataclasses.replace(self._whole, model=without(news_model(), feature))

    def _train(self, name: str, *, small: bool, until: int, change: bool = False) -> Trainer:
        trainer = Trainer(
            self._small if small else self._whole,
            Publication(self._folder / name),
            program_cache=BUILD / "cache" / "dense",
            change_model=change,
        )
        source = self._fewer if small else self._events
        trainer.fit(FirstEvents(source, self._first[min(until, self.days)]))
        return trainer

    def _copy(self, name: str, to: str) -> None:
        shutil.copytree(self._folder / name, self._folder / to)

    def _auc(self, trainer: Trainer) -> dict[str, list[float]]:
        hours = trainer.state.prequential.hourly()
        daily = trainer.state.prequential.daily()
        return {
            "days": [daily[self._day + day] for day in range(self.days)],
            "hours": [auc for _, auc in sorted(hours.items())],
        }

    def measure(self) -> dict[str, dict[str, list[float]]]:
        """Return AUC by day and by hour of each run."""
        found = {"whole": self._auc(self._train("whole", small=False, until=self.days))}
        self._train("small", small=True, until=_COMES)
        self._copy("small", "changed")
        found["small"] = self._auc(self._train("small", small=True, until=self.days))
        self._train("changed", small=False, until=_GOES, change=True)
        self._copy("changed", "back")
        found["changed"] = self._auc(self._train("changed", small=False, until=self.days))
        back = self._train("back", small=True, until=self.days, change=True)
        return found | {"back": self._auc(back)}


def _mean(figures: list[float], first: int) -> float:
    return float(np.mean(figures[first:]))


def rows_of(found: list[dict[str, dict[str, list[float]]]]) -> list[report.Row]:
    """Return a row a claim, of the seeds' means; the spread is the pairs' standard error."""
    last = len(found[0]["whole"]["days"]) - 1
    rows = []
    for name, peer, first, claim in (
        ("changed", "whole", _COMES + 1, "H.6"),
        ("back", "small", _GOES + 1, "22.4"),
        ("whole", "small", _COMES + 1, ""),
    ):
        ours, theirs = ([_mean(each[run]["days"], first) for each in found] for run in (name, peer))
        of_peer = float(np.mean(theirs))
        rows.append(
            mean_row(
                f"{name}, days {first} to {last}",
                ours,
                of_peer,
                peer,
                bar=of_peer - _LOSS if claim else 0.0,
                error=mean_and_error(np.subtract(ours, theirs).tolist())[1],
                claim=claim,
            )
        )
    return rows


def _measure(given: argparse.Namespace) -> list[report.Row]:
    kept = BUILD / "bench" / "change"
    kept.mkdir(parents=True, exist_ok=True)
    found = []
    for seed in range(1, given.seeds + 1):
        file = kept / f"{given.feature}-{seed}.json"
        if not file.exists():
            with tempfile.TemporaryDirectory() as folder:
                measured = Runs(given.data, given.feature, seed, Path(folder)).measure()
            file.write_text(json.dumps(measured))
        found.append(json.loads(file.read_text()))
        for name, figures in found[-1].items():
            days = " ".join(f"{auc:.4f}" for auc in figures["days"])
            CONSOLE.print(f"seed {seed} {name:8} {days}")
    return rows_of(found)


if __name__ == "__main__":
    parser = parts.options("change", __doc__)
    parser.add_argument("--data", required=True, help="a file of the news stream")
    parser.add_argument("--feature", default="prev", help="that comes on day 5")
    parser.add_argument("--seeds", type=int, default=3)
    parts.command("A feature that comes and goes", _measure, parser)
