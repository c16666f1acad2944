"""Guesses about unknown columns, by name, type and values; and where it has to ask."""

import datetime
import gzip
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embertide.trainer.data import open_events
from embertide.trainer.data.base import EventSchema, FeatureColumn
from embertide.trainer.data.columns import count_rows, facts, read_sample, sniff, survey_time
from embertide.trainer.data.guess import Asked, Guess, guess
from embertide.trainer.errors import ConfigurationError, DataError

ROWS = 2000
EPOCH_S = 1_700_000_000


def draw(seed: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "event_time": EPOCH_S + np.arange(ROWS) * 60,
        "user_id": rng.integers(0, 300, ROWS),
        "country": rng.choice(["at", "de", "fr"], ROWS),
        "price": np.round(rng.lognormal(2, 1, ROWS), 2),
        "age": rng.integers(18, 90, ROWS),
        "genres": rng.choice(["a|b", "c", "a|c|d", "b|d"], ROWS),
        "request_id": np.arange(ROWS) + 10**9,
        "clicked": rng.integers(0, 2, ROWS),
    }


def guessed(columns: dict[str, Any], asked: Asked | None = None) -> Guess:
    return guess(facts(pa.table(columns), ROWS), asked)


def roles(found: Guess) -> dict[str, str]:
    return {each.facts.name: each.role for each in found.choices}


def test_each_column_is_taken_for_what_it_is() -> None:
    found = guessed(draw())
    assert roles(found) == {
        "event_time": "time",
        "user_id": "key",
        "country": "key",
        "price": "number",
        "age": "number and key",
        "genres": "list",
        "request_id": "left out",
        "clicked": "label",
    }
    schema = found.schema()
    assert schema.dense == ("price", "age")
    assert [f.name for f in schema.features] == [
        *("user_id", "country", "age", "genres", "price_bin"),
    ]
    assert (schema.label, schema.ts, schema.ts_unit_ms, schema.positive) == (
        *("clicked", "event_time", 1000, ""),
    )


@pytest.mark.parametrize(
    ("unit", "per_s"),
    [("seconds", 1), ("milliseconds", 10**3), ("microseconds", 10**6), ("nanoseconds", 10**9)],
)
def test_the_unit_of_a_time_is_told_by_its_size(unit: str, per_s: int, tmp_path: Path) -> None:
    columns = draw()
    columns["event_time"] = columns["event_time"] * per_s
    found = guessed(columns)
    assert found.unit == f"{unit} since 1970"
    path = str(tmp_path / "in.parquet")
    pq.write_table(pa.table(columns), path)
    (batch,) = open_events(path, schema=found.schema()).batches(batch_size=ROWS)
    assert batch.ts_ms_B.tolist() == [(EPOCH_S + 60 * i) * 1000 for i in range(ROWS)]


@pytest.mark.parametrize("zone", ["", "Z", "+02:00"])
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_times_that_are_text_are_read(zone: str, form: str, tmp_path: Path) -> None:
    columns = draw()
    origin = datetime.datetime(2024, 2, 28, tzinfo=datetime.UTC)
    minutes = [origin + datetime.timedelta(minutes=i) for i in range(ROWS)]
    columns["event_time"] = [f"{each:%Y-%m-%d %H:%M:%S.%f}{zone}" for each in minutes]
    path = tmp_path / f"in.{form}"
    write(path, columns)
    files = sniff([str(path)], form)
    found = guess(facts(read_sample(files), ROWS))
    source = open_events(str(path), schema=found.schema())
    (batch,) = source.batches(batch_size=ROWS)
    late_ms = 2 * 3_600_000 if zone.startswith("+") else 0
    assert batch.ts_ms_B[0] == origin.timestamp() * 1000 - late_ms
    assert batch.ts_ms_B[-1] - batch.ts_ms_B[0] == 60_000 * (ROWS - 1)
    assert source.dead_letters.count == 0


def test_a_day_that_does_not_exist_costs_its_row_alone(tmp_path: Path) -> None:
    columns = draw()
    columns["event_time"] = ["2024-02-28"] * 5 + ["2024-02-31", "soon"] + ["2024-03-01"] * 1993
    write(tmp_path / "in.csv", columns)
    schema = guessed(draw()).schema()
    source = open_events(str(tmp_path / "in.csv"), schema=schema)
    assert sum(len(each) for each in source.batches(batch_size=100)) == ROWS - 2
    assert source.dead_letters.by_reason == {"ts is not a time of ISO 8601": 2}


