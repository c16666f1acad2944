"""The training loop: killed anywhere and started again, it ends where it would have anyway."""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killing import CACHE, Killed, train, unserved
from serving import flip_byte
from snapshots import newest_files, snapshot_files
from waiting import wait_until

from embertide import _store
from embertide.trainer.config import PruneConfig, RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.model.export import tensor_bytes
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.publisher import Outgoing, Publisher
from embertide.trainer.publish.snapshot import SnapshotInfo, write_snapshot
from embertide.trainer.run import versions
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint import saver
from embertide.trainer.run.checkpoint.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    HarmedCheckpointError,
)
from embertide.trainer.run.loop import Trainer
from embertide.trainer.run.versions import Versions

# So few bytes that rows go and come back at every pass.
PRUNE = PruneConfig(bytes=10_000, half_life=20, first=(3,), every=5, least=2)
RUN = RunConfig(
    model=news_model(), prune=PRUNE, batch_size=24, publish_every_s=600, snapshot_every=4
)
NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5))
TOTAL = NEWS.total_events()


@dataclasses.dataclass
class Whole:
    """A run that nothing stopped."""

    publication: Publication
    trainer: Trainer
    program: Path

    def new(self, path: Path) -> Publication:
        """An empty publication, with the program that all share: exporting it takes seconds."""
        path.mkdir()
        shutil.copyfile(self.program, path / "program.pt2")
        return Publication(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    publication = Publication(tmp_path_factory.mktemp("whole") / "pub")
    trainer = Trainer(RUN, publication, program_cache=CACHE)
    trainer.fit(NEWS)
    return Whole(publication, trainer, publication.program)


@pytest.fixture
def fresh(whole: Whole, tmp_path: Path) -> Publication:
    return whole.new(tmp_path / "pub")


def numbers(publication: Publication) -> list[int]:
    lines = publication.log.read_text().splitlines()
    return sorted({json.loads(line)["number"] for line in lines})


def resume(publication: Publication) -> Trainer:
    trainer = Trainer(RUN, publication, program_cache=CACHE)
    trainer.fit(NEWS)
    return trainer


def assert_ends_as(whole: Whole, publication: Publication, trainer: Trainer) -> None:
    assert newest_files(publication) == newest_files(whole.publication)
    assert publication.snapshots()[-1].number == whole.publication.snapshots()[-1].number
    assert numbers(publication) == numbers(whole.publication)
    assert trainer.state.number == whole.trainer.state.number
    # Learned once, scored once.
    assert (trainer.state.events, trainer.state.done, trainer.state.offset) == (TOTAL, TOTAL, TOTAL)
    mine, theirs = trainer.state.prequential, whole.trainer.state.prequential
    assert mine.daily_summaries() == theirs.daily_summaries()
    assert mine.hourly() == theirs.hourly()
    found = checkpoints.load_newest(publication)
    assert found is not None
    assert found.checkpoint.version == publication.snapshots()[-1]


# --- killed and resumed ---------------------------------------------------------------------------


def test_the_whole_run_learns_everything_once_and_publishes_by_event_time(whole: Whole) -> None:
    # An event of the last interval before hour 3 is there: versions 1 to 18, and the end.
    assert numbers(whole.publication) == list(range(1, 20))
    assert [v.number for v in whole.publication.snapshots()] == [16, 19]
    assert whole.trainer.state.events == TOTAL > 500
    assert whole.trainer.state.prequential.daily()[0] > 0.5
    assert list(whole.publication.path.glob("*/.*")) == []
    assert whole.trainer.state.rows.passes > 10
    assert whole.trainer.state.rows.pruned is not None
    assert whole.trainer.state.rows.pruned.rows_pruned > 0
    assert whole.trainer.state.rows.stats()["unworthy_keys"] > 0
    assert whole.trainer.state.rows.pruned.bytes <= PRUNE.row_bytes(seen=0)


@pytest.mark.parametrize("batches", [1, 7, 13, 22])
def test_a_run_killed_between_batches_ends_as_one_never_killed(
    whole: Whole, fresh: Publication, batches: int
) -> None:
    train(RUN, NEWS, fresh, batches)
    assert_ends_as(whole, fresh, resume(fresh))


def test_a_pruned_run_with_an_ssd_ends_as_one_without(tmp_path: Path) -> None:
    news = NewsSource(NewsConfig(hours=2, views_per_hour=900, users=3000, new_items_per_hour=20))
    tables = tuple(dataclasses.replace(table, dim=256) for table in news_model().tables)
    in_memory = dataclasses.replace(
        RUN,
        model=dataclasses.replace(news_model(), tables=tables, top_mlp=(16,)),
        prune=PruneConfig(bytes=1_500_000, first=(3,), every=5, least=2),
        batch_size=64,
    )
    beyond = dataclasses.replace(
        in_memory,
        ddr_budget_bytes=1 << 20,
        ssd_budget_bytes=8 << 20,
        ssd_directory=str(tmp_path / "ssd"),
    )
    whole = Trainer(in_memory, unserved(tmp_path / "whole"))
    whole.fit(news)
    publication = unserved(tmp_path / "pub")
    train(beyond, news, publication, 30)
    trainer = Trainer(beyond, publication, program_cache=CACHE)
    trainer.fit(news)
    assert newest_files(publication) == newest_files(whole.publication)
    assert trainer.state.prequential.hourly() == whole.state.prequential.hourly()
    stats = trainer.state.rows.stats()
    assert trainer.state.rows.passes > 3
    assert min(stats["evictions_to_ssd"], stats["promotions"]) > 500


def test_a_run_killed_again_and_again_ends_as_one_never_killed(
    whole: Whole, fresh: Publication
) -> None:
    for _ in range(3):
        train(RUN, NEWS, fresh, 8)
    trainer = resume(fresh)
    assert trainer.versions.publisher.lineage >= 3
    assert_ends_as(whole, fresh, trainer)


PLACES: dict[str, tuple[Any, str]] = {
    "delta": (Publication, "write_delta"),
    "commit file": (Publication, "_write_commit"),
    "note": (Publication, "note"),
    "arrival": (Versions, "wait_published"),
    "state": (CheckpointWriter, "add"),
    "checkpoint": (CheckpointWriter, "finish"),
    "snapshot": (saver, "write_snapshot"),
    "prune": (Publication, "prune"),
    "prune checkpoints": (checkpoints, "prune"),
}


def kill_at(
    publication: Publication, place: str, call: int, after: bool, patch: pytest.MonkeyPatch
) -> None:
    """Die at the n-th call of a step of publishing (-1: the last), before or after it."""
    owner, name = PLACES[place]
    real: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        last = trainer.state.done == TOTAL
        due = last if call < 0 else calls == call
        if due and not after:
            raise Killed
        result = real(*args, **kwargs)
        if due:
            raise Killed
        return result

    trainer = Trainer(RUN, publication, program_cache=CACHE)
    static = isinstance(owner.__dict__.get(name), staticmethod)
    with patch.context() as patched:
        patched.setattr(owner, name, staticmethod(step) if static else step)
        with pytest.raises(Killed):
            trainer.fit(NEWS)


# Killed after one step is nearly killed before the next one; both are tried where a run ends.
MOMENTS = [
    pytest.param(1, False, id="first-before"),
    pytest.param(1, True, id="first-after", marks=pytest.mark.long),
    pytest.param(3, False, id="third-before"),
    pytest.param(3, True, id="third-after", marks=pytest.mark.long),
    pytest.param(-1, False, id="last-before"),
    pytest.param(-1, True, id="last-after"),
]


@pytest.mark.parametrize(("call", "after"), MOMENTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_killed_while_it_publishes_ends_as_one_never_killed(
    whole: Whole,
    fresh: Publication,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    call: int,
    after: bool,
) -> None:
    kill_at(fresh, place, call, after, monkeypatch)
    assert_ends_as(whole, fresh, resume(fresh))


def test_a_run_that_is_done_has_nothing_more_to_do(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole.publication.path, tmp_path / "pub")
    publication = Publication(tmp_path / "pub")
    before = publication.versions()
    trainer = resume(publication)
    assert trainer.versions.publisher.stats.versions == 0
    assert publication.versions() == before
    assert_ends_as(whole, publication, trainer)


def test_a_stream_that_went_on_is_learned_from_where_it_ended(
    whole: Whole, fresh: Publication
) -> None:
    first = Trainer(RUN, fresh, program_cache=CACHE)
    first.fit(FirstEvents(NEWS, TOTAL // 2))
    second = resume(fresh)
    assert first.state.events < TOTAL
    assert (second.state.events, second.state.done) == (TOTAL, TOTAL)
    # Batches fall elsewhere now, so the model is another one; the events are the same.
    mine, theirs = (
        second.state.prequential.daily_summaries(),
        whole.trainer.state.prequential.daily_summaries(),
    )
    assert [day.events for day in mine.values()] == [day.events for day in theirs.values()]


# --- written while training goes on ---------------------------------------------------------------


@contextlib.contextmanager
def at_snapshot(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Have the writer do something first when it comes to the snapshot of a version."""

    def write(path: Path, info: SnapshotInfo, *args: Any, **kwargs: Any) -> None:
        if info.version == number:
            act()
        write_snapshot(path, info, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("embertide.trainer.run.checkpoint.saver.write_snapshot", write)
        yield


def test_versions_go_out_while_a_checkpoint_is_written_and_a_kill_loses_it_for_no_run(
    whole: Whole, fresh: Publication
) -> None:
    def wait_and_die() -> None:
        wait_until(lambda: fresh.versions()[-1].number >= 7)
        raise Killed

    trainer = Trainer(RUN, fresh, program_cache=CACHE)
    with at_snapshot(4, wait_and_die), pytest.raises(Killed):
        trainer.fit(NEWS)
    assert [v.number for v in fresh.snapshots()] == [1]
    again = Trainer(dataclasses.replace(RUN, keep_snapshots=9), fresh, program_cache=CACHE)
    again.fit(NEWS)
    # As the killed run had published it, some versions before the newest one.
    assert fresh.snapshots()[:2] == [VersionId(1, 1), VersionId(4, 1)]
    assert_ends_as(whole, fresh, again)


def test_no_version_follows_the_first_before_its_snapshot_is_there(
    whole: Whole, fresh: Publication
) -> None:
    def wait_and_die() -> None:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: bool(fresh.deltas()), timeout_s=0.3)
        raise Killed

    trainer = Trainer(RUN, fresh, program_cache=CACHE)
    with at_snapshot(1, wait_and_die), pytest.raises(Killed):
        trainer.fit(NEWS)
    assert fresh.versions() == []
    assert_ends_as(whole, fresh, resume(fresh))


def failing(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_checkpoint_that_cannot_be_written_stops_the_run_and_says_why(
    whole: Whole, fresh: Publication
) -> None:
    trainer = Trainer(RUN, fresh, program_cache=CACHE)
    message = "the checkpoint of version 8 cannot be written: .*Input/output error"
    with at_snapshot(8, failing(errno.EIO)), pytest.raises(CheckpointError, match=message):
        trainer.fit(NEWS)
    assert trainer.state.number < 12  # the next checkpoint at the latest
    assert trainer.versions.saver.stats.saved == 2
    assert_ends_as(whole, fresh, resume(fresh))


def test_a_checkpoint_that_the_drive_has_no_room_for_is_left_out(
    whole: Whole, fresh: Publication, caplog: pytest.LogCaptureFixture
) -> None:
    # Before: CheckpointError, and the run ended.
    trainer = Trainer(dataclasses.replace(RUN, keep_snapshots=9), fresh, program_cache=CACHE)
    with at_snapshot(8, failing(errno.ENOSPC)), caplog.at_level(logging.ERROR):
        trainer.fit(NEWS)
    assert "the checkpoint of version 8 is not written, the one before stays" in caplog.text
    assert [version.number for version in fresh.snapshots()] == [1, 4, 12, 16, 19]
    assert trainer.versions.counters()["checkpoints_without_room"] == 1
    assert sorted(each.name for each in (fresh.path / "checkpoints").iterdir())[2:] == [
        version.folder for version in fresh.snapshots()[2:]
    ]  # and nothing of version 8
    assert_ends_as(whole, fresh, trainer)


@pytest.mark.parametrize("number", [1, 19])
def test_the_first_checkpoint_and_the_last_need_room(
    fresh: Publication, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(RUN, fresh, program_cache=CACHE)
    copies = trainer.versions.checkpointer._copies

    def slow_copies() -> Iterator[saver.BucketCopy]:
        yield from copies()
        if trainer.state.number == number:  # the writer has failed before all is copied
            of = trainer.versions.saver
            wait_until(lambda: of._writing is not None and of._writing.done())

    monkeypatch.setattr(trainer.versions.checkpointer, "_copies", slow_copies)
    message = f"the checkpoint of version {number} cannot be written: .*No space left on device"
    with at_snapshot(number, failing(errno.ENOSPC)), pytest.raises(CheckpointError, match=message):
        trainer.fit(NEWS)


# --- what the killed run had sent -----------------------------------------------------------------


def foreign_row(key: int) -> bytes:
    layout = _store.RowLayout(chunk_dim=16)
    return _store.encode_record(
        key, 1, 0, _store.encode_payload(layout, 1, np.full(16, 9, np.float32))
    )


def send_foreign(publication: Publication, trainer: Trainer, number: int, *keys: int) -> None:
    """Publish as another run would, with rows of table `cand` that the stream does not have.

    Everything else is as the last version of `trainer` is.
    """
    other = Publisher(
        publication, bus=None, model=RUN.model.name, schema_id=trainer.versions.publisher.schema_id
    )
    last = trainer.publication.read_commit(trainer.publication.deltas()[-1]).commit
    other.publish(
        number,
        watermark_ms=last.watermark_ms,
        changes=[(trainer.state.rows.tables[2], 0, b"".join(map(foreign_row, keys)))],
        dense=tensor_bytes(trainer.learner.served),
    )


def test_what_only_the_killed_run_had_published_is_taken_back(
    whole: Whole, fresh: Publication
) -> None:
    train(RUN, NEWS, fresh, 14)
    newest = fresh.versions()[-1].number
    send_foreign(fresh, whole.trainer, newest + 1, 77_777_777)
    keeping_all = dataclasses.replace(RUN, keep_snapshots=9)
    trainer = Trainer(keeping_all, fresh, program_cache=CACHE)
    trainer.fit(NEWS)
    assert_ends_as(whole, fresh, trainer)
    first = next(v for v in fresh.deltas() if v.lineage == trainer.versions.publisher.lineage)
    assert first.number == newest + 2
    records = b"".join(batch.records for batch in fresh.read_batches(first) if batch.table_id == 2)
    assert _store.encode_record(77_777_777, 0, 2, b"") in records


def test_an_end_that_was_published_with_another_state_is_published_again(
    whole: Whole, fresh: Publication, caplog: pytest.LogCaptureFixture
) -> None:
    train(RUN, NEWS, fresh, 22)
    last = whole.trainer.state.number
    send_foreign(fresh, whole.trainer, last, 5)
    with caplog.at_level(logging.WARNING, logger=versions.__name__):
        trainer = resume(fresh)
    assert f"version {last} was published with another state" in caplog.text
    assert trainer.state.number == last + 1 == fresh.snapshots()[-1].number
    mine, theirs = newest_files(fresh), newest_files(whole.publication)
    assert mine["dense/tensors.safetensors"] == theirs["dense/tensors.safetensors"]
    for t, table in enumerate(trainer.state.rows.tables):
        for bucket in range(1 << table.bucket_bits):
            rows = whole.trainer.state.rows.store.export_bucket(t, bucket)
            assert trainer.state.rows.store.export_bucket(t, bucket) == rows


# --- a version that cannot be written -------------------------------------------------------------


def served_rows(publication: Publication, trainer: Trainer) -> "_store.ServingStore":
    """Return a node's rows after all versions' changes: the first version has no rows."""
    tables = trainer.state.rows.tables
    store = _store.ServingStore(tables=tables, ddr_budget_bytes=256 << 20)
    index = {table.id: t for t, table in enumerate(tables)}
    store.commit(1)
    for version in publication.deltas():
        for batch in publication.read_batches(version):
            table = index[batch.table_id]
            store.stage_records(version.number, table, batch.bucket, batch.records)
        store.commit(version.number)
    return store


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("place", ["_write_commit", "write_delta", "note"])
def test_rows_of_a_version_that_could_not_be_written_are_in_the_next_one(
    fresh: Publication, monkeypatch: pytest.MonkeyPatch, place: str, number: int
) -> None:
    # No snapshot but the first and the last: deltas are all that a node gets.
    run = dataclasses.replace(RUN, prune=None, snapshot_every=1000, keep_snapshots=9)
    trainer = Trainer(run, fresh, program_cache=CACHE)
    real, calls = getattr(Publication, place), 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    static = isinstance(Publication.__dict__[place], staticmethod)
    monkeypatch.setattr(Publication, place, staticmethod(fail) if static else fail)
    if number == errno.ENOSPC:  # training goes on; before: OSError, and the run ended
        trainer.fit(NEWS)
        assert trainer.versions.publisher.stats.versions_without_room == 1
    else:
        with pytest.raises(OSError, match="Input/output error"):
            trainer.fit(NEWS)
        trainer.fit(NEWS)  # the drive is good again
    assert trainer.state.events == TOTAL
    assert not [each for each in fresh.path.glob("deltas/*") if not (each / "commit.pb").exists()]
    served = served_rows(fresh, trainer)
    for t, table in enumerate(trainer.state.rows.tables):
        for bucket in range(1 << table.bucket_bits):
            assert served.export_bucket(t, bucket) == trainer.state.rows.store.export_bucket(
                t, bucket
            )


def test_a_snapshot_that_was_due_with_a_version_without_room_comes_with_the_next(
    fresh: Publication, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Publication.write_delta

    def fail(self: Publication, version: VersionId, *args: Any) -> None:
        if version.number == 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, version, *args)

    monkeypatch.setattr(Publication, "write_delta", fail)
    trainer = Trainer(dataclasses.replace(RUN, keep_snapshots=9), fresh, program_cache=CACHE)
    trainer.fit(NEWS)
    assert [version.number for version in fresh.snapshots()] == [1, 4, 9, 12, 16, 19]


@pytest.mark.parametrize("file", ["*.delta", "commit.pb"])
def test_what_a_damaged_file_held_goes_out_again(fresh: Publication, file: str) -> None:
    # Before: PublicationError, "fails its checksum", at each start.
    run = dataclasses.replace(RUN, prune=None, snapshot_every=5, keep_snapshots=9)
    killed = train(run, NEWS, fresh, 14)
    # Another run changes rows that ours does not change any more.
    records = killed.state.rows.store.export_bucket(2, 0)
    keys = _store.record_keys(killed.state.rows.tables[2].layout, records).tolist()
    send_foreign(fresh, killed, fresh.deltas()[-1].number + 1, *keys)
    node = served_rows(fresh, killed)  # it had the versions from the bus, before the damage
    before = fresh.deltas()[-1]
    flip_byte(sorted((fresh.path / "deltas" / before.folder).glob(file))[0], 30)
    trainer = Trainer(run, fresh, program_cache=CACHE)
    assert trainer.versions.publisher.stats.damaged_partitions == (64 if file == "commit.pb" else 1)
    trainer.fit(NEWS)
    index = {table.id: t for t, table in enumerate(trainer.state.rows.tables)}
    later = [version for version in fresh.deltas() if version > before]
    for version in later:
        for batch in fresh.read_batches(version):
            node.stage_records(version.number, index[batch.table_id], batch.bucket, batch.records)
        node.commit(version.number)
    for t, _, bucket in trainer.state.rows.places():
        assert node.export_bucket(t, bucket) == trainer.state.rows.store.export_bucket(t, bucket)
    # Nodes that need the file get past it.
    assert later[0].number % 5 != 0
    assert later[0] in fresh.snapshots()


# --- refusals -------------------------------------------------------------------------------------


def changed_table(run: RunConfig) -> RunConfig:
    changed = dataclasses.replace(run.model.tables[2], init_scale=0.5)
    tables = (*run.model.tables[:2], changed)
    model = dataclasses.replace(run.model, tables=(*tables, *run.model.tables[3:]))
    return dataclasses.replace(run, model=model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: dataclasses.replace(run, seed=2), "seed = 1, this run has 2"),
        (lambda run: dataclasses.replace(run, batch_size=49), "batch_size = 24, this run has 49"),
        (changed_table, r"model.tables\[2\].init_scale = 0.05, this run has 0.5"),
    ],
)
def test_a_checkpoint_of_another_config_is_refused_and_the_field_named(
    whole: Whole, change: Callable[[RunConfig], RunConfig], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Trainer(change(RUN), whole.publication, program_cache=CACHE)


@pytest.fixture
def copy(whole: Whole, tmp_path: Path) -> Publication:
    """The whole run's publication, to be harmed."""
    shutil.copytree(whole.publication.path, tmp_path / "copy")
    return Publication(tmp_path / "copy")


def with_rates(sparse: float, dense: float) -> RunConfig:
    optimizer = dataclasses.replace(
        RUN.optimizer, sparse_learning_rate=sparse, dense_learning_rate=dense
    )
    return dataclasses.replace(RUN, optimizer=optimizer)


def test_a_changed_learning_rate_is_taken_when_allowed_and_remembered(
    fresh: Publication, caplog: pytest.LogCaptureFixture
) -> None:
    train(RUN, NEWS, fresh, 8)
    run, old = with_rates(0.02, 0.0005), RUN.optimizer
    names = ["optimizer.sparse_learning_rate", "optimizer.dense_learning_rate"]
    with pytest.raises(CheckpointError, match=f"--allow-change {names[0]}"):
        Trainer(run, fresh, program_cache=CACHE, allow_change=names[1:])
    with caplog.at_level(logging.WARNING, logger="embertide.trainer.run.resume"):
        trainer = Trainer(run, fresh, program_cache=CACHE, allow_change=names)
    assert f"{names[0]} changes from {old.sparse_learning_rate} to 0.02" in caplog.text
    assert [group["lr"] for group in trainer.learner.optimizer.param_groups] == [0.0005]
    after = trainer.state.number
    trainer.fit(NEWS)
    # A run that goes on from there needs no permission, and still knows.
    again = Trainer(run, fresh, program_cache=CACHE)
    assert again.state.changes == [
        {"after": after, "setting": names[1], "from": old.dense_learning_rate, "to": 0.0005},
        {"after": after, "setting": names[0], "from": old.sparse_learning_rate, "to": 0.02},
    ]


def test_versions_without_a_checkpoint_are_refused(copy: Publication) -> None:
    shutil.rmtree(copy.path / "checkpoints")
    with pytest.raises(CheckpointError, match="holds versions but no checkpoint"):
        Trainer(RUN, copy, program_cache=CACHE)


def checkpoint_folder(publication: Publication, at: int = -1) -> Path:
    return publication.path / "checkpoints" / publication.snapshots()[at].folder


def restore(publication: Publication, run: RunConfig = RUN) -> Learner:
    """Do what a run does with the newest checkpoint before it goes on."""
    found = checkpoints.load_newest(publication)
    assert found is not None
    learner = Learner(run)
    found.restore_rows(learner.rows)
    return learner


def test_a_harmed_checkpoint_is_refused_wherever_the_harm_is(
    whole: Whole, copy: Publication
) -> None:
    folder = checkpoint_folder(copy)
    paths = [*folder.iterdir(), copy.snapshot_path(copy.snapshots()[-1]) / "manifest.json"]
    assert len(paths) == 7

    def refused(path: Path, reason: str = "") -> None:
        with pytest.raises(HarmedCheckpointError, match=f"{path.name}.* {reason}") as caught:
            restore(copy)
        assert caught.value.version == copy.snapshots()[-1]

    for path in paths:
        data = path.read_bytes()
        for at in range(0, len(data), len(data) // 5):
            flip_byte(path, at)
            refused(path)
            path.write_bytes(data)
        for length in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            refused(path)
        if path.name != "checkpoint.json":
            path.unlink()
            refused(path, "is missing") if path.name != "manifest.json" else None
        path.write_bytes(data)


@pytest.mark.parametrize(
    "file", ["checkpoint.json", "rows.safetensors", "manifest.json", "tables/user/*"]
)
def test_a_run_goes_on_from_the_checkpoint_before_a_harmed_one(
    whole: Whole, copy: Publication, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    # Before: CheckpointError at each start, until somebody moved the folder.
    newest = copy.snapshots()[-1]
    folders = [copy.path / kind / newest.folder for kind in ("checkpoints", "snapshots")]
    flip_byte(next(path for folder in folders for path in folder.glob(file)), -20)
    with caplog.at_level(logging.ERROR):
        trainer = Trainer(RUN, copy, program_cache=CACHE)
    assert f"the checkpoint of version {newest.number} is put aside" in caplog.text
    assert trainer.state.number < newest.number
    assert trainer.versions.counters()["harmed_checkpoints"] == 1
    trainer.fit(NEWS)
    assert_ends_as(whole, copy, trainer)


def test_a_run_whose_checkpoints_are_all_harmed_says_where_they_are(copy: Publication) -> None:
    for n in range(len(copy.snapshots())):
        flip_byte(checkpoint_folder(copy, n) / "checkpoint.json", 20)
    with pytest.raises(CheckpointError, match=r"no checkpoint to go on from: .* \.harmed"):
        Trainer(RUN, copy, program_cache=CACHE)
    assert len(list((copy.path / "checkpoints").glob("*.harmed"))) == len(copy.snapshots())


def test_files_of_another_checkpoint_are_refused_and_the_field_named(copy: Publication) -> None:
    one, other = checkpoint_folder(copy), checkpoint_folder(copy, 0)
    for name, field in (
        ("rows.safetensors", "bucket 0 of table user has sha256"),
        ("dense.safetensors", "has sha256"),
        ("scores.safetensors", "has bytes"),
        ("stream.safetensors", "has sha256"),
        ("checkpoint.json", "is of version 000000000016-000001"),
    ):
        kept = (one / name).read_bytes()
        shutil.copyfile(other / name, one / name)
        with pytest.raises(CheckpointError, match=f"{name},? {field}"):
            restore(copy)
        (one / name).write_bytes(kept)
    manifests = [copy.snapshot_path(v) / "manifest.json" for v in copy.snapshots()]
    shutil.copyfile(manifests[0], manifests[-1])
    with pytest.raises(CheckpointError, match=r"manifest\.json has sha256"):
        restore(copy)


def test_a_checkpoint_of_another_format_is_refused(copy: Publication) -> None:
    path = checkpoint_folder(copy) / "checkpoint.json"
    text = path.read_text()
    for other in (4, 8):
        path.write_text(text.replace('"format":6', f'"format":{other}'))
        with pytest.raises(CheckpointError, match=f"has format {other}, this build reads 5 to 7"):
            restore(copy)


def test_nothing_in_a_checkpoint_is_code(copy: Publication) -> None:
    for path in checkpoint_folder(copy).iterdir():
        # A pickle begins with its protocol, a zip of pickles with PK.
        assert path.read_bytes()[:1] == b"{" or path.read_bytes()[8:9] == b"{"


def test_what_a_killed_writer_left_is_cleared_away(fresh: Publication) -> None:
    train(RUN, NEWS, fresh, 5)
    left = fresh.path / "checkpoints" / "000000000003-000009"
    left.mkdir()
    for path in (left / "rows.safetensors", left.with_name("000000000001-000001.tmp")):
        path.write_text("half")
    resume(fresh)
    kept = {version.folder for version in fresh.snapshots()}
    assert {path.name for path in (fresh.path / "checkpoints").iterdir()} == kept


# --- order ----------------------------------------------------------------------------------------


class Watched(Trainer):
    """Notes in what order it waits, learns and publishes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.log: list[tuple[str, int, int]] = []
        super().__init__(*args, **kwargs)
        publish = self.versions.publish

        def noted(number: int, watermark_ms: int, **options: bool) -> None:
            self.log.append(("publish", number, watermark_ms))
            publish(number, watermark_ms, **options)

        self.versions.publish = noted  # type: ignore[method-assign]
        take = self.steps.take

        def noted_part(part: Batch) -> None:
            self.log.append(("learn", int(part.event_B[0]), int(part.event_B[-1])))
            self.log.append(("times", int(part.ts_ms_B[0]), int(part.ts_ms_B[-1])))
            take(part)

        self.steps.take = noted_part  # type: ignore[method-assign]

    def wait(self, end: int, _: Callable[[], bool]) -> bool:
        """As the gate."""
        self.log.append(("wait", end, end))
        return True


def test_a_versions_watermark_parts_what_it_learned_from_what_it_did_not(
    fresh: Publication,
) -> None:
    trainer = Watched(RUN, fresh, program_cache=CACHE)
    trainer.fit(NEWS)
    learned = newest = -1
    for what, first, last in trainer.log:
        if what == "publish":
            assert learned <= last
            newest = last
        elif what == "times":
            assert first > newest
            learned = last
    assert learned > 0
    assert len([entry for entry in trainer.log if entry[0] == "publish"]) == 19


def test_nothing_is_learned_before_the_gate_released_it(fresh: Publication) -> None:
    trainer = Watched(RUN, fresh, program_cache=CACHE)
    trainer.fit(NEWS, gate=trainer)
    released, next_event = 0, 0
    for what, first, last in trainer.log:
        if what == "wait":
            assert first > released
            released = first
        elif what == "learn":
            assert first == next_event  # each once, in order
            assert last < released
            next_event = last + 1
    assert next_event == TOTAL


def test_a_gate_that_stays_shut_holds_the_trainer_back(whole: Whole, fresh: Publication) -> None:
    class Shut:
        def wait(self, end: int, _: Callable[[], bool]) -> bool:
            if end > TOTAL // 2:
                raise Killed
            return True

    trainer = Trainer(RUN, fresh, program_cache=CACHE)
    with pytest.raises(Killed):
        trainer.fit(NEWS, gate=Shut())
    assert 0 < trainer.state.events <= TOTAL // 2
    assert_ends_as(whole, fresh, resume(fresh))


def test_a_trainer_that_is_stopped_before_a_shut_gate_ends_and_goes_on_there(
    fresh: Publication,
) -> None:
    class Shut:
        def wait(self, end: int, is_stopping: Callable[[], bool]) -> bool:
            if end <= TOTAL // 2:
                return True
            trainer.stop()
            return not is_stopping()

    trainer = Trainer(RUN, fresh, program_cache=CACHE)
    trainer.fit(NEWS, gate=Shut())
    assert trainer.stopped
    learned = trainer.state.events
    assert 0 < learned <= TOTAL // 2
    assert trainer.state.offset == trainer.state.done  # nothing of the batch that waited
    again = Watched(RUN, fresh, program_cache=CACHE)
    again.fit(NEWS)
    parts = [(first, last) for what, first, last in again.log if what == "learn"]
    assert parts[0][0] == learned
    assert again.state.events == TOTAL


@pytest.mark.parametrize("killed", [False, True], ids=["whole", "killed"])
def test_the_copy_kept_is_the_first_version_that_learned_the_first_quarter(
    whole: Whole, fresh: Publication, tmp_path: Path, killed: bool
) -> None:
    every = dataclasses.replace(RUN, snapshot_every=1, keep_snapshots=99)
    reference = Watched(every, whole.new(tmp_path / "every"), program_cache=CACHE)
    reference.fit(NEWS)
    done = number = 0
    for what, first, last in reference.log:
        done = last + 1 if what == "learn" else done
        if what == "publish" and done >= TOTAL // 4:
            number = first
            break
    copy = tmp_path / "kept" / "a.quarter"
    if killed:
        train(RUN, NEWS, fresh, 8)  # past the quarter, before the next checkpoint
        assert fresh.versions()[-1].number > number > fresh.snapshots()[-1].number
    trainer = Trainer(RUN, fresh, program_cache=CACHE)
    trainer.versions.keep_copy(TOTAL // 4, copy)
    trainer.fit(NEWS)
    wanted = reference.publication.snapshot_path(VersionId(number, 1))
    assert snapshot_files(copy) == snapshot_files(wanted)
    assert_ends_as(whole, fresh, trainer)  # keeping a copy changes nothing else
    assert list(copy.parent.iterdir()) == [copy]


def test_events_are_learned_while_a_version_is_written(
    fresh: Publication, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(RUN, fresh, program_cache=CACHE)
    real = Publisher.finish
    learned: list[int] = []
    numbers: list[int] = []

    def finish(self: Publisher, outgoing: Outgoing) -> VersionId:
        numbers.append(outgoing.version.number)
        if outgoing.version.number == 5:
            begun = trainer.state.events
            wait_until(lambda: trainer.state.events > begun, every_s=0.001)
            learned.append(trainer.state.events - begun)
        return real(self, outgoing)

    monkeypatch.setattr(Publisher, "finish", finish)
    trainer.fit(NEWS)
    assert learned
    assert learned[0] > 0
    assert numbers == list(range(2, 20))
