"""The window of a run: rows are held for batches that are read ahead, and nothing else changes."""

import collections
import dataclasses
import logging
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from killing import CACHE, train, unserved
from snapshots import newest_files

from embertide import _store
from embertide.trainer.config import EvalConfig, LabelJoin, PruneConfig, RunConfig
from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.export import tensor_bytes
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.progress import Progress
from embertide.trainer.run.window import BRINGING, Window

NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=1500, users=6000, new_items_per_hour=40))
# Rows of 1 KiB, so that few batches fill a small DDR.
MODEL = dataclasses.replace(
    news_model(),
    tables=tuple(dataclasses.replace(table, dim=256) for table in news_model().tables),
    top_mlp=(16,),
)
IN_DDR = RunConfig(model=MODEL, batch_size=16, publish_every_s=900, ddr_budget_bytes=64 << 20)
COLUMNS = len(MODEL.columns)


def held(run: RunConfig, ssd: Path, batches: int, ddr_bytes: int = 2 << 20) -> RunConfig:
    """Return the run beyond DDR, with a window of so many batches."""
    return dataclasses.replace(
        run,
        ddr_budget_bytes=ddr_bytes,
        ssd_budget_bytes=32 << 20,
        ssd_directory=str(ssd),
        hold_bytes=ddr_bytes // 2,
        hold_batches=batches,
    )


# --- batches of random repeats --------------------------------------------------------------------


def random_batches(seed: int, count: int, events: int, repeats: float) -> list[Batch]:
    """Return batches of which so large a share of the keys is one of the batches just before."""
    rng = np.random.default_rng(seed)
    batches, late = list[Batch](), rng.integers(0, 4000, (events, COLUMNS))
    for n in range(count):
        keys_BF = rng.integers(0, 4000, (events, COLUMNS))
        again_BF = rng.random(keys_BF.shape) < repeats
        keys_BF[again_BF] = rng.permuted(late, axis=0)[again_BF]
        if n % 3 == 0:  # and some of a while ago
            late = keys_BF
        event_B = np.arange(n * events, (n + 1) * events)
        batches.append(
            Batch(
                first=n * events,
                next_offset=(n + 1) * events,
                event_B=event_B,
                ts_ms_B=event_B * 100,
                keys_BF=keys_BF.astype(np.int64),
                dense_BD=np.zeros((events, MODEL.dense_columns), np.float32),
                label_B=(rng.random(events) < 0.3).astype(np.float32),
            )
        )
    return batches


def state_of(learner: Learner) -> list[Any]:
    """Return all that was learned, byte for byte."""
    store = learner.rows.store
    found: list[Any] = [tensor_bytes(learner.net)]
    for t, table in enumerate(learner.rows.tables):
        for b in range(1 << table.bucket_bits):
            states = store.bucket_state(t, b)
            found.append([np.asarray(each).tobytes() for each in states if each is not None])
            found.append(store.take_changes(t, b))
    return found


def learned(run: RunConfig, batches: list[Batch]) -> tuple[list[Any], Window, int]:
    """Learn batches as a run does, without versions; return what is learned, and evictions."""
    learner = Learner(run)
    window = Window(learner, run)

    def learn_next() -> None:
        oldest = window.take()
        ready = oldest.ready.result()
        assert ready is not None
        learner.learn(ready)
        window.done(oldest)

    for batch in batches:
        if run.ssd_budget_bytes == 0:
            learner.learn(batch)
            continue
        while not window.has_room():
            learn_next()
        window.put(batch, batch, None)
    while len(window) > 0:
        learn_next()
    evictions = int(learner.rows.stats()["evictions_to_ssd"])
    learner.rows.store.check_integrity()
    return state_of(learner), window, evictions


