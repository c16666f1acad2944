"""Checkpoints and their writer, without a training loop: bounds, errors, other devices.

Shapes: B samples, F features.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embertide import _store
from embertide.trainer.config import FeatureConfig, ModelConfig, TableConfig
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.snapshot import DensePart, SnapshotInfo
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointWriter,
)
from embertide.trainer.run.checkpoint.saver import BucketCopy, Saver, SaverOptions, SnapshotJob

CONFIG = ModelConfig(
    name="m",
    tables=(
        TableConfig(name="item", dim=16, chunks=4, bucket_bits=3),
        TableConfig(name="user", dim=8, bucket_bits=2),
    ),
    features=(FeatureConfig(name="shown", table="item"), FeatureConfig(name="who", table="user")),
)
BUCKETS = 8 + 4
OPTIONS = SaverOptions(memory_bytes=64 << 20, keep_snapshots=2, keep_s=0)


@pytest.fixture
def publication(tmp_path: Path) -> Publication:
    made = Publication(tmp_path / "pub")
    made.path.mkdir()
    made.program.write_bytes(b"a program")
    return made


def learn(rows: EmbeddingStore, steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        keys_BF = rng.integers(0, 12_000, (1024, 2))
        weights = rng.standard_normal((1024, rows.embedding_dim)).astype(np.float32)
        embeddings = rows(keys_BF)
        (embeddings * embeddings.new_tensor(weights)).sum().backward()
        rows.step()


@pytest.fixture(scope="module")
def learned() -> EmbeddingStore:
    rows = EmbeddingStore(CONFIG)
    learn(rows, 30, seed=1)
    return rows


def copies_of(rows: EmbeddingStore) -> Iterator[BucketCopy]:
    for t, table, bucket in rows.places():
        records = rows.store.export_bucket(t, bucket)
        state = rows.store.bucket_state(t, bucket)
        yield BucketCopy(table=table, bucket=bucket, records=records, state=state)


def job(publication: Publication, rows: EmbeddingStore, number: int) -> SnapshotJob:
    checkpoint = Checkpoint(
        version=VersionId(number, 1),
        config={"seed": 1},
        changed=[],
        changes=[],
        offset=7,
        done=6,
        events=5,
        origin_ms=4,
        net={},
        optimizer={"state": {0: {"none": None}}, "param_groups": [{"lr": 0.1}]},
        rows=rows.progress(),
        prequential=Prequential(),
        histories=[],
    )
    info = SnapshotInfo.of(CONFIG, lineage=1, version=number, watermark_ms=0)
    dense = DensePart(program=publication.program, cpu="x86-64-v3", tensors=b"tensors")
    return SnapshotJob(
        checkpoint=checkpoint, info=info, tables=rows.tables, dense=dense, then=lambda: None
    )


def saved(publication: Publication, rows: EmbeddingStore, number: int = 1) -> Saver:
    with Saver(publication, OPTIONS) as saver:
        saver.save(job(publication, rows, number), copies_of(rows))
    return saver


def everything(rows: EmbeddingStore) -> list[tuple[Any, ...]]:
    return [
        (each.table.name, each.bucket, each.records, *(array.tobytes() for array in each.state))
        for each in copies_of(rows)
    ]


# --- restoring ------------------------------------------------------------------------------------


def test_a_checkpoint_gives_back_what_was_saved(
    publication: Publication, learned: EmbeddingStore
) -> None:
    saved(publication, learned)
    found = checkpoints.load_newest(publication)
    assert found is not None
    wanted = job(publication, learned, 1).checkpoint
    for field in dataclasses.fields(Checkpoint):
        assert getattr(found.checkpoint, field.name) == getattr(wanted, field.name)


@pytest.mark.parametrize(
    "budgets",
    [
        {"devices": 3},
        {"devices": 2, "ddr_budget_bytes": 16 << 20},
        {"devices": 2, "ddr_budget_bytes": 2 << 20, "ssd_budget_bytes": 32 << 20},
    ],
    ids=["devices", "budget", "ssd"],
)
def test_rows_are_restored_to_other_devices_and_tiers_and_learn_on_alike(
    publication: Publication, tmp_path: Path, budgets: dict[str, Any]
) -> None:
    rows = EmbeddingStore(CONFIG)
    learn(rows, 30, seed=1)
    saved(publication, rows)
    found = checkpoints.load_newest(publication)
    assert found is not None
    directory = str(tmp_path) if "ssd_budget_bytes" in budgets else ""
    other = EmbeddingStore(CONFIG, ssd_directory=directory, **budgets)
    found.restore_rows(other)
    assert everything(other) == everything(rows)
    if directory:
        assert other.stats()["evictions_to_ssd"] > 0
    for each in (rows, other):
        learn(each, 10, seed=2)
    assert everything(other) == everything(rows)
    other.store.check_integrity()


# --- written beside the training thread -----------------------------------------------------------


class Held:
    """A writer that waits before it writes its n-th bucket, until it is released."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int = 1) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        self._left = at
        real = CheckpointWriter.add
        held = self

        def add(writer: Any, *args: Any, **more: Any) -> None:
            held._left -= 1
            if held._left == 0:
                held.reached.set()
                assert held.released.wait(10)
            real(writer, *args, **more)

        patch.setattr(CheckpointWriter, "add", add)

    def release_when(self, condition: Callable[[], bool]) -> threading.Thread:
        """Release it, from another thread, once a condition holds."""
        done = threading.Event()

        def run() -> None:
            while not condition() and not done.wait(0.002):
                pass
            self.released.set()

        thread = threading.Thread(target=run)
        thread.start()
        return thread


