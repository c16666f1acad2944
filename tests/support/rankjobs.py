"""The work of ranks in tests of them: functions that a process of `rankpool` can import."""

import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from fp64 import SEED, batch_of, model
from killing import CACHE
from numpy.typing import NDArray
from rankpool import die

from embertide.trainer.config import (
    AllReduce,
    Codecs,
    CorrectionConfig,
    EvalConfig,
    FeatureConfig,
    LocalSGD,
    ModelConfig,
    OptimizerConfig,
    PruneConfig,
    PublishBudget,
    RunConfig,
    TableConfig,
)
from embertide.trainer.data import shared
from embertide.trainer.data.bags import Bags
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.learner import Learner
from embertide.trainer.model.prior import head_bias_of
from embertide.trainer.presets import news_counters, news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.checkpoint.checkpoint import CheckpointWriter
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress
from embertide.trainer.sync.plan import EVERYWHERE, Ownership, balanced
from embertide.trainer.sync.ranks import Ranks

STEP = RunConfig(
    model=dataclasses.replace(
        model(top_sees_embeddings=True),
        tables=tuple(
            dataclasses.replace(table, bucket_bits=2)
            for table in model(top_sees_embeddings=True).tables
        ),
    ),
    optimizer=OptimizerConfig(sparse_learning_rate=0.05, epsilon=1e-4, initial_accumulator=1e-5),
    seed=SEED,
    ddr_budget_bytes=8 << 20,
)
OWNERS = {
    "by rows": lambda ranks: balanced(STEP.model, ranks),
    "whole": lambda ranks: Ownership(
        ranks, (np.zeros(4, np.uint16), np.full(4, ranks - 1, np.uint16))
    ),
    "everywhere": lambda ranks: Ownership(
        ranks, (np.full(4, EVERYWHERE, np.uint16), np.full(4, EVERYWHERE, np.uint16))
    ),
    "mixed": lambda ranks: Ownership(
        ranks, (np.full(4, EVERYWHERE, np.uint16), np.arange(4, dtype=np.uint16) % ranks)
    ),
}
Steps = tuple[list[NDArray[np.float32]], dict[str, NDArray[Any]], dict[tuple[int, int], bytes]]


def some_steps(ranks: Ranks, how: str, codecs: Codecs, steps: int) -> Steps:
    """Scores, the net, and the buckets that this rank writes, after some steps."""
    run = dataclasses.replace(STEP, codecs=codecs)
    learner = Learner(run, ranks, OWNERS[how](ranks.size))
    rng = np.random.default_rng(3)
    scores = [learner.learn(batch_of(rng, 12)) for _ in range(steps)]
    net = {name: value.numpy() for name, value in learner.net.state_dict().items()}
    rows = learner.rows
    if how == "by rows" and steps > 4:  # by then most keys have rows
        assert rows.stats()["placed_keys"] > 0, "no step was told where its lookup found rows"
    return scores, net, {(t, b): rows.store.export_bucket(t, b) for t, _, b in rows.places()}


def let_go(ranks: Ranks) -> bool:
    """Whether what adds up gradients, and holds a channel, goes with its learner."""
    learner = Learner(STEP, ranks, balanced(STEP.model, ranks.size))
    learner.learn(batch_of(np.random.default_rng(3), 12))
    watched = weakref.ref(learner.sync)
    del learner
    gc.collect()
    return watched() is None


def own_net_steps(ranks: Ranks) -> dict[str, NDArray[Any]]:
    """The tensors of a net with batch norm and dropout after some steps, one without a part."""
    run = dataclasses.replace(STEP, model=dataclasses.replace(STEP.model, net="own_net:Tower"))
    learner = Learner(run, ranks, balanced(STEP.model, ranks.size))
    rng = np.random.default_rng(3)
    for count in (12, 9, 1, 12):
        learner.learn(batch_of(rng, count))
    state = learner.net.state_dict().items()
    return {name: value.numpy() for name, value in state if value.is_floating_point()}