def most_held(run: RunConfig, batches: list[Batch], length: int) -> int:
    """Return what the rows of so many batches in a row may take together, at most."""
    store = Learner(dataclasses.replace(run, ssd_budget_bytes=0, hold_bytes=0, hold_batches=0))
    table_of = [MODEL.table_index(column.table) for column in MODEL.columns]
    most = 0
    for first in range(len(batches)):
        rows = {
            (table_of[f], key)
            for batch in batches[first : first + length]
            for f in range(COLUMNS)
            for key in batch.keys_BF[:, f].tolist()
        }
        most = max(most, sum(store.rows.store.hold_bytes_of(table) for table, _key in rows))
    return most


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 1000),
    length=st.sampled_from([0, 1, 2, 3, 7]),
    ddr_kib=st.sampled_from([1536, 1792, 2048]),
    repeats=st.sampled_from([0.0, 0.3, 0.6]),
    pruned=st.booleans(),
)
def test_random_repeats_end_with_the_bits_of_ddr_alone(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    length: int,
    ddr_kib: int,
    repeats: float,
    pruned: bool,
) -> None:
    prune = PruneConfig(bytes=2_500_000, first=(3,), every=5, least=2) if pruned else None
    in_ddr = dataclasses.replace(IN_DDR, prune=prune, batch_size=4)
    batches = random_batches(seed, 150, 4, repeats)
    beyond = held(in_ddr, tmp_path_factory.mktemp("ssd"), length, ddr_kib << 10)
    wanted, *_ = learned(in_ddr, batches)
    found, window, evictions = learned(beyond, batches)
    assert found == wanted
    figures = window.figures()
    assert evictions > 100
    assert figures["unheld"] == 0
    assert figures["misses"] == 0
    assert figures["hits"] > 0
    assert (figures["held_rows"], figures["held_bytes"]) == (0, 0)
    assert 0 < figures["most_held_bytes"] <= most_held(in_ddr, batches, length or 64)
    assert figures["most_held_bytes"] <= beyond.hold_bytes


def test_todays_policy_misses_rows_that_a_window_holds(tmp_path: Path) -> None:
    batches = random_batches(3, 40, 24, 0.5)
    beyond = dataclasses.replace(
        held(IN_DDR, tmp_path / "ssd", 0), hold_bytes=0, ddr_budget_bytes=1 << 20
    )
    learner = Learner(beyond)
    window = Window(learner, beyond)
    for batch in batches:
        window.put(batch, batch, None)
        oldest = window.take()
        learner.learn(oldest.ready.result() or batch)
        window.done(oldest)
    assert window.figures() == {}
    assert learner.rows.stats()["evictions_to_ssd"] > 100


def test_a_batch_that_does_not_fit_is_learned_all_the_same_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = random_batches(5, 12, 8, 0.2)
    large = random_batches(6, 13, 300, 0.0)[-1]  # of more rows than may be held
    large = dataclasses.replace(large, first=96, next_offset=396)
    in_ddr = dataclasses.replace(IN_DDR, batch_size=8)
    with caplog.at_level(logging.WARNING):
        found, window, _ = learned(held(in_ddr, tmp_path / "ssd", 0), [*batches, large, *batches])
    assert found == learned(in_ddr, [*batches, large, *batches])[0]
    assert window.figures()["unheld"] == 1
    assert window.figures()["misses"] == 0, "of those that were held"
    assert "the rows of a batch of 300 events do not fit" in caplog.text


def test_the_window_is_longer_where_the_drive_is_slower_than_the_net(tmp_path: Path) -> None:
    run = held(dataclasses.replace(IN_DDR, batch_size=4), tmp_path / "ssd", 0, 8 << 20)
    learner = Learner(run)
    window, lengths = Window(learner, run), []
    real = learner.rows.bring
    for slow_s in (0.0, 0.05):

        def bring(keys: Any, slow_s: float = slow_s) -> None:
            time.sleep(slow_s)  # a drive that is slow
            real(keys)

        learner.rows.bring = bring  # type: ignore[method-assign]
        for batch in random_batches(8, 30, 4, 0.5):
            while not window.has_room():
                oldest = window.take()
                time.sleep(0.005)  # a net
                window.done(oldest)
            window.put(batch, batch, None)
        lengths.append(window.figures()["length"])
        while len(window) > 0:
            window.done(window.take())
    assert lengths[0] < 12
    assert lengths[1] > lengths[0]
    assert lengths[1] <= 64


def test_a_hold_for_which_there_is_no_room_is_seldom_tried(tmp_path: Path) -> None:
    run = held(dataclasses.replace(IN_DDR, batch_size=16), tmp_path / "ssd", 0)
    learner = Learner(run)
    window = Window(learner, run)
    window._length = lambda: 64  # type: ignore[method-assign]  # bytes alone bound it
    real, tries = learner.rows.hold, list[bool]()

    def hold(keys: Any) -> Any:
        missing = real(keys)
        tries.append(missing is not None)
        return missing

    def settle() -> None:  # behind what each of its threads has to do
        all_here = threading.Barrier(BRINGING)
        jobs = [window._workers.submit(all_here.wait) for _ in range(all_here.parties)]
        for job in jobs:
            job.result()

    learner.rows.hold = hold  # type: ignore[method-assign]
    batches, lengths = random_batches(9, 80, 16, 0.5), list[int]()
    for batch in batches:
        while not window.has_room():
            lengths.append(len(window))
            window.done(window.take())
            settle()
        window.put(batch, batch, None)
        settle()
    while len(window) > 0:
        window.done(window.take())
        settle()
    assert tries.count(True) == len(batches)
    assert len(lengths) > 40
    assert statistics.mean(lengths) > 3, "what there is room for is held"
    assert tries.count(False) < len(batches) // 5


