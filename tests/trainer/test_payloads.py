"""Payloads of all formats: the same columns, and faults that concern one payload alone."""

import datetime
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest

from embertide.trainer.data.assemble import Assembler, Chunk
from embertide.trainer.data.base import DeadLetters, EventSchema, FeatureColumn
from embertide.trainer.data.payloads import PayloadError, Payloads, _time_ms, payloads_of
from embertide.trainer.data.rows import Rows, concatenate
from embertide.trainer.errors import ConfigurationError

SCHEMA = EventSchema(
    features=(
        FeatureColumn(name="item", column="item"),
        FeatureColumn(name="word", column="word"),
        FeatureColumn(name="tags", column="tags", transform="keys", weights="shares"),
        FeatureColumn(name="hour", column="ts", transform="hour_of_day"),
    ),
    dense=("price",),
    label="y",
    more_labels=("buy",),
    weight="w",
    ts="ts",
    ts_unit_ms=1,
)
AVRO = {
    "type": "record",
    "name": "Event",
    "fields": [
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "item", "type": "long"},
        {"name": "word", "type": ["null", "string"]},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "shares", "type": {"type": "array", "items": "float"}},
        {"name": "price", "type": ["null", "double"]},
        {"name": "y", "type": "boolean"},
        {"name": "buy", "type": ["null", "int"]},
        {"name": "w", "type": "float"},
    ],
}
DAY_MS = 1_790_000_000_000


def records(n: int = 40) -> list[dict[str, Any]]:
    rng = random.Random(5)
    return [
        {
            "ts": DAY_MS + i * 1000,
            "item": rng.choice([rng.getrandbits(62), -rng.getrandbits(40)]),
            "word": rng.choice(["", "äß", "news"]),
            "tags": rng.sample(["a", "b", "c"], i % 3),
            "shares": [0.5 * j for j in range(i % 3)],
            "price": rng.choice([None, 0.25, 3.5]),
            "y": i % 2 == 0,
            "buy": rng.choice([None, 0, 1]),
            "w": rng.choice([0.5, 1.0, 2.0]),
        }
        for i in range(n)
    ]


def avro(record: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, AVRO, record)
    return out.getvalue()


def arrow(records: list[dict[str, Any]]) -> bytes:
    table = pa.Table.from_pylist(records)
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    data: bytes = out.getvalue().to_pybytes()
    return data


@pytest.fixture
def avsc(tmp_path: Path) -> str:
    path = tmp_path / "event.avsc"
    path.write_text(json.dumps(AVRO))
    return str(path)


def rows_of(payloads: Payloads[Any], data: list[bytes], pieces: int = 1) -> Rows:
    """All accepted rows; payloads are put together in so many pieces."""
    dead = DeadLetters()
    assembler = Assembler(SCHEMA, dead)
    parts, at = [], 0
    for piece in np.array_split(np.arange(len(data)), pieces):
        found = [payloads.rows(data[i], SCHEMA) for i in piece]
        done = 0
        for count, columns in payloads.columns(found, SCHEMA):
            n = sum(len(each) for each in found[done : done + count])
            chunk = Chunk(event_N=np.arange(at, at + n), columns=columns, end=at + n)
            parts.append(assembler.accept(chunk))
            at, done = at + n, done + count
    parts += assembler.finish()
    assert dead.by_reason == {}
    return concatenate(parts)


def assert_same(ours: Rows, theirs: Rows) -> None:
    for mine, other in zip(ours.arrays, theirs.arrays, strict=True):
        np.testing.assert_array_equal(mine, other)
    for f, bags in theirs.lists.items():
        np.testing.assert_array_equal(ours.lists[f].keys_N, bags.keys_N)
        np.testing.assert_array_equal(ours.lists[f].offsets_B1, bags.offsets_B1)
        assert bags.weights_N is not None
        np.testing.assert_array_equal(np.asarray(ours.lists[f].weights_N), bags.weights_N)