def write(path: Path, columns: dict[str, Any], delimiter: str = ",") -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
        return
    lines = [delimiter.join(columns)]
    lines += [delimiter.join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.mark.parametrize(
    ("name", "delimiter"), [("a.csv", ";"), ("a.tsv", "\t"), ("a.csv.gz", ",")]
)
def test_text_is_guessed_as_the_table_that_it_holds(
    name: str, delimiter: str, tmp_path: Path
) -> None:
    write(tmp_path / name, draw(), delimiter)
    files = sniff([str(tmp_path / name)], "csv")
    assert files.delimiter == delimiter
    assert count_rows(files) == ROWS
    found = guess(facts(read_sample(files), ROWS))
    assert roles(found) == roles(guessed(draw()))
    clock = survey_time(files, "event_time")
    assert (clock.rows, clock.first, clock.last) == (ROWS, EPOCH_S, EPOCH_S + 60 * (ROWS - 1))
    assert (clock.backwards, clock.gap, clock.group, clock.is_number) == (0, 60, 1, True)
    source = open_events(files.paths[0], format="csv", delimiter=delimiter, schema=found.schema())
    (batch,) = source.batches(batch_size=ROWS)
    assert batch.label_B.tolist() == draw()["clicked"].tolist()


@pytest.mark.parametrize(
    ("name", "values", "rule", "positives"),
    [
        ("rating", [1, 2, 3, 4, 5], ">= 4", [4, 5]),
        ("stars", [0.5, 2.5, 3.5, 4.0, 5.0], ">= 4", [4.0, 5.0]),
        ("y", [-1, 1], ">= 1", [1]),
        ("target", ["no", "yes"], "== yes", ["yes"]),
        ("income", [" <=50K", " <=50K", " >50K"], "== >50K", [" >50K"]),
        ("event_type", ["view", "view", "cart", "purchase"], "== purchase", ["purchase"]),
    ],
)
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_what_counts_as_a_positive_is_stated_and_read_so(
    name: str, values: list[Any], rule: str, positives: list[Any], form: str, tmp_path: Path
) -> None:
    columns = draw()
    del columns["clicked"]
    columns[name] = [values[i % len(values)] for i in range(ROWS)]
    write(tmp_path / f"in.{form}", columns)
    found = guess(facts(read_sample(sniff([str(tmp_path / f"in.{form}")], form)), ROWS))
    assert found.named("label") == name
    assert found.positive == rule
    source = open_events(str(tmp_path / f"in.{form}"), schema=found.schema())
    (batch,) = source.batches(batch_size=ROWS)
    assert batch.label_B.tolist() == [float(each in positives) for each in columns[name]]


def test_a_label_that_is_missing_or_no_number_costs_its_row(tmp_path: Path) -> None:
    columns = draw()
    del columns["clicked"]
    schema = guessed({**columns, "rating": [4, 2] * (ROWS // 2)}, Asked(label="rating")).schema()
    assert schema.positive == ">= 4"
    columns["rating"] = ["4", "", "x", "2"] * (ROWS // 4)
    write(tmp_path / "in.csv", columns)
    source = open_events(str(tmp_path / "in.csv"), schema=schema)
    (batch,) = source.batches(batch_size=ROWS)
    assert batch.label_B.tolist() == [1.0, 0.0] * (ROWS // 4)
    assert source.dead_letters.by_reason == {
        "label is missing": ROWS // 4,
        "label is not a number": ROWS // 4,
    }


def test_where_two_could_be_the_label_it_says_how_to_choose() -> None:
    columns = draw()
    columns["a"], columns["b"] = columns.pop("clicked"), columns["user_id"] % 2
    with pytest.raises(ConfigurationError, match=r"each of a, b could be the label: .*--label"):
        guessed(columns)
    assert guessed(columns, Asked(label="b")).named("label") == "b"
    assert roles(guessed(columns, Asked(label="b", ignore=("a",))))["a"] == "left out"
    del columns["a"], columns["b"]
    with pytest.raises(ConfigurationError, match="no column looks like a label"):
        guessed(columns)


def test_where_two_could_be_the_time_it_says_how_to_choose() -> None:
    columns = draw()
    columns["created_at"] = columns["event_time"] - 5
    with pytest.raises(ConfigurationError, match=r"could be the time: .*--time.*--no-time"):
        guessed(columns)
    found = guessed(columns, Asked(time="created_at"))
    assert roles(found)["created_at"] == "time"
    assert guessed(columns, Asked(no_time=True)).schema().ts is None
    with pytest.raises(ConfigurationError, match="there is no column 'wen'"):
        guessed(columns, Asked(time="wen"))


def test_numbers_that_only_name_things_are_keys() -> None:
    columns = draw()
    rng = np.random.default_rng(3)
    columns["c7"] = rng.choice(rng.integers(0, 1 << 30, 500), ROWS)  # hashes
    columns["zip"] = rng.integers(1000, 9999, ROWS)
    columns["amount"] = rng.integers(0, 5000, ROWS)
    columns["shop"] = rng.integers(0, 700, ROWS).astype(float)
    columns["shop"][::50] = np.nan  # as tables with missing integers write them
    found = roles(guessed(columns))
    assert (found["c7"], found["zip"], found["shop"]) == ("key", "key", "key")
    assert found["amount"] == "number"


def test_integers_that_came_as_floats_are_read_as_keys(tmp_path: Path) -> None:
    columns = draw()
    columns["shop"] = (np.arange(ROWS) % 70).astype(float)
    columns["shop"][3] = np.nan
    path = str(tmp_path / "in.parquet")
    pq.write_table(pa.table(columns), path)
    schema = guessed(columns, Asked(keys=("shop",))).schema()
    at = [each.name for each in schema.features].index("shop")
    (batch,) = open_events(path, schema=schema).batches(batch_size=ROWS)
    assert batch.keys_BF[:6, at].tolist() == [0, 1, 2, -1, 4, 5]
    columns["shop"][4] = 1.5
    pq.write_table(pa.table(columns), path)
    source = open_events(path, schema=schema)
    next(source.batches(batch_size=ROWS))
    assert source.dead_letters.by_reason == {"key shop is not an integer": 1}


def test_values_that_never_come_again_are_left_out() -> None:
    columns = draw()
    columns["uuid"] = [f"u{i:08d}" for i in range(ROWS)]
    columns["constant"] = ["x"] * ROWS
    columns["empty"] = pa.nulls(ROWS, pa.string())
    found = {each.facts.name: each for each in guessed(columns).choices}
    for name, why in (("uuid", "each row"), ("constant", "one value"), ("empty", "no row has")):
        assert found[name].role == "left out"
        assert why in found[name].why


def test_distinct_keys_are_reckoned_for_all_rows() -> None:
    rng = np.random.default_rng(1)
    table = pa.table({"few": rng.integers(0, 10, 1000), "new": np.arange(1000), "y": [0, 1] * 500})
    found = {each.name: each for each in facts(table, 10_000)}
    assert found["few"].expected == 10
    assert found["new"].expected == 10_000


def test_a_file_without_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,1193,5,978300760\n")
    with pytest.raises(DataError, match="holds values; write the names of the columns there"):
        sniff([str(tmp_path / "a.csv")], "csv")
    (tmp_path / "b.csv").write_text("")
    with pytest.raises(DataError, match="is empty"):
        sniff([str(tmp_path / "b.csv")], "csv")


@pytest.mark.parametrize(
    ("transform", "edges", "said"),
    [
        ("bin", (), "'bin' needs one or more"),
        ("key", (1.0,), "no other has any"),
        ("bin", (2.0, 1.0), "finite numbers, ascending"),
        ("bin", (1.0, float("nan")), "finite numbers, ascending"),
        ("bin", tuple(map(float, range(65_537))), "65,537 edges; give 65,536 at most"),
        ("bin", (1.0, 2.0), "bins are of a column of dense, which has no 'price'"),
    ],
)
def test_bins_that_are_none_are_refused(
    transform: Literal["key", "bin"], edges: tuple[float, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        EventSchema(
            features=(FeatureColumn(name="p", column="price", transform=transform, edges=edges),),
            label="y",
        )
