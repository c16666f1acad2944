"""Live events from brokers of Kafka's protocol: order, restarts, losses, poison, secrets."""

import dataclasses
import itertools
import json
import logging
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from kafka_broker import Broker, KafkaBroker, SmallBroker
from poison import ARROW, JSON, stream
from waiting import wait_until

from embertide.server.adapters.process import free_ports
from embertide.trainer.commands import reports
from embertide.trainer.data import is_live, joined, kafka_partition, open_events
from embertide.trainer.data.base import (
    Batch,
    EventSchema,
    EventTimes,
    FeatureColumn,
    feedback_schema,
    news_schema,
)
from embertide.trainer.data.kafka import open_topic
from embertide.trainer.data.kafka_client import KafkaClient, KafkaConfig
from embertide.trainer.data.kafka_partition import ROWS
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.data.merge import MergedSource
from embertide.trainer.errors import ConfigurationError, DataError, TrainerError

SCHEMA = EventSchema(
    features=(FeatureColumn(name="item", column="item"),), label="y", ts="ts", ts_unit_ms=1
)
QUIET_S = 0.2
ARRAYS = ("event_B", "ts_ms_B", "keys_BF", "label_B")
_topics = itertools.count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path_factory.mktemp("kafka") / "broker.log") as started:
        yield started


@pytest.fixture(scope="module")
def small() -> Iterator[SmallBroker]:
    with SmallBroker() as started:
        yield started


def topic(broker: Broker, partitions: int = 1) -> str:
    name = f"clicks-{next(_topics)}"
    broker.make(name, partitions)
    return name


def event(ts: int, item: int, **more: Any) -> bytes:
    return json.dumps({"ts": ts, "item": item, "y": item % 2, **more}).encode()


def source(broker: Broker, topic: str, folder: Path | None = None, **more: Any) -> MergedSource:
    settings = {"quiet_s": QUIET_S, "patience_s": 20, **more}
    made = open_topic(KafkaConfig.of(broker.url(topic, **settings)), SCHEMA)
    if folder is not None:
        made.remember_in(folder)
    return made


def read(live: MergedSource, events: int, batch_size: int = 1000, after: Any = None) -> list[Batch]:
    """The first events, or those after a batch; fewer, if some do not come in a minute."""
    start = 0
    if after is not None:
        live.seek(after.origin.next_cursor)
        start = after.next_offset
    giving_up = threading.Timer(60, live.leave)
    giving_up.start()
    try:
        return list(FirstEvents(live, events).batches(batch_size=batch_size, start=start))
    finally:
        giving_up.cancel()


def items(batches: list[Batch]) -> list[int]:
    return [int(key) for batch in batches for key in batch.keys_BF[:, 0]]


