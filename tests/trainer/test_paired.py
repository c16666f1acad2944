"""Two models on the same events: intervals that cover, verdicts that know a tie."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.config import RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.eval import grouped, metrics
from embertide.trainer.eval.metrics import Array
from embertide.trainer.eval.paired import compare
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"


def events(seed: int, noise: tuple[float, float]) -> tuple[Array, Array, Array, Array]:
    """Users whose events go together, and two models that see the truth through noise."""
    rng = np.random.default_rng(seed)
    user = np.repeat(np.arange(90), 20)
    # A model that lacks knowledge of a user is wrong in all of the user's events.
    truth = np.repeat(rng.normal(-1, 1.5, 90), 20) + rng.normal(0, 0.3, 1800)
    label = (rng.random(1800) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    scores = []
    for each in noise:
        seen = truth + each * np.repeat(rng.normal(0, 1, 90), 20)
        scores.append((1 / (1 + np.exp(-seen))).astype(np.float32))
    return user, label, scores[0], scores[1]


def test_figures_are_the_exact_ones_and_draws_are_seeded() -> None:
    user, label, one, other = events(1, (0.2, 1.0))
    found = compare(label, one, other, cluster_B=user, user_B=user, replicates=100)
    wanted = {
        "normalised_entropy": [metrics.normalised_entropy(label, each) for each in (one, other)],
        "log_loss": [metrics.log_loss(label, each) for each in (one, other)],
        "auc": [metrics.auc(label, each) for each in (one, other)],
        "gauc": [grouped.gauc(user, label, each).gauc for each in (one, other)],
    }
    assert list(found.differences) == list(wanted)
    for name, (first, second) in wanted.items():
        each = found.differences[name]
        assert (each.first, each.second) == pytest.approx((first, second), abs=1e-12)
        assert each.difference == pytest.approx(second - first, abs=1e-12)
        assert each.low <= each.difference <= each.high
    again = compare(label, one, other, cluster_B=user, user_B=user, replicates=100)
    assert again == found
    assert compare(label, one, other, cluster_B=user, replicates=100, seed=2) != found


def test_the_better_one_is_named_whichever_side_it_is_on() -> None:
    user, label, good, bad = events(2, (0.1, 2.0))
    for sides, verdict in (((good, bad), "first is better"), ((bad, good), "second is better")):
        found = compare(label, *sides, cluster_B=user, replicates=200).differences
        assert {each.verdict for each in found.values()} == {verdict}
    same = compare(label, good, good, cluster_B=user, user_B=user, replicates=100).differences
    assert {each.verdict for each in same.values()} == {"tie"}
    assert all(each.low == each.high == 0 for each in same.values())


def test_equal_models_tie_as_often_as_the_confidence_says() -> None:
    # Events drawn apart from their users would find a winner far more often.
    ties = {"users": 0, "events": 0}
    for seed in range(60):
        user, label, one, other = events(seed, (2.0, 2.0))
        clusters = {"users": user, "events": np.arange(len(user))}
        for name, cluster in clusters.items():
            found = compare(label, one, other, cluster_B=cluster, replicates=100, seed=seed)
            ties[name] += found.differences["log_loss"].verdict == "tie"
    assert ties["users"] >= 50  # of 60; 57 expected
    assert ties["events"] < 40


def test_what_cannot_be_compared_is_refused() -> None:
    half = np.full(4, 0.5)
    with pytest.raises(ValueError, match="at least 2"):
        compare(np.array([0, 1, 0, 1]), half, half, cluster_B=np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="all labels are one"):
        compare(np.ones(4), half, half, cluster_B=np.arange(4))


def test_the_command_compares_versions_and_calls_a_tie_a_tie(tmp_path: Path) -> None:
    folder = tmp_path / "pub"
    # A version of nothing learned, and one of an hour.
    run = RunConfig(model=news_model(), batch_size=64, publish_every_s=3600, keep_snapshots=9)
    news = NewsSource(NewsConfig(hours=2, views_per_hour=300, seed=1))
    Trainer(run, Publication(folder), program_cache=CACHE).fit(news)
    path = tmp_path / "run.py"
    path.write_text(
        "from embertide.trainer.config import RunConfig\n"
        "from embertide.trainer.presets import news_model\n"
        "from embertide.trainer.data.generator import NewsConfig, NewsSource\n"
        "run = RunConfig(model=news_model())\n"
        "source = NewsSource(NewsConfig(hours=2, views_per_hour=300, seed=1))\n"
    )
    command = ["compare", str(folder), str(folder), "--config", str(path), "--replicates", "100"]

    def run_it(*more: str) -> str:
        done = CliRunner().invoke(app, [*command, *more], env={**os.environ, "COLUMNS": "80"})
        assert done.exit_code == 0, done.output
        return done.stdout

    said = json.loads(run_it("--first-version", "1", "--json"))
    assert said["versions"][0] == 1 < said["versions"][1]
    assert said["differences"]["log_loss"]["verdict"] == "second is better"
    assert said["resampled"] == "users"
    same = json.loads(run_it("--json", "--user", ""))
    assert same["resampled"] == "blocks of time"
    assert {each["verdict"] for each in same["differences"].values()} == {"tie"}
    text = run_it("--first-version", "1")
    assert "95.0% confidence, by normalised entropy: second is better" in text
    assert "a tie: the difference is within chance" in run_it()
    assert max(map(len, text.splitlines())) <= 80