def test_saving_returns_when_the_rows_are_copied_and_later_steps_change_nothing_of_it(
    publication: Publication, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = EmbeddingStore(CONFIG)
    learn(rows, 10, seed=1)
    before = everything(rows)
    held = Held(monkeypatch)
    with Saver(publication, OPTIONS) as saver:
        saver.save(job(publication, rows, 1), copies_of(rows))
        saver.check()
        assert publication.snapshots() == []
        learn(rows, 10, seed=2)
        held.released.set()
    assert everything(rows) != before
    found = checkpoints.load_newest(publication)
    assert found is not None
    other = EmbeddingStore(CONFIG)
    found.restore_rows(other)
    assert everything(other) == before


def test_one_checkpoint_is_in_flight_and_the_next_one_waits_and_is_counted(
    publication: Publication, learned: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    seen: list[list[VersionId]] = []

    def watched() -> Iterator[BucketCopy]:
        seen.append(publication.snapshots())
        yield from copies_of(learned)

    with Saver(publication, OPTIONS) as saver:
        saver.save(job(publication, learned, 1), copies_of(learned))
        releasing = held.release_when(lambda: saver.stats.waits == 1)
        saver.save(job(publication, learned, 2), watched())
        releasing.join()
    assert seen == [[VersionId(1, 1)]]  # the first is whole before the second one's copies
    assert (saver.stats.saved, saver.stats.waits) == (2, 1)
    assert saver.stats.paused_s >= saver.stats.longest_pause_s > 0
    assert saver.stats.written_s > 0


def test_copies_that_wait_never_exceed_their_bound(
    publication: Publication, learned: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [copy.bytes for copy in copies_of(learned)]
    options = dataclasses.replace(OPTIONS, memory_bytes=2 * max(sizes))
    written = most = 0
    real = CheckpointWriter.add
    copied: list[int] = []

    def add(writer: Any, *args: Any, **more: Any) -> None:
        nonlocal written, most
        real(writer, *args, **more)
        # A copy that is made and not handed over yet is the one that waits for room.
        most = max(most, sum(copied[:-1]) - sum(sizes[:written]))
        written += 1

    def counted() -> Iterator[BucketCopy]:
        for copy in copies_of(learned):
            copied.append(copy.bytes)
            yield copy

    monkeypatch.setattr(CheckpointWriter, "add", add)
    with Saver(publication, options) as saver:
        saver.save(job(publication, learned, 1), counted())
    assert written == BUCKETS
    assert 0 < most <= options.memory_bytes < sum(sizes)
    assert saver.stats.waits > 0


def test_a_bucket_larger_than_the_bound_goes_alone(
    publication: Publication, learned: EmbeddingStore
) -> None:
    with Saver(publication, dataclasses.replace(OPTIONS, memory_bytes=1)) as saver:
        saver.save(job(publication, learned, 1), copies_of(learned))
    assert checkpoints.load_newest(publication) is not None


def test_rows_that_cannot_be_copied_leave_no_snapshot(
    publication: Publication, learned: EmbeddingStore
) -> None:
    def broken() -> Iterator[BucketCopy]:
        yield from list(copies_of(learned))[:-1]
        raise _store.StoreError("a block is bad")

    saver = Saver(publication, OPTIONS)
    with pytest.raises(_store.StoreError, match="a block is bad"), saver:
        saver.save(job(publication, learned, 1), broken())
    assert publication.snapshots() == []
    assert checkpoints.load_newest(publication) is None


def test_a_writer_that_fails_while_training_waits_for_room_wakes_it(
    publication: Publication, learned: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise OSError("the drive is gone")

    monkeypatch.setattr(CheckpointWriter, "add", fail)
    saver = Saver(publication, dataclasses.replace(OPTIONS, memory_bytes=1))
    message = "checkpoint of version 3 cannot be written: the drive is gone"
    saver.save(job(publication, learned, 3), copies_of(learned))
    with pytest.raises(CheckpointError, match=message):
        saver.wait()
    assert saver.stats.saved == 0


def test_a_snapshot_that_lost_its_checkpoint_is_written_again_with_it(
    publication: Publication, learned: EmbeddingStore
) -> None:
    saved(publication, learned)
    (publication.path / "checkpoints" / VersionId(1, 1).folder / "checkpoint.json").unlink()
    assert checkpoints.load_newest(publication) is None
    saved(publication, learned)
    assert checkpoints.load_newest(publication) is not None