def same(ours: Batch, theirs: Batch) -> bool:
    bounds = (ours.first, ours.next_offset) == (theirs.first, theirs.next_offset)
    return bounds and all(np.array_equal(getattr(ours, n), getattr(theirs, n)) for n in ARRAYS)


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_partitions_are_one_stream_that_goes_on_from_any_batch(
    broker: KafkaBroker, tmp_path: Path, batch_size: int
) -> None:
    name = topic(broker, 3)
    times = np.sort(np.random.default_rng(3).integers(40, size=90))
    for p in range(3):
        mine = [event(int(times[i]), i) for i in range(p, 90, 3)]
        broker.add(name, mine, p)
    whole = read(source(broker, name, tmp_path), 90, batch_size)
    assert sorted(items(whole)) == list(range(90))
    ts_N = np.concatenate([batch.ts_ms_B for batch in whole])
    assert (np.diff(ts_N) >= 0).all()
    for before, after in itertools.pairwise(whole):
        assert before.watermark_ms < after.ts_ms_B[0]
    for i in {0, len(whole) // 2, len(whole) - 2} & set(range(len(whole) - 1)):
        again = read(source(broker, name, tmp_path), 90, batch_size, after=whole[i])
        assert len(again) == len(whole) - i - 1
        assert all(map(same, again, whole[i + 1 :]))


def test_messages_of_several_events_are_taken_up_in_their_middle(
    broker: KafkaBroker, tmp_path: Path
) -> None:
    name = topic(broker)
    data = [[json.loads(event(10 * m + i, 10 * m + i)) for i in range(5)] for m in range(4)]
    broker.add(name, [json.dumps(each).encode() for each in data])
    whole = read(source(broker, name, tmp_path), 20, 3)
    assert items(whole) == [10 * m + i for m in range(4) for i in range(5)]
    assert whole[0].origin is not None
    assert whole[0].origin.next_cursor == (3,)
    assert whole[1].origin is not None
    assert whole[1].origin.next_cursor == (ROWS + 1,)
    again = read(source(broker, name, tmp_path), 20, 3, after=whole[0])
    assert all(map(same, again, whole[1:]))


def test_a_quiet_time_is_written_down_so_that_all_cut_alike(
    broker: KafkaBroker, tmp_path: Path
) -> None:
    name = topic(broker)
    broker.add(name, [event(1, 0), event(2, 1), event(2, 2)])
    live = source(broker, name, tmp_path)
    batches = live.batches(batch_size=1000)
    first = next(batches)
    assert items([first]) == [0, 1, 2]
    # One event is too late for its group, one is of the next millisecond.
    broker.add(name, [event(2, 3), event(3, 4)])
    second = next(batches)
    batches.close()
    assert items([second]) == [4]
    assert live.counters()["closed"] == 2
    assert live.dead_letters.by_reason == {"ts goes backwards": 1}
    # Who reads later and never has to wait, or goes on from there, sees the same.
    broker.add(name, [event(9, 5), event(10, 6)])
    for after, wanted in ((None, [first, second]), (first, [second])):
        fresh = source(broker, name, tmp_path)
        again = read(fresh, 6, after=after)
        assert all(map(same, again, wanted))
        assert fresh.dead_letters.by_reason == {"ts goes backwards": 1}


def test_a_late_event_after_a_quiet_time_has_one_time_whoever_reads_it(
    broker: KafkaBroker, tmp_path: Path
) -> None:
    """Closing 5 makes it 6 for an event of 3, though whoever goes on there has not read the 5."""
    name = topic(broker)
    broker.add(name, [event(4, 0), event(5, 1)])
    times = EventTimes(max_lateness_s=3600)
    schema = dataclasses.replace(SCHEMA, times=times)
    config = KafkaConfig.of(broker.url(name, quiet_s=QUIET_S))

    def opened() -> MergedSource:
        made = open_topic(config, schema)
        made.remember_in(tmp_path)
        return made

    live = opened()
    batches = live.batches(batch_size=1000)
    first = next(batches)
    broker.add(name, [b"poison", event(3, 2), event(4, 3), event(9, 4)])
    second = next(batches)
    batches.close()
    assert second.ts_ms_B.tolist() == [6, 6, 9]
    for place in (2 * ROWS, 3 * ROWS):  # where the silence was, and the first event after it
        fresh = opened()
        fresh.seek((place,))
        again = next(iter(fresh.batches(batch_size=1000, start=first.next_offset)))
        assert same(again, second)


@pytest.mark.parametrize("format", ["json", "arrow"])
def test_what_no_reader_can_read_costs_nothing_else(broker: KafkaBroker, format: str) -> None:
    name = topic(broker)
    bad = {"json": JSON, "arrow": ARROW}[format]
    good = event(1, 100)
    if format == "arrow":
        good = stream(pa.RecordBatch.from_pylist([{"ts": 1, "item": 100, "y": 1}]))
    broker.add(name, [each for one in bad if len(one) < 900_000 for each in (good, one)])
    broker.add(name, [good])
    sent = sum(len(one) < 900_000 for one in bad)  # the broker takes no larger ones
    live = source(broker, name, format=format)
    assert items(read(live, sent + 1)) == [100] * (sent + 1)
    assert live.dead_letters.by_reason == {"malformed message": sent}


def test_partitions_that_come_later_are_said_to_be_unread(
    broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = topic(broker, 2)
    live = source(broker, name)
    monkeypatch.setattr(kafka_partition, "_PARTITIONS_EVERY_S", 0.0)
    monkeypatch.setattr(KafkaClient, "partitions", lambda _: list(range(5)))
    for part in (0, 1):
        broker.add(name, [event(ts, ts) for ts in range(20)], part)
    assert len(items(read(live, 40))) == 40
    assert live.counters()["unread_partitions"] == 3
    (said,) = [each for each in caplog.messages if "partitions now" in each]
    assert f"/{name} has 5 partitions now, and 2 are read" in said


def test_a_poisoned_message_goes_aside_alone(broker: KafkaBroker, tmp_path: Path) -> None:
    name = topic(broker)
    bad: list[bytes | None] = [
        b"\xff\x00 no JSON",
        None,
        b'{"ts": null, "item": 1, "y": 0}',
        b'{"ts": 13, "item": {}, "y": 0}',
        event(14, 1, y=7),
        b"[" * 9999,
    ]
    mixed = [each for k, one in enumerate(bad) for each in (event(10 + k, 100 + k), one)]
    broker.add(name, [*mixed, event(30, 200)])
    live = source(broker, name)
    live.letters_to(tmp_path / "dead.jsonl")
    assert items(read(live, 7)) == [100, 101, 102, 103, 104, 105, 200]
    assert live.dead_letters.by_reason == {
        "malformed message": 4,
        "ts is missing": 1,
        "label is not 0 or 1": 1,
    }
    lines = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert {line["input"] for line in lines} == {f"{name}-0"}
    assert [line["event"] // ROWS for line in lines if line["reason"] != "label is not 0 or 1"] == [
        1,
        3,
        7,
        11,
        5,
    ]
    texts = [line["value"] for line in lines if line["reason"] == "malformed message"]
    assert "offset 1: it is no JSON" in texts[0]
    assert texts[1] == "offset 3: it has no value"
    assert texts[2].startswith("offset 7: column 'item' is dict {}; a key is")


def test_a_broker_that_comes_back_is_read_on_from_the_same_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with KafkaBroker(tmp_path / "broker.log") as broker:
        name = topic(broker)
        sent = [event(i, i) for i in range(30)]
        broker.add(name, sent)
        live = source(broker, name, tmp_path)
        batches = live.batches(batch_size=10)
        found = [next(batches), next(batches)]
        broker.kill()
        wait_until(lambda: live.counters()["outages"] > 0)
        broker.start()
        broker.make(name)
        broker.add(name, [*sent, *(event(i, i) for i in range(30, 50))])
        while len(items(found)) < 45:
            found.append(next(batches))
        batches.close()
    assert items(found)[:45] == list(range(45))
    assert live.dead_letters.count == 0


def test_a_broker_that_stays_away_ends_the_run(tmp_path: Path) -> None:
    with KafkaBroker(tmp_path / "broker.log") as broker:
        name = topic(broker)
        broker.add(name, [event(i, i) for i in range(5)])
        live = source(broker, name, patience_s=3)
        batches = live.batches(batch_size=1)
        next(batches)
        broker.kill()
        with pytest.raises(TrainerError, match=r"partition 0 was away for 3 s: .*; start the"):
            for _ in batches:
                pass


def fill(small: SmallBroker, name: str, begin: int, messages: int) -> None:
    small.add(name, [event(i, i, pad="x" * 5000) for i in range(begin, begin + messages)])


def test_what_retention_dropped_unread_is_an_error_or_counted(
    small: SmallBroker, tmp_path: Path
) -> None:
    name = topic(small, 4)
    fill(small, name, 0, 100)
    (before,) = itertools.islice(source(small, name, tmp_path).batches(batch_size=50), 1)
    assert before.origin is not None
    assert before.origin.next_cursor[0] == 50 * ROWS
    fill(small, name, 100, 1400)  # 7 MB, of which 5 are kept
    with pytest.raises(DataError) as caught:
        read(source(small, name, tmp_path), 200, after=before)
    said = str(caught.value)
    assert "partition 0: offsets 50 to " in said
    assert "dropped them before they were read" in said
    assert "add lost=skip to the URL" in said
    skipping = source(small, name, tmp_path, lost="skip")
    got = items(read(skipping, 51 + 100, 20, after=before))
    first = got[0]
    assert got == list(range(first, first + len(got)))
    assert skipping.dead_letters.by_reason == {"dropped before it was read": first - 50}
    assert f"offsets 50 to {first - 1}, {first - 50} messages" in said


def test_messages_that_were_gone_before_a_run_began_are_not_lost(
    small: SmallBroker, tmp_path: Path
) -> None:
    name = topic(small, 4)
    fill(small, name, 0, 1500)
    live = source(small, name, tmp_path)
    first = items(read(live, 10, 10))[0]
    assert first > 0
    assert live.dead_letters.count == 0
    # A run that was killed before its first checkpoint still misses what goes then.
    fill(small, name, 1500, 1000)
    with pytest.raises(DataError, match=f"offsets {first} to "):
        read(source(small, name, tmp_path), 10, 10)


def test_a_topic_that_was_made_anew_is_told(small: SmallBroker, tmp_path: Path) -> None:
    name = topic(small, 4)
    fill(small, name, 0, 10)
    live = source(small, name, tmp_path)
    live.seek((999 * ROWS, 0, 0, 0))
    with pytest.raises(DataError, match=r"offset 999 lies beyond its 10 messages: was the topic"):
        list(FirstEvents(live, 2000).batches(batch_size=10, start=999))


def test_the_group_shows_what_a_checkpoint_holds_and_is_never_read(
    broker: KafkaBroker, tmp_path: Path
) -> None:
    name = topic(broker)
    broker.add(name, [event(i, i) for i in range(40)])
    live = source(broker, name, tmp_path, group="news")
    batches = live.batches(batch_size=10)
    first = next(batches)
    assert first.next_offset == 10
    live.checkpointed(10)
    other = Consumer({"bootstrap.servers": broker.address, "group.id": "news"})

    def offset() -> int:
        return int(other.committed([TopicPartition(name, 0)], timeout=5)[0].offset)

    wait_until(lambda: offset() == 10)
    batches.close()
    other.commit(offsets=[TopicPartition(name, 0, 33)], asynchronous=False)
    other.close()
    assert items(read(source(broker, name, tmp_path, group="news"), 20, 10))[0] == 0


def test_lag_is_on_the_page_of_metrics(broker: KafkaBroker, tmp_path: Path) -> None:
    name = topic(broker)
    broker.add(name, [event(i, i) for i in range(1500)])
    live = source(broker, name, messages=100)
    batches = live.batches(batch_size=10)
    next(batches)
    (port,) = free_ports(1)
    with reports.metrics_page(port, live, tmp_path):

        def lag() -> float:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                lines = page.read().decode().splitlines()
            wanted = f'embertide_trainer_source_lag{{input="{name}-0"}}'
            return next(float(line.split()[1]) for line in lines if line.startswith(wanted))

        assert 0 <= lag() < 1500
        wait_until(lambda: lag() == 0)
    batches.close()


def test_an_idle_partition_holds_nobody_up_and_leaving_is_prompt(
    broker: KafkaBroker, tmp_path: Path
) -> None:
    name = topic(broker, 4)
    broker.add(name, [event(i, i) for i in range(20)], 2)
    live = source(broker, name, tmp_path)
    assert items(read(live, 20)) == list(range(20))
    assert live.counters()["silences"] > 0
    begin_s = time.monotonic()
    batches = live.batches(batch_size=5)
    next(batches)
    batches.close()
    assert time.monotonic() - begin_s < 8
    assert not [each for each in threading.enumerate() if each.name == "merged"]


def test_impressions_and_clicks_of_two_topics_are_joined(
    broker: KafkaBroker, tmp_path: Path
) -> None:
    shows, clicks = topic(broker), topic(broker)
    broker.add(shows, [json.dumps({"id": i, "ts": i, "item": i}).encode() for i in range(10)])
    broker.add(clicks, [json.dumps({"id": i, "ts": i + 0.5}).encode() for i in range(0, 9, 2)])
    impressions = EventSchema(features=SCHEMA.features, label=None, id="id", ts="ts")
    both = joined(
        open_events(broker.url(shows, quiet_s=QUIET_S), schema=impressions),
        open_events(broker.url(clicks, quiet_s=QUIET_S), schema=feedback_schema(id="id", ts="ts")),
        silent_s=2 * QUIET_S,
    )
    both.remember_in(tmp_path)
    batches = read(both, 15)
    feedback_N = np.concatenate([batch.origin.feedback_B for batch in batches if batch.origin])
    assert feedback_N.tolist() == [i % 3 == 1 for i in range(15)]


def test_the_schema_is_told_by_the_newest_messages(broker: KafkaBroker) -> None:
    name = topic(broker, 2)
    with pytest.raises(TrainerError, match="has no message of a known schema; add events first"):
        open_events(broker.url(name))
    columns = dict.fromkeys(news_schema().columns, 1)
    broker.add(name, [b"?", json.dumps(columns).encode(), b"!"], 1)
    assert open_events(broker.url(name)).schema == news_schema()


def test_further_labels_and_weights_come_through_partitions(broker: KafkaBroker) -> None:
    name = topic(broker, 2)
    for p in range(2):
        broker.add(name, [event(i, i, buy=[0, 1, None][i % 3], w=i / 2) for i in range(6)], p)
    schema = EventSchema(
        features=SCHEMA.features, label="y", more_labels=("buy",), weight="w", ts="ts"
    )
    live = open_topic(KafkaConfig.of(broker.url(name, quiet_s=QUIET_S)), schema)
    (batch,) = read(live, 12)
    assert batch.weight_B is not None
    assert batch.weight_B.tolist() == [i / 2 for i in range(6) for _ in range(2)]
    assert np.isnan(batch.labels(2)[:, 1]).tolist() == [i % 3 == 2 for i in range(6) for _ in "ab"]


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("kafka://user:secret@h:1/t", "no user or password: .*credentials in that file"),
        ("kafka:///t", "has brokers and no user"),
        ("kafka://h:1/", "'' is no topic; give"),
        ("kafka://h:1/a/b", "'a/b' is no topic"),
        ("kafka://h:1/t?quiet_s=soon", "quiet_s='soon' of Kafka's URL is no number"),
        ("kafka://h:1/t?speed=9", "'speed' is no setting of Kafka's URL: format, avro_schema"),
        ("kafka://h:1/t?lost=perhaps", "lost is 'perhaps'; use one of stop, skip"),
        ("kafka://h:1/t?messages=0", "messages is 0"),
        ("kafka://h:1/t?group=", "group is empty"),
        ("kafka://h:1/t?quiet_s=0", "quiet_s is 0.0"),
    ],
)
def test_a_url_that_will_not_do_is_refused_without_its_secrets(url: str, wanted: str) -> None:
    assert is_live(url)
    with pytest.raises(ValueError, match=wanted) as caught:
        KafkaConfig.of(url)
    assert "secret" not in str(caught.value)


