"""`eval`: a published version scores a file by itself, with exact figures."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from shop import RUN as SHOP_RUN
from shop import Shop
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.config import RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.history import History, extend
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.grouped import gauc
from embertide.trainer.eval.metrics import summarise
from embertide.trainer.eval.published import PublishedModel
from embertide.trainer.presets import news_counters, news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=100, users=60, seed=1))
NAMES = [feature.name for feature in news_model().features]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """Counters, and deltas after the newest snapshot but one."""
    folder = tmp_path_factory.mktemp("eval") / "pub"
    run = RunConfig(model=news_counters(), batch_size=64, publish_every_s=600, snapshot_every=5)
    trainer = Trainer(run, Publication(folder), program_cache=CACHE)
    trainer.fit(FirstEvents(NEWS, NEWS.first_event(1)))
    return folder, trainer


def learner_scores(trainer: Trainer, batch: Batch) -> NDArray[np.float32]:
    """Scores by the histories of the version's end: nothing is liked since."""
    unlabelled = dataclasses.replace(batch, label_B=np.zeros(len(batch), np.float32))
    histories = []
    for each in trainer.state.histories:
        histories.append(History(each.config, NAMES))
        histories[-1].restore(each.state())
    return trainer.learner.score(extend(histories, unlabelled))


def test_a_version_scores_as_the_run_that_made_it(published: tuple[Path, Trainer]) -> None:
    folder, trainer = published
    model = PublishedModel.open(folder)
    assert model.number == trainer.state.number
    batch = next(NEWS.batches(batch_size=300, start=NEWS.first_event(1)))
    np.testing.assert_allclose(
        model.score(batch), learner_scores(trainer, batch), atol=1e-6, rtol=0
    )


def test_transforms_and_weighed_lists_are_as_in_training(tmp_path: Path) -> None:
    trainer = Trainer(SHOP_RUN, Publication(tmp_path / "pub"), program_cache=CACHE)
    trainer.fit(Shop(600))
    batch = next(Shop(600).batches(batch_size=200))
    model = PublishedModel.open(tmp_path / "pub")
    model.check(Shop(600))
    np.testing.assert_allclose(model.score(batch), trainer.learner.score(batch), atol=1e-6, rtol=0)
    with pytest.raises(ConfigurationError, match="has the features"):
        model.check(NEWS)


def test_a_version_is_the_same_by_its_snapshot_and_by_deltas_since_an_older_one(
    published: tuple[Path, Trainer], tmp_path: Path
) -> None:
    folder, _ = published
    whole = PublishedModel.open(folder)
    assert not whole.files.commits
    copy = tmp_path / "pub"
    shutil.copytree(folder, copy)
    shutil.rmtree(Publication(copy).snapshot_path(Publication(folder).snapshots()[-1]))
    by_deltas = PublishedModel.open(copy)
    assert by_deltas.number == whole.number
    assert by_deltas.files.commits
    batch = next(NEWS.batches(batch_size=300, start=NEWS.first_event(1)))
    assert (by_deltas.score(batch) == whole.score(batch)).all()
    older = PublishedModel.open(by_deltas.files.snapshot)
    assert older.number < whole.number
    assert (older.score(batch) != whole.score(batch)).any()
    with pytest.raises(ConfigurationError, match="has no version 99; it keeps"):
        PublishedModel.open(folder, 99)


def run_eval(*more: str) -> str:
    done = CliRunner().invoke(app, ["eval", *more], env={**os.environ, "COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_prints_exact_figures(published: tuple[Path, Trainer], tmp_path: Path) -> None:
    folder, trainer = published
    path, picture = tmp_path / "run.py", tmp_path / "calibration.png"
    path.write_text(
        "from embertide.trainer.config import RunConfig\n"
        "from embertide.trainer.presets import news_counters\n"
        "from embertide.trainer.data.generator import NewsConfig, NewsSource\n"
        "run = RunConfig(model=news_counters())\n"
        "source = NewsSource(NewsConfig(hours=2, views_per_hour=100, users=60, seed=1))\n"
    )
    options = (str(folder), "--config", str(path), "--slices", "hour_of_day", "--slices", "device")
    before = sorted(folder.rglob("*"))
    said = json.loads(run_eval(*options, "--most-values", "2", "--json", "--plot", str(picture)))
    assert sorted(folder.rglob("*")) == before
    batch = next(NEWS.batches(batch_size=NEWS.total_events() or 0))
    score = learner_scores(trainer, batch)
    exact = summarise(batch.label_B, score)
    assert said["figures"]["events"] == len(batch)
    for name in ("log_loss", "normalised_entropy", "auc", "calibration"):
        assert said["figures"][name] == pytest.approx(getattr(exact, name), abs=1e-5)
    users = batch.keys_BF[:, NAMES.index("user")]
    assert said["figures"]["gauc"] == pytest.approx(
        gauc(users, batch.label_B, score).gauc, abs=1e-4
    )
    assert said["events_up_to_watermark"] == NEWS.first_event(1)
    second = batch.ts_ms_B // 3_600_000 == 1
    of_second = said["slices"]["hour_of_day"]["1"]
    wanted = summarise(batch.label_B[second], score[second])
    assert of_second["events"] == int(second.sum())
    assert of_second["normalised_entropy"] == pytest.approx(wanted.normalised_entropy, abs=1e-5)
    assert list(said["slices"]["device"])[-1] == "rest"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    text = run_eval(*options)
    assert max(map(len, text.splitlines())) <= 80
    assert f"{said['figures']['normalised_entropy']:.4f}" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--slices", "colour"), "'colour' is no feature of one key"),
        (("--user", "nobody"), "'nobody' is no feature"),
        (("--version", "99"), "has no version 99"),
    ],
)
def test_what_is_not_there_is_refused(
    published: tuple[Path, Trainer], options: tuple[str, ...], said: str
) -> None:
    command = ["eval", str(published[0]), "--demo", "--hours", "1", *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert said in done.stderr
