"""Incremental snapshots: a run goes on from one as from a snapshot with all rows."""

import dataclasses
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from killing import CACHE, Killed, train
from serving import flip_byte
from snapshots import newest_files

from embertide.trainer.config import PruneConfig, PublishBudget, RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint.checkpoint import CheckpointWriter, HarmedCheckpointError
from embertide.trainer.run.checkpoint.increment import ChangedKeys
from embertide.trainer.run.fork import Fork
from embertide.trainer.run.loop import Trainer

# Rows go and come back at every pass.
PRUNE = PruneConfig(bytes=200_000, half_life=200, first=(20,), every=20, least=10)
FULL = RunConfig(
    model=news_model(), prune=PRUNE, batch_size=64, publish_every_s=600, snapshot_every=1
)
RUN = dataclasses.replace(FULL, full_snapshot_every=4)
STOP = 178  # batches, so that the newest snapshot is the second increment after one of all rows
NEWS = NewsSource(NewsConfig(hours=4, views_per_hour=1200, users=6000, new_items_per_hour=60))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run that nothing stopped, each of whose snapshots has all rows."""
    return train(FULL, NEWS, Publication(tmp_path_factory.mktemp("whole") / "pub"))


@pytest.fixture(scope="module")
def stopped(whole: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Publication:
    """A run that died when its newest snapshot was an incremental one."""
    publication = fresh(whole, tmp_path_factory.mktemp("stopped") / "pub")
    train(RUN, NEWS, publication, STOP)
    return publication


@pytest.fixture
def copy(stopped: Publication, tmp_path: Path) -> Publication:
    shutil.copytree(stopped.path, tmp_path / "copy")
    return Publication(tmp_path / "copy")


def fresh(whole: Trainer, path: Path) -> Publication:
    path.mkdir()
    shutil.copyfile(whole.publication.program, path / "program.pt2")
    return Publication(path)


def newest(publication: Publication) -> VersionId:
    found = checkpoints.newest(publication)
    assert found is not None
    return found


def contents(rows: EmbeddingStore) -> list[bytes]:
    """Every row and all that learning knows of it."""
    parts = []
    for t, _, bucket in rows.places():
        parts.append(rows.store.export_bucket(t, bucket))
        parts += [
            np.ascontiguousarray(each).tobytes() for each in rows.store.bucket_state(t, bucket)
        ]
    return parts


def restored(publication: Publication, run: RunConfig = RUN) -> EmbeddingStore:
    found = checkpoints.load_newest(publication)
    assert found is not None
    learner = Learner(run)
    found.restore_rows(learner.rows)
    return learner.rows


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_an_increment_has_what_changed_and_leads_to_every_row_and_its_state(
    stopped: Publication, whole: Trainer, tmp_path: Path
) -> None:
    version = newest(stopped)
    assert checkpoints.is_increment(stopped, version)
    base = stopped.snapshots()[-1]
    assert base < version
    assert not stopped.snapshot_path(version).exists()
    rows = checkpoints.folder_of(stopped, version) / "rows.safetensors"
    assert size(stopped.path / "increments") > rows.stat().st_size > 0
    # Against the same run with snapshots of all rows, as of the same version.
    reference = fresh(whole, tmp_path / "pub")
    train(FULL, NEWS, reference, STOP)
    assert newest(reference).number == version.number
    assert contents(restored(stopped)) == contents(restored(reference, FULL))
    of_all = checkpoints.folder_of(reference, newest(reference)) / "rows.safetensors"
    assert rows.stat().st_size < 0.8 * of_all.stat().st_size


@pytest.mark.parametrize("batches", [1, 45, 101, STOP])
def test_a_run_killed_between_increments_ends_as_one_with_snapshots_of_all_rows(
    whole: Trainer, tmp_path: Path, batches: int
) -> None:
    publication = fresh(whole, tmp_path / "pub")
    train(RUN, NEWS, publication, batches)
    trainer = train(RUN, NEWS, publication)
    assert newest_files(publication) == newest_files(whole.publication)
    assert contents(trainer.state.rows) == contents(whole.state.rows)
    counters = trainer.versions.counters()
    assert counters["increments"] > 0
    assert counters["snapshot_bytes_reused"] > 0 < counters["snapshot_bytes_written"]


@pytest.mark.parametrize("call", [2, 4])
@pytest.mark.parametrize("step", ["add", "_write_rest"])
def test_a_run_killed_while_it_writes_one_goes_on_from_the_last(
    whole: Trainer, copy: Publication, monkeypatch: pytest.MonkeyPatch, step: str, call: int
) -> None:
    before, real = newest(copy), getattr(CheckpointWriter, step)
    calls = 0

    def dying(writer: CheckpointWriter, *args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Killed
        real(writer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, step, dying)
        with pytest.raises(Killed):
            train(RUN, NEWS, copy)
    assert newest(copy) >= before
    contents(restored(copy))
    train(RUN, NEWS, copy)
    assert newest_files(copy) == newest_files(whole.publication)


def test_what_an_increment_needs_is_kept_and_what_nobody_needs_goes(copy: Publication) -> None:
    run = dataclasses.replace(RUN, keep_snapshots=1)
    train(run, NEWS, copy, 18)
    version = newest(copy)
    found = checkpoints.SavedCheckpoint(copy, version)
    assert found.increment is not None
    assert copy.snapshots() == [found.increment.base]
    assert {each for each, _ in found.increment.chain} <= set(copy.deltas())
    assert copy.increments() == [version]
    train(run, NEWS, copy)
    assert copy.increments() == []  # the end of a run has all rows


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        ("increments/*/checkpoint.json", "torn"),
        ("increments/*/rows.safetensors", "torn"),
        ("increments/*/rows.safetensors", "missing"),
        ("deltas/*/commit.pb", "torn"),
        ("deltas/*/commit.pb", "missing"),
        ("deltas/*/p-00.delta", "missing"),
    ],
)
def test_a_harmed_piece_is_named_and_the_run_goes_on_from_the_one_before(
    copy: Publication, caplog: pytest.LogCaptureFixture, file: str, harm: str
) -> None:
    version = newest(copy)
    found = checkpoints.SavedCheckpoint(copy, version)
    path = max(each for each in copy.path.glob(file) if each.parent.name <= version.folder)
    if harm == "torn":
        flip_byte(path, -20)
    else:
        path.unlink()
    with pytest.raises(HarmedCheckpointError, match=path.name) as caught:
        restored(copy)
    assert caught.value.version == version
    with caplog.at_level(logging.ERROR):
        trainer = Trainer(RUN, copy, program_cache=CACHE)
    assert f"the checkpoint of version {version.number} is put aside" in caplog.text
    assert found.increment is not None
    assert found.increment.base.number <= trainer.state.number < version.number


def test_a_fork_of_an_increment_has_its_rows(stopped: Publication, tmp_path: Path) -> None:
    fork = Trainer(
        RUN,
        Publication(tmp_path / "fork"),
        program_cache=CACHE,
        fork=Fork(publication=stopped, keep_place=True),
    )
    assert fork.forked is not None
    assert fork.forked.version == newest(stopped).number
    assert contents(fork.state.rows) == contents(restored(stopped))


def test_changed_keys_are_each_once_and_ascend() -> None:
    changed = ChangedKeys()
    for keys in ([3, 1], [2**64 - 1, 3], [], [7]):
        changed.add((0, 5), np.array(keys, np.uint64))
    changed.add((1, 0), np.array([3], np.uint64))
    assert changed.of((0, 5)).tolist() == [1, 3, 7, 2**64 - 1]
    assert changed.of((9, 9)).tolist() == []
    assert changed.count() == 5


def test_increments_and_a_publish_budget_are_refused_together() -> None:
    budget = PublishBudget(bytes_per_s=1000)
    with pytest.raises(ValueError, match="full_snapshot_every is 4, and publish_budget"):
        dataclasses.replace(RUN, publish_budget=budget)
