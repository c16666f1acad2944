"""The work of ranks in tests of hot rows: functions that a process of `rankpool` can import."""

import contextlib
import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fp64 import DIM, KEYS, batch_of
from killing import CACHE
from numpy.typing import NDArray
from rankjobs import NEWS, OWNERS, RUNS, STEP
from rankpool import die

from embertide import _store
from embertide.trainer.config import Codecs, LocalSGD, OptimizerConfig, PruneConfig
from embertide.trainer.embedding.hot import HotRows
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.learner import Learner
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer
from embertide.trainer.sync.hot import HotSet
from embertide.trainer.sync.ranks import Ranks

Found = tuple[list[NDArray[np.float32]], dict[tuple[int, int], Any], dict[str, int]]
HOT_ROWS = 200


def drawn(seed: int, ranks: int, tables: int, keys: NDArray[np.int64]) -> HotSet:
    """Return a set of about half of the keys of each table, at any rank, their own among them."""
    rng = np.random.default_rng(seed)
    picked = [keys[rng.random(len(keys)) < 0.5] for _ in range(tables)]
    table_K = np.repeat(np.arange(tables, dtype=np.int32), [len(each) for each in picked])
    host_K = rng.integers(0, ranks, len(table_K)).astype(np.uint16)
    return HotSet(table_K, np.concatenate(picked), host_K)


def steps(
    ranks: Ranks, optimizer: Any, pruned: bool, codecs: Codecs, hot: bool, sets: int = 4
) -> Found:
    """Scores, then rows with their states, and figures, after steps between which sets change."""
    run = dataclasses.replace(
        STEP,
        codecs=codecs,
        optimizer=OptimizerConfig(name=optimizer, sparse_learning_rate=0.05, epsilon=1e-4),
        prune=PruneConfig(
            bytes=1_100, waiting_bytes=128, half_life=5, first=(2,), every=3, least=2, max_age=6
        )
        if pruned
        else None,
        hot_rows=HOT_ROWS if hot else 0,
    )
    learner = Learner(run, ranks, OWNERS["by rows"](ranks.size))
    rows = learner.rows
    rng = np.random.default_rng(3)
    scores = []
    for seed in range(sets):
        # Keys that no batch has are among them, and keys that have no row yet.
        if rows.hot is not None:
            rows.hot.send_out(drawn(seed, ranks.size, 2, np.arange(KEYS + 3)))
        scores += [learner.learn(batch_of(rng, 12)) for _ in range(3)]
        rows.bring_rows_home()
    places = [(t, b) for t, _, b in rows.places()]
    found = {
        at: (rows.store.export_bucket(*at), [a.tobytes() for a in rows.store.bucket_state(*at)])
        for at in places
    }
    pruning = rows.pruning() or {"passes": 0}
    return scores, found, rows.hot_figures() | {"passes": pruning["passes"]}


