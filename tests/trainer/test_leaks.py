"""Columns that tell the label are said, by `init` and by `train`, and `init` leaves them out."""

import decimal
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.commands.run_file import load
from embertide.trainer.data import leaks, watch
from embertide.trainer.data import open_events as opened
from embertide.trainer.data.base import MISSING_KEY, EventSchema, FeatureColumn
from embertide.trainer.data.leaks import (
    ColumnNote,
    SampledColumn,
    equal_columns,
    examine,
    kept_rows,
    unique_note,
)
from embertide.trainer.data.watch import WatchedSource

ROWS = 4000
EPOCH_S = 1_700_000_000


def drawn(seed: int, rate: float = 0.1, rows: int = ROWS) -> tuple[np.random.Generator, Any]:
    rng = np.random.default_rng(seed)
    return rng, rng.random(rows) < rate


def kinds(notes: list[ColumnNote]) -> dict[str, str]:
    return {note.columns[0]: note.kind for note in notes}


def write(path: Path, seed: int = 1, **more: Any) -> Path:
    """Write clicks with columns of your own, which may be made of the label."""
    rng, label_N = drawn(seed)
    columns = {
        "ts": EPOCH_S + np.arange(ROWS) * 30,
        "user_id": rng.integers(0, 300, ROWS),
        "item_id": rng.integers(0, 50, ROWS),
        "price": rng.lognormal(2, 1, ROWS),
        "clicked": label_N.astype(np.int64),
    }
    columns |= {name: make(rng, label_N) for name, make in more.items()}
    arrays = {name: pa.array(values, from_pandas=True) for name, values in columns.items()}
    pq.write_table(pa.table(arrays), path)
    return path


def refunded(rng: np.random.Generator, label_N: Any) -> Any:
    return np.where(label_N, rng.lognormal(2, 1, ROWS), np.nan)


def outcome(rng: np.random.Generator, label_N: Any) -> Any:
    return np.where(label_N, rng.choice(["won", "sold"], ROWS), rng.choice(["lost", "left"], ROWS))


