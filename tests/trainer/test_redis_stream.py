"""Live events from a real Redis: index and entry, groups, late events, losses, other readers."""

import dataclasses
import io
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
import redis
from poison import ARROW, JSON
from shop import Shop
from typer.testing import CliRunner
from waiting import wait_until

from embertide.server.adapters.process import free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.__main__ import app
from embertide.trainer.data import open_events
from embertide.trainer.data.base import Batch, DeadLetters, EventSchema, FeatureColumn
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.data.merge import MergedSource
from embertide.trainer.data.redis_stream import (
    STREAM,
    EventSender,
    RedisStreamSource,
    StreamConfig,
)
from embertide.trainer.errors import ConfigurationError, DataError, TrainerError

SCHEMA = EventSchema(
    features=(FeatureColumn(name="item", column="item"), FeatureColumn(name="word", column="word")),
    dense=("price",),
    label="y",
    ts="ts",
    ts_unit_ms=1,
)
QUIET_S = 0.15
ARRAYS = ("event_B", "ts_ms_B", "keys_BF", "dense_BD", "label_B")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    log = tmp_path_factory.mktemp("redis") / "redis.log"
    with RedisServer(RedisOptions(log=log)) as started:
        yield started


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as made:
        made.flushall()
        yield made


def config(server: RedisServer, **changes: Any) -> StreamConfig:
    return StreamConfig(**{"url": server.url, "quiet_s": QUIET_S, "patience_s": 5.0, **changes})


def encoded(columns: dict[str, Any]) -> bytes:
    table = pa.table(columns)
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    data: bytes = out.getvalue().to_pybytes()
    return data


def rows(ts: list[int], **changes: Any) -> dict[str, Any]:
    """Columns of events at these times."""
    n = len(ts)
    columns = {"ts": ts, "item": list(range(n)), "word": ["a"] * n, "price": [0.5] * n}
    return {**columns, "y": [0] * n, **changes}


# Its second place is none of the dictionary's.
BEYOND = pa.DictionaryArray.from_arrays(pa.array([0, 999]), pa.array(["a"]), safe=False)


class Stream:
    """A producer without our library: ids of its own."""

    def __init__(self, client: Any) -> None:
        self.client, self.at = client, 0

    def add(
        self, ts: list[int], data: bytes | None = None, came: object = None, **changes: Any
    ) -> None:
        data = encoded(rows(ts, **changes)) if data is None else data
        fields = {"arrow": data} if came is None else {"arrow": data, "at": str(came)}
        self.client.xadd(STREAM, fields, id=f"{self.at}-{len(ts)}")
        self.at += len(ts)


def source(server: RedisServer, dead: DeadLetters | None = None, **changes: Any) -> Any:
    return RedisStreamSource(config(server, **changes), SCHEMA, dead_letters=dead)


def read(server: RedisServer, events: int, batch_size: int = 1000, start: int = 0) -> list[Batch]:
    first = FirstEvents(source(server), events)
    return list(first.batches(batch_size=batch_size, start=start))


def same(ours: Batch, theirs: Batch) -> bool:
    bounds = (ours.first, ours.next_offset) == (theirs.first, theirs.next_offset)
    return bounds and all(np.array_equal(getattr(ours, n), getattr(theirs, n)) for n in ARRAYS)


def test_further_labels_and_weights_come_as_they_were_sent(
    server: RedisServer, client: Any
) -> None:
    schema = dataclasses.replace(SCHEMA, more_labels=("buy", "share"), weight="w")
    (given,) = FirstEvents(Shop(), 40).batches(batch_size=100)
    rng = np.random.default_rng(1)
    sent = dataclasses.replace(
        given,
        keys_BF=given.keys_BF[:, :2],
        dense_BD=given.dense_BD[:, :1],
        lists={},
        more_labels_BL=rng.choice([0, 1, np.nan], (len(given), 2)).astype(np.float32),
        weight_B=rng.random(len(given), np.float32),
    )
    EventSender(config(server), schema).send(sent)
    events = FirstEvents(RedisStreamSource(config(server), schema), len(sent))
    (got,) = events.batches(batch_size=len(sent))
    np.testing.assert_array_equal(got.labels(3), sent.labels(3))
    assert got.weight_B is not None
    assert sent.weight_B is not None
    np.testing.assert_array_equal(got.weight_B, sent.weight_B)


