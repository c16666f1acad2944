"""`news-crossed` served by nodes, a minute of events old at most.

A trainer and two nodes under Triton go hand in hand, minute by minute of event time: the trainer
publishes, both nodes follow the bus, one of them scores the events up to the next batch, and then
the trainer may learn them. Days 0 to 3 are learned alone. An answer is as old as its last event is
younger than the watermark that it states.
"""

import argparse
import contextlib
import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from bench import report
from bench.learns.presets import DAYS, FIRST_SEED, news_of
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError
from bench.train.quality import CROSSED
from bench.train.runs import DAY_S, mean_row, tree_of
from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.adapters.schema import schema_of
from embertide.server.cli.common_options import DEFAULT_BACKENDS
from embertide.server.cli.snapshot import newest_snapshot
from embertide.trainer.config import RunConfig
from embertide.trainer.data import open_events
from embertide.trainer.data.base import Batch
from embertide.trainer.data.limit import FirstEvents, take
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.eval.served import (
    Answer,
    ServedModel,
    ServedNodes,
    VersionNotHeldError,
)
from embertide.trainer.lab.trials import Trial, measured
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer

_CLAIM = "H.7"
_BAR = 0.905
_EVERY_S, _BATCH = 60, 128
_SNAPSHOT_EVERY = 1440  # versions: a day's
_NODES = 2
_PATIENCE_S = 60.0
_LOOK_S = 0.001  # between looks for a version: some 8,640 are waited for
_MODEL = "news"
_CODE = ("trainer", "server", "backend_cpp", "bench/learns/served.py")  # decides them


class Nodes:
    """The nodes, and what they answered. A context manager that ends them; for one thread."""

    def __init__(self, publication: Path, bus: str, folder: Path) -> None:
        """Start them on what is published."""
        self._stack = contextlib.ExitStack()
        ports = free_ports(2 * _NODES)
        starts = []
        for n in range(_NODES):
            model = triton.ModelOptions(
                kind="ranking",
                publication=publication,
                bus=bus,
                max_batch_size=4096,
                ddr_budget_bytes=2 << 30,
                schema=schema_of(newest_snapshot(publication)),
            )
            repository = folder / f"models-{n}"
            triton.write_model(repository, _MODEL, model)
            starts.append(
                triton.ServerOptions(
                    repository=repository,
                    backends=DEFAULT_BACKENDS,
                    log=folder / f"node-{n}.log",
                    grpc_port=ports[2 * n],
                    metrics_port=ports[2 * n + 1],
                    explicit=True,
                    models=(_MODEL,),
                )
            )
        servers = triton.start_together(self._stack, starts)
        served = [self._stack.enter_context(ServedModel(each.grpc, _MODEL)) for each in servers]
        self._nodes = ServedNodes(served)

    def __enter__(self) -> Self:
        """Return them."""
        return self

    def __exit__(self, *error: object) -> None:
        """End them."""
        self._stack.close()

    def score(self, batch: Batch, version: int) -> Answer:
        """Have the next node score a batch by a version, which may be on its way.

        Raises:
            BenchError: It does not come.
        """
        ends_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._nodes.score(batch, version=version)
            except VersionNotHeldError as error:
                if time.monotonic() > ends_s:
                    raise BenchError(f"version {version} is at no node: {error}") from error
                time.sleep(_LOOK_S)


@dataclasses.dataclass(kw_only=True, slots=True)
class Scored:
    """The scores of a run.

    Attributes:
        prequential: By day.
        failed: Requests that failed before they were answered.
        requests: All that were answered.
        age_ms: Of the oldest answer: from its watermark to its last event.
    """

    prequential: Prequential
    failed: int = 0
    requests: int = 0
    age_ms: int = 0


