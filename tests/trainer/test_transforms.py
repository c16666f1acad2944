"""Transforms of dense features: each step is what numpy says it is, fitted once, kept for ever.

Shapes: N events, D columns of DENSE.
"""

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killing import CACHE, train
from numpy.typing import NDArray
from shop import DENSE, RUN, Shop, model
from snapshots import snapshot_files

from bench.criteo import criteo
from embertide import _store
from embertide.trainer.config import DenseConfig, DenseStep, RunConfig, SequenceConfig
from embertide.trainer.model.learner import Learner
from embertide.trainer.model.transforms import make_transforms
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.snapshot import SnapshotError, read_manifest, read_transforms
from embertide.trainer.run.checkpoint.checkpoint import CheckpointError
from embertide.trainer.run.loop import Trainer

STEPS: dict[str, tuple[DenseStep, ...]] = {
    "log1p": ("log1p",),
    "clip": ("clip",),
    "standardise": ("standardise",),
    "quantile": ("quantile",),
    "bucketise": ("bucketise",),
    "all": ("clip", "log1p", "standardise", "quantile", "bucketise"),
}


def column(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)[:, None]


def done(config: DenseConfig, sample_N1: Any, value_N1: Any) -> NDArray[np.float32]:
    """Return what a feature's transform, fitted to a sample, makes of values."""
    made, _ = make_transforms(model(config), sample_N1).apply(value_N1)
    return made


# --- the steps ------------------------------------------------------------------------------------


def skewed(count: int, seed: int) -> NDArray[np.float32]:
    """Values of both signs, many of them 0, some far away."""
    rng = np.random.default_rng(seed)
    sign_N1 = rng.integers(-1, 2, (count, 1))
    return (rng.lognormal(1, 2, (count, 1)) * sign_N1).astype(np.float32)


def by_numpy(config: DenseConfig, sample_N: Any, value_N: Any) -> Any:
    """The same in float64, from the definitions; each step gets and gives floats."""
    for step in config.steps:
        if step == "clip":
            low, high = np.quantile(sample_N, config.clip)
            sample_N, value_N = np.clip(sample_N, low, high), np.clip(value_N, low, high)
        elif step == "log1p":
            sample_N, value_N = (np.sign(x) * np.log1p(np.abs(x)) for x in (sample_N, value_N))
        elif step == "standardise":
            mean, std = sample_N.mean(), sample_N.std()
            sample_N, value_N = (sample_N - mean) / std, (value_N - mean) / std
        elif step == "quantile":
            at = np.quantile(sample_N, np.linspace(0, 1, config.points))
            left, right = np.searchsorted(at, at, "left"), np.searchsorted(at, at, "right") - 1
            share = (left + right) / 2 / (config.points - 1)
            sample_N, value_N = np.interp(sample_N, at, share), np.interp(value_N, at, share)
        else:
            inner = np.linspace(0, 1, config.points + 2)[1:-1]
            edges = np.unique(np.quantile(sample_N, inner))
            sample_N, value_N = (
                np.searchsorted(edges, x, "right") / len(edges) for x in (sample_N, value_N)
            )
        sample_N, value_N = (x.astype(np.float32).astype(np.float64) for x in (sample_N, value_N))
    return value_N


@pytest.mark.parametrize("name", STEPS)
def test_each_transform_is_what_numpy_says_in_float64(name: str) -> None:
    config = DenseConfig(name="x", steps=STEPS[name], clip=(0.05, 0.9), points=33)
    sample_N1, value_N1 = skewed(5000, 1), skewed(2000, 2)
    want_N1 = by_numpy(config, sample_N1.astype(np.float64), value_N1.astype(np.float64))
    found_N1 = done(config, sample_N1, value_N1)
    assert found_N1.dtype == np.float32
    if name == "all":  # a step's place may fall to the other side of an edge by rounding alone
        assert (np.abs(found_N1 - want_N1) < 1e-6).mean() > 0.999
    else:
        np.testing.assert_allclose(found_N1, want_N1, rtol=2e-7, atol=1e-7)
    assert len(np.unique(found_N1)) > 10


def test_a_quantile_is_even_over_what_it_was_fitted_to() -> None:
    config = DenseConfig(name="x", steps=("quantile",))
    sample_N1 = np.random.default_rng(3).lognormal(0, 3, (20_000, 1)).astype(np.float32)
    shares, _ = np.histogram(done(config, sample_N1, sample_N1), bins=20, range=(0, 1))
    assert shares.min() > 0.9 * 1000
    assert shares.max() < 1.1 * 1000


def test_missing_values_take_no_step_and_no_part_in_the_fit() -> None:
    config = DenseConfig(name="x", steps=("standardise",), fill=-9.0, missing=True)
    sample_N1 = column(np.nan, 1, 3, np.nan)
    transforms = make_transforms(model(config, DenseConfig(name="y")), np.hstack([sample_N1] * 2))
    assert (transforms.inputs, transforms.outputs) == (2, 3)
    made, missing = transforms.apply(np.array([[1, 0], [np.nan, np.nan]], np.float32))
    assert made.tolist() == [[-1, 0, 0], [-9, 1, 0]]
    assert missing == 2


@pytest.mark.parametrize("steps", STEPS.values())
@pytest.mark.parametrize("values", [[np.nan, np.nan], [], [5.0, 5.0, np.nan], [0.1] * 7])
def test_what_tells_nothing_gives_harmless_steps_and_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture, steps: tuple[DenseStep, ...], values: list[float]
) -> None:
    config = DenseConfig(name="x", steps=steps)
    with caplog.at_level(logging.WARNING):
        made = done(config, column(*values), column(-1e30, 0, 5, 7, np.nan, 3e38))
    assert np.isfinite(made).all()
    assert len(caplog.records) == config.fitted
    assert not caplog.records or "dense feature 'x' is" in caplog.text