def test_entries_may_hold_json_or_avro(server: RedisServer, client: Any, tmp_path: Path) -> None:
    names = {"ts": "long", "item": "long", "word": "string", "price": "double", "y": "int"}
    avro: Any = {"type": "record", "name": "Event"}
    avro["fields"] = [{"name": name, "type": kind} for name, kind in names.items()]
    (tmp_path / "event.avsc").write_text(json.dumps(avro))
    events = [
        dict(zip(names, (i, 3 * i, "ab"[i % 2], i / 4, i % 2), strict=True)) for i in range(8)
    ]
    packed = io.BytesIO()
    for event in events[5:7]:
        fastavro.schemaless_writer(packed, avro, event)
    for id, fields in (
        ("0-1", {"json": json.dumps(events[0])}),
        ("1-2", {"arrow": encoded({n: [e[n] for e in events[1:3]] for n in names})}),
        ("3-2", {"json": json.dumps(events[3:5])}),
        ("5-2", {"avro": packed.getvalue()}),
        ("7-1", {"avro": b"poison"}),
        ("8-1", {"json": b"poison"}),
        ("9-2", {"json": json.dumps(events[7])}),  # which is one event
        ("11-1", {"json": json.dumps(events[7])}),
    ):
        client.xadd(STREAM, fields, id=id)
    live = source(server, avro_schema=str(tmp_path / "event.avsc"))
    (got,) = FirstEvents(live, 12).batches(batch_size=100)
    assert got.event_B.tolist() == [*range(7), 11]
    assert got.keys_BF[:, 0].tolist() == [event["item"] for event in events]
    assert len(set(got.keys_BF[:, 1].tolist())) == 2
    assert got.dense_BD[:, 0].tolist() == [event["price"] for event in events]
    assert live.dead_letters.by_reason == {"malformed entry": 4}


def pending(client: Any, group: str = "reader") -> int:
    return int(client.xpending(STREAM, group)["pending"])


def test_what_was_sent_is_read_in_the_batches_of_the_source_itself(
    server: RedisServer, client: Any
) -> None:
    news = NewsSource(NewsConfig(hours=2, views_per_hour=60, users=40, new_items_per_hour=5))
    sender = EventSender(config(server), news.schema)
    sent = [sender.send(batch) for batch in news.batches(batch_size=37)]
    assert sent == [batch.first for batch in news.batches(batch_size=37)]
    live = RedisStreamSource(config(server))
    assert live.schema == news.schema
    total = news.total_events()
    theirs = list(FirstEvents(live, total).batches(batch_size=50))
    ours = list(news.batches(batch_size=50))
    assert len(ours) == len(theirs)
    assert all(map(same, ours, theirs))
    assert live.dead_letters.count == 0
    # It is the last group alone that had to be waited for.
    assert live.counters()["closed"] == 1


@pytest.mark.parametrize("batch_size", [1, 4, 1000])
def test_reading_from_any_batch_gives_the_batches_after_it(
    server: RedisServer, client: Any, batch_size: int
) -> None:
    stream = Stream(client)
    times = np.sort(np.random.default_rng(3).integers(20, size=60)).tolist()
    for begin, end in itertools.pairwise([0, 1, 9, 25, 26, 27, 55, 60]):
        stream.add(times[begin:end])
    whole = read(server, 60, batch_size)
    assert np.concatenate([batch.event_B for batch in whole]).tolist() == list(range(60))
    for before, after in itertools.pairwise(whole):
        assert before.watermark_ms < after.ts_ms_B[0]
    for i, batch in enumerate(whole):
        resumed = read(server, 60, batch_size, batch.next_offset) if i + 1 < len(whole) else []
        assert len(resumed) == len(whole) - i - 1
        assert all(map(same, resumed, whole[i + 1 :]))


def test_a_quiet_time_is_written_down_so_that_all_cut_alike(
    server: RedisServer, client: Any
) -> None:
    stream = Stream(client)
    stream.add([1, 2, 2])
    batches = source(server).batches(batch_size=1000)
    first = next(batches)
    assert first.event_B.tolist() == [0, 1, 2]
    # One event is too late for its group, one is of the next millisecond.
    stream.at = 3
    stream.add([2, 3])
    second = next(batches)
    assert second.event_B.tolist() == [4]
    # Who comes later and never had to wait, or goes on from there, sees the same.
    for start, wanted in ((0, [first, second]), (3, [second])):
        dead = DeadLetters()
        again = FirstEvents(source(server, dead), 5).batches(batch_size=1000, start=start)
        assert all(map(same, again, wanted))
        assert dead.by_reason == {"ts goes backwards": 1}
    assert [id for id, _ in client.xrange(STREAM)] == [b"0-3", b"3-0", b"3-2", b"5-0"]


