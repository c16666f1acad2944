"""Lists of keys, weighed or not: every reader, every fault, and batches cut anywhere."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
import xxhash

from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.config import SequenceConfig
from embertide.trainer.data.assemble import fold
from embertide.trainer.data.bags import Bags, jagged
from embertide.trainer.data.base import (
    PADDING_KEY,
    Batch,
    DeadLetters,
    EventSchema,
    EventSource,
    FeatureColumn,
)
from embertide.trainer.data.csv import CsvSource, TextFormat
from embertide.trainer.data.history import HistorySource
from embertide.trainer.data.limit import FirstEvents, blocks
from embertide.trainer.data.parquet import ParquetSource
from embertide.trainer.data.redis_stream import EventSender, RedisStreamSource, StreamConfig
from embertide.trainer.errors import DataError

Opener = Callable[..., EventSource]
ITEM, TAGS, WORDS = range(3)
TAG_COLUMN = FeatureColumn(
    name="tags", column="tags", transform="keys", weights="shares", max_keys=4
)


def schema(**changes: Any) -> EventSchema:
    features = (
        FeatureColumn(name="item", column="item"),
        TAG_COLUMN,
        FeatureColumn(name="words", column="words", transform="keys"),
    )
    return EventSchema(**{"features": features, "label": "y", "ts": "ts", **changes})


def some(events: int) -> dict[str, list[Any]]:
    """Columns in groups of 1 to 4 events of one ts; lists of 0 to 4 items."""
    rng = np.random.default_rng(7)
    sizes = rng.integers(0, 5, (2, events))
    return {
        "ts": np.repeat(np.arange(events), rng.integers(1, 5, events))[:events].tolist(),
        "item": rng.integers(-5, 5, events).tolist(),
        "tags": [rng.integers(-(2**62), 2**62, n).tolist() for n in sizes[0]],
        "shares": [(rng.integers(-8, 8, n) / 4).tolist() for n in sizes[0]],
        "words": [[f"w{i}" for i in rng.integers(0, 9, n)] for n in sizes[1]],
        "y": rng.integers(2, size=events).tolist(),
    }


def parquet(path: Path, columns: Mapping[str, Any], given: EventSchema) -> ParquetSource:
    kinds = {"tags": pa.list_(pa.int64()), "words": pa.large_list(pa.string())}
    arrays = {
        name: pa.array(values, kinds.get(name)) if isinstance(values, list) else values
        for name, values in columns.items()
    }
    pq.write_table(pa.table(arrays), path, row_group_size=64)
    return ParquetSource(str(path), given)


def field(value: Any, separator: str) -> str:
    if isinstance(value, list):
        return separator.join(str(item) for item in value)
    return "" if value is None else str(value)


def csv(path: Path, columns: Mapping[str, list[Any]], given: EventSchema) -> CsvSource:
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(field(value, given.list_separator) for value in row) for row in rows]
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    return CsvSource(str(path), given)


def tsv(path: Path, columns: Mapping[str, list[Any]], given: EventSchema) -> CsvSource:
    """Tabs, and no header."""
    rows = zip(*columns.values(), strict=True)
    lines = ["\t".join(field(value, given.list_separator) for value in row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    text = TextFormat(delimiter="\t", quoted=False, names=tuple(columns))
    return CsvSource(str(path), given, text)


FORMATS: dict[str, Any] = {"parquet": parquet, "csv": csv, "tsv": tsv}


@pytest.fixture(params=FORMATS)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    def opened(columns: Mapping[str, Any], **changes: Any) -> EventSource:
        source: EventSource = FORMATS[request.param](tmp_path / "in", columns, schema(**changes))
        return source

    return opened


def read(source: EventSource) -> Batch:
    (batch,) = source.batches(batch_size=10_000)
    return batch


def hashed(word: str) -> int:
    return int(np.uint64(xxhash.xxh3_64_intdigest(word.encode())).view(np.int64))


def as_lists(bags: Bags) -> list[tuple[list[int], list[float] | None]]:
    """Keys and weights of each bag."""
    every = (bags.cut(b, b + 1) for b in range(len(bags)))
    return [
        (one.keys_N.tolist(), None if one.weights_N is None else one.weights_N.tolist())
        for one in every
    ]


def same(ours: Batch, theirs: Batch) -> bool:
    names = ("event_B", "ts_ms_B", "keys_BF", "dense_BD", "label_B")
    return (
        (ours.first, ours.next_offset) == (theirs.first, theirs.next_offset)
        and all(np.array_equal(getattr(ours, n), getattr(theirs, n)) for n in names)
        and ours.lists.keys() == theirs.lists.keys() == {TAGS, WORDS}
        and all(as_lists(ours.lists[f]) == as_lists(theirs.lists[f]) for f in ours.lists)
    )


# --- readers --------------------------------------------------------------------------------------


def test_lists_become_bags_of_keys_and_weights(opener: Opener) -> None:
    columns = some(200)
    batch = read(opener(columns))
    assert as_lists(batch.lists[TAGS]) == list(zip(columns["tags"], columns["shares"], strict=True))
    words = [([hashed(word) for word in row], None) for row in columns["words"]]
    assert as_lists(batch.lists[WORDS]) == words
    assert batch.keys_BF[:, ITEM].tolist() == columns["item"]
    assert (batch.keys_BF[:, TAGS:] == PADDING_KEY).all()


def test_a_missing_list_is_an_empty_one(opener: Opener) -> None:
    columns = {**some(3), "tags": [[1], None, []], "shares": [[2.0], [], None]}
    source = opener({**columns, "words": [None, ["a"], None]})
    batch = read(source)
    assert as_lists(batch.lists[TAGS]) == [([1], [2]), ([], []), ([], [])]
    assert as_lists(batch.lists[WORDS]) == [([], None), ([hashed("a")], None), ([], None)]
    assert source.dead_letters.count == 0


def test_keys_of_lists_are_folded_as_others_are(opener: Opener) -> None:
    folded = FeatureColumn(name="tags", column="tags", transform="keys", rows=7)
    columns = some(50)
    batch = read(opener(columns, features=(folded,)))
    keys_N = np.concatenate([np.array(keys, np.int64) for keys in columns["tags"]])
    assert batch.lists[0].keys_N.tolist() == fold(keys_N, 7).tolist()
    assert batch.lists[0].weights_N is None


@pytest.mark.parametrize("separator", [" ", ";;"])
def test_text_is_split_at_the_separator(separator: str, tmp_path: Path) -> None:
    columns = some(40)
    ours = read(csv(tmp_path / "in.csv", columns, schema(list_separator=separator)))
    assert same(ours, read(parquet(tmp_path / "in.parquet", columns, schema())))


def test_numbers_are_strings_where_the_format_says_so(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("tags,y\n7|x,1\n8,0\n9|10,0\n")
    given = EventSchema(
        features=(FeatureColumn(name="tags", column="tags", transform="keys"),), label="y"
    )
    path = str(tmp_path / "in.csv")
    source = CsvSource(path, given)
    assert source.key_kinds == {"tags": "int"}  # by most of its items
    assert as_lists(read(source).lists[0]) == [([8], None), ([9, 10], None)]
    strings = read(CsvSource(path, given, TextFormat(kinds={"tags": "string"}))).lists[0]
    assert as_lists(strings)[0] == ([hashed("7"), hashed("x")], None)


# --- faults ---------------------------------------------------------------------------------------

INFINITE = float("inf")
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "too many": (
        {"tags": [1, 2, 3, 4, 5], "shares": [1.0] * 5},
        "list tags has more than 4 keys",
    ),
    "fewer weights": (
        {"tags": [1, 2], "shares": [1.0]},
        "weights shares are not as many as the keys of tags",
    ),
    "more weights": (
        {"tags": [], "shares": [1.0]},
        "weights shares are not as many as the keys of tags",
    ),
    "infinite": (
        {"tags": [1, 2], "shares": [1.0, INFINITE]},
        "a weight of shares is not a finite number",
    ),
    "beyond fp32": (
        {"tags": [1], "shares": [1e200]},
        "a weight of shares is not a finite number",
    ),
}
TEXT_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no integer": ({"tags": [1, "x"], "shares": [1, 1]}, "a key of list tags is not an integer"),
    "too large": ({"tags": [2**64], "shares": [1]}, "a key of list tags is not an integer"),
    "gap": ({"tags": [1, "", 2], "shares": [1, 1, 1]}, "a key of list tags is missing"),
    "no weight": (
        {"tags": [1, 2], "shares": ["", 1]},
        "a weight of shares is not a finite number",
    ),
}
NULL_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "null key": ({"tags": [1, None], "shares": [1.0, 1.0]}, "a key of list tags is missing"),
    "null word": ({"words": [None]}, "a key of list words is missing"),
    "null weight": (
        {"tags": [1], "shares": [None]},
        "a weight of shares is not a finite number",
    ),
}


def assert_rejects_row_1(opened: Any, path: Path, changes: Mapping[str, Any], reason: str) -> None:
    columns = {**some(4), "ts": [0, 9, 9, 9]}
    wanted = read(opened(path / "good", columns, schema()))
    for name, value in changes.items():
        columns[name][1] = value
    columns["ts"][1] = 100  # what is rejected sets no time
    source = opened(path / "bad", columns, schema())
    source.dead_letters = DeadLetters(path=path / "dead")
    batch = read(source)
    assert batch.event_B.tolist() == [0, 2, 3]
    assert source.dead_letters.by_reason == {reason: 1}
    line = json.loads((path / "dead").read_text())
    assert line["event"] == 1
    for f in (TAGS, WORDS):
        kept = [bag for b, bag in enumerate(as_lists(wanted.lists[f])) if b != 1]
        assert as_lists(batch.lists[f]) == kept


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_list_rejects_its_event_alone(name: str, fault: str, tmp_path: Path) -> None:
    assert_rejects_row_1(FORMATS[name], tmp_path, *FAULTS[fault])


@pytest.mark.parametrize("fault", TEXT_FAULTS)
def test_text_that_is_no_list_rejects_its_event_alone(fault: str, tmp_path: Path) -> None:
    assert_rejects_row_1(csv, tmp_path, *TEXT_FAULTS[fault])


@pytest.mark.parametrize("fault", NULL_FAULTS)
def test_a_null_in_a_list_rejects_its_event_alone(fault: str, tmp_path: Path) -> None:
    assert_rejects_row_1(parquet, tmp_path, *NULL_FAULTS[fault])


def test_a_dead_letter_shows_the_list(tmp_path: Path) -> None:
    columns = {**some(1), "tags": [list(range(1000))], "shares": [[1.0] * 1000]}
    source = parquet(tmp_path / "in", columns, schema())
    source.dead_letters = DeadLetters(path=tmp_path / "dead")
    assert list(source.batches(batch_size=1)) == []
    assert json.loads((tmp_path / "dead").read_text())["value"].startswith("[0, 1, 2, 3")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("tags", [1], "list 'tags' is int64; cast it to list<int64> or list<string>"),
        ("tags", [[0.5]], r"list 'tags' is list<.*double>; cast it"),
        ("shares", [1.0], "weights 'shares' are double; cast them to list<float>"),
        ("shares", [["a"]], r"weights 'shares' are list<.*string>; cast them"),
        ("item", [[1]], r"column 'item' is list<.*int64>; read it with transform 'keys'"),
        ("y", [[1]], r"column 'y' is list<"),
    ],
)
def test_a_column_that_is_no_such_list_is_refused(
    name: str, values: list[Any], message: str, tmp_path: Path
) -> None:
    columns = {**some(1), name: pa.array(values)}
    with pytest.raises(DataError, match=message):
        parquet(tmp_path / "in.parquet", columns, schema())


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"weights": "w"}, "weights 'w' with transform 'key'; only the keys of a list"),
        ({"transform": "keys", "max_keys": 0}, "max_keys is 0; give 1 or more"),
    ],
)
def test_columns_that_cannot_be_are_refused(column: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeatureColumn(name="f", column="c", **column)


def test_an_empty_separator_is_refused() -> None:
    with pytest.raises(ValueError, match="list_separator is empty"):
        schema(list_separator="")


@pytest.mark.parametrize("column", ["item", "y", "ts", "tags"])
def test_a_list_shares_its_column_with_nothing_else(column: str) -> None:
    weighed = FeatureColumn(name="more", column="words", transform="keys", weights=column)
    with pytest.raises(ValueError, match=f"column '{column}' is read as a list of keys and as"):
        schema(features=(*schema().features[:2], weighed))


def test_a_sequence_over_a_list_is_refused(tmp_path: Path) -> None:
    source = csv(tmp_path / "in.csv", some(3), schema())
    for user, item in (("item", "tags"), ("tags", "item")):
        with pytest.raises(ValueError, match="feature 'tags' is a list; user and item are one key"):
            HistorySource(source, [SequenceConfig(name="hist", user=user, item=item)])


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_batches_are_cut_and_resumed_anywhere(
    opener: Opener, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = some(150)
    columns["shares"][20] = [1.0] * 9
    source = opener(columns)
    whole = list(source.batches(batch_size=batch_size))
    joined = Bags.concatenated([batch.lists[TAGS] for batch in whole])
    assert as_lists(joined) == as_lists(read(source).lists[TAGS])
    monkeypatch.setattr("embertide.trainer.data.csv.BLOCK_BYTES", 700)
    monkeypatch.setattr("embertide.trainer.data.parquet.LIST_CHUNK_ROWS", 5)
    assert all(map(same, source.batches(batch_size=batch_size), whole))
    for i in range(0, len(whole), max(1, len(whole) // 20)):
        rest = list(source.batches(batch_size=batch_size, start=whole[i].next_offset))
        assert len(rest) == len(whole) - i - 1
        assert all(map(same, rest, whole[i + 1 :]))


def test_parts_of_batches_have_their_lists(tmp_path: Path) -> None:
    source = csv(tmp_path / "in.csv", some(100), schema())
    batch = read(source)
    cut = [part for _, part in blocks(batch, origin_ms=0, every_ms=5000)]
    assert len(cut) > 5
    for f in (TAGS, WORDS):
        joined = Bags.concatenated([part.lists[f] for part in cut])
        assert as_lists(joined) == as_lists(batch.lists[f])
    (first,) = FirstEvents(source, 40).batches(batch_size=1000)
    assert as_lists(first.lists[WORDS]) == as_lists(batch.lists[WORDS])[: len(first)]


def test_bytes_of_lists_count(tmp_path: Path) -> None:
    batch = read(csv(tmp_path / "in.csv", some(100), schema()))
    tags, words = batch.lists[TAGS], batch.lists[WORDS]
    lists = 12 * len(tags.keys_N) + 8 * len(words.keys_N) + 2 * 4 * 101
    assert batch.nbytes == lists + 100 * (8 + 8 + 3 * 8 + 4)


def test_every_column_of_a_batch_is_bags() -> None:
    tags = Bags.of(np.array([5, 6, 7]), np.array([2, 1]), np.array([0.5, 1, 2], np.float32))
    batch = Batch(
        first=0,
        next_offset=2,
        event_B=np.arange(2),
        ts_ms_B=np.arange(2),
        keys_BF=np.array([[1, PADDING_KEY, PADDING_KEY], [2, PADDING_KEY, 3]]),
        dense_BD=np.zeros((2, 0), np.float32),
        label_B=np.zeros(2, np.float32),
        lists={1: tags},
    )
    bags_F = batch.bags()
    assert [bags.offsets_B1.tolist() for bags in bags_F] == [[0, 1, 2], [0, 2, 3], [0, 0, 1]]
    assert [bags.keys_N.tolist() for bags in bags_F] == [[1, 2], [5, 6, 7], [3]]
    request = jagged(bags_F)
    assert request.lengths_BF.tolist() == [[1, 2, 0], [1, 1, 1]]
    assert request.keys_N.tolist() == [1, 5, 6, 2, 7, 3]
    assert request.weights_N is not None
    assert request.weights_N.tolist() == [1, 0.5, 1, 1, 2, 1]


# --- streams --------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(RedisOptions(log=tmp_path / "log")) as started:
        yield started


def test_a_stream_carries_lists(server: RedisServer, tmp_path: Path) -> None:
    source = parquet(tmp_path / "in.parquet", some(200), schema())
    config = StreamConfig(url=server.url, quiet_s=0.15, patience_s=5.0)
    sender = EventSender(config, source.schema)
    for batch in source.batches(batch_size=30):
        sender.send(batch)
    theirs = list(source.batches(batch_size=50))
    ours = list(FirstEvents(RedisStreamSource(config, schema()), 200).batches(batch_size=50))
    # Strings went as the keys that they became.
    assert len(ours) == len(theirs)
    assert all(map(same, ours, theirs))
    with redis.Redis.from_url(server.url) as client:
        assert client.xlen(config.stream) > 5