def test_rows_are_brought_while_those_of_the_batch_before_still_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embertide.trainer.run.window._MERGED_KEYS", 1)
    run = held(dataclasses.replace(IN_DDR, batch_size=16), tmp_path / "ssd", 4)
    learner = Learner(run)
    window = Window(learner, run)
    real, all_here = learner.rows.bring, threading.Barrier(BRINGING)
    keys_brought = list[set[tuple[int, int]]]()

    def bring(keys: Any) -> None:
        all_here.wait(timeout=60)  # for the other thread, which has a batch of its own
        real(keys)
        keys_brought.append({(table, key) for table, keys_N in keys for key in keys_N.tolist()})

    learner.rows.bring = bring  # type: ignore[method-assign]
    batches = random_batches(3, BRINGING, 16, 0.5)
    for batch in batches:
        window.put(batch, batch, None)
    while len(window) > 0:
        window.done(window.take())
    assert len(keys_brought) == len(batches)
    wanted = {
        (table, key)
        for batch in batches
        for table, keys_N in learner.table_keys(batch)
        for key in keys_N.tolist()
    }
    assert set.union(*keys_brought) == wanted
    assert sum(map(len, keys_brought)) == len(wanted), "what one batch holds, no other brings"


def test_a_failed_read_comes_where_its_batch_would_and_leaves_nothing_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = held(IN_DDR, tmp_path / "ssd", 3)
    trainer = Trainer(run, unserved(tmp_path / "pub"), program_cache=CACHE)
    rows = trainer.state.rows
    real, calls = rows.bring, 0

    def bring(keys: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise OSError("the drive is gone")
        real(keys)

    monkeypatch.setattr(rows, "bring", bring)
    with pytest.raises(OSError, match="the drive is gone"):
        trainer.fit(NEWS)
    assert trainer.state.events >= 16
    assert rows.store.held()[:2] == (0, 0)
    assert len(trainer.steps.window) == 0


# --- runs -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Whole:
    """A run whose rows all lie in DDR."""

    run: RunConfig
    publication: Publication
    trainer: Trainer


KINDS = {
    "plain": IN_DDR,
    "pruned": dataclasses.replace(
        IN_DDR, prune=PruneConfig(bytes=2_500_000, first=(3,), every=5, least=2)
    ),
    "held out": dataclasses.replace(IN_DDR, evaluation=EvalConfig(hold_out=0.2)),
}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    found = {}
    for kind, run in KINDS.items():
        publication = unserved(tmp_path_factory.mktemp("whole") / "pub")
        trainer = Trainer(run, publication, program_cache=CACHE)
        trainer.fit(NEWS)
        found[kind] = Whole(run, publication, trainer)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batches", [0, 1, 4])
def test_a_run_with_a_window_ends_with_the_bytes_of_one_in_ddr(
    wholes: dict[str, Whole], tmp_path: Path, kind: str, batches: int
) -> None:
    whole = wholes[kind]
    publication = unserved(tmp_path / "pub")
    trainer = train(held(whole.run, tmp_path / "ssd", batches), NEWS, publication)
    assert newest_files(publication) == newest_files(whole.publication)
    assert [v.number for v in publication.versions()] == [
        v.number for v in whole.publication.versions()
    ]
    assert trainer.state.prequential.hourly() == whole.trainer.state.prequential.hourly()
    if kind == "held out":
        assert trainer.state.monitor.quality(trainer.state.prequential) == (
            whole.trainer.state.monitor.quality(whole.trainer.state.prequential)
        )
    figures = trainer.figures()["window"]
    assert (figures["misses"], figures["unheld"]) == (0, 0)
    stats = trainer.state.rows.stats()
    assert stats["evictions_to_ssd"] > 100
    assert stats["evictions_by_writers"] < stats["evictions_to_ssd"], (
        "the window's thread makes room, too"
    )
    assert (figures["batches"], figures["held_rows"]) == (0, 0)


@pytest.mark.parametrize("killed_at", [7, 31])
def test_a_run_with_a_window_that_is_killed_ends_as_one_that_is_not(
    wholes: dict[str, Whole], tmp_path: Path, killed_at: int
) -> None:
    run = held(KINDS["pruned"], tmp_path / "ssd", 4)
    publication = unserved(tmp_path / "pub")
    train(run, NEWS, publication, killed_at)
    train(run, NEWS, publication)
    assert newest_files(publication) == newest_files(wholes["pruned"].publication)


class Paced:
    """A stream that is slower than the trainer: a batch comes when those before it are learned."""

    def __init__(self, of: EventSource) -> None:
        self._of = of
        self.trainer: Trainer | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def batches(self, **given: Any) -> Iterator[Batch]:
        for batch in self._of.batches(**given):
            end_s = time.monotonic() + 20
            while self.trainer is not None and self.trainer.state.done < batch.first:
                assert time.monotonic() < end_s, f"event {batch.first - 1} waits for more to come"
                time.sleep(0.001)
            yield batch


def test_on_a_slow_stream_the_window_waits_for_nothing(
    wholes: dict[str, Whole], tmp_path: Path
) -> None:
    run = held(IN_DDR, tmp_path / "ssd", 4)
    publication = unserved(tmp_path / "pub")
    trainer = Trainer(run, publication, program_cache=CACHE)
    source: Any = Paced(NEWS)
    source.trainer = trainer
    lengths = collections.Counter[int]()
    real = trainer.steps.window.take

    def take() -> Any:
        lengths[len(trainer.steps.window)] += 1
        return real()

    trainer.steps.window.take = take  # type: ignore[method-assign]
    trainer.fit(source)
    assert set(lengths) == {1}, "no batch waited behind another"
    assert newest_files(publication) == newest_files(wholes["plain"].publication)


def test_on_a_fast_stream_the_delay_is_at_most_that_of_the_window(tmp_path: Path) -> None:
    run = held(IN_DDR, tmp_path / "ssd", 4)
    trainer = Trainer(run, unserved(tmp_path / "pub"), program_cache=CACHE)
    seen = list[dict[str, float]]()

    def show(progress: Progress) -> None:
        seen.append(progress.window)

    trainer.fit(NEWS, progress=show, every_s=0)
    assert max(each["batches"] for each in seen) in (3, 4)
    assert all(each["length"] == 4 for each in seen)
    assert max(each["held_bytes"] for each in seen) <= run.hold_bytes
    last = seen[-1]
    # Three batches are learned before it at most, beside versions that end meanwhile.
    assert 0 < last["delay_ms"] <= last["most_delay_ms"]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssd_budget_bytes": 0}, "without an SSD no row leaves DDR"),
        ({"hold_bytes": (1 << 20) + 1}, "more than half of ddr_budget_bytes.*at most 1048576"),
        ({"hold_bytes": -1}, "hold_bytes is -1.*give 0 or more bytes"),
        ({"hold_batches": 65}, "hold_batches 65.*0 to 64 batches"),
        ({"hold_bytes": 0}, "hold_batches is 2 and hold_bytes 0"),
        ({"ahead_bytes": 0}, "ahead_bytes 0, which reads no batch ahead"),
        ({"negative_rate": 0.5}, "with late labels or negative_rate"),
        ({"labels": LabelJoin(wait_s=60)}, "with late labels or negative_rate"),
    ],
)
def test_a_run_refuses_a_window_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    run = held(IN_DDR, Path("ssd"), 2)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(run, **changes)