def test_almost_constant_columns_are_not_clipped_to_a_constant() -> None:
    sample_N1 = column(*[0] * 5000, 7)
    made = done(DenseConfig(name="x", steps=("clip",)), sample_N1, column(3, 9))
    assert made.tolist() == [[3], [7]]


def test_columns_of_sequences_pass_as_they_are() -> None:
    sequence = SequenceConfig(name="liked", user="user", item="it", length=3)
    config = model(DenseConfig(name="x", missing=True), net="history", sequences=(sequence,))
    assert config.raw_columns == ("x", "liked_length", "liked_repeat")
    assert (config.dense_features, config.dense_columns) == (2, 4)
    transforms = make_transforms(config, np.zeros((0, 1), np.float32))
    made, _ = transforms.apply(np.array([[np.e - 1, 3, 1]], np.float32))
    np.testing.assert_allclose(made, [[1, 0, 3, 1]], rtol=1e-7)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": ("sqrt",)}, "'sqrt'"),
        ({"steps": ("log1p",) * 9}, "9 steps"),
        ({"clip": (0.5, 0.5)}, "clip"),
        ({"points": 1}, "points is 1"),
        ({"points": 257}, "points is 257"),
        ({"fill": float("nan")}, "fill is nan"),
    ],
)
def test_a_feature_that_cannot_be_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DenseConfig(name="x", **wrong)


def test_the_store_refuses_rows_of_another_width() -> None:
    transforms = make_transforms(model(DenseConfig(name="x")), column(1))
    with pytest.raises(_store.StoreError, match=r"take \[B,1\] values"):
        transforms.apply(np.zeros((2, 3), np.float32))


# --- in a run -------------------------------------------------------------------------------------

SHOP = Shop()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return train(RUN, SHOP, Publication(tmp_path_factory.mktemp("whole") / "pub"))


def newest(publication: Publication) -> Path:
    return publication.snapshot_path(publication.snapshots()[-1])


def test_a_fresh_run_is_fitted_to_its_first_events_and_learns_them_all(whole: Trainer) -> None:
    want = make_transforms(RUN.model, SHOP.whole.dense_BD[:300])
    assert whole.learner.transforms is not None
    assert whole.learner.transforms.text == want.text
    assert whole.state.events == SHOP.total_events()
    assert whole.learner.missing == np.isnan(SHOP.whole.dense_BD).sum() > 300


def test_the_snapshot_has_them_and_the_raw_columns(whole: Trainer) -> None:
    manifest = read_manifest(newest(whole.publication))
    version = whole.publication.snapshots()[-1]
    assert manifest["committed_ms"] == whole.publication.read_commit(version).commit.committed_ms
    assert manifest["dense_features"] == 3
    assert [each["role"] for each in manifest["dense"]] == ["program", "tensors", "transforms"]
    read = read_transforms(newest(whole.publication))
    assert read is not None
    assert whole.learner.transforms is not None
    assert read.text == whole.learner.transforms.text
    assert manifest["schema_id"] == whole.versions.publisher.schema_id


@pytest.mark.parametrize("batches", [1, 20, 33])
def test_a_killed_run_goes_on_with_the_same_fit_and_ends_with_the_same_bytes(
    whole: Trainer, tmp_path: Path, batches: int
) -> None:
    path = tmp_path / "pub"
    path.mkdir()
    shutil.copyfile(whole.publication.program, path / "program.pt2")  # exporting takes seconds
    publication = Publication(path)
    killed = train(RUN, SHOP, publication, batches)
    resumed = Trainer(RUN, publication, program_cache=CACHE)
    assert killed.learner.transforms is not None
    assert resumed.learner.transforms is not None
    assert resumed.learner.transforms.text == killed.learner.transforms.text
    assert resumed.versions.publisher.schema_id == killed.versions.publisher.schema_id
    resumed.fit(SHOP)
    assert snapshot_files(newest(publication)) == snapshot_files(newest(whole.publication))


def test_a_run_goes_on_with_no_other_transforms(whole: Trainer) -> None:
    other = dataclasses.replace(DENSE[1], points=18)
    model = dataclasses.replace(RUN.model, dense=(DENSE[0], other, DENSE[2]))
    with pytest.raises(CheckpointError, match=r"model.dense\[1\].points = 17, this run has 18"):
        Trainer(dataclasses.replace(RUN, model=model), whole.publication, program_cache=CACHE)


def test_transforms_that_are_not_what_was_written_are_refused(
    whole: Trainer, tmp_path: Path
) -> None:
    shutil.copytree(newest(whole.publication), tmp_path / "snapshot")
    path = tmp_path / "snapshot" / "dense" / "transforms.json"
    path.write_text(path.read_text().replace("17", "18").replace("0.5", "0.6"))
    with pytest.raises(SnapshotError, match=r"transforms\.json is not what manifest\.json says"):
        read_transforms(tmp_path / "snapshot")


def test_schemas_differ_with_the_fit_alone(whole: Trainer, tmp_path: Path) -> None:
    path = tmp_path / "pub"
    path.mkdir()
    shutil.copyfile(whole.publication.program, path / "program.pt2")
    trainer = train(dataclasses.replace(RUN, warmup_events=200), SHOP, Publication(path), 1)
    assert trainer.versions.publisher.schema_id != whole.versions.publisher.schema_id


def test_without_steps_to_fit_nothing_is_held_back() -> None:
    learner = Learner(RunConfig(model=criteo()))
    assert learner.transforms is not None
    batches = iter(())
    assert learner.warm_up(batches, labelled=False) is batches
    steps = [each["steps"] for each in json.loads(learner.transforms.text)["columns"]]
    assert steps == [[{"kind": "log1p"}]] * 13
