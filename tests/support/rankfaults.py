"""Faults of one rank, for tests of many: functions that a process of `rankpool` can import."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from killing import CACHE
from rankjobs import NEWS, RUNS
from rankpool import die

from embertide import _store
from embertide.trainer.config import PruneConfig, RunConfig, TableConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint.checkpoint import CheckpointWriter
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress
from embertide.trainer.sync.ranks import Ranks

RUN = RUNS["news"]
REFUSED = ("refused_rows", "failed_keys", "unworthy_keys", "worthy_keys_without_room")


def _places(trainer: Trainer) -> dict[str, tuple[Any, str]]:
    """Where each stage of a run begins: an object, and the name of what is called then."""
    exchange = trainer.state.rows.exchange
    assert exchange is not None
    publication = trainer.versions.publisher.publication
    return {
        "events": (trainer._events, "from_first"),
        "keys": (exchange, "ask"),
        "rows": (exchange, "rows"),
        "gradients": (exchange, "give"),
        "dense": (trainer.learner.sync, "finish"),
        "delta": (publication, "_write_part"),
        "commit": (publication, "_write_commit"),
        "snapshot": (_store, "write_bucket_file"),
        "state": (CheckpointWriter, "add"),
        "checkpoint": (CheckpointWriter, "finish"),
    }


def _at_call(place: tuple[Any, str], calls: int, act: Callable[[], None]) -> Callable[[], None]:
    """Have `act` happen before so many calls and later ones; return what undoes it."""
    target, name = place
    whole = getattr(target, name)
    left = calls

    def call(*values: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left <= 0:
            act()
        return whole(*values, **named)

    setattr(target, name, call)
    return lambda: setattr(target, name, whole)


def lose_rank(ranks: Ranks, stage: str, lost: int, folder: str) -> None:
    """Train; one rank is killed in a stage."""
    trainer = Trainer(RUN, Publication(Path(folder)), program_cache=CACHE, ranks=ranks)
    if ranks.rank == lost:
        # Well after the second snapshot; those with other counts are called more or less often.
        calls = {
            "commit": 12,
            "delta": 80,
            "snapshot": 50,
            "checkpoint": 3,
            "events": 5,
        }.get(stage, 30)
        _at_call(_places(trainer)[stage], calls, die)
    trainer.fit(NEWS)


def fill_drive(ranks: Ranks, stage: str, folder: str) -> dict[str, int]:
    """Train; the drive has no room for the last rank's part of the second checkpoint."""
    trainer = Trainer(RUN, Publication(Path(folder)), program_cache=CACHE, ranks=ranks)
    left = 1

    def refuse() -> None:
        nonlocal left
        if trainer.versions.saver.stats.saved == 1 and left:
            left = 0
            raise OSError(28, "No space left on device")

    if ranks.rank < ranks.size - 1:
        trainer.fit(NEWS)
    else:
        undo = _at_call(_places(trainer)[stage], 1, refuse)
        try:
            trainer.fit(NEWS)
        finally:
            undo()
    return trainer.versions.counters()


def shift_clock(ranks: Ranks, wrong: int, by_s: int, folder: str) -> int:
    """Train; the clock of one rank is off. Return when the run began, by the right clock, in ms."""
    began_ms = time.time_ns() // 1_000_000
    right = time.time, time.time_ns
    if ranks.rank == wrong:
        time.time = lambda: right[0]() + by_s
        time.time_ns = lambda: right[1]() + by_s * 10**9
    try:
        # Snapshots are kept by their age, too.
        run = dataclasses.replace(RUN, keep_snapshots_s=600)
        trainer = Trainer(run, Publication(Path(folder)), program_cache=CACHE, ranks=ranks)
        trainer.fit(NEWS)
    finally:
        time.time, time.time_ns = right
    return began_ms


def go_on_half_blind(ranks: Ranks, blind: int, folder: str) -> int:
    """Go on with a run whose newest checkpoint one rank does not see; return its version."""
    publication = Publication(Path(folder))
    if ranks.rank == blind:
        newest = checkpoints.newest(publication)
        assert newest is not None
        there = publication.snapshots
        setattr(publication, "snapshots", lambda: [v for v in there() if v != newest])  # noqa: B010
        seen = checkpoints.is_complete
        checkpoints.is_complete = lambda publication, version: (
            version != newest and seen(publication, version)
        )
    try:
        return Trainer(RUN, publication, program_cache=CACHE, ranks=ranks).state.number
    finally:
        if ranks.rank == blind:
            checkpoints.is_complete = seen


# Rows that are wide, so that few of them fill the least budget there is.
CROWD = NewsSource(NewsConfig(hours=1, views_per_hour=1200, users=20_000, new_items_per_hour=5))


def _wide(prune: PruneConfig | None) -> RunConfig:
    tables = tuple(
        TableConfig(name=table.name, dim=256, bucket_bits=table.bucket_bits)
        for table in RUN.model.tables
    )
    model = dataclasses.replace(RUN.model, tables=tables, top_mlp=(16,))
    return dataclasses.replace(
        RUN, model=model, prune=prune, batch_size=64, ddr_budget_bytes=1 << 20
    )


CROWDED = {
    "plain": _wide(None),
    "pruned": _wide(PruneConfig(bytes=300_000, half_life=20, first=(3,), every=5, least=2)),
}


def crowd_store(ranks: Ranks, name: str, plan: str, folder: str) -> dict[str, Any]:
    """Train with stores of the least budget, by a plan; return the counters of what was refused.

    Returns:
        Those of this rank's store, those of all, and those that progress showed last.
    """
    run, publication = CROWDED[name], Publication(Path(folder))
    shown: list[Progress] = []
    trainer = Trainer(run, publication, program_cache=CACHE, ranks=ranks, plan_file=Path(plan))
    trainer.fit(CROWD, progress=shown.append, every_s=0)
    stats = trainer.state.rows.stats()
    total = trainer.figures()["store"]
    return {
        "here": {name: stats[name] for name in ("rows", *REFUSED)},
        "total": {name: total[name] for name in ("rows", *REFUSED)},
        "shown": [{"rows": each.rows} | each.dropped for each in shown],
    }


def overfill_store(ranks: Ranks, plan: str, folder: str) -> None:
    """Train with stores that are too small; a rank that fails ends, as its process would."""
    try:
        with ranks.failing():
            crowd_store(ranks, "plain", plan, folder)
    except _store.StoreError:
        die()