def test_a_window_whose_rows_may_not_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    run = held(dataclasses.replace(IN_DDR, batch_size=64), tmp_path / "ssd", 3)
    message = r"hold_batches=3 batches of 64 events may hold \d+ bytes of rows, more than"
    with pytest.raises(ConfigurationError, match=message) as raised:
        Trainer(run, unserved(tmp_path / "pub"), program_cache=CACHE)
    fits = int(str(raised.value).split("hold_batches=")[2].split(",")[0])
    assert fits < 3
    # The value that it names is accepted.
    run = dataclasses.replace(run, hold_batches=fits)
    Trainer(run, unserved(tmp_path / "other"), program_cache=CACHE)


def test_many_ranks_hold_no_rows(tmp_path: Path) -> None:
    run = held(IN_DDR, tmp_path / "ssd", 1)
    learner = Learner(run)
    learner.ranks = SimpleNamespace(size=2)  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="2 ranks ask one another for rows"):
        Window(learner, run)


def test_the_store_names_why_it_holds_no_more(tmp_path: Path) -> None:
    rows = Learner(held(IN_DDR, tmp_path / "ssd", 0)).rows
    keys = [(0, np.arange(5000))]
    assert not rows.hold(keys)
    with pytest.raises(_store.StoreError, match="hold fewer batches, or give more of both"):
        rows.store.hold_rows(keys)
    assert rows.store.held()[:2] == (0, 0)
