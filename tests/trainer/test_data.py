"""The readers: batches, resuming, rejected rows, and files that are not what they should be."""

import datetime as dt
import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from embertide.trainer.data import open_events
from embertide.trainer.data.base import (
    MAX_GROUP,
    MISSING_KEY,
    Batch,
    DeadLetters,
    EventSchema,
    EventSource,
    EventTimes,
    FeatureColumn,
    news_schema,
)
from embertide.trainer.data.csv import BLOCK_BYTES, MAX_LINE_BYTES, CsvSource, TextFormat
from embertide.trainer.data.parquet import ParquetSource
from embertide.trainer.data.texts import Kind
from embertide.trainer.errors import DataError, TrainerError

Opener = Callable[[], EventSource]
ARRAYS = ("event_B", "ts_ms_B", "keys_BF", "dense_BD", "label_B")


def small_schema(**changes: Any) -> EventSchema:
    features = (
        FeatureColumn(name="item", column="item"),
        FeatureColumn(name="word", column="word"),
        FeatureColumn(name="hour", column="ts", transform="hour_of_day"),
    )
    given = {"features": features, "dense": ("price",), "label": "y", "ts": "ts"}
    return EventSchema(**{**given, **changes})


def small_columns(events: int, *, dirty: bool = False) -> dict[str, list[Any]]:
    """Columns of the small schema, groups of 1 to 9 events of equal ts."""
    rng = np.random.default_rng(7)
    columns: dict[str, list[Any]] = {
        "ts": np.repeat(np.arange(events), rng.integers(1, 10, events))[:events].tolist(),
        "item": rng.integers(-(2**62), 2**62, events).tolist(),
        "word": [f"w{i}" for i in rng.integers(20, size=events)],
        "price": rng.random(events).round(3).tolist(),
        "y": rng.integers(2, size=events).tolist(),
    }
    if dirty:
        for row in rng.choice(events, events // 10, replace=False).tolist():
            name, bad = [("y", 2), ("y", None), ("ts", None), ("ts", 0)][row % 4]
            columns[name][row] = bad
    return columns


def parquet(path: Path, columns: dict[str, Any], group_rows: int = 64) -> str:
    pq.write_table(pa.table(columns), path, row_group_size=group_rows)
    return str(path)


def csv(path: Path, columns: dict[str, list[Any]]) -> str:
    lines = [",".join(columns)]
    for row in zip(*columns.values(), strict=True):
        lines.append(",".join("" if value is None else str(value) for value in row))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def headless_line(label: object = 1, first: str = "68fd1e64") -> str:
    return "\t".join([str(label), "3", "", "-2", first, "", '"5db9'])


def headless(path: Path) -> EventSource:
    """Opens a file of such lines, which has no header."""
    words = ("first", "second", "third")
    schema = EventSchema(
        features=tuple(FeatureColumn(name=name, column=name) for name in words),
        dense=("a", "b", "c"),
        label="label",
    )
    kinds: dict[str, Kind] = dict.fromkeys(words, "string")
    names = ("label", *schema.dense, *words)
    return open_events(str(path), schema=schema, names=names, kinds=kinds, quoted=False)


@pytest.fixture(params=["parquet", "csv", "no header"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens a dirty file of 500 events in each format."""
    if request.param == "parquet":
        path = parquet(tmp_path / "in.parquet", small_columns(500, dirty=True))
        return lambda: ParquetSource(path, small_schema())
    if request.param == "csv":
        path = csv(tmp_path / "in.csv", small_columns(500, dirty=True))
        lines = Path(path).read_text().splitlines()
        lines[3:3] = ["1,2", "", "1,2,3,4,5,6"]
        lines.append("the last line is cut off")
        Path(path).write_text("\n".join(lines))
        return lambda: CsvSource(path, small_schema())
    rows = [headless_line(i % 2, f"{i:08x}") for i in range(500)]
    rows[3:3] = ["1\t2", headless_line("x")]
    day = tmp_path / "day.tsv"
    day.write_text("\n".join(rows) + "\n")
    return lambda: headless(day)


def read(source: EventSource, batch_size: int = 10_000, start: int = 0) -> Batch:
    (batch,) = source.batches(batch_size=batch_size, start=start)
    return batch


def same(ours: Batch, theirs: Batch) -> bool:
    bounds = (ours.first, ours.next_offset) == (theirs.first, theirs.next_offset)
    return bounds and all(
        np.array_equal(getattr(ours, n), getattr(theirs, n), equal_nan=True) for n in ARRAYS
    )


@pytest.mark.parametrize("batch_size", [1, 37, 499, 10_000])
def test_resuming_at_any_batch_equals_reading_on(opener: Opener, batch_size: int) -> None:
    whole = list(opener().batches(batch_size=batch_size))
    # Each start is a read of its own, so of many batches a part will do.
    for i in range(0, len(whole), max(1, len(whole) // 25)):
        offset = whole[i].next_offset
        resumed = list(opener().batches(batch_size=batch_size, start=offset))
        assert len(resumed) == len(whole) - i - 1
        assert all(map(same, resumed, whole[i + 1 :]))


@pytest.mark.parametrize("batch_size", [1, 16, 100])
def test_events_of_equal_ts_are_never_split(opener: Opener, batch_size: int) -> None:
    whole, parts = read(opener()), list(opener().batches(batch_size=batch_size))
    for name in ARRAYS:
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(whole, name))
    for before, after in itertools.pairwise(parts):
        assert before.watermark_ms < after.ts_ms_B[0]
        assert before.event_B[-1] < before.next_offset == after.first
        # Greedy: without its last group a batch would have been too small.
        assert np.sum(before.ts_ms_B < before.watermark_ms) < batch_size <= len(before)


def test_batches_do_not_depend_on_how_much_is_read_at_once(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = opener(), opener()
    at_once = list(sources[0].batches(batch_size=30))
    monkeypatch.setattr("embertide.trainer.data.csv.BLOCK_BYTES", 700)
    monkeypatch.setattr("embertide.trainer.data.parquet.CHUNK_ROWS", 7)
    in_bits = list(sources[1].batches(batch_size=30))
    assert len(at_once) == len(in_bits)
    assert all(map(same, at_once, in_bits))
    assert sources[0].dead_letters.by_reason == sources[1].dead_letters.by_reason


def test_rejected_rows_are_counted_and_keep_their_event_index(opener: Opener) -> None:
    source = opener()
    batch = read(source)
    assert source.dead_letters.count > 0
    assert len(batch) + source.dead_letters.count == batch.next_offset
    assert (np.diff(batch.ts_ms_B) >= 0).all()


def test_text_and_parquet_give_the_same_batches(tmp_path: Path) -> None:
    columns = small_columns(300, dirty=True)
    ours = ParquetSource(parquet(tmp_path / "a.parquet", columns), small_schema())
    theirs = CsvSource(csv(tmp_path / "a.csv", columns), small_schema())
    assert same(read(ours), read(theirs))
    assert ours.dead_letters.by_reason == theirs.dead_letters.by_reason
    assert (ours.total_events(), theirs.total_events()) == (300, None)


def test_columns_become_keys_times_and_dense_values(tmp_path: Path) -> None:
    columns = {
        "ts": [3600 * 25, 3600 * 26],
        "item": [-5, None],
        "word": ["übung", None],
        "price": [-1.5, None],
        "y": [1, 0],
    }
    path = parquet(tmp_path / "a.parquet", columns)
    batch = read(ParquetSource(path, small_schema()))
    hashed = [xxhash.xxh3_64_intdigest(word.encode()) for word in ("übung", "")]
    signed = np.array(hashed, np.uint64).view(np.int64)
    assert batch.keys_BF.tolist() == [[-5, signed[0], 1], [MISSING_KEY, signed[1], 2]]
    np.testing.assert_array_equal(batch.dense_BD[:, 0], np.array([-1.5, np.nan], np.float32))
    assert batch.ts_ms_B.tolist() == [90_000_000, 93_600_000]
    assert [getattr(batch, name).dtype for name in ARRAYS] == ["i8", "i8", "i8", "f4", "f4"]


def test_a_dense_value_that_is_nan_is_missing_as_null_is(tmp_path: Path) -> None:
    columns = {**small_columns(3), "price": pa.array([1.5, float("nan"), None])}
    source = ParquetSource(parquet(tmp_path / "a.parquet", columns), small_schema())
    np.testing.assert_array_equal(read(source).dense_BD[:, 0], [1.5, np.nan, np.nan])
    assert source.dead_letters.count == 0


@pytest.mark.parametrize(
    "words",
    [
        pa.array(["a", None, "b", "a"]).dictionary_encode(),
        pa.array([b"a", None, b"b", b"a"]),
        pa.array(["a", None, "b", "a"], pa.large_string()),
    ],
)
def test_strings_hash_alike_in_every_encoding(tmp_path: Path, words: pa.Array) -> None:
    columns = {**small_columns(4), "word": words}
    keys = read(ParquetSource(parquet(tmp_path / "a.parquet", columns), small_schema())).keys_BF
    expected = [xxhash.xxh3_64_intdigest(word) for word in (b"a", b"", b"b", b"a")]
    assert keys[:, 1].view(np.uint64).tolist() == expected


def test_timestamps_carry_their_own_unit(tmp_path: Path) -> None:
    moment = dt.datetime(1970, 1, 2, 5, tzinfo=dt.UTC)
    columns = {**small_columns(1), "ts": pa.array([moment], pa.timestamp("us", "UTC"))}
    batch = read(ParquetSource(parquet(tmp_path / "a.parquet", columns), small_schema()))
    assert batch.ts_ms_B.tolist() == [29 * 3_600_000]
    assert batch.keys_BF[0, 2] == 5


def test_without_ts_the_event_index_is_the_time(tmp_path: Path) -> None:
    schema = small_schema(ts=None, features=(FeatureColumn(name="item", column="item"),))
    batch = read(ParquetSource(parquet(tmp_path / "a.parquet", small_columns(50)), schema))
    assert batch.ts_ms_B.tolist() == batch.event_B.tolist() == list(range(50))


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("y", 2.0, "label is not 0 or 1"),
        ("y", float("nan"), "label is not 0 or 1"),
        ("y", None, "label is missing"),
        ("price", float("-inf"), "dense price is infinite"),
        ("price", 1e39, "dense price is infinite"),
        ("ts", None, "ts is missing"),
        ("ts", 0, "ts goes backwards"),
        ("ts", 2**60, "ts is out of range"),
    ],
)
def test_a_bad_value_costs_its_row_alone(
    tmp_path: Path, column: str, value: object, reason: str
) -> None:
    columns = small_columns(60)
    columns["ts"] = [ts + 1 for ts in columns["ts"]]
    columns["y"] = [float(y) for y in columns["y"]]
    columns[column][40] = value
    dead = DeadLetters(path=tmp_path / "dead.jsonl")
    path = parquet(tmp_path / "a.parquet", columns)
    batch = read(ParquetSource(path, small_schema(), dead_letters=dead))
    assert batch.event_B.tolist() == [i for i in range(60) if i != 40]
    assert dead.by_reason == {reason: 1}
    (line,) = (tmp_path / "dead.jsonl").read_text().splitlines()
    assert json.loads(line) == {"event": 40, "reason": reason, "value": repr(value)}


def test_a_rejected_row_does_not_set_the_time(tmp_path: Path) -> None:
    columns = {**small_columns(3), "ts": [-20, 10**9, -10], "y": [0, 2, 1]}
    batch = read(ParquetSource(parquet(tmp_path / "a.parquet", columns), small_schema()))
    assert batch.ts_ms_B.tolist() == [-20_000, -10_000]
    assert batch.keys_BF[:, 2].tolist() == [23, 23]


@pytest.mark.parametrize(
    ("column", "text", "reason"),
    [
        ("item", "12a", "key item is not an integer"),
        ("item", "0x1F", "key item is not an integer"),
        ("item", "99999999999999999999", "key item is not an integer"),
        ("price", "cheap", "dense price is not a number"),
        ("price", "inf", "dense price is not a number"),
        ("ts", "noon", "ts is not a number"),
        ("y", "yes", "label is not 0 or 1"),
        ("y", "\udcff", "label is not 0 or 1"),
    ],
)
def test_text_that_does_not_parse_is_a_dead_letter(
    tmp_path: Path, column: str, text: str, reason: str
) -> None:
    columns = small_columns(60)
    columns[column][40] = text
    path = csv(tmp_path / "a.csv", {name: columns[name] for name in columns if name != column})
    lines = Path(path).read_text().splitlines()
    full = [
        f"{line},{value}" for line, value in zip(lines, [column, *columns[column]], strict=True)
    ]
    Path(path).write_bytes("\n".join(full).encode("utf-8", "surrogateescape"))
    source = CsvSource(path, small_schema())
    batch = read(source)
    assert source.dead_letters.by_reason == {reason: 1}
    assert batch.event_B.tolist() == [i for i in range(60) if i != 40]


def test_an_undecodable_line_of_wrong_length_is_a_dead_letter(tmp_path: Path) -> None:
    path = tmp_path / "day.tsv"
    path.write_bytes(b"1\t\xff\n" + headless_line().encode() + b"\n")
    source = headless(path)
    assert read(source).event_B.tolist() == [1]
    assert source.dead_letters.by_reason == {"malformed line": 1}


IN_2033 = 1_999_999_999


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
@pytest.mark.parametrize("batch_size", [1, 50, 10_000])
def test_one_event_from_the_future_is_rejected_alone(
    tmp_path: Path, suffix: str, batch_size: int
) -> None:
    columns = small_columns(400)
    columns["ts"][100] = IN_2033
    dead = DeadLetters(path=tmp_path / "dead.jsonl")
    path = (parquet if suffix == "parquet" else csv)(tmp_path / f"a.{suffix}", columns)
    kind = ParquetSource if suffix == "parquet" else CsvSource
    whole = list(kind(path, small_schema(), dead_letters=dead).batches(batch_size=batch_size))
    assert np.concatenate([b.event_B for b in whole]).tolist() == [
        i for i in range(400) if i != 100
    ]
    (line,) = (tmp_path / "dead.jsonl").read_text().splitlines()
    value = repr(IN_2033) if suffix == "parquet" else repr(str(IN_2033))
    reason = "ts is far ahead of the events after it"
    assert json.loads(line) == {"event": 100, "reason": reason, "value": value}
    for before, after in itertools.pairwise(whole[:: max(len(whole) // 5, 1)]):
        again = kind(path, small_schema()).batches(batch_size=batch_size, start=before.next_offset)
        assert after.first in [batch.first for batch in again]


def test_a_late_event_has_its_own_hour_and_the_streams_time(tmp_path: Path) -> None:
    columns = {**small_columns(4), "ts": [3590, 3605, 3595, 3610]}
    schema = small_schema(times=EventTimes(max_lateness_s=30))
    batch = read(ParquetSource(parquet(tmp_path / "a.parquet", columns), schema))
    assert batch.ts_ms_B.tolist() == [3_590_000, 3_605_000, 3_605_000, 3_610_000]
    assert batch.keys_BF[:, 2].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("x", MAX_LINE_BYTES + 1),
        ("x", 3 * BLOCK_BYTES),
        ('"', MAX_LINE_BYTES + 1),
        (",", 2 * BLOCK_BYTES),
        ("\udcff", MAX_LINE_BYTES + 1),
    ],
)
def test_a_line_that_is_too_long_costs_itself_alone(tmp_path: Path, size: int, text: str) -> None:
    # Arrow gave the whole file up: "straddling object straddles two block boundaries".
    path = csv(tmp_path / "a.csv", small_columns(60))
    lines = Path(path).read_text().splitlines()
    lines[31] = "5,1," + text * size + ",0.5,1"
    lines.append("9," + text * size)
    Path(path).write_text("\n".join(lines), errors="surrogateescape")
    dead = DeadLetters(path=tmp_path / "dead.jsonl")
    batch = read(CsvSource(path, small_schema(), dead_letters=dead))
    assert batch.event_B.tolist() == [i for i in range(60) if i != 30]
    assert dead.by_reason == {"malformed line": 2}
    first, second = map(json.loads, (tmp_path / "dead.jsonl").read_text().splitlines())
    assert (first["event"], second["event"]) == (30, 60)
    assert "too long" in first["value"]


def test_a_file_whose_first_line_is_too_long_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x" * (MAX_LINE_BYTES + 1) + "\n1,2\n")
    with pytest.raises(DataError, match="first line has more than"):
        CsvSource(str(tmp_path / "a.csv"), small_schema())


def test_lines_without_a_header_become_raw_numbers_and_hashed_strings(tmp_path: Path) -> None:
    path = tmp_path / "day_0.tsv.gz"
    # Digits alone, which a kind of its own says are text.
    path.write_bytes(gzip.compress((headless_line(first="12345678") + "\n").encode()))
    batch = read(headless(path))
    np.testing.assert_array_equal(batch.dense_BD[0], np.array([3, np.nan, -2], np.float32))
    expected = [xxhash.xxh3_64_intdigest(word) for word in (b"12345678", b"", b'"5db9')]
    assert batch.keys_BF[0].view(np.uint64).tolist() == expected


def test_a_first_line_of_values_says_that_the_columns_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "day.tsv"
    path.write_text(headless_line().replace('"', "") + "\n")
    for schema in (None, small_schema()):
        with pytest.raises(DataError, match="its first line is an event, give open_events names="):
            open_events(str(path), schema=schema)
    with pytest.raises(ValueError, match="names has 'y' 2 times"):
        open_events(str(path), schema=small_schema(), names=("y", "y"))
    with pytest.raises(DataError, match=r"'ts' is missing; there are y, z: .* an empty column$"):
        open_events(str(path), schema=small_schema(), names=("y", "z"))
    table = parquet(tmp_path / "a.parquet", small_columns(3))
    with pytest.raises(ValueError, match=r"a\.parquet is parquet, which has names of its own"):
        open_events(table, schema=small_schema(), names=("y",))


def test_tsv_is_csv_with_tabs(tmp_path: Path) -> None:
    lines = Path(csv(tmp_path / "a.csv", small_columns(30))).read_text()
    (tmp_path / "a.tsv").write_text(lines.replace(",", "\t"))
    ours, theirs = (
        open_events(str(tmp_path / name), schema=small_schema()) for name in ("a.tsv", "a.csv")
    )
    assert same(read(ours), read(theirs))


def test_ids_of_which_most_are_digits_alone_are_text(tmp_path: Path) -> None:
    ids = ["00000000", "53845412", "cc623af8", "13579024", "71300000"] * 20
    (tmp_path / "in.csv").write_text("id,y\n" + "".join(f"{each},1\n" for each in ids))
    schema = EventSchema(features=(FeatureColumn(name="id", column="id"),), label="y")
    source = CsvSource(str(tmp_path / "in.csv"), schema)
    assert source.key_kinds == {"id": "string"}
    (batch,) = source.batches(batch_size=100)
    assert len(batch.label_B) == 100
    assert source.dead_letters.by_reason == {}


def test_a_kind_given_by_hand_overrides_the_guess(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv", {**small_columns(3), "item": [1, 2, 3]})
    assert read(CsvSource(path, small_schema())).keys_BF[:, 0].tolist() == [1, 2, 3]
    text = TextFormat(kinds={"item": "string"})
    by_hand = read(CsvSource(path, small_schema(), text)).keys_BF[:, 0]
    assert by_hand.view(np.uint64)[0] == xxhash.xxh3_64_intdigest(b"1")


def test_a_group_too_large_to_keep_whole_is_an_error(tmp_path: Path) -> None:
    events = MAX_GROUP + 10
    columns = {**small_columns(events), "ts": [1, *[5] * (events - 1)]}
    source = ParquetSource(parquet(tmp_path / "a.parquet", columns, events), small_schema())
    batches = source.batches(batch_size=1)
    assert next(batches).event_B.tolist() == [0]
    with pytest.raises(DataError, match="share ts 5000 ms") as caught:
        next(batches)
    assert caught.value.row == 1


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    columns = small_columns(3)
    del columns["price"]
    paths = [parquet(tmp_path / "a.parquet", columns), csv(tmp_path / "a.csv", columns)]
    for kind, path in zip((ParquetSource, CsvSource), paths, strict=True):
        says = "'price' is missing; there are ts, item, word, y: .*or the file an empty column"
        with pytest.raises(DataError, match=says):
            kind(path, small_schema())


@pytest.mark.parametrize("column", ["item", "price", "ts", "y"])
def test_a_column_of_a_wrong_type_is_named_with_the_remedy(tmp_path: Path, column: str) -> None:
    columns = {**small_columns(2), column: [[1], [2]]}
    path = parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(DataError, match=f"'{column}' is list<.*cast it"):
        ParquetSource(path, small_schema())


@pytest.mark.parametrize("suffix", ["parquet", "csv", "tsv"])
def test_a_missing_or_empty_file_is_an_error_that_names_it(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"gone.{suffix}"
    with pytest.raises(TrainerError, match="no such file") as caught:
        open_events(str(path))
    assert isinstance(caught.value, DataError)
    assert caught.value.path == str(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="gone"):
        open_events(str(path))


def test_a_truncated_parquet_file_is_refused_at_once(tmp_path: Path) -> None:
    path = Path(parquet(tmp_path / "a.parquet", small_columns(200)))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="not a whole Parquet file"):
        ParquetSource(str(path), small_schema())


def test_a_damaged_row_group_is_an_error_and_no_wrong_batch(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(small_columns(200)), path, row_group_size=64, compression="zstd")
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 3] = bytes(len(data) // 3 - 4)
    path.write_bytes(data)
    with pytest.raises(DataError, match="row group 0 is damaged"):
        list(ParquetSource(str(path), small_schema()).batches(batch_size=10))


def test_a_start_beyond_the_end_is_an_error_and_at_the_end_is_nothing(opener: Opener) -> None:
    end = read(opener()).next_offset
    source = opener()
    assert list(source.batches(batch_size=10, start=end)) == []
    assert source.dead_letters.count == 0
    with pytest.raises(DataError, match=f"start {end + 1} lies beyond its {end} events"):
        list(opener().batches(batch_size=10, start=end + 1))


@pytest.mark.parametrize(("batch_size", "start"), [(0, 0), (1, -1)])
def test_arguments_out_of_range_are_refused(opener: Opener, batch_size: int, start: int) -> None:
    with pytest.raises(ValueError, match=r"batch_size 0|start -1"):
        opener().batches(batch_size=batch_size, start=start)


def test_a_known_schema_is_found_by_the_columns(tmp_path: Path) -> None:
    columns = {name: [0, 1] for name in news_schema().columns}
    for path in (parquet(tmp_path / "a.parquet", columns), csv(tmp_path / "a.csv", columns)):
        source = open_events(path)
        assert source.schema == news_schema()
        assert len(read(source)) == 2


def test_unknown_columns_formats_and_suffixes_say_what_to_give(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"when": [1], "what": [2]})
    with pytest.raises(
        DataError, match="columns when, what fit no schema that is known: `embertide init "
    ):
        open_events(path)
    with pytest.raises(ValueError, match=r"'json' does not exist; use one of parquet, csv$"):
        open_events(path, format="json")
    with pytest.raises(
        ValueError, match=r"'criteo' does not exist; .*; bench/criteo\.py of the so"
    ):
        open_events(path, format="criteo")
    (tmp_path / "a.bin").write_bytes(b"when,what")
    with pytest.raises(ValueError, match="tells no format"):
        open_events(str(tmp_path / "a.bin"))


def test_a_url_is_read_through_fsspec(tmp_path: Path) -> None:
    for path in (
        parquet(tmp_path / "a.parquet", small_columns(30)),
        csv(tmp_path / "a.csv", small_columns(30)),
    ):
        remote = open_events(f"file://{path}", schema=small_schema())
        assert same(read(remote), read(open_events(path, schema=small_schema())))
        with pytest.raises(DataError, match="no such file"):
            open_events(f"file://{path}.csv", schema=small_schema())


def test_dead_letters_are_bounded_on_disk_and_counted_in_full(tmp_path: Path) -> None:
    path = tmp_path / "dead.jsonl"
    dead = DeadLetters(path=path, max_lines=3)
    dead.add([1, 2], "one", ["x" * 500, None])
    dead.add([3, 4, 5], "two", [1, 2, 3])
    lines = path.read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == [1, 2, 3]
    assert max(map(len, lines)) < 200
    assert (dead.count, dead.by_reason) == (5, {"one": 2, "two": 3})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"features": ()}, "features is empty"),
        ({"features": (FeatureColumn(name="a", column="b"),) * 2}, "repeat a name"),
        ({"ts": None}, "hour_of_day reads the ts column None"),
        ({"ts_unit_ms": 0}, "ts_unit_ms is 0"),
    ],
)
def test_a_schema_that_nothing_could_satisfy_is_refused(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        small_schema(**wrong)