@pytest.mark.parametrize("pieces", [1, 7])
def test_all_formats_give_the_same_rows(avsc: str, pieces: int) -> None:
    given = records()
    theirs = rows_of(payloads_of("arrow"), [arrow(given)])
    assert len(theirs) == 40
    single: list[tuple[Payloads[Any], Callable[[dict[str, Any]], bytes]]] = [
        (payloads_of("json"), lambda each: json.dumps(each).encode()),
        (payloads_of("avro", avsc), avro),
        (payloads_of("confluent-avro", avsc), lambda each: b"\0\0\0\0\x07" + avro(each)),
    ]
    for payloads, encode in single:
        assert_same(rows_of(payloads, [encode(each) for each in given], pieces), theirs)
        assert payloads.absent.total() == 0
    # Several events in one payload.
    json_array = [json.dumps(given[:30]).encode(), json.dumps(given[30:]).encode()]
    assert_same(rows_of(payloads_of("json"), json_array), theirs)
    avros = b"".join(avro(each) for each in given)
    assert_same(rows_of(payloads_of("avro", avsc), [avros]), theirs)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"item": 1.5}, "column 'item' is float 1.5; a key is an integer or a string"),
        ({"item": 1 << 64}, "is no 64-bit integer; write it as a string"),
        ({"item": {"id": 3}}, "column 'item' is dict {'id': 3}; a key is"),
        ({"price": "dear"}, "column 'price' is str 'dear'; give a number"),
        ({"tags": 7}, "column 'tags' is int 7; give a list"),
        ({"shares": ["x"]}, "column 'shares' is str 'x'; give a number"),
        ({"ts": "yesterday"}, "column 'ts' is str 'yesterday', which is no time of ISO 8601"),
        ({"ts": 1e300}, "column 'ts' is float 1e+300, which is out of range"),
        ({"ts": [1]}, "column 'ts' is list [1]; give a number, or a time"),
        ({"y": []}, "column 'y' is list []; give a number"),
        ({"price": 10**400}, "column 'price' int too large to convert to float"),
    ],
)
def test_a_value_of_another_type_is_named(change: dict[str, Any], wanted: str) -> None:
    (given,) = records(1)
    with pytest.raises(PayloadError) as caught:
        payloads_of("json").rows(json.dumps(given | change).encode(), SCHEMA)
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", "it is no JSON"),
        (b"{", "it is no JSON"),
        (b"\xff\xfe\x00", "it is no JSON"),
        (b"3", "it holds int 3 where an event, an object, should be"),
        (b"[{}, null]", "it holds NoneType None where"),
        (b"[]", "it holds 0 events"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"item": ' + b"9" * 5000 + b"}", "it is no JSON"),
        (b"[" + b"{}," * 65_536 + b"{}]", "it holds 65537 events"),
    ],
)
def test_what_is_no_event_of_json_is_said(data: bytes, wanted: str) -> None:
    with pytest.raises(PayloadError, match=wanted.replace("[", r"\[")):
        payloads_of("json").rows(data, SCHEMA)


def test_values_that_are_left_out_are_null_and_counted() -> None:
    payloads = payloads_of("json")
    bare = {"ts": DAY_MS, "y": 1, "w": 1}
    whole = {**bare, "item": 3, "word": "a"}
    rows = rows_of(payloads, [json.dumps(each).encode() for each in (whole, bare)])
    assert rows.arrays[2][1, :2].tolist() == [-1, -1]
    assert np.isnan(rows.arrays[3]).all()
    assert payloads.absent == {
        **dict.fromkeys(("item", "word"), 1),
        **dict.fromkeys(("tags", "shares", "price", "buy"), 2),
    }


def test_a_key_depends_on_its_own_event_alone() -> None:
    """Strings and integers may be mixed, whatever else is read with them."""
    given = records(4)
    for event, value in zip(given, (5, "5", None, 5.0), strict=True):
        event["word"] = value
    data = [json.dumps(each).encode() for each in given]
    together, alone = (rows_of(payloads_of("json"), data, pieces) for pieces in (1, 4))
    assert_same(together, alone)
    keys = together.arrays[2][:, 1].tolist()
    assert keys[0] == keys[3] == 5
    assert keys[2] == -1
    assert keys[1] not in (5, -1)


