"""The meaning of a text, one rule for all readers; and blocks of whole records of any text."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import fastavro
import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from embertide.client import text_keys
from embertide.trainer.data import lines, open_events, texts
from embertide.trainer.data.base import EventSchema, FeatureColumn, Positive
from embertide.trainer.data.clock import survey, usual_range
from embertide.trainer.data.csv import TextFormat, TextReader, split_fields
from embertide.trainer.data.payloads import payloads_of

FIELDS = st.text(st.sampled_from('ab",\n;|\\ x\u00fc'), max_size=6)


@st.composite
def tables(draw: st.DrawFn) -> list[list[str]]:
    columns = draw(st.integers(2, 4))
    row = st.lists(FIELDS, min_size=columns, max_size=columns)
    return draw(st.lists(row, min_size=1, max_size=8))


@hypothesis.settings(deadline=None, max_examples=100, derandomize=True, database=None)
@hypothesis.given(
    rows=tables(),
    size=st.integers(1, 30),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_records_are_those_that_were_written(
    rows: list[list[str]], size: int, quoting: Any, end: str
) -> None:
    out = io.StringIO()
    # A line feed is quoted only where it ends lines.
    quoting = csv.QUOTE_ALL if end == "\r" else quoting
    csv.writer(out, lineterminator=end, quoting=quoting).writerows(rows)
    data = out.getvalue().encode()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    shape = TextFormat().shape
    blocks = lines.blocks(lines.unified(iter(pieces)), shape, len(rows[0]))
    text = b"".join(blocks).decode()
    assert list(csv.reader(io.StringIO(text, newline=""))) == rows


@pytest.mark.parametrize("size", [7, 100, 1 << 20])
@pytest.mark.parametrize(
    ("bad", "lost"),
    [
        (b'"open,2', 1),
        (b'1,"open', 1),
        (b'a"b,"c', 1),
        (b'"a"b,2', 0),
        (b'1,5" pipe', 0),
        (b"1,2,3", 1),
    ],
)
def test_a_line_with_odd_quotes_costs_itself_alone(
    bad: bytes, lost: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = b"".join(b"%d,%d\n" % (i, i) for i in range(50))
    path = tmp_path / "a.csv"
    path.write_bytes(b"x,y\n" + good + bad + b"\n" + good)
    monkeypatch.setattr("embertide.trainer.data.csv.BLOCK_BYTES", size)
    blocks = list(TextReader(str(path), TextFormat()).blocks(("x",)))
    assert sum(len(block.event_N) for block in blocks) == 101 - lost
    assert [event for block in blocks for event, _ in block.malformed] == [50] * lost
    assert blocks[-1].end == 101


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (["1", "2", None, "NA"], "int"),
        (["1.0", "2.0", "nan"], "int"),
        (["1", "2.5", "3", "null"], "float"),
        (["2024-01-01", "2024-01-01T10:00Z", "soon"], "time"),
        (["a", "1", "2"], "string"),
        ([None, None], "string"),
        (["18446744073709551615", "1"], "int"),
    ],
)
def test_most_texts_tell_a_kind(data: list[str | None], kind: str) -> None:
    assert texts.kind_of(pa.array(data).cast(pa.binary())) == kind


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1970-01-02", 86_400_000),
        ("1970-01-01 00:00:01 UTC", 1000),
        ("1970-01-01T02:00:00+02:00", 0),
        ("1970-01-01T00:00:00.123456789Z", 123),
        ("1970-01-01 00:00:00,5", 500),
        ("2023-02-30", None),
        ("0000-00-00", None),
    ],
)
def test_times_of_every_kind_alone_and_together(text: str, ms: int | None) -> None:
    for more in ([], ["2024-05-05"], ["2024-05-05T00:00:00Z"], ["x"]):
        value_N, null_N, bad_N = texts.parsed(pa.array([text, *more]).cast(pa.binary()), "time")
        assert not null_N[0]
        assert bad_N[0] == (ms is None)
        assert ms is None or value_N[0] == ms


def schema(kind: Any) -> EventSchema:
    word = FeatureColumn(name="word", column="word", kind=kind)
    return EventSchema(features=(word, FeatureColumn(name="i", column="i")), label="y")


def keys_of(data: list[bytes], given: EventSchema, format: str, avsc: str = "") -> list[int]:
    payloads = payloads_of(format, avsc)
    rows = [payloads.rows(each, given) for each in data]
    found: list[int] = []
    for _, columns in payloads.columns(rows, given):
        column = columns["word"]
        values = column.values.astype(np.int64)
        if column.null_N is not None:
            values[column.null_N] = -1
        found += values.tolist()
    return found


def test_a_missing_text_has_one_key_wherever_it_comes_from(tmp_path: Path) -> None:
    wanted = text_keys(["a", None, "7"]).tolist()
    columns = {"word": ["a", None, "7"], "i": [1, 2, 3], "y": [0, 1, 0]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("word,i,y\na,1,0\n,2,1\n7,3,0\n")
    for name in ("a.parquet", "a.csv"):
        source = open_events(str(tmp_path / name), schema=schema("string"))
        (batch,) = source.batches(batch_size=10)
        assert batch.keys_BF[:, 0].tolist() == wanted
    events = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    data = [json.dumps(each).encode() for each in events]
    data[2] = json.dumps({**events[2], "word": 7}).encode()  # a number, as it is written
    assert keys_of(data, schema("string"), "json") == wanted
    said = {
        "type": "record",
        "name": "Event",
        "fields": [
            {"name": "word", "type": ["null", "string"]},
            {"name": "i", "type": "int"},
            {"name": "y", "type": "int"},
        ],
    }
    (tmp_path / "e.avsc").write_text(json.dumps(said))
    parsed = fastavro.parse_schema(said)
    messages = []
    for event in events:
        file = io.BytesIO()
        fastavro.schemaless_writer(file, parsed, event)
        messages.append(file.getvalue())
    for kind in ("", "string"):  # Avro's own type tells, too
        assert keys_of(messages, schema(kind), "avro", str(tmp_path / "e.avsc")) == wanted


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        ("", ["a", None], 1),
        ("", [None, 5, None, "b"], 1),
        ("", [5, None], 0),
        ("", ["a", 5], 0),
        ("string", ["a", None], 0),
        ("int", ["5", None], 0),
    ],
)
def test_a_null_among_texts_that_nobody_called_texts_is_told_once(
    kind: str, values: list[Any], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    given, payloads = schema(kind), payloads_of("json")
    for value in values * 2:
        payloads.rows(json.dumps({"word": value, "i": None, "y": 0}).encode(), given)
    assert [each.split(":")[0] for each in caplog.messages] == ["column 'word'"] * told
    assert all("kind='string'" in each for each in caplog.messages)


def test_a_column_of_integers_takes_texts_of_them(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"word": ["5", "x", None], "i": [1, 2, 3], "y": [0, 1, 0]}), tmp_path / "a"
    )
    source = open_events(str(tmp_path / "a"), format="parquet", schema=schema("int"))
    (batch,) = source.batches(batch_size=10)
    assert batch.keys_BF[:, 0].tolist() == [5, -1]
    assert source.dead_letters.by_reason == {"key word is not an integer": 1}
    data = [
        json.dumps({"word": each, "i": 1, "y": 0}).encode() for each in ("5", 5, None, 2**64 - 1)
    ]
    assert keys_of(data, schema("int"), "json") == [5, 5, -1, -1]


@pytest.mark.parametrize("rule", ["== '1'", "== 'x'", "== yes", "== 1", ">= 4"])
def test_a_rule_of_text_that_looks_like_a_number_is_quoted(rule: str) -> None:
    found = Positive.of(rule)
    assert (
        found.value == {"== '1'": "1", "== 'x'": "'x'", "== yes": "yes", "== 1": 1, ">= 4": 4}[rule]
    )


def test_outliers_decide_nothing_about_a_clock() -> None:
    rng = np.random.default_rng(1)
    value_N = 1_700_000_000 + np.sort(rng.uniform(0, 86_400, 1000))
    for odd in (0.0, -1.0, 2_700_000_000.0, 1e12, 253_402_300_799.0):
        for at in (0, 500, 999):
            harmed_N = value_N.copy()
            harmed_N[at] = odd
            pieces: list[Any] = [harmed_N[:300], harmed_N[300:]]
            facts = survey(pieces.__iter__, 1000.0, is_number=True)
            assert facts.outliers == 1
            assert facts.outlier == (at, odd)
            assert facts.backwards == 0
            assert facts.last - facts.first <= 86_400
            assert facts.gap < 3600
            assert facts.begins_outside == (at == 0 and odd < 1e9)


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=20),
    st.lists(st.integers(0, 300), max_size=4),
)
def test_a_clock_says_how_many_rows_share_a_time(
    runs: list[tuple[int, int]], cuts: list[int]
) -> None:
    size_R = [size for _, size in runs]
    value_N = np.cumsum([1.0 + step for step, _ in runs]).repeat(size_R)
    pieces = np.split(value_N, sorted(cut for cut in cuts if cut < len(value_N)))
    facts = survey(lambda: iter(pieces), 1000.0, is_number=True)
    assert facts.group == max(size_R)
    assert facts.together == pytest.approx(np.square(size_R).sum() / sum(size_R))


@pytest.mark.parametrize(
    "value_N",
    [
        np.arange(1000.0),
        np.array([5.0]),
        np.array([1.0, 2.0, 1e12]),
        np.cumsum(np.random.default_rng(2).exponential(3600, 500)),
        np.repeat(1_700_000_000.0, 50),
    ],
)
def test_times_without_outliers_are_all_usual(value_N: Any) -> None:
    assert usual_range(value_N, 1000.0) == (value_N.min(), value_N.max())


def test_a_header_is_split_as_its_rows_are() -> None:
    assert split_fields(b'"a,b",c', TextFormat()) == ["a,b", "c"]
    assert split_fields(b"a\x1fb", TextFormat(delimiter="::")) == ["a", "b"]
