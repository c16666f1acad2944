"""Whatever is wrong with a live event, it is a dead letter by itself, and what follows is read."""

import io
import json
import resource
import struct
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import ARROW, JSON, bomb, nested, stream

from embertide.trainer.data.assemble import Assembler, Chunk
from embertide.trainer.data.base import DeadLetters, EventSchema, FeatureColumn
from embertide.trainer.data.payloads import PayloadError, Payloads, payloads_of
from embertide.trainer.data.rows import Rows

SCHEMA = EventSchema(
    features=(
        FeatureColumn(name="item", column="item"),
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
NAMES = SCHEMA.columns
GOOD = {"ts": 1, "item": 2, "tags": ["a"], "shares": [0.5], "price": 0.5, "y": 1, "buy": 0, "w": 1}
AVRO = {
    "type": "record",
    "name": "Event",
    "fields": [
        {"name": "ts", "type": ["null", "long", "double", "string"]},
        {"name": "item", "type": ["null", "long", "bytes", "double"]},
        {"name": "tags", "type": {"type": "array", "items": ["null", "string", "long"]}},
        {"name": "shares", "type": {"type": "array", "items": ["null", "double"]}},
        {"name": "price", "type": ["null", "double", "string"]},
        {"name": "y", "type": ["null", "int", "boolean", "string"]},
        {"name": "buy", "type": ["null", "int"]},
        {"name": "w", "type": ["null", "float"]},
    ],
}
MAX_LETTERS = 400  # of a message about a payload


NUMBERS = (
    st.integers() | st.floats() | st.integers(min_value=10**18, max_value=10**4000).map(lambda n: n)
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text() | st.sampled_from(["1" * 5000, "NaN", "2023"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
RECORDS = st.fixed_dictionaries(
    {}, optional={name: st.just(GOOD[name]) | VALUES for name in NAMES}
) | st.fixed_dictionaries({name: st.just(GOOD[name]) | VALUES for name in NAMES})
TYPES = st.sampled_from(
    [
        *(pa.int8(), pa.uint64(), pa.int64(), pa.float16(), pa.float64(), pa.bool_(), pa.null()),
        *(pa.string(), pa.binary(), pa.large_string(), pa.string_view(), pa.date32(), pa.date64()),
        *(pa.timestamp("s"), pa.timestamp("ns", "UTC"), pa.time32("s"), pa.duration("ms")),
        *(pa.decimal128(9, 2), pa.list_(pa.int64()), pa.list_(pa.string()), pa.list_(pa.float32())),
        *(pa.list_(pa.list_(pa.int64())), pa.struct([("a", pa.int64())]), pa.large_list(pa.int8())),
        *(pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.int64())),
        *(
            pa.list_(pa.dictionary(pa.int8(), pa.string())),
            pa.run_end_encoded(pa.int32(), pa.int8()),
        ),
        *(pa.binary(4), pa.list_(pa.int64(), 2), pa.map_(pa.string(), pa.int64())),
    ]
)


def learned(payloads: Payloads[Any], data: bytes, schema: EventSchema = SCHEMA) -> int:
    """Rows of a payload that would be learned from; anything but PayloadError is raised."""
    said = ""
    try:
        rows = payloads.rows(data, schema)
    except PayloadError as error:
        said = str(error)
    if said:
        assert len(said) < MAX_LETTERS
        return 0
    dead = DeadLetters()
    accepted: list[Rows] = []
    assembler = Assembler(schema, dead)
    for _, columns in payloads.columns([rows], schema):
        n = len(rows)
        came_ms = np.full(n, 10)
        chunk = Chunk(event_N=np.arange(n), columns=columns, end=n, came_ms=came_ms)
        accepted.append(assembler.accept(chunk))
    accepted += assembler.finish()
    taken = sum(map(len, accepted))
    assert taken + dead.count == len(rows)
    return taken


def avro(record: Any, schema: Any = AVRO) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), record)
    return out.getvalue()


def good_batch(n: int = 3) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{**GOOD, "ts": i} for i in range(n)])


@pytest.fixture(scope="module")
def avro_payloads(tmp_path_factory: pytest.TempPathFactory) -> Payloads[Any]:
    path = tmp_path_factory.mktemp("avro") / "event.avsc"
    path.write_text(json.dumps(AVRO))
    return payloads_of("avro", str(path))


def test_good_events_of_each_format_are_read(avro_payloads: Payloads[Any]) -> None:
    assert learned(payloads_of("json"), json.dumps(GOOD).encode()) == 1
    assert learned(avro_payloads, avro(GOOD)) == 1
    for compression in (None, "zstd", "lz4"):
        assert learned(payloads_of("arrow"), stream(good_batch(), compression)) == 3