@pytest.mark.parametrize(
    ("ts", "unit_ms", "ms"),
    [
        (1_790_000_000, 1000, 1_790_000_000_000),
        (1_790_000_000.1234, 1000, 1_790_000_000_123),
        (1_790_000_000_123_999, 0.001, 1_790_000_000_123),
        ("2026-09-21T14:13:20.5Z", 1000, 1_790_000_000_500),
        ("2026-09-21T16:13:20+02:00", 1000, 1_790_000_000_000),
        ("2026-09-21", 1000, 1_789_948_800_000),
    ],
)
def test_times_of_every_kind(ts: object, unit_ms: float, ms: int) -> None:
    schema = EventSchema(
        features=(FeatureColumn(name="i", column="i"),), label="y", ts="ts", ts_unit_ms=unit_ms
    )
    payloads = payloads_of("json")
    rows = payloads.rows(json.dumps({"ts": ts, "i": 1, "y": 0}).encode(), schema)
    ((_, columns),) = payloads.columns([rows], schema)
    assert columns["ts"].values.view(np.int64).tolist() == [ms]


def test_avro_is_read_whole_or_put_aside(avsc: str) -> None:
    plain, headed = payloads_of("avro", avsc), payloads_of("confluent-avro", avsc)
    data = avro(records(1)[0])
    assert len(plain.rows(data, SCHEMA)) == 1
    for cut in range(len(data)):
        with pytest.raises(PayloadError):
            plain.rows(data[:cut], SCHEMA)
    with pytest.raises(PayloadError, match="no Avro of the schema"):
        plain.rows(data + b"\x01", SCHEMA)
    for bad in (data, b"\0\0\0"):
        with pytest.raises(PayloadError, match="has no header of Confluent's format"):
            headed.rows(bad if bad[0:1] == b"\0" and len(bad) < 5 else b"\1" + bad, SCHEMA)


def test_bytes_by_chance_are_rows_or_payload_errors(avsc: str) -> None:
    rng = random.Random(2)
    given = records(3)
    formats = {
        "json": json.dumps(given).encode(),
        "avro": b"".join(map(avro, given)),
        "arrow": arrow(given),
    }
    for format, data in formats.items():
        payloads = payloads_of(format, avsc if format == "avro" else "")
        for _ in range(300):
            harmed = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                harmed[rng.randrange(len(harmed))] = rng.getrandbits(8)
            try:
                rows = payloads.rows(bytes(harmed), SCHEMA)
            except PayloadError:
                continue
            assert all(columns for _, columns in payloads.columns([rows], SCHEMA))


def test_what_cannot_be_read_at_all_is_refused_at_the_start(tmp_path: Path, avsc: str) -> None:
    with pytest.raises(ConfigurationError, match="format 'xml' does not exist; use json, avro"):
        payloads_of("xml")
    with pytest.raises(ConfigurationError, match="give the schema's file"):
        payloads_of("avro")
    with pytest.raises(ConfigurationError, match="give the schema's file"):
        payloads_of("json", avsc)
    with pytest.raises(ConfigurationError, match="no Avro schema"):
        payloads_of("avro", str(tmp_path / "none.avsc"))
    (tmp_path / "long.avsc").write_text('"long"')
    with pytest.raises(ConfigurationError, match="no Avro schema of a record"):
        payloads_of("avro", str(tmp_path / "long.avsc"))
    twice = EventSchema(
        features=(FeatureColumn(name="a", column="a"),), dense=("a",), label="y", ts="ts"
    )
    with pytest.raises(ConfigurationError, match="one use a column"):
        payloads_of("json").check(twice)


def test_avro_times_and_dates_are_times() -> None:
    utc = datetime.UTC
    when = datetime.datetime(2026, 9, 21, 14, 13, 20, tzinfo=utc)
    assert _time_ms(when, 1000) == 1_790_000_000_000
    assert _time_ms(when.replace(tzinfo=None), 1000) == 1_790_000_000_000
    assert _time_ms(datetime.date(2026, 9, 21), 1000) == 1_789_948_800_000