def in_parts(ranks: Ranks, parts: int) -> Steps:
    """Some steps of batches that go through the net in parts."""
    run = dataclasses.replace(STEP, net_parts=parts)
    learner = Learner(run, ranks, balanced(STEP.model, ranks.size))
    rng = np.random.default_rng(3)
    scores = [learner.learn(batch_of(rng, 12)) for _ in range(4)]
    net = {name: value.numpy() for name, value in learner.net.state_dict().items()}
    rows = learner.rows
    return scores, net, {(t, b): rows.store.export_bucket(t, b) for t, _, b in rows.places()}


def empty_parts(ranks: Ranks) -> list[float]:
    """Batches of fewer groups than ranks: some ranks have no part."""
    learner = Learner(STEP, ranks, balanced(STEP.model, ranks.size))
    rng = np.random.default_rng(5)
    scores = []
    for count in (1, 2, 3):
        batch = batch_of(rng, count)
        same = dataclasses.replace(batch, ts_ms_B=np.zeros(count, np.int64))
        scores += learner.learn(same).tolist()
        scores += learner.learn(batch).tolist()
    return scores


LISTS = ModelConfig(
    name="lists",
    tables=(
        TableConfig(name="a", dim=4, bucket_bits=2),
        TableConfig(name="b", dim=8, bucket_bits=1),
    ),
    features=(
        FeatureConfig(name="x", table="a", pooling="mean", keys="list"),
        FeatureConfig(name="y", table="a", keys="weighed"),
        FeatureConfig(name="z", table="b"),
    ),
)


def own_loop(ranks: Ranks) -> tuple[NDArray[np.float32], dict[tuple[int, int], bytes]]:
    """A loop of a user's own: each rank gives its half of the samples to the store."""
    rows = EmbeddingStore(LISTS, optimizer=OptimizerConfig(initial_accumulator=0.1), ranks=ranks)
    rng = np.random.default_rng(9)
    pooled = []
    for _ in range(3):
        sizes = rng.integers(0, 5, (2, 8))
        keys = [rng.integers(0, 30, n) for n in (sizes[0].sum(), sizes[1].sum(), 8)]
        weights = rng.random(sizes[1].sum(), np.float32)
        bags = [
            Bags.of(keys[0], sizes[0]),
            Bags.of(keys[1], sizes[1], weights),
            Bags.of(keys[2], np.ones(8, np.int64)),
        ]
        begin, end = 8 * ranks.rank // ranks.size, 8 * (ranks.rank + 1) // ranks.size
        out = rows.pool([each.cut(begin, end) for each in bags])
        (out**2).sum().backward()
        rows.step()
        pooled.append(out.detach().numpy())
    found = {(t, b): rows.store.export_bucket(t, b) for t, _, b in rows.places()}
    return np.concatenate(pooled), found


NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5))
RUNS = {
    "news": RunConfig(model=news_model(), batch_size=24, publish_every_s=600, snapshot_every=4),
    "under a budget": RunConfig(
        model=news_model(),
        batch_size=24,
        publish_every_s=600,
        snapshot_every=4,
        publish_budget=PublishBudget(bytes_per_s=3, max_age_versions=8),
        evaluation=EvalConfig(user="user", slices=("device",), hold_out=0.1),
    ),
    "counters, pruned": RunConfig(
        model=news_counters(),
        prune=PruneConfig(bytes=40_000, half_life=20, first=(3,), every=5, least=2),
        batch_size=24,
        publish_every_s=600,
        snapshot_every=4,
    ),
}
# Enough rows for half of them not to change from one version to the next.
MANY_NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=1200, users=6000, new_items_per_hour=60))
_ALL_ROWS = RunConfig(model=news_model(), batch_size=128, publish_every_s=600, snapshot_every=1)
MANY_RUNS = {
    "all rows": _ALL_ROWS,
    "increments": dataclasses.replace(_ALL_ROWS, full_snapshot_every=4),
}
# Rows of which two ranks have more than a budget of 1 MiB each holds.
WIDE_NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=2400, users=8000, new_items_per_hour=20))
_WIDE = RunConfig(
    model=dataclasses.replace(
        news_model(),
        tables=tuple(dataclasses.replace(table, dim=256) for table in news_model().tables),
    ),
    prune=PruneConfig(bytes=4_500_000, first=(3,), every=5, least=2),
    batch_size=128,
    publish_every_s=600,
    snapshot_every=4,
)
WIDE_RUNS = {
    "in memory": _WIDE,
    "on an SSD": dataclasses.replace(_WIDE, ddr_budget_bytes=1 << 20, ssd_budget_bytes=8 << 20),
}