@given(record=RECORDS)
@settings(max_examples=200, deadline=None)
def test_json_of_any_values_is_read_or_refused(record: dict[str, Any]) -> None:
    learned(payloads_of("json"), json.dumps(record).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value",
    [
        *(nested(985), nested(400, '{"a": ' + nested(300) + "}"), nested(100_000), "1" * 5000),
        *("-" + "9" * 400, "1e999", "NaN", "-Infinity", '"' + "\\ud800" * 50 + '"', "{}", "[[1]]"),
        *('"9999-12-31T23:59:59-23:59"', '"0001-01-01T00:00:00+23:59"', "[null]", "[NaN]"),
    ],
)
def test_json_that_is_made_to_break_is_refused(name: str, value: str) -> None:
    fields = [f'"{n}": {value if n == name else json.dumps(GOOD[n])}' for n in NAMES]
    learned(payloads_of("json"), f"{{{', '.join(fields)}}}".encode())
    # If a field is there twice, the last one counts.
    twice = f'{{"{name}": {value}, {", ".join(fields)}}}'
    learned(payloads_of("json"), twice.encode())


def test_a_list_of_any_depth_is_refused() -> None:
    for depth in range(850, 1000):
        deep = f'{{"ts": 1, "item": {nested(depth)}, "y": 0}}'
        assert learned(payloads_of("json"), deep.encode()) == 0


@given(data=st.binary(max_size=60), at=st.integers(0, 200), cut=st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_bytes_of_any_kind_are_read_or_refused(
    avro_payloads: Payloads[Any], data: bytes, at: int, cut: int
) -> None:
    for payloads, good in (
        (payloads_of("json"), json.dumps(GOOD).encode()),
        (avro_payloads, avro(GOOD)),
        (payloads_of("arrow"), stream(good_batch(), "lz4")),
    ):
        for each in (data, good[:at] + data + good[at + len(data) :], good[:cut]):
            learned(payloads, each)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_arrow_of_any_types_is_read_or_refused(data: st.DataObject) -> None:
    arrays = []
    for name in NAMES:
        good = good_batch().column(name)
        kind = data.draw(st.none() | TYPES, label=name)
        if kind is None:
            arrays.append(good)
        elif data.draw(st.booleans()):
            arrays.append(pa.nulls(3, kind))
        else:
            try:
                arrays.append(good.cast(kind))
            except (pa.ArrowException, ValueError, TypeError):
                arrays.append(pa.nulls(3, kind))
    twice = data.draw(st.booleans(), label="one column twice")
    names = [*NAMES, NAMES[0]] if twice else list(NAMES)
    batch = pa.RecordBatch.from_arrays([*arrays, *(arrays[:1] if twice else [])], names=names)
    taken = learned(payloads_of("arrow"), stream(batch))
    assert not (twice and taken)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_an_arrow_bomb_is_refused_before_it_is_decompressed(compression: str) -> None:
    data = bomb(300 << 20, compression)
    assert len(data) < 2 << 20  # lz4's least
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    allocated = pa.total_allocated_bytes()
    with pytest.raises(PayloadError, match=r"bytes decompressed; \d+ at most"):
        payloads_of("arrow").rows(data, SCHEMA)
    assert pa.total_allocated_bytes() <= allocated + (1 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB
    small = stream(good_batch(1).append_column("zeros", pa.array([b"\0" * (1 << 20)])), compression)
    assert learned(payloads_of("arrow"), small) == 1


def test_more_rows_than_may_be_are_refused_by_the_header() -> None:
    batch = pa.RecordBatch.from_arrays([pa.nulls(1 << 30)], names=["ts"])
    with pytest.raises(PayloadError, match=r"it holds 1073741824 events"):
        payloads_of("arrow").rows(stream(batch), SCHEMA)


def test_a_dictionary_is_not_written_out_beyond_a_bound() -> None:
    good = good_batch(1)
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int16()), ["x|" * 50_000])
    arrays = [text if n == "tags" else pa.concat_arrays([good.column(n)] * 4000) for n in NAMES]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(NAMES))
    with pytest.raises(PayloadError, match="written out"):
        payloads_of("arrow").rows(stream(batch), SCHEMA)


def test_a_header_that_lies_about_its_buffers_is_refused() -> None:
    data = bytearray(stream(good_batch(), "lz4"))
    allocated = pa.total_allocated_bytes()
    for at in range(0, len(data) - 8, 4):
        changed = bytes(data[:at]) + struct.pack("<q", (1 << 62) + at) + bytes(data[at + 8 :])
        learned(payloads_of("arrow"), changed)
    assert pa.total_allocated_bytes() <= allocated + (1 << 20)


def test_payloads_that_are_no_events_are_refused(avro_payloads: Payloads[Any]) -> None:
    for format, payloads in (("json", JSON), ("arrow", ARROW)):
        assert [learned(payloads_of(format), each) for each in payloads] == [0] * len(payloads)
    assert all(learned(avro_payloads, each) == 0 for each in (*JSON, *ARROW))


def test_dead_letters_show_a_value_of_any_depth_in_one_line(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    dead = DeadLetters(path=tmp_path / "dead.jsonl")
    dead.add([1, 2], "reason", [deep, "\x1b[2J\n" * 1000])
    lines = (tmp_path / "dead.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["event"] for line in lines] == [1, 2]
    assert all(len(line) < 300 and b"\x1b" not in line for line in lines)
