"""A trainer that makes histories and counts goes on, when killed, with those it had."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from killing import train

from embertide import _store
from embertide.trainer.config import ModelConfig, PublishBudget, RunConfig
from embertide.trainer.data.base import PADDING_KEY
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.history import History, HistorySource, for_requests
from embertide.trainer.data.limit import blocks, take
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import news_counters
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.snapshot import read_manifest
from embertide.trainer.publish.snapshot_rows import read_buckets
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.loop import Trainer

NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=15, new_items_per_hour=5))


def model(users: int) -> ModelConfig:
    (sequence,) = news_counters().sequences
    return dataclasses.replace(
        news_counters(), sequences=(dataclasses.replace(sequence, users=users),)
    )


# Fewer than there are, so that some are forgotten and come again.
RUN = RunConfig(
    model=model(users=8), batch_size=24, publish_every_s=600, snapshot_every=4, keep_snapshots=9
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return train(RUN, NEWS, Publication(tmp_path_factory.mktemp("whole") / "pub"))


def test_a_killed_run_ends_with_the_rows_net_and_histories_of_one_never_killed(
    whole: Trainer, tmp_path: Path
) -> None:
    path = tmp_path / "pub"
    path.mkdir()
    shutil.copyfile(whole.publication.program, path / "program.pt2")  # exporting takes seconds
    publication = Publication(path)
    for batches in (9, 7):  # what is resumed lies within a batch
        train(RUN, NEWS, publication, batches)
        assert len(publication.snapshots()) > 0
    resumed = train(RUN, NEWS, publication)
    theirs, mine = (p.snapshots()[-1] for p in (whole.publication, publication))
    assert mine.number == theirs.number
    for ours, wanted in zip(resumed.state.rows.buckets(), whole.state.rows.buckets(), strict=True):
        assert ours[2] == wanted[2]
    tensors = [
        each.publication.snapshot_path(each.publication.snapshots()[-1])
        / "dense/tensors.safetensors"
        for each in (resumed, whole)
    ]
    assert tensors[0].read_bytes() == tensors[1].read_bytes()
    states = [each.state.histories[0].state() for each in (resumed, whole)]
    np.testing.assert_array_equal(states[0].user_U, states[1].user_U)
    np.testing.assert_array_equal(states[0].items_UL, states[1].items_UL)
    assert states[0].forgotten == states[1].forgotten > 0


def test_a_trainer_learns_what_a_source_of_histories_gives(whole: Trainer) -> None:
    learner, figures = Learner(RUN), Prequential()
    every_ms, origin_ms = RUN.publish_every_s * 1000, whole.state.origin_ms
    assert origin_ms is not None
    reached = 0
    batches = HistorySource(NEWS, RUN.model.sequences).batches(batch_size=RUN.batch_size)
    for batch in learner.warm_up(batches):
        for number, part in blocks(batch, origin_ms=origin_ms, every_ms=every_ms):
            if number > reached:
                reached = number
                learner.refresh(origin_ms + number * every_ms - 1)
            figures.add(part.ts_ms_B, part.label_B, learner.learn(part))
    assert figures.daily_summaries() == whole.state.prequential.daily_summaries()


def histories_of(rows: EmbeddingStore, buckets: dict[int, bytes]) -> dict[int, list[int]]:
    """The items of each user, out of the records of buckets; none where it is a tombstone."""
    layout = rows.tables[-1].layout
    found = {}
    for records in buckets.values():
        keys, items = _store.decode_key_records(layout, records)
        for key, row in zip(keys.view(np.int64).tolist(), items.tolist(), strict=True):
            found[key] = [item for item in row if item != PADDING_KEY]
    return found


def state_of(history: History) -> dict[int, list[int]]:
    state = history.state()
    items = [[key for key in row if key != PADDING_KEY] for row in state.items_UL.tolist()]
    return dict(zip(state.user_U.tolist(), items, strict=True))


def test_each_version_carries_the_histories_of_its_end_and_no_others(whole: Trainer) -> None:
    publication, rows = whole.publication, whole.state.rows
    table = rows.tables[-1]
    assert (table.name, table.layout.dtype, table.layout.chunks) == ("hist_of_user", "keys", 10)
    (sequence,) = RUN.model.sequences
    history = History(sequence, [feature.name for feature in RUN.model.features])
    events = next(NEWS.batches(batch_size=100_000))
    assert whole.state.origin_ms is not None
    held: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    done, tombstones, unchanged = 0, 0, 0
    for version in publication.deltas():
        commit = publication.read_commit(version).commit
        end = int(np.searchsorted(events.ts_ms_B, commit.watermark_ms, side="right"))
        if end > done:
            history.extend(take(events, done, end))
            done = end
        now = state_of(history)
        buckets = {
            batch.bucket: batch.records
            for batch in publication.read_batches(version)
            if batch.table_id == table.id
        }
        carried = histories_of(rows, buckets)
        assert carried == {
            user: now.get(user, []) for user in {*before, *now} if before.get(user) != now.get(user)
        }
        tombstones += sum(not items for items in carried.values())
        unchanged += sum(user not in carried for user in now)
        held = {user: items for user, items in {**held, **carried}.items() if items}
        assert held == now
        before = now
    assert done == len(events)
    assert tombstones > 0
    assert unchanged > 0
    newest = publication.snapshot_path(publication.snapshots()[-1])
    files = {
        bucket: records
        for _, of, bucket, records in read_buckets(rows, newest)
        if of.name == table.name
    }
    assert histories_of(rows, files) == held


def test_histories_are_not_held_back_by_a_publish_budget(tmp_path: Path, whole: Trainer) -> None:
    path = tmp_path / "pub"
    path.mkdir()
    shutil.copyfile(whole.publication.program, path / "program.pt2")
    budget = PublishBudget(bytes_per_s=1, max_age_versions=50)
    run = dataclasses.replace(RUN, publish_budget=budget)
    trainer = train(run, NEWS, Publication(path), 9)
    trainer.versions.wait_published()
    assert trainer.versions.image is not None
    assert trainer.versions.image.stats.deferred_rows > 100
    trained, held = (
        {
            (table.name, bucket): records
            for table, bucket, records in of.buckets()
            if table.layout.dtype == "keys"
        }
        for of in (trainer.state.rows, trainer.versions.image)
    )
    assert trained == held
    assert any(trained.values())
    resumed = train(run, NEWS, Publication(path))
    assert resumed.versions.image is not None
    state = state_of(resumed.state.histories[0])
    buckets = {b: r for t, b, r in resumed.versions.image.buckets() if t.layout.dtype == "keys"}
    assert histories_of(resumed.state.rows, buckets) == state


def test_a_sequence_that_is_not_published_leaves_tables_and_requests_as_they_were() -> None:
    (sequence,) = RUN.model.sequences
    silent = dataclasses.replace(
        RUN.model, sequences=(dataclasses.replace(sequence, published=False),)
    )
    assert len(Learner(dataclasses.replace(RUN, model=silent)).rows.tables) == len(silent.tables)
    assert for_requests(NEWS, RUN.model) is NEWS
    columns = [each.name for each in for_requests(NEWS, silent).schema.features]
    assert columns == [each.name for each in silent.columns]
    with pytest.raises(ValueError, match="published stand behind the others"):
        dataclasses.replace(
            RUN.model,
            sequences=(sequence, dataclasses.replace(sequence, name="more", published=False)),
        )


def test_a_snapshot_names_the_columns_of_the_sequence(whole: Trainer) -> None:
    newest = whole.publication.snapshot_path(whole.publication.snapshots()[-1])
    manifest = read_manifest(newest)
    assert [each["name"] for each in manifest["features"][10:]] == [f"hist{i}" for i in range(10)]
    assert {each["table"] for each in manifest["features"][10:]} == {"article"}
    assert manifest["dense_features"] == 2
    assert manifest["sequences"] == [
        {
            "name": "hist",
            "user": "user",
            "item": "cand",
            "table": "hist_of_user",
            "columns": [f"hist{i}" for i in range(10)],
            "dense": 0,
        }
    ]
    assert manifest["requires"] == ["keys"]
    found = checkpoints.load_newest(whole.publication)
    assert found is not None
    assert len(found.checkpoint.histories[0].user_U) == 8
