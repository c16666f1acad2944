"""A trainer that makes histories and counts goes on, when killed, with those it had."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from killing import train

from embertide.trainer.checkpoint import checkpoint as checkpoints
from embertide.trainer.config import ModelConfig, RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.history import HistorySource
from embertide.trainer.data.limit import blocks
from embertide.trainer.eval.metrics import Prequential
from embertide.trainer.learner import Learner
from embertide.trainer.loop import Trainer
from embertide.trainer.presets import globo_counters
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.snapshot import read_manifest

NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=15, new_items_per_hour=5))


def model(users: int) -> ModelConfig:
    (sequence,) = globo_counters().sequences
    return dataclasses.replace(
        globo_counters(), sequences=(dataclasses.replace(sequence, users=users),)
    )


# Fewer than there are, so that some are forgotten and come again.
RUN = RunConfig(model=model(users=8), batch_size=24, publish_every_s=600, snapshot_every=4)


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
    for ours, wanted in zip(resumed.rows.buckets(), whole.rows.buckets(), strict=True):
        assert ours[2] == wanted[2]
    tensors = [
        each.publication.snapshot_path(each.publication.snapshots()[-1])
        / "dense/tensors.safetensors"
        for each in (resumed, whole)
    ]
    assert tensors[0].read_bytes() == tensors[1].read_bytes()
    states = [each.histories[0].state() for each in (resumed, whole)]
    np.testing.assert_array_equal(states[0].user_U, states[1].user_U)
    np.testing.assert_array_equal(states[0].items_UL, states[1].items_UL)
    assert states[0].forgotten == states[1].forgotten > 0


def test_a_trainer_learns_what_a_source_of_histories_gives(whole: Trainer) -> None:
    learner, figures = Learner(RUN), Prequential()
    every_ms, origin_ms = RUN.publish_every_s * 1000, whole.origin_ms
    assert origin_ms is not None
    reached = 0
    for batch in HistorySource(NEWS, RUN.model.sequences).batches(batch_size=RUN.batch_size):
        for number, part in blocks(batch, origin_ms=origin_ms, every_ms=every_ms):
            if number > reached:
                reached = number
                learner.refresh(origin_ms + number * every_ms - 1)
            figures.add(part.ts_ms_B, part.label_B, learner.learn(part))
    assert figures.daily_summaries() == whole.prequential.daily_summaries()


def test_a_snapshot_names_the_columns_of_the_sequence(whole: Trainer) -> None:
    newest = whole.publication.snapshot_path(whole.publication.snapshots()[-1])
    manifest = read_manifest(newest)
    assert [each["name"] for each in manifest["features"][10:]] == [f"hist{i}" for i in range(10)]
    assert {each["table"] for each in manifest["features"][10:]} == {"article"}
    assert manifest["dense_features"] == 2
    found = checkpoints.load_newest(whole.publication)
    assert found is not None
    assert len(found.checkpoint.histories[0].user_U) == 8
