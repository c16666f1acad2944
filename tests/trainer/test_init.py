"""`embertide init`: the file of a run that it writes trains with no change."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.commands.inputs import check_model
from embertide.trainer.commands.run_file import load
from embertide.trainer.model.learner import Learner
from embertide.trainer.run.defaults import (
    batch_size,
    max_versions,
    rates,
    schedule_of_clock,
    schedule_of_rows,
)

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
YEAR_S = 365 * 86_400


def ratings(path: Path, rows: int = 6000) -> Path:
    """Write ratings of a few years, by user and not by time, as such files come."""
    rng = np.random.default_rng(1)
    user_N, movie_N = rng.integers(0, 90, rows), rng.integers(0, 40, rows)
    rating_N = np.clip(np.rint(3 + (movie_N % 5 - 2) + rng.normal(0, 0.7, rows)), 1, 5)
    time_N = 1_000_000_000 + rng.integers(0, 3 * YEAR_S, rows)
    order_N = np.lexsort((time_N, user_N))
    table = {
        "userId": user_N[order_N],
        "movieId": movie_N[order_N],
        "genres": [f"g{i % 3}|g{i % 7}" for i in movie_N[order_N].tolist()],
        "rating": rating_N[order_N].astype(np.int64),
        "timestamp": time_N[order_N],
    }
    pq.write_table(pa.table(table), path)
    return path


def init(data: Path, out: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["init", str(data), "-o", str(out), *more])


def test_ratings_by_user_become_a_run_in_order_of_time(tmp_path: Path) -> None:
    out = tmp_path / "run.py"
    done = init(ratings(tmp_path / "My ratings.parquet"), out)
    assert done.exit_code == 0, done.output
    assert "label: 1 if >= 4" in " ".join(done.output.split())
    assert "were not in order of timestamp: sorted into" in done.output
    assert f"--config {out}" in done.output
    assert max(map(len, done.output.split("were not")[0].splitlines())) <= 80
    given = load(out)
    assert given.source is not None
    check_model(given.run.model, given.source)
    assert given.run.model.name == "my_ratings"
    learner, events = Learner(given.run), 0
    for batch in given.source.batches(batch_size=given.run.batch_size):
        learner.learn(batch)
        events += len(batch)
    assert events == 6000
    assert given.source.dead_letters.count == 0
    versions = 3 * YEAR_S / given.run.publish_every_s
    assert 2 <= versions <= 5  # of some thousands of events each, not one for ten minutes


def clicks_of_days(path: Path, days: int, rows: int = 12_000) -> Path:
    """Write clicks whose clock tells the day alone, not in its order."""
    rng = np.random.default_rng(5)
    day_N = np.datetime64("2024-01-01") + rng.integers(0, days, rows)
    table = {
        "user": rng.integers(0, 500, rows),
        "day": day_N.astype("datetime64[ms]"),
        "click": rng.integers(0, 2, rows),
    }
    pq.write_table(pa.table(table), path)
    return path


def test_a_clock_that_would_make_steps_of_a_thousand_rows_is_none(tmp_path: Path) -> None:
    """Ten days of 1,200 rows: as a clock, that is ten steps in all."""
    done = init(clicks_of_days(tmp_path / "clicks.parquet", days=10), tmp_path / "run.py")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "day is too coarse for a clock: rows of one time are learned at once, 1,2" in said
    given = load(tmp_path / "run.py")
    assert given.source is not None
    assert given.source.schema.ts is None
    sizes = [len(batch) for batch in given.source.batches(batch_size=given.run.batch_size)]
    assert (sum(sizes), max(sizes)) == (12_000, 8)


@pytest.mark.parametrize(
    ("rows", "step", "rate"),
    [
        (24_999, 8, 0.000_25),
        (25_000, 16, 0.000_5),
        (99_999, 32, 0.001),
        (100_000, 128, 0.002),
        (10**9, 256, 0.002),
    ],
)
def test_a_small_file_is_learned_in_small_steps(rows: int, step: int, rate: float) -> None:
    assert batch_size(rows) == step
    assert rates(step).dense_learning_rate == pytest.approx(rate)


def test_a_clock_of_many_days_is_one(tmp_path: Path) -> None:
    done = init(clicks_of_days(tmp_path / "clicks.parquet", days=100), tmp_path / "run.py")
    assert done.exit_code == 0, done.output
    given = load(tmp_path / "run.py")
    assert given.source is not None
    assert given.source.schema.ts == "day"


def test_rows_without_a_time_are_counted_and_not_dated(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    columns = {"color": rng.choice(["red", "blue"], 9000), "weight": rng.normal(0, 1, 9000)}
    columns["y"] = (columns["weight"] + rng.normal(0, 1, 9000) > 0).astype(np.int64)
    path = tmp_path / "shop.csv"
    lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    said = json.loads(init(path, tmp_path / "run.py", "--json").stdout)
    assert (said["model"], said["rows"], said["publish_every_s"]) == ("shop", 9000, 2)
    assert "no time: the order of rows is time" in said["notes"][0]
    given = load(tmp_path / "run.py")
    assert given.source is not None
    assert given.source.schema.ts is None
    assert [each.name for each in given.run.model.dense] == ["weight"]


def test_a_file_that_exists_is_kept_and_a_guess_that_is_unsure_is_none(tmp_path: Path) -> None:
    data, out = ratings(tmp_path / "r.parquet", 500), tmp_path / "run.py"
    out.write_text("mine")
    done = init(data, out)
    assert done.exit_code == 2
    assert "exists: name another with -o, or say --force" in done.stderr
    assert out.read_text() == "mine"
    assert init(data, out, "--force", "--positive", ">= 3").exit_code == 0
    assert "positive='>= 3'" in out.read_text()
    refused = init(data, tmp_path / "b.py", "--label", "stars")
    assert refused.exit_code == 2
    assert "there is no column 'stars'" in refused.stderr
    assert init(data, tmp_path / "b.py", "--positive", "four").exit_code == 2
    assert not (tmp_path / "b.py").exists()


def test_a_runs_file_among_the_data_is_told_its_option(tmp_path: Path) -> None:
    data, out = ratings(tmp_path / "r.parquet", 500), tmp_path / "it's.py"
    done = CliRunner().invoke(app, ["init", str(data), str(out)])
    assert done.exit_code == 2
    assert f"to write the run there, say -o {shlex.quote(str(out))}" in done.stderr
    assert not out.exists()


def test_what_to_type_next_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    data, out = ratings(tmp_path / "r.parquet", 500), tmp_path / "it's a run.py"
    done = init(data, out, "--positive", ">= 3")
    assert done.exit_code == 0
    following = shlex.split(done.stdout.replace("\n", " ").split("next: ")[1])
    assert following == ["embertide", "train", "build/r", "--config", str(out)]


def test_train_says_what_to_type_for_columns_that_it_does_not_know(tmp_path: Path) -> None:
    data = ratings(tmp_path / "r.parquet", 100)
    done = CliRunner().invoke(app, ["train", str(tmp_path / "p"), "--data", str(data)])
    assert done.exit_code == 2
    assert f"`embertide init {data}`" in done.stderr
    none = CliRunner().invoke(app, ["train", str(tmp_path / "p")])
    assert none.exit_code == 2
    assert "give --data FILE, or --demo for synthetic news" in none.stderr
    both = CliRunner().invoke(app, ["train", str(tmp_path / "p"), "--demo", "--data", str(data)])
    assert "--data and --demo: give one of them" in both.stderr
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("events", "span_s", "most", "every_s"),
    [
        (100_000, 1038 * 86_400, None, 21 * 86_400),  # not 31,000 versions of three events each
        (5_000_000, 10 * 86_400, None, 600),
        (5_000_000, 10 * 86_400, 200, 7200),
        (500, 60, None, 600),
        (10**6, 0, 200, 1),
    ],
)
def test_versions_are_as_many_as_events_and_clock_deserve(
    events: int, span_s: int, most: int | None, every_s: int
) -> None:
    found = schedule_of_clock(events, span_s, most=most)
    assert found.publish_every_s == every_s
    versions = span_s / every_s
    assert versions / found.snapshot_every <= 20
    assert found.snapshot_every >= 6


@pytest.mark.parametrize(
    ("events", "days", "every_s"),
    [
        (5_327_200, 10, 900),  # news
        (100_000, 1038, 21 * 86_400),  # ratings
        (5_327_200, 0.1, 60),  # too fast for versions of ten minutes: 200 at most
        (600_000, 60, 43_200),
    ],
)
def test_a_file_whose_events_come_fast_has_more_versions(
    events: int, days: float, every_s: int
) -> None:
    span_s = days * 86_400
    assert (
        schedule_of_clock(events, span_s, most=max_versions(events, span_s)).publish_every_s
        == every_s
    )


def test_the_file_says_what_could_be_turned_on(tmp_path: Path) -> None:
    out = tmp_path / "run.py"
    assert init(ratings(tmp_path / "r.parquet"), out).exit_code == 0
    text = out.read_text()
    for said in (
        "TableConfig(name='movie_id', chunks=4, counters=CountersConfig(feature='movie_id'))",
        "net='history', sequences=(SequenceConfig(name='hist', user='user_id', item='movie_id', ",
        "FeatureConfig(name='pair', table='pair', crossed=('user_id', 'movie_id'))",
    ):
        assert f"#     {said}" in text


def test_amounts_are_read_as_bins_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    price_N = np.exp(rng.normal(3, 1, 5000)).round(2)
    price_N[::10] = np.nan
    columns = {"item": rng.integers(0, 50, 5000), "price": price_N}
    pq.write_table(
        pa.table(
            {name: pa.array(values, from_pandas=True) for name, values in columns.items()}
            | {"label": (rng.random(5000) < 0.3).astype(np.int64)}
        ),
        tmp_path / "shop.parquet",
    )
    assert init(tmp_path / "shop.parquet", tmp_path / "run.py").exit_code == 0
    said = "# Who asks sends price; embertide.Client makes the bin."
    assert said in (tmp_path / "run.py").read_text()
    given = load(tmp_path / "run.py")
    assert given.source is not None
    names = [feature.name for feature in given.run.model.features]
    batches = list(given.source.batches(batch_size=5000))
    bin_N = np.concatenate([batch.keys_BF[:, names.index("price_bin")] for batch in batches])
    assert (bin_N[::10] == -1).all()
    counts = np.bincount(bin_N[bin_N >= 0])
    assert len(counts) == 16
    assert counts.min() > 0.8 * counts.max()
    edges = np.array(given.source.schema.features[names.index("price_bin")].edges, np.float32)
    there_N = bin_N >= 0
    value_N = price_N[there_N].astype(np.float32)
    assert np.isin(edges, value_N).all()
    assert np.array_equal(bin_N[there_N], (edges[None, :] <= value_N[:, None]).sum(1))


@pytest.mark.parametrize("by", ["the shell", "a glob of ours"])
def test_several_files_are_one_input(tmp_path: Path, by: str) -> None:
    for name in ("b", "a"):
        ratings(tmp_path / f"{name}.parquet", 3000)
    pattern = str(tmp_path / "[ab].parquet")
    named = sorted(map(str, tmp_path.iterdir())) if by == "the shell" else [pattern]
    done = CliRunner().invoke(app, ["init", *named, "-o", str(tmp_path / "run.py"), "--no-time"])
    assert done.exit_code == 0, done.output
    # A long path is folded anywhere.
    titled = "a.parquetand1more:6,000rows" in "".join(done.output.split())
    assert titled == (by == "the shell")
    given = load(tmp_path / "run.py")
    assert given.source is not None
    assert given.source.total_events() == 6000
    assert given.run.model.name == "a"


def test_rows_without_a_clock_give_versions_of_some_thousands() -> None:
    assert schedule_of_rows(60_000).publish_every_s == 2
    assert schedule_of_rows(10**8, most=200).publish_every_s == 500


@pytest.mark.long
def test_what_init_writes_trains_and_goes_on(tmp_path: Path) -> None:
    out, folder = tmp_path / "run.py", tmp_path / "pub"
    assert init(ratings(tmp_path / "r.parquet"), out).exit_code == 0
    letters = tmp_path / "letters"
    words = ["train", str(folder), "--config", str(out), "--cache", str(CACHE)]
    done = CliRunner().invoke(app, [*words, "--dead-letters", str(letters)])
    assert done.exit_code == 0, done.output
    assert "6,000 learned, 0 rejected" in done.output
    assert "mean of" in " ".join(done.output.split())
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert CliRunner().invoke(app, words).exit_code == 0
