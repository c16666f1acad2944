"""The work of ranks in tests of column-wise tables: functions that a process can import."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from fp64 import batch_of
from killing import CACHE
from numpy.typing import NDArray
from rankjobs import NEWS, STEP
from rankpool import die

from embertide.trainer.config import (
    Codecs,
    ModelConfig,
    OptimizerConfig,
    PruneConfig,
    RunConfig,
)
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer
from embertide.trainer.sync.plan import Ownership
from embertide.trainer.sync.ranks import Ranks

Found = tuple[list[NDArray[np.float32]], dict[tuple[int, int], Any], dict[str, Any]]


def chunky(dtype: Any = "fp32") -> ModelConfig:
    """Return the model of the steps, with rows of four chunks in both tables."""
    tables = tuple(
        dataclasses.replace(table, dim=8, chunks=4, dtype=dtype) for table in STEP.model.tables
    )
    return dataclasses.replace(STEP.model, tables=tables)


def owners(ranks: int, columns: tuple[tuple[int, ...], ...]) -> Ownership:
    """Return owners of the steps' tables by rows, and by columns where some are given."""
    homes = tuple(((t + np.arange(4)) % ranks).astype(np.uint16) for t in range(2))
    return Ownership(ranks, homes, columns)


def steps(
    ranks: Ranks,
    columns: tuple[tuple[int, ...], ...],
    versions: int = 4,
    codecs: Codecs | None = None,
    dtype: str = "fp32",
    **changed: Any,
) -> Found:
    """Scores, then rows with their states, and figures, after steps with versions between them."""
    run = dataclasses.replace(STEP, model=chunky(dtype), codecs=codecs or Codecs(), **changed)
    learner = Learner(run, ranks, owners(ranks.size, columns))
    rows = learner.rows
    rng = np.random.default_rng(3)
    scores = []
    taken: dict[tuple[int, int], Any] = {}
    for version in range(versions):
        scores += [learner.learn(batch_of(rng, 12)) for _ in range(3)]
        rows.bring_rows_home()
        for t, _, bucket in rows.places():
            taken[t, bucket, version] = rows.store.take_changes(t, bucket)  # type: ignore[index]
    places = [(t, b) for t, _, b in rows.places()]
    found = taken | {
        at: (rows.store.export_bucket(*at), [a.tobytes() for a in rows.store.bucket_state(*at)])
        for at in places
    }
    rows.store.check_integrity()
    stats = rows.stats()
    counted = {
        name: stats[name]
        for name in ("clipped_gradients", "refused_gradients", "dropped_gradients")
    }
    pruned = rows.pruning() or {}
    return scores, found, rows.column_figures() | counted | {"pruning": pruned}


def named(ranks: Ranks, columns: tuple[tuple[int, ...], ...], changed: dict[str, Any]) -> Found:
    """Do `steps`, by names of what is changed."""
    return steps(ranks, columns, **changed)


PRUNED = PruneConfig(
    bytes=1_600, waiting_bytes=128, half_life=5, first=(2,), every=3, least=2, max_age=6
)
OPTIMIZERS = {
    name: OptimizerConfig(name=name, sparse_learning_rate=0.05, epsilon=1e-4)
    for name in ("rowwise_adagrad", "rowwise_adam", "adagrad", "sgd")
}

_NEWS = news_model()
RUNS = {
    "news": RunConfig(
        model=dataclasses.replace(
            _NEWS,
            tables=tuple(
                dataclasses.replace(table, dim=max(table.dim, 8), chunks=4)
                for table in _NEWS.tables
            ),
        ),
        batch_size=24,
        publish_every_s=600,
        snapshot_every=4,
    )
}
RUNS["pruned"] = dataclasses.replace(
    RUNS["news"],
    prune=PruneConfig(bytes=30_000, half_life=20, first=(3,), every=5, least=2),
)


def plan_file(folder: Path, name: str, ranks: int, columns: dict[str, list[int]]) -> Path:
    """Write a plan by which some tables are column-wise; the same rank writes a bucket in each."""
    tables = {
        table.name: {"columns": columns[table.name]}
        if table.name in columns
        else [(t + bucket) % ranks for bucket in range(1 << table.bucket_bits)]
        for t, table in enumerate(RUNS[name].model.tables)
    }
    path = folder / f"{name}-{ranks}.json"
    path.write_text(json.dumps({"format": "embertide ranks 1", "ranks": ranks, "tables": tables}))
    return path


def train(ranks: Ranks, name: str, folder: str, plan: str, batches: int = 0) -> dict[str, Any]:
    """Train to the end by a plan; or until so many batches are learned, then die."""
    trainer = Trainer(
        RUNS[name],
        Publication(Path(folder)),
        program_cache=CACHE,
        ranks=ranks,
        plan_file=Path(plan) if plan else None,
    )
    left = batches
    learned = trainer.learner.learn

    def learn(*batch: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            trainer.versions.saver.wait()
            ranks.channel("written").gather(None)
            if ranks.rank == ranks.size - 1:
                die()
        return learned(*batch)

    trainer.learner.learn = learn  # type: ignore[method-assign, assignment]
    trainer.fit(NEWS)
    return {"scores": trainer.state.prequential.hourly()} | trainer.figures()
