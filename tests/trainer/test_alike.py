"""Labels of neighbouring events that are alike ask for small steps, and nothing else does."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.commands.run_file import load
from embertide.trainer.data.alike import alike

EVENTS = 20_000
STEP = 128
SITTING = 100

Floats = NDArray[np.float64]


def likeness(rate_N: Floats, ts_N: Floats | None = None, seed: int = 1) -> float:
    """Return what labels drawn at these rates come to, of one event after the other."""
    label_N = np.random.default_rng(seed).random(len(rate_N)) < rate_N
    return alike(label_N, np.arange(len(rate_N), dtype=np.float64) if ts_N is None else ts_N, STEP)


def moods(events: int = EVENTS, length: int = SITTING) -> Floats:
    """Return the rates of people who like three in ten, or seven, one person after the other."""
    mood_P = np.random.default_rng(2).choice([0.3, 0.7], events // length + 1)
    rate_N: Floats = mood_P[np.arange(events) // length]
    return rate_N


def test_people_one_after_the_other_are_alike() -> None:
    """Two of one batch are of one person in half of the cases; then they correlate by 0.16."""
    assert 0.07 < likeness(moods()) < 0.12


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01, 0.001])
def test_chance_is_not(rate: float) -> None:
    for seed in range(20):
        assert likeness(np.full(EVENTS, rate), seed=seed) == 0.0


def test_a_rate_that_moves_slowly_is_not() -> None:
    assert likeness(np.linspace(0.05, 0.95, 10 * EVENTS)) == 0.0


def test_people_at_the_same_time_are_not() -> None:
    """Two hundred of them, who take turns."""
    rate_N = moods().reshape(-1, SITTING).T.reshape(-1)
    assert likeness(rate_N) == 0.0


def test_events_of_one_time_are_learned_together_anyway() -> None:
    assert likeness(moods(), ts_N=np.arange(EVENTS) // SITTING * 60.0) == 0.0


def test_labels_that_take_turns_are_not() -> None:
    assert likeness((np.arange(EVENTS) % 2).astype(np.float64)) == 0.0


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01])
def test_chance_is_not_of_the_fewest_events_either(rate: float) -> None:
    for seed in range(200):
        assert likeness(np.full(32 * STEP, rate), seed=seed) == 0.0


def test_chance_is_not_of_small_steps_either() -> None:
    """Of 600 events in steps of 16, chance is above the least that counts one time in four."""
    rng = np.random.default_rng(6)
    at_N = np.arange(600, dtype=np.float64)
    assert not any(alike(rng.random(600) < 0.5, at_N, 16) for _ in range(60))


def test_a_few_events_do_not_tell() -> None:
    label_N = np.repeat([True, False] * 16, STEP)
    assert alike(label_N[:-1], np.arange(len(label_N) - 1.0), STEP) == 0.0
    assert alike(label_N, np.arange(float(len(label_N))), STEP) > 0.9


@given(st.lists(st.booleans(), max_size=80), st.integers(0, 3))
def test_no_labels_are_too_few_or_too_equal(labels: list[bool], gap: int) -> None:
    label_N, ts_N = np.array(labels, np.bool_), np.arange(len(labels)) // (gap + 1)
    assert 0 <= alike(label_N, ts_N.astype(np.float64), 2) <= 2
    assert alike(np.zeros_like(label_N), ts_N.astype(np.float64), 2) == 0.0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=40, max_size=400),
    st.integers(2, 12),
)
def test_it_is_the_correlation_of_pairs(rows: list[tuple[int, bool]], size: int) -> None:
    """Counted pair by pair; what is below its bounds says nothing."""
    mood_N = np.array([mood > 4 for mood, _ in rows]).repeat(5)
    ts_N = np.cumsum([later for _, later in rows]).astype(np.float64).repeat(5)
    found = alike(mood_N, ts_N, size)
    centred_N = mood_N - mood_N.mean()
    place_N = np.arange(len(mood_N))
    same_NN = place_N[:, None] // size == place_N // size
    around_NN = place_N[:, None] // (16 * size) == place_N // (16 * size)
    within_NN = same_NN & (ts_N[:, None] != ts_N)
    between_NN = around_NN & ~same_NN
    product_NN = centred_N[:, None] * centred_N
    if found > 0:
        expected = product_NN[within_NN].mean() - product_NN[between_NN].mean()
        assert found == pytest.approx(expected / (centred_N**2).mean())


def films(rows: int, *, together: bool, moods: tuple[float, float] = (0.25, 0.75)) -> pa.Table:
    """Return ratings of people of two moods, who like so many films; by film, not by time."""
    rng = np.random.default_rng(3)
    user_N = np.arange(rows) // SITTING
    likes_N = rng.choice(moods, user_N[-1] + 1)[user_N]
    minute_N = np.arange(rows) if together else rng.permutation(rows)
    return pa.table(
        {
            "user id": [f"u'{user}" for user in user_N],
            "film": rng.integers(0, 300, rows),
            "rating": rng.integers(1, 4, rows) + 2 * (rng.random(rows) < likes_N),
            "timestamp": 1_500_000_000 + 60 * minute_N,
        }
    ).sort_by("film")


@pytest.mark.parametrize("name", ["films.parquet", "films.csv"])
def test_init_writes_small_steps_down_and_says_why(tmp_path: Path, name: str) -> None:
    data, out = tmp_path / name, tmp_path / "run.py"
    table = films(12_000, together=True)
    if data.suffix == ".csv":
        pyarrow.csv.write_csv(table, data)
    else:
        pq.write_table(table, data)
    done = CliRunner().invoke(app, ["init", str(data), "-o", str(out)])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "labels of events that follow each other are alike" in said
    assert "steps of 8, at twice the rate" in said
    assert "takes longer" not in said  # than other files of so many rows
    run = load(out).run
    assert (run.batch_size, run.optimizer.sparse_learning_rate) == (8, 0.2)


def test_init_keeps_the_usual_rate_where_labels_are_a_little_alike(tmp_path: Path) -> None:
    data, out = tmp_path / "films.parquet", tmp_path / "run.py"
    pq.write_table(films(40_000, together=True, moods=(0.41, 0.59)), data)
    done = CliRunner().invoke(app, ["init", str(data), "-o", str(out)])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert (
        "alike (0.01 more than of those nearby): rows learn in steps of 8, which takes longer"
        in said
    )
    run = load(out).run
    assert (run.batch_size, run.optimizer.sparse_learning_rate) == (8, 0.1)


def test_init_takes_the_usual_steps_where_people_come_and_go(tmp_path: Path) -> None:
    data, out = tmp_path / "films.parquet", tmp_path / "run.py"
    pq.write_table(films(30_000, together=False), data)
    done = CliRunner().invoke(app, ["init", str(data), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "are alike" not in done.output
    run = load(out).run
    assert (run.batch_size, run.optimizer.sparse_learning_rate) == (16, 0.1)
    assert run.optimizer.dense_learning_rate == pytest.approx(0.002 * 16 / 64)


def test_a_label_of_words_is_read_as_it_is_learned(tmp_path: Path) -> None:
    """The file is sorted, so its labels are read again: as texts, with `== 'yes'` in place."""
    table = films(12_000, together=True)
    liked = ["yes" if rating.as_py() > 3 else "no" for rating in table["rating"]]
    table = table.drop_columns("rating").append_column("liked", pa.array(liked))
    data, out = tmp_path / "films.csv", tmp_path / "run.py"
    pyarrow.csv.write_csv(table, data)
    done = CliRunner().invoke(app, ["init", str(data), "-o", str(out), "--label", "liked"])
    assert done.exit_code == 0, done.output
    assert load(out).run.optimizer.sparse_learning_rate == 0.2