NOW, IN_2033 = 1_800_000_000_000, 1_999_999_999_000


@pytest.mark.parametrize("clock", [False, True])
def test_one_event_from_the_future_does_not_silence_a_stream(
    server: RedisServer, client: Any, clock: bool
) -> None:
    # It had all 4,899 events after it rejected as late.
    stream = Stream(client)
    for begin in range(0, 5000, 50):
        ts = [NOW + 100 * i for i in range(begin, begin + 50)]
        if begin == 100:
            ts[0] = IN_2033
        stream.add(ts, came=ts[-1] + 30 if clock else None)
    dead = DeadLetters()
    whole = list(FirstEvents(source(server, dead), 5000).batches(batch_size=64))
    assert dead.by_reason == {"ts is far ahead of the events after it": 1}
    assert sum(map(len, whole)) == 4999
    assert whole[-1].watermark_ms == NOW + 100 * 4999
    # Whoever goes on from a batch decides the same.
    for i in (0, 1, 2, 40):
        assert all(map(same, read(server, 5000, 64, whole[i].next_offset), whole[i + 1 :]))


def test_an_event_of_now_after_a_silence_waits_for_no_other(
    server: RedisServer, client: Any
) -> None:
    stream = Stream(client)
    stream.add([NOW], came=NOW + 10)
    batches = source(server).batches(batch_size=100)
    assert next(batches).ts_ms_B.tolist() == [NOW]
    stream.at = 1
    stream.add([NOW + 10**9], came=NOW + 10**9 + 10)
    assert next(batches).ts_ms_B.tolist() == [NOW + 10**9]


def test_a_lone_event_after_a_silence_waits_for_the_next_one(
    server: RedisServer, client: Any
) -> None:
    # It would wait for ever for 32 events that agree.
    stream = Stream(client)
    stream.add([NOW, NOW + 1])
    batches = source(server).batches(batch_size=1000)
    assert next(batches).event_B.tolist() == [0, 1]
    stream.at = 2
    stream.add([NOW + 10**9])
    later = threading.Timer(4 * QUIET_S, stream.add, [[NOW + 10**9 + 1]])
    later.start()
    found = next(batches)
    later.join()
    assert found.event_B.tolist() == [2, 3]
    closed = [id for id, fields in client.xrange(STREAM) if b"closed" in fields]
    assert closed == [b"2-0", b"4-0"]
    again = FirstEvents(source(server), 4).batches(batch_size=1000, start=2)
    assert all(map(same, again, [found]))


@pytest.mark.parametrize("came", [b"", b"soon", b"-5", b"9" * 400, "\u0663"])
def test_a_clock_that_is_no_time_is_not_believed(
    server: RedisServer, client: Any, came: object
) -> None:
    stream = Stream(client)
    text = came.decode() if isinstance(came, bytes) else came
    stream.add([NOW, NOW + 1], came=text)
    assert [len(batch) for batch in read(server, 2)] == [2]


def test_the_sender_has_redis_say_when_an_entry_came(server: RedisServer, client: Any) -> None:
    news = NewsSource(NewsConfig(hours=1, views_per_hour=20))
    EventSender(config(server), news.schema).send(next(news.batches(batch_size=10)))
    ((_, fields),) = client.xrange(STREAM)
    seconds, micros = client.time()
    assert 0 <= seconds * 1000 + micros // 1000 - int(fields[b"at"]) < 60_000


def test_a_group_is_not_closed_while_it_grows(server: RedisServer, client: Any) -> None:
    stream = Stream(client)
    stream.add([1, 1])
    late = source(server)
    real = late._close

    def close(*args: Any) -> None:
        if stream.at == 2:
            stream.add([1, 1])  # between the quiet time and its mark
        real(*args)

    late._close = close
    batch = next(late.batches(batch_size=1000))
    assert batch.event_B.tolist() == [0, 1, 2, 3]
    assert late.counters()["closed"] == 1