class Lockstep:
    """The trainer's gate: nodes score events before they may be learned. A context manager."""

    def __init__(self, path: Path, trainer: Trainer, bus: str, folder: Path) -> None:
        """Score the events of a file, from the first day that counts on."""
        self._batches = open_events(str(path)).batches(batch_size=_BATCH)
        self._batch = next(self._batches)
        self._trainer, self._bus, self._folder = trainer, bus, folder
        self._nodes: Nodes | None = None  # until the first day that counts
        self._at, self._day = 0, -1
        self.scored = Scored(prequential=Prequential())

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the nodes."""
        if self._nodes is not None:
            self._nodes.__exit__(*error)

    def wait(self, end: int, is_stopping: Callable[[], bool]) -> bool:
        """Have all before index `end` scored."""
        while self._at < end:
            batch = self._batch
            last = min(end, batch.first + len(batch))
            part = take(batch, self._at - batch.first, last - batch.first)
            day = int(part.ts_ms_B[0]) // (1000 * DAY_S)
            if day != self._day:
                CONSOLE.print(f"day {day}; served so far: {self.scored.prequential.daily()}")
                self._day = day
            if day >= DAYS[0]:
                self._score(part)
            self._at = last
            if last == batch.first + len(batch):
                self._batch = next(self._batches, batch)
        return True

    def _score(self, part: Batch) -> None:
        self._trainer.versions.wait_published()
        newest = self._trainer.versions.publisher.newest
        assert newest is not None
        if self._nodes is None:
            publication = self._trainer.publication.path
            self._nodes = Nodes(publication, self._bus, self._folder)
        answer = self._nodes.score(part, newest.number)
        scored = self.scored
        scored.failed += answer.failures
        scored.requests += 1
        scored.age_ms = max(scored.age_ms, part.watermark_ms - answer.watermark_ms)
        scored.prequential.add(part.ts_ms_B, part.label_B, answer.score_B)


def served(run: RunConfig, path: Path, events: int | None, folder: Path) -> Scored:
    """Learn a file, at most so many of its events, and have nodes score the days that count."""
    source = open_events(str(path))
    publication, programs = Publication(folder / "publication"), BUILD / "cache" / "dense"
    with RedisServer(RedisOptions(log=folder / "redis.log")) as redis:
        trainer = Trainer(run, publication, bus=redis.url, program_cache=programs)
        with Lockstep(path, trainer, redis.url, folder) as gate:
            trainer.fit(source if events is None else FirstEvents(source, events), gate=gate)
    return gate.scored


def _figures(settings: RunConfig, path: Path, events: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        scored = served(settings, path, events, Path(folder))
    daily = scored.prequential.daily()
    days = ", ".join(f"{day}: {auc:.4f}" for day, auc in daily.items())
    seed, failed = settings.seed, scored.failed
    CONSOLE.print(f"seed {seed}: {days}; {scored.requests:,} requests, {failed} failed")
    auc = scored.prequential.mean_daily(*DAYS)
    return {"auc": auc, "age_s": scored.age_ms / 1000, "failed": failed}


def run(given: argparse.Namespace) -> Iterator[report.Row]:
    """Yield the AUC of what nodes served, the oldest answer, and failed requests."""
    stream = news_of(given)
    runs = [
        dataclasses.replace(
            CROSSED,
            seed=seed,
            batch_size=_BATCH,
            publish_every_s=_EVERY_S,
            snapshot_every=_SNAPSHOT_EVERY,
        )
        for seed in range(FIRST_SEED, FIRST_SEED + given.seeds)
    ]
    of = stream.path, given.events
    code = [*map(tree_of, _CODE)]
    trials = [
        Trial(
            name=f"served {each.seed}",
            depends=repr((each, of, code)),
            measure=functools.partial(_figures, each, *of),
        )
        for each in runs
    ]
    found = measured(trials, BUILD / "bench" / "served", jobs=given.jobs)
    auc, ages_s, failed = (
        [float(each[key]) for each in found] for key in ("auc", "age_s", "failed")
    )
    name = "news-crossed, served by two nodes"
    metric = f"AUC of days {DAYS[0]} to {DAYS[1]}"
    yield mean_row(name, auc, _BAR, "0.905", bar=_BAR, metric=metric, claim=_CLAIM)
    yield report.measure(
        (name, "oldest answer", "s"), ages_s, better="lower", target=_EVERY_S, claim=_CLAIM
    )
    yield report.measure(
        (name, "failed requests", "count"), failed, better="lower", target=0, claim=_CLAIM
    )