# --- the judgement --------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rate=st.sampled_from([0.003, 0.02, 0.3, 0.97]),
    rows=st.integers(1, 3000),
    clock=st.booleans(),
    blocky=st.booleans(),
)
def test_what_is_drawn_without_the_label_is_no_leak(
    seed: int, rate: float, rows: int, clock: bool, blocky: bool
) -> None:
    rng, label_N = drawn(seed, rate, rows)
    if blocky:  # a mean label that moves as far as it can
        label_N = np.sort(label_N)
    few_N = rng.integers(0, 5, rows)
    columns = [
        SampledColumn(name="own", keys_N=rng.permutation(rows).astype(np.int64)),
        SampledColumn(name="pair", keys_N=rng.permutation(rows) // 2),
        SampledColumn(name="few", keys_N=few_N),
        SampledColumn(name="noise", value_N=rng.normal(0, 1, rows)),
        SampledColumn(name="gaps", value_N=np.where(few_N > 0, rng.normal(0, 1, rows), np.nan)),
        SampledColumn(
            name="bag",
            items_M=rng.integers(0, 99, int(few_N.sum())),
            sizes_N=few_N.astype(np.int64),
        ),
    ]
    ts_ms_N = np.arange(rows) * 1000 if clock else None
    assert examine(columns, label_N, ts_ms_N) == []


@pytest.mark.parametrize("rate", [0.01, 0.5])
@pytest.mark.parametrize("clock", [True, False])
def test_each_way_to_contain_the_label_is_said(rate: float, clock: bool) -> None:
    rng, label_N = drawn(3, rate, 6000)
    rows = len(label_N)
    ts_ms_N = np.arange(rows) * 60_000.0
    before_N = ts_ms_N - rng.integers(0, 10**9, rows)
    size_N = rng.integers(0, 3, rows) + label_N
    item_M = rng.integers(1, 200, int(size_N.sum()))
    item_M[(np.cumsum(size_N) - size_N)[label_N]] = 0
    due_N = rng.lognormal(5, 1, rows)
    columns = {
        "code": SampledColumn(name="code", keys_N=rng.integers(0, 4, rows) * 2 + label_N),
        "mixed": SampledColumn(name="mixed", value_N=np.abs(rng.normal(0, 1, rows)) + 5 * label_N),
        "middle": SampledColumn(
            name="middle", value_N=np.where(label_N, 0.0, rng.choice([-1, 1], rows)) * 3.5
        ),
        "absent": SampledColumn(
            name="absent", keys_N=np.where(label_N, np.arange(rows), MISSING_KEY)
        ),
        "some": SampledColumn(
            name="some", value_N=np.where(label_N & (rng.random(rows) < 0.7), 1.0, np.nan)
        ),
        "bag": SampledColumn(name="bag", items_M=item_M, sizes_N=size_N),
        "later": SampledColumn(
            name="later", value_N=np.where(label_N, ts_ms_N + 10**6, before_N), unit_ms=1.0
        ),
        "due": SampledColumn(name="due", value_N=due_N),
        "paid": SampledColumn(name="paid", value_N=due_N + np.where(label_N, 9.0, -9.0)),
    }
    wanted = {
        "code": "tells the label",
        "mixed": "tells the label",
        "middle": "tells the label",
        "absent": "after the label",
        "some": "after the label",
        "bag": "tells the label",
        "due": "together",
    }
    if clock:
        wanted["later"] = "after the label"
    notes = examine(list(columns.values()), label_N, ts_ms_N if clock else None)
    assert kinds(notes) == wanted
    assert [note.is_leak for note in notes] == sorted((n.is_leak for n in notes), reverse=True)


def test_too_few_events_prove_nothing() -> None:
    rng, label_N = drawn(1, 0.5, 90)
    assert examine([SampledColumn(name="y", keys_N=label_N.astype(np.int64))], label_N) == []
    label_N = np.zeros(5000, np.bool_)
    label_N[rng.integers(0, 5000, 6)] = True
    assert examine([SampledColumn(name="y", value_N=label_N * 1.5)], label_N) == []


def test_columns_that_are_equal_or_renamed_are_said_once() -> None:
    rng, _ = drawn(1)
    key_N = rng.integers(0, 40, ROWS)
    number_N = np.where(key_N > 3, rng.normal(0, 1, ROWS), np.nan)
    own_N = rng.permutation(ROWS).astype(np.int64)
    columns = [
        SampledColumn(name="a", keys_N=key_N),
        SampledColumn(name="b", keys_N=key_N * 7 + 1),
        SampledColumn(name="c", keys_N=key_N.copy()),
        SampledColumn(name="x", value_N=number_N),
        SampledColumn(name="y", value_N=number_N.copy()),
        SampledColumn(name="own", keys_N=own_N),
        SampledColumn(name="other own", keys_N=own_N[::-1].copy()),
        SampledColumn(name="none", value_N=np.zeros(ROWS)),
        SampledColumn(name="none again", value_N=np.zeros(ROWS)),
    ]
    notes = equal_columns(columns)
    assert [note.columns for note in notes] == [("b", "a"), ("c", "a"), ("y", "x")]
    assert "is another name of 'a'" in notes[0].text
    assert "is equal to 'a'" in notes[1].text


def test_a_sample_is_bounded_and_the_same_whatever_else_is_read() -> None:
    _, label_N = drawn(1, 0.01, 50_000)
    event_N = np.arange(50_000)
    kept = kept_rows(label_N, event_N, most=1000)
    assert len(kept) == 1000 + label_N.sum()
    assert (np.diff(kept) > 0).all()
    later = kept_rows(label_N[:40_000], event_N[:40_000], most=10**6)
    assert len(later) == 40_000
    assert unique_note("a", 94, 100) is None
    assert unique_note("a", 95, 100) is not None


# --- init -----------------------------------------------------------------------------------------


def init(data: Path, out: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["init", str(data), "-o", str(out), *more])


def test_init_leaves_a_leak_out_and_says_how_to_have_it(tmp_path: Path) -> None:
    data = write(tmp_path / "clicks.parquet", outcome=outcome, refund=refunded)
    out = tmp_path / "run.py"
    done = init(data, out)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "'outcome' alone tells the label: AUC 1.0000" in said
    assert "it is left out, --key-column 'outcome' has it all the same" in said
    assert "'refund' is known only after the label: only positives have a value" in said
    text = out.read_text()
    why = "known only after the label; --number-column 'refund' has it all the same."
    assert f"#   refund: {why}" in text
    given = load(out)
    assert given.source is not None
    assert given.source.schema.dense == ("price",)
    assert not {"outcome", "refund"} & {*given.source.schema.columns}


def test_a_column_that_a_person_names_stays_in(tmp_path: Path) -> None:
    data = write(tmp_path / "clicks.parquet", outcome=outcome)
    done = init(data, tmp_path / "run.py", "--key-column", "outcome", "--json")
    said = json.loads(done.stdout)
    assert {each["column"]: each["role"] for each in said["columns"]}["outcome"] == "key"
    assert any("'outcome' alone tells the label" in note for note in said["notes"])
    given = load(tmp_path / "run.py")
    assert given.source is not None
    assert "outcome" in given.source.schema.columns


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_a_label_of_numbers_may_be_compared_as_text(tmp_path: Path, dtype: type) -> None:
    """As a person may ask; no row equals the text here, so `init` says that none is positive."""
    rng, label_N = drawn(1)
    columns = {"item": rng.integers(0, 9, len(label_N)), "rating": label_N.astype(dtype)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    done = init(tmp_path / "a.parquet", tmp_path / "run.py", "--positive", "== yes")
    assert done.exit_code in (0, 2), done.output
    assert "Error" not in repr(done.exception), done.exception


def test_numbers_that_no_integer_holds_are_rejected_by_row(tmp_path: Path) -> None:
    """As a key that is an amount, too; and as a time. The rows beside them are learned."""
    rng, label_N = drawn(1)
    rows = len(label_N)
    wide = [decimal.Decimal(value) for value in rng.choice((1, 2, 10**25), rows)]
    columns = {
        "age": pa.array(wide, pa.decimal128(38, 0)),
        "item": rng.integers(0, 9, rows),
        "rating": label_N.astype(np.int64),
        "ts": np.where(rng.random(rows) < 0.1, 1e308, 1.7e9 + np.arange(rows)),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    done = init(tmp_path / "a.parquet", tmp_path / "run.py", "--time", "ts")
    assert done.exit_code == 0, repr(done.exception)
    said = " ".join(done.output.split())
    assert "rows are rejected: key age does not fit 64 bits, first 1e+25" in said
    assert "rows are rejected: ts is out of range, first 1e+308" in said


def test_a_file_whose_only_key_is_a_leak_is_refused_with_the_reason(tmp_path: Path) -> None:
    rng, label_N = drawn(1)
    table = {"outcome": outcome(rng, label_N), "clicked": label_N.astype(np.int64)}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    done = init(tmp_path / "a.parquet", tmp_path / "run.py")
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert "no column holds keys" in said
    assert "it alone tells the label" in said
    assert not (tmp_path / "run.py").exists()


# --- train ----------------------------------------------------------------------------------------


def schema(*keys: str, dense: tuple[str, ...] = ()) -> EventSchema:
    features = tuple(FeatureColumn(name=name, column=name) for name in keys)
    return EventSchema(features=features, label="clicked", ts="ts", dense=dense)


def watched(path: Path, of: EventSchema, said: list[ColumnNote]) -> WatchedSource:
    source = WatchedSource(opened(str(path), schema=of), said.append)
    plain = list(opened(str(path), schema=of).batches(batch_size=64))
    through = list(source.batches(batch_size=64))
    assert [len(batch) for batch in through] == [len(batch) for batch in plain]
    for one, other in zip(through, plain, strict=True):
        assert np.array_equal(one.keys_BF, other.keys_BF)
        assert np.array_equal(one.dense_BD, other.dense_BD, equal_nan=True)
    return source


def own(rng: np.random.Generator, label_N: Any) -> Any:
    return [f"s{n}" for n in rng.permutation(ROWS).tolist()]


def test_a_source_that_is_watched_says_each_thing_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOOKS", (1000, 2000))
    path = write(tmp_path / "a.parquet", outcome=outcome, refund=refunded, session=own)
    of = schema("user_id", "outcome", "session", dense=("price", "refund"))
    said: list[ColumnNote] = []
    source = watched(path, of, said)
    assert kinds(said) == {
        "refund": "after the label",
        "outcome": "tells the label",
        "session": "nearly unique",
    }
    assert len(said) == 3
    assert source.notes == said
    again = list(source.batches(batch_size=64, start=0))
    assert again
    assert len(said) == 3


@pytest.mark.parametrize("rows", [300, ROWS])
def test_a_watched_sample_stays_within_its_bounds(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (leaks, watch):
        monkeypatch.setattr(module, "MAX_ROWS", 150)
    monkeypatch.setattr(watch, "_MAX_KEYS", 64)
    monkeypatch.setattr(watch, "_MAX_CELLS", 4 * rows)
    path = write(tmp_path / "a.parquet", outcome=outcome, session=own)
    of = schema("user_id", "outcome", "session", dense=("price",))
    said: list[ColumnNote] = []
    source = watched(path, of, said)
    assert kinds(said) == {"outcome": "tells the label", "session": "nearly unique"}
    sample = watch._Sample(source)
    for batch in opened(str(path), schema=of).batches(batch_size=64):
        sample.add(batch)
        assert sample._cells <= 4 * rows
        assert max(sample._rows) <= 2 * 150


def test_lists_are_watched_too(tmp_path: Path) -> None:
    def bag(rng: np.random.Generator, label_N: Any) -> Any:
        words = rng.integers(0, 50, (ROWS, 2)).tolist()
        return [[f"w{n}" for n in row] + ["paid"] * int(label_N[i]) for i, row in enumerate(words)]

    path = write(tmp_path / "a.parquet", tags=bag)
    of = EventSchema(
        features=(
            FeatureColumn(name="user", column="user_id"),
            FeatureColumn(name="tags", column="tags", transform="keys"),
        ),
        label="clicked",
        ts="ts",
    )
    said: list[ColumnNote] = []
    for _ in WatchedSource(opened(str(path), schema=of), said.append).batches(batch_size=64):
        pass
    assert kinds(said) == {"tags": "tells the label"}


def test_train_says_it_and_counts_it_in_its_result(tmp_path: Path) -> None:
    cache = Path(__file__).parents[2] / "build" / "cache" / "dense"
    data = write(tmp_path / "clicks.parquet", outcome=outcome)
    assert init(data, tmp_path / "run.py", "--key-column", "outcome").exit_code == 0
    done = CliRunner().invoke(
        app,
        [
            *("train", str(tmp_path / "p"), "--config", str(tmp_path / "run.py"), "--json"),
            *("--log", str(tmp_path / "log.jsonl"), "--cache", str(cache)),
        ],
    )
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    (note,) = lines[-1]["result"]["column_notes"]
    assert (note["kind"], note["columns"]) == ("tells the label", ["outcome"])
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    said = [each["message"] for each in logged if "alone tells" in each.get("message", "")]
    assert len(said) == 1