def test_entries_are_acknowledged_once_a_checkpoint_holds_them_whole(
    server: RedisServer, client: Any
) -> None:
    stream = Stream(client)
    for ts in ([1, 2], [3, 4, 5], [6]):
        stream.add(ts)
    live = source(server)
    next(live.batches(batch_size=1000))
    assert pending(client) == 4  # with the mark
    for offset, left in ((0, 4), (1, 4), (2, 3), (4, 3), (5, 2), (6, 1)):
        live.checkpointed(offset)
        assert pending(client) == left
    # A reader that starts over reads what is pending, and what is not.
    assert [batch.event_B.tolist() for batch in read(server, 6, start=2)] == [[2, 3, 4, 5]]


def test_what_is_not_read_yet_is_told(server: RedisServer, client: Any) -> None:
    stream = Stream(client)
    for n in range(50):
        stream.add([1000 * n, 1000 * n + 1])
    live = source(server, entries=2)
    batches = live.batches(batch_size=1)
    next(batches)
    assert live.lag() == {live.path: 96}  # the first read gave two entries of two events
    for _ in range(99):  # the last of them once nothing more came for a while
        next(batches)
    assert live.lag() == {live.path: 0}


def test_events_trimmed_unread_are_counted_and_named(
    server: RedisServer, client: Any, tmp_path: Path
) -> None:
    stream = Stream(client)
    for ts in ([1, 2], [3, 4, 5], [6], [7]):
        stream.add(ts)
    client.xtrim(STREAM, maxlen=2, approximate=False)
    dead = DeadLetters(path=tmp_path / "dead.jsonl")
    batches = source(server, dead).batches(batch_size=1, start=1)
    assert next(batches).event_B.tolist() == [5]
    assert dead.by_reason == {"trimmed before it was read": 4}
    (line,) = (tmp_path / "dead.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "event": 1,
        "events": 4,
        "reason": "trimmed before it was read",
        "value": "entry 5-1",
    }


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"no arrow", "Invalid"),
        (encoded(rows([1])), "it holds 1 events"),
        (encoded({"ts": [1, 2]}), "column 'item' is missing"),
        (encoded(rows([1, 2], y=[[0], [1]])), "column 'y' is list<item: int64>; read it"),
        (encoded(rows([1, 2], word=BEYOND)), "out of bounds"),
    ],
)
def test_a_malformed_entry_costs_its_events_alone(
    server: RedisServer, client: Any, tmp_path: Path, data: bytes, why: str
) -> None:
    stream = Stream(client)
    stream.add([1, 2])
    stream.add([3, 3], data)
    stream.add([4])
    dead = DeadLetters(path=tmp_path / "dead.jsonl")
    first = FirstEvents(source(server, dead), 5)
    (batch,) = first.batches(batch_size=1000)
    assert batch.event_B.tolist() == [0, 1, 4]
    assert dead.by_reason == {"malformed entry": 2}
    if why != "Invalid":
        assert why in (tmp_path / "dead.jsonl").read_text()


def test_what_no_reader_can_read_costs_nothing_else(server: RedisServer, client: Any) -> None:
    stream, bad = Stream(client), [("json", each) for each in JSON]
    bad += [("arrow", each) for each in ARROW]
    for at, (field, data) in enumerate(bad):
        stream.add([at])
        client.xadd(STREAM, {field: data}, id=f"{stream.at}-1")
        stream.at += 1
    stream.add([1000])
    live = source(server)
    batches = FirstEvents(live, 2 * len(bad) + 1).batches(batch_size=1000)
    assert sum(len(batch) for batch in batches) == len(bad) + 1
    assert live.dead_letters.by_reason == {"malformed entry": len(bad)}


def test_an_entry_with_any_byte_changed_is_read_or_rejected(
    server: RedisServer, client: Any
) -> None:
    rng = np.random.default_rng(11)
    stream, good = Stream(client), encoded(rows([5, 5, 5]))
    for _ in range(300):
        data = np.frombuffer(good, np.uint8).copy()
        data[rng.integers(len(data), size=rng.integers(1, 4))] = rng.integers(256)
        stream.add([5, 5, 5], data.tobytes()[: len(data) - int(rng.integers(2)) * 9])
    live = source(server)
    seen = sum(len(batch) for batch in FirstEvents(live, 900).batches(batch_size=1))
    assert seen + live.dead_letters.count == 900
    assert live.dead_letters.by_reason["malformed entry"] > 0