SECRET = "correct-horse"


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (f"sasl.password {SECRET}", "line 1: write NAME=VALUE"),
        (f"# mine\n\ngroup.id={SECRET}", "line 3: leave group.id: give group= in the URL"),
        (f"sasl.passwort={SECRET}", 'No such configuration property: "sasl.passwort"'),
        (f"security.protocol=sasl_ssl\nssl.ca.location=/none/{SECRET}", "does not start"),
    ],
)
def test_a_client_file_that_will_not_do_is_named_without_its_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lines: str, wanted: str
) -> None:
    (tmp_path / "client").write_text(lines)
    with pytest.raises(ConfigurationError) as caught:
        open_events(f"kafka://127.0.0.1:9/t?client={tmp_path / 'client'}")
    assert wanted in str(caught.value)
    if "password" in lines or "group" in lines:
        assert SECRET not in str(caught.value) + caplog.text


def test_a_topic_or_broker_that_is_not_there_is_told(broker: KafkaBroker) -> None:
    with pytest.raises(TrainerError, match=r"/none: .*; make the topic first, or name another"):
        open_events(broker.url("none"), schema=SCHEMA)
    (port,) = free_ports(1)
    with pytest.raises(TrainerError, match=r"cannot be reached: .*Connection refused"):
        open_events(f"kafka://127.0.0.1:{port}/t?patience_s=0.5", schema=SCHEMA)


def test_credentials_come_from_a_file_and_go_nowhere_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with KafkaBroker(tmp_path / "broker.log") as broker:
        (tmp_path / "client").write_text(
            "security.protocol=sasl_plaintext\nsasl.mechanism=SCRAM-SHA-512\n"
            f"sasl.username=ann\nsasl.password={SECRET}\n"
        )
        with pytest.raises(TrainerError) as caught:
            open_events(broker.url("t", client=tmp_path / "client", patience_s=1), schema=SCHEMA)
    assert "cannot be reached" in str(caught.value)
    assert SECRET not in str(caught.value) + caplog.text + repr(caught.value.__context__)