def train_wide(ranks: Ranks, name: str, folder: str) -> dict[str, Any]:
    """Train wide rows to the end; return what it came to."""
    run = WIDE_RUNS[name]
    if run.ssd_budget_bytes:
        run = dataclasses.replace(run, ssd_directory=str(Path(folder) / "ssd"))
    trainer = Trainer(run, Publication(Path(folder)), program_cache=CACHE, ranks=ranks)
    trainer.fit(WIDE_NEWS)
    return {"scores": trainer.state.prequential.hourly(), "stats": trainer.state.rows.stats()}


def train(ranks: Ranks, name: str, folder: str, batches: int = 0, by: str = "") -> dict[str, Any]:
    """Train to the end; or until so many batches are learned, then stop as `by` says.

    Within an increment, `batches` are buckets.
    """
    run = (RUNS | MANY_RUNS)[name]
    trainer = Trainer(run, Publication(Path(folder)), program_cache=CACHE, ranks=ranks)
    began_at = trainer.state.number
    left = batches

    def show(_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0 and by == "kill":
            die()
        if left == 0 and by == "stop":
            trainer.stop()

    if by == "kill within an increment":
        kill_in_increment(batches)
    elif by:
        learned = trainer.learner.learn

        def learn(*batch: Any) -> Any:
            if ranks.rank == ranks.size - 1:
                show(None)
            return learned(*batch)

        trainer.learner.learn = learn  # type: ignore[method-assign, assignment]
    trainer.fit(MANY_NEWS if name in MANY_RUNS else NEWS)
    return {
        "began_at": began_at,
        "events": trainer.state.events,
        "auc": trainer.state.prequential.daily()[0],
        "stopped": trainer.stopped,
        "version": trainer.state.number,
        "lineage": trainer.versions.publisher.lineage,
        "scores": trainer.state.prequential.hourly(),
        "held": trainer.state.monitor.held.hourly(),
        "gauc": trainer.state.monitor.daily_gauc(),
        "slices": trainer.state.monitor.slices(),
    } | trainer.figures()


def kill_in_increment(buckets: int) -> None:
    """Die by SIGKILL when so many buckets of the second increment after a snapshot are written."""
    whole, left = CheckpointWriter.add, buckets

    def add(writer: CheckpointWriter, *values: Any, **named: Any) -> None:
        nonlocal left
        whole(writer, *values, **named)
        left -= writer._increment is not None and writer._increment.ordinal == 2
        if left == 0:
            writer._rows.flush()
            die()

    CheckpointWriter.add = add  # type: ignore[method-assign, assignment]


def with_another_seed(ranks: Ranks, folder: str) -> None:
    run = dataclasses.replace(RUNS["news"], seed=1 + ranks.rank)
    Trainer(run, Publication(Path(folder)), program_cache=CACHE, ranks=ranks)


def failing(ranks: Ranks, stage: str, folder: str) -> None:
    """The last rank fails in a stage of a run."""
    trainer = Trainer(RUNS["news"], Publication(Path(folder)), program_cache=CACHE, ranks=ranks)
    exchange = trainer.state.rows.exchange
    assert exchange is not None
    calls = 0

    def fail(*_: Any, **__: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < 3:
            return whole(*_, **__)
        raise OSError(28, "No space left on device")

    places: dict[str, tuple[Any, str]] = {
        "keys": (exchange, "ask"),
        "rows": (exchange, "rows"),
        "gradients": (exchange, "give"),
        "dense": (trainer.learner.optimizer, "step"),
        "publish": (trainer.versions.publisher.publication, "_write_part"),
        "snapshot": (trainer.state.rows.store, "export_bucket"),
    }
    target, attribute = places[stage]
    whole = getattr(target, attribute)
    if ranks.rank == ranks.size - 1 and stage != "snapshot":
        setattr(target, attribute, fail)
    trainer.fit(NEWS)


def wrong_events(ranks: Ranks, folder: str) -> None:
    class Broken(NewsSource):
        def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
            for n, batch in enumerate(super().batches(batch_size=batch_size, start=start)):
                if n == 3:
                    raise ConfigurationError("the events end here")
                yield batch

    news = NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5)
    trainer = Trainer(RUNS["news"], Publication(Path(folder)), program_cache=CACHE, ranks=ranks)
    trainer.fit(Broken(news))


def from_the_first(ranks: Ranks, size: int) -> tuple[bytes, int]:
    """Return what the first rank gives, and the number of bytes that this one sent for it."""
    channel = ranks.channel("test")
    given = channel.from_first(bytes(range(256)) * size if ranks.first else None, "data")
    return given, channel.traffic["data"].bytes


def events_that_pause(ranks: Ranks, folder: str, pause_s: float) -> int:
    """A stream that stands still for longer than ranks wait for one another."""

    class Pausing(NewsSource):
        def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
            for n, batch in enumerate(super().batches(batch_size=batch_size, start=start)):
                if n == 3:
                    time.sleep(pause_s)
                yield batch

    shared._STILL_EVERY_S = 0.5
    news = NewsConfig(hours=1, views_per_hour=60, users=80, new_items_per_hour=5)
    trainer = Trainer(RUNS["news"], Publication(Path(folder)), program_cache=CACHE, ranks=ranks)
    trainer.fit(Pausing(news))
    return trainer.state.events


def told_of_a_quiet_stream(ranks: Ranks, folder: str) -> list[tuple[int, int]]:
    """Let a stream stand still until all that it had is told: events learned, and events told.

    While it learns, nothing is told after the first batch.
    """
    quiet = threading.Event()
    gave, told = [0], list[tuple[int, int]]()

    class Quiet(NewsSource):
        def batches(self, *, batch_size: int, start: int = 0) -> Iterator[Batch]:
            for n, batch in enumerate(super().batches(batch_size=batch_size, start=start)):
                if n == 5:
                    assert quiet.wait(30), f"{gave} events were given, and told: {told}"
                    return
                gave[0] += len(batch)
                yield batch

    def hear(progress: Progress) -> None:
        told.append((trainer.state.events, progress.events))
        if progress.events == gave[0]:
            quiet.set()

    news = NewsConfig(hours=1, views_per_hour=60, users=80, new_items_per_hour=5)
    trainer = Trainer(RUNS["news"], Publication(Path(folder)), program_cache=CACHE, ranks=ranks)
    trainer.fit(Quiet(news), progress=hear, every_s=3600)
    return told


def prior_of_ranks(ranks: Ranks, folder: str, sync: str = "") -> list[float]:
    """The bias of the head at which this rank began, in a short run of all."""
    run = RunConfig(
        model=news_model(),
        batch_size=32,
        warmup_events=300,
        sync=LocalSGD(every=2) if sync else AllReduce(),
    )
    publication = Publication(Path(folder))
    trainer = Trainer(run, publication, ranks=ranks, program_cache=CACHE)
    bias_H = head_bias_of(trainer.learner.net)
    assert bias_H is not None
    begun: list[float] = []
    start = trainer.learner.start_at

    def noted(logit_H: NDArray[np.float32]) -> None:
        start(logit_H)
        begun.extend(bias_H.tolist())

    trainer.learner.start_at = noted  # type: ignore[method-assign]
    trainer.fit(NewsSource(NewsConfig(hours=1, views_per_hour=40, users=30, new_items_per_hour=5)))
    return begun


def corrected_ranks(ranks: Ranks) -> list[float]:
    """The correction after some steps of all ranks."""
    run = dataclasses.replace(STEP, correction=CorrectionConfig(half_life=500))
    learner = Learner(run, ranks, balanced(STEP.model, ranks.size))
    rng = np.random.default_rng(3)
    for _ in range(6):
        learner.learn(batch_of(rng, 24))
    assert learner.correction is not None
    offsets: list[float] = learner.correction.offset_H.tolist()
    return offsets