def test_an_entry_that_redis_numbered_is_named_and_loses_nothing(
    server: RedisServer, client: Any
) -> None:
    Stream(client).add([1])
    client.xadd(STREAM, {"item": "3"})
    live = source(server)
    assert next(live.batches(batch_size=5)).event_B.tolist() == [0]
    assert live.dead_letters.by_reason == {"malformed entry": 1}


def test_a_stream_that_was_lost_is_an_error_that_says_what_to_do(
    server: RedisServer, client: Any
) -> None:
    Stream(client).add([1])
    with pytest.raises(DataError, match=r"start 7 lies beyond its 1 events: .*XSETID"):
        next(source(server).batches(batch_size=1, start=7))
    client.execute_command("XSETID", STREAM, "7-0")
    live = source(server).batches(batch_size=1, start=7)
    client.xadd(STREAM, {"arrow": encoded(rows([9]))}, id="7-1")
    assert next(live).event_B.tolist() == [7]


def test_a_stream_lost_while_it_is_read_is_not_taken_for_the_one_that_was(
    server: RedisServer, client: Any
) -> None:
    stream = Stream(client)
    stream.add([1, 2])
    live = source(server)
    real = live._close

    def close(*args: Any) -> None:
        client.delete(STREAM)
        stream.at = 0
        stream.add([7])
        real(*args)

    live._close = close
    with pytest.raises(DataError, match="start 2 lies beyond its 1 events: was the stream lost"):
        next(live.batches(batch_size=1000))


def test_a_connection_lost_while_it_waits_loses_and_repeats_nothing(
    server: RedisServer, client: Any
) -> None:
    stream = Stream(client)
    stream.add([0])
    live = source(server, quiet_s=5.0)
    batches = live.batches(batch_size=1)

    def lose() -> None:
        while not client.info("clients")["blocked_clients"]:
            pass
        client.client_kill_filter(_type="normal", skipme=True)
        stream.add([1])
        stream.add([2])

    loser = threading.Thread(target=lose)
    loser.start()
    assert [next(batches).event_B.tolist() for _ in range(2)] == [[0], [1]]
    loser.join()
    assert live.counters()["reconnects"] == 1
    assert live.dead_letters.count == 0


def test_a_reply_that_never_came_is_read_again(server: RedisServer, client: Any) -> None:
    stream = Stream(client)
    for ts in range(4):
        stream.add([ts])
    live = source(server, entries=2)
    real, calls = live._redis.xreadgroup, itertools.count()

    def lossy(*args: Any, **kwargs: Any) -> Any:
        reply = real(*args, **kwargs)
        if next(calls) == 1:
            raise redis.ConnectionError("the reply was lost")
        return reply

    live._redis.xreadgroup = lossy
    batches = FirstEvents(live, 4).batches(batch_size=1)
    assert [batch.event_B.tolist() for batch in batches] == [[0], [1], [2], [3]]
    assert live.dead_letters.count == 0


def test_two_readers_of_a_group_get_an_error_and_no_wrong_batch(
    server: RedisServer, client: Any
) -> None:
    stream = Stream(client)
    for ts in range(8):
        stream.add([ts])
    live = source(server, entries=1)
    real = live._redis.xreadgroup

    def thief(*args: Any, **kwargs: Any) -> Any:
        client.xreadgroup("reader", "other", {STREAM: ">"}, count=1)
        return real(*args, **kwargs)

    live._redis.xreadgroup = thief
    with pytest.raises(TrainerError, match="another reader uses group 'reader'"):
        next(live.batches(batch_size=1))
    live._redis.xreadgroup = real
    assert next(live.batches(batch_size=1)).event_B.tolist() == [0]


def test_senders_share_a_stream_and_a_bound(server: RedisServer, client: Any) -> None:
    schema = NewsSource().schema
    news = NewsSource(NewsConfig(hours=1, views_per_hour=40))
    batches = list(news.batches(batch_size=4))

    def send() -> None:
        sender = EventSender(config(server), schema)
        for batch in batches:
            sender.send(batch)

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [tuple(map(int, id.split(b"-"))) for id, _ in client.xrange(STREAM)]
    assert len(ids) == 3 * len(batches)
    assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(ids))
    bounded = EventSender(config(server, keep_entries=1), schema)
    for batch in batches * 5:
        bounded.send(batch)
    assert client.xlen(STREAM) < 150  # Redis trims a node of its tree at a time