def train(
    ranks: Ranks, name: str, folder: str, hot: bool, batches: int = 0, **changed: Any
) -> dict[str, Any]:
    """Train to the end with sets that are drawn; or until so many batches are learned, then die."""
    run = dataclasses.replace(RUNS[name], hot_rows=HOT_ROWS if hot else 0, **changed)
    trainer = Trainer(run, Publication(Path(folder)), program_cache=CACHE, ranks=ranks)
    rows = trainer.state.rows
    if rows.hot is not None:
        draw_sets(rows.hot, ranks.size)
    left = batches
    learned = trainer.learner.learn

    def learn(*batch: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            # Where a run goes on must not depend on how far a checkpoint was.
            trainer.versions.saver.wait()
            ranks.channel("written").gather(None)
            if ranks.rank == ranks.size - 1:
                die()
        return learned(*batch)

    trainer.learner.learn = learn  # type: ignore[method-assign, assignment]
    trainer.fit(NEWS)
    return {"scores": trainer.state.prequential.hourly()} | trainer.figures()


def draw_sets(hot: HotRows, ranks: int) -> None:
    """Have sets be drawn of the keys that were asked for, in place of being chosen by them."""
    choose, seed = hot.choose, 0

    def choose_any() -> HotSet:
        nonlocal seed
        choose()
        seed += 1
        asked = [np.array(each, np.int64) for each in hot._channel.gather(found.pop(0))]
        keys = np.unique(np.concatenate(asked))
        return drawn(seed, ranks, len(hot._tables), keys)

    found: list[list[int]] = []
    clear = hot._counts.clear

    def noted() -> None:
        found.append(hot._counts.asks().key_K.tolist())
        clear()

    hot._counts.clear = noted  # type: ignore[method-assign]
    hot.choose = choose_any  # type: ignore[method-assign]


def chosen(ranks: Ranks, steps: int, hot_rows: int, whole: bool) -> dict[str, Any]:
    """Keys asked of each rank in steps after a set was chosen by those before; and the set."""
    run = dataclasses.replace(STEP, hot_rows=hot_rows)
    how = "whole" if whole else "by rows"
    learner = Learner(run, ranks, OWNERS[how](ranks.size))
    rows = learner.rows
    assert rows.hot is not None
    rng = np.random.default_rng(3)
    asks = []
    for _ in range(2):
        before = rows.hot.stats.asks
        for _ in range(steps):
            learner.learn(batch_of(rng, 48))
        asks.append(rows.hot.stats.asks - before)
        rows.bring_rows_home()
        rows.send_hot_rows_out()
    return {"asks": asks, "set": [each.tolist() for each in rows.hot.rows]}


def added_up(ranks: Ranks) -> tuple[bytes, bytes]:
    """A guest after gradients whose sum in their order is 5, and after 5 itself."""
    learner = Learner(dataclasses.replace(STEP, hot_rows=HOT_ROWS), ranks)
    hot = learner.rows.hot
    assert hot is not None
    learner.learn(batch_of(np.random.default_rng(3), 48))
    keys = np.arange(KEYS)
    hot.send_out(HotSet(np.zeros(KEYS, np.int32), keys, (keys % ranks.size).astype(np.uint16)))
    assert hot.guests is not None
    records, _ = hot.guests.export_rows(0, keys.astype(np.uint64))
    key = _store.record_keys(hot._tables[0].layout, records)[:1]
    records, state = hot.guests.export_rows(0, key)
    plain = _store.TrainingStore(tables=list(hot._tables), optimizer=STEP.optimizer.name)
    plain.import_records(0, 0, records)
    plain.set_states(0, key, state)

    def bag(table: int, value: float) -> Any:
        return table, key.view(np.int64), None, np.full((1, DIM), value, np.float32), None

    step = partial(_store.TrainingStore.apply_gradients, learning_rate=0.1, initial_accumulator=1.0)
    step(plain, [bag(0, 5.0)])
    bags = [bag(len(hot._tables), value) for value in (1e30, 1.0, -1e30, 5.0)]
    hot.apply(step, bags, [None] * 4)
    return hot.guests.export_rows(0, key)[0], plain.export_rows(0, key)[0]


def room(ranks: Ranks) -> int:
    """Be refused more hot rows than memory has room for; take as many as the error says."""

    def store(hot_rows: int) -> EmbeddingStore:
        return EmbeddingStore(
            STEP.model, ranks=ranks, hot_rows=hot_rows, ddr_budget_bytes=STEP.ddr_budget_bytes
        )

    try:
        store(1_000_000)
    except ConfigurationError as error:
        found = re.search(r"hot_rows is 1000000.* give at most hot_rows=(\d+)", str(error))
    assert found is not None
    fits = int(found[1])
    store(fits)
    return fits


def planned(ranks: Ranks, of_run: int, of_plan: int | None) -> int | str:
    """Return how many rows may be hot by a run and its plan; or why they are refused."""
    owners = dataclasses.replace(OWNERS["by rows"](ranks.size), hot_rows=of_plan)
    learner = Learner(dataclasses.replace(STEP, hot_rows=of_run), ranks, owners)
    with contextlib.suppress(ConfigurationError):
        apart = dataclasses.replace(STEP, sync=LocalSGD())
        Learner(apart, ranks, dataclasses.replace(owners, hot_rows=1))
        return "ranks that are apart had hot rows"
    return 0 if learner.rows.hot is None else learner.rows.hot.max_rows