@pytest.mark.usefixtures("client")
def test_missing_dense_values_are_sent_as_such(server: RedisServer) -> None:
    shop = Shop(200)
    sender = EventSender(config(server), shop.schema)
    for batch in shop.batches(batch_size=50):
        sender.send(batch)
    live = RedisStreamSource(config(server), shop.schema)
    (batch,) = FirstEvents(live, 150).batches(batch_size=200)
    np.testing.assert_array_equal(batch.dense_BD, shop.whole.dense_BD[:150])
    assert np.isnan(batch.dense_BD).sum() > 10


def test_what_cannot_be_used_is_refused_with_the_remedy(server: RedisServer, client: Any) -> None:
    with pytest.raises(TrainerError, match="has no entry of a known schema; add events first"):
        open_events(server.url)
    Stream(client).add([1])
    with pytest.raises(TrainerError, match="known schema: columns ts, item, word, price, y"):
        open_events(f"{server.url}#{STREAM}")
    with pytest.raises(TrainerError, match="cannot be reached"):
        open_events(f"redis://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(ConfigurationError, match="a column has two uses"):
        EventSender(
            config(server), EventSchema(features=SCHEMA.features, label="price", dense=("price",))
        )
    client.set("text", "x")
    with pytest.raises(TrainerError, match="WRONGTYPE"):
        next(source(server, stream="text").batches(batch_size=1))
    for wrong in ({"url": "http://x"}, {"entries": 0}, {"group": ""}, {"quiet_s": 0.0}):
        with pytest.raises(ValueError, match=r"http|entries|group|quiet_s"):
            config(server, **wrong)


def test_a_password_is_not_shown() -> None:
    assert str(StreamConfig.of("redis://me:secret@host:1/0#k")) == "host:1/0#k"


def test_the_command_sends_a_file_and_goes_on_where_it_was_told(
    server: RedisServer, client: Any, tmp_path: Path
) -> None:
    news = NewsSource(NewsConfig(hours=1, views_per_hour=60, users=40, new_items_per_hour=5))
    path = str(tmp_path / "news.parquet")
    news.write_parquet(path)
    send = ["send-events", server.url, "--data", path, "--batch-size", "16", "--json"]
    first = json.loads(CliRunner().invoke(app, [*send, "--events", "100"]).stdout)
    assert first == {"events": 100, "next": 100, "rejected": {}}
    CliRunner().invoke(app, [*send, "--start", str(first["next"])])
    total = news.total_events()
    theirs = FirstEvents(RedisStreamSource(config(server)), total).batches(batch_size=64)
    assert all(map(same, news.batches(batch_size=64), theirs))
    for arguments in (["http://x"], [server.url, "--data", server.url]):
        failed = CliRunner().invoke(app, ["send-events", *arguments])
        assert failed.exit_code == 2


@pytest.mark.parametrize("merged", [False, True])
def test_a_reader_that_waits_for_events_leaves_when_told(
    server: RedisServer, client: Any, merged: bool
) -> None:
    Stream(client).add([1, 2])
    live: Any = source(server, quiet_s=60.0)
    if merged:
        live = MergedSource([live], silent_s=60.0)
    ended = threading.Event()

    def read_on() -> None:
        for _ in live.batches(batch_size=1000):
            pass
        ended.set()

    threading.Thread(target=read_on, daemon=True).start()

    def has_read() -> bool:
        groups: Any = client.xinfo_groups(STREAM)
        return bool(groups) and groups[0]["pending"] == 1

    wait_until(has_read, timeout_s=20)  # and it waits now
    began = time.monotonic()
    live.leave()
    assert ended.wait(10)
    assert time.monotonic() - began < 2


def test_a_redis_that_stands_still_is_told_at_once(
    server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embertide.trainer.data.redis_stream._FIRST_ANSWER_S", 0.2)
    client.execute_command("CLIENT", "PAUSE", "1500")
    began = time.monotonic()
    with pytest.raises(TrainerError, match="cannot be reached in time"):
        RedisStreamSource(config(server), Shop(10).schema)
    assert time.monotonic() - began < 1.4  # reads may take `quiet_s` and five seconds more
