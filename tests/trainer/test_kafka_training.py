"""Training on a topic of Kafka: killed anywhere, it ends with the bytes of a run over the events.

All events of one time are in one partition, so that their order does not depend on partitions.
"""

import functools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka_broker import KafkaBroker, messages_of
from killing import CACHE, train
from snapshots import newest_files
from waiting import wait_until

from embertide.server.adapters.process import Child
from embertide.trainer.config import RunConfig
from embertide.trainer.data import open_events
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import FirstEvents
from embertide.trainer.presets import news_model, news_rates
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.storage import Storage
from embertide.trainer.run.loop import Trainer

RUN = RunConfig(
    model=news_model(), optimizer=news_rates(), batch_size=24, publish_every_s=600, snapshot_every=4
)
NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5))
TOTAL = NEWS.total_events()
PARTITIONS = 3
TOPIC = "news"


def fill(broker: KafkaBroker) -> None:
    """Make the topic with all events, and a poisoned message after each tenth of them."""
    broker.make(TOPIC, PARTITIONS)
    sent: list[list[bytes | None]] = [[] for _ in range(PARTITIONS)]
    for at, batch in enumerate(NEWS.batches(batch_size=1)):
        of_time = sent[int(batch.ts_ms_B[0]) // 1000 % PARTITIONS]
        of_time += messages_of(NEWS.schema, batch)
        if at % 10 == 9:
            of_time.append(b"poison")
    for partition, messages in enumerate(sent):
        assert len(messages) > 20
        broker.add(TOPIC, messages, partition)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path_factory.mktemp("kafka") / "broker.log") as started:
        fill(started)
        yield started


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Publication:
    """A run over the events themselves that nothing stopped."""
    publication = Publication(tmp_path_factory.mktemp("whole") / "pub")
    train(RUN, NEWS, publication)
    return publication


@pytest.fixture
def fresh(whole: Publication, tmp_path: Path) -> Publication:
    """An empty publication, with the program that all share."""
    (tmp_path / "news").mkdir()
    shutil.copyfile(whole.program, tmp_path / "news" / "program.pt2")
    return Publication(tmp_path / "news")


def open_live(broker: KafkaBroker) -> FirstEvents:
    return FirstEvents(open_events(broker.url(TOPIC, quiet_s=0.3, messages=20)), TOTAL)


def test_a_run_killed_three_times_ends_as_one_over_the_events(
    broker: KafkaBroker, whole: Publication, fresh: Publication
) -> None:
    rng = random.Random(int(time.time()))
    for _ in range(3):
        batches = rng.randint(1, 6)  # of 21: some are left for the last run
        print(f"killed after {batches} batches")
        train(RUN, open_live(broker), fresh, batches)
    live = open_live(broker)
    trainer = train(RUN, live, fresh)
    assert (trainer.state.events, trainer.state.offset) == (TOTAL, TOTAL)
    assert live.dead_letters.by_reason["malformed message"] > 0
    assert newest_files(fresh) == newest_files(whole)


def test_what_waiting_decided_outlives_the_folder(
    broker: KafkaBroker, whole: Publication, tmp_path: Path
) -> None:
    """A partition is late after the run had waited for it; its folder is kept, lost, or torn."""
    topic = "late"
    broker.make(topic, 2)
    events = list(NEWS.batches(batch_size=1))
    by_part = [[b for b in events if int(b.ts_ms_B[0]) // 1000 % 2 == p] for p in (0, 1)]
    half = len(by_part[1]) // 2

    def add(part: int, batches: list[Batch]) -> None:
        broker.add(topic, [m for b in batches for m in messages_of(NEWS.schema, b)], part)

    def learn(folder: Path, upto: int, storage: str | None) -> Publication:
        publication = Publication(folder)
        folder.mkdir(exist_ok=True)
        shutil.copyfile(whole.program, publication.program)
        given = None if storage is None else Storage(storage)
        live = FirstEvents(open_events(broker.url(topic, quiet_s=0.3, messages=20)), upto)
        trainer = Trainer(RUN, publication, program_cache=CACHE, storage=given)
        trainer.fit(live)
        assert trainer.state.events == upto
        return publication

    add(0, by_part[0])
    add(1, by_part[1][:half])
    there = sum(map(len, (*by_part[0], *by_part[1][:half])))
    url = f"file://{tmp_path}/bucket"
    learn(tmp_path / "news", there, url)
    for name in ("silences.jsonl", "inputs/0/closed.jsonl", "inputs/1/closed.jsonl"):
        assert Storage(url).read(name) == (tmp_path / "news" / name).read_bytes()
    add(1, by_part[1][half:])
    shutil.copytree(tmp_path / "news", tmp_path / "torn")
    (tmp_path / "torn" / "silences.jsonl").unlink()
    shutil.rmtree(tmp_path / "torn" / "inputs")
    kept, torn = (newest_files(learn(tmp_path / n, TOTAL, None)) for n in ("news", "torn"))
    lost = newest_files(learn(tmp_path / "empty", TOTAL, url))
    assert kept == torn == lost


def command(broker: KafkaBroker, fresh: Publication) -> list[str]:
    url = broker.url(TOPIC, quiet_s=0.3, messages=20)
    said = [sys.executable, "-m", "embertide.trainer", "train", str(fresh.path), "--json"]
    said += ["--data", url, "--events", str(TOTAL), "--cache", str(CACHE)]
    return [*said, "--batch-size", "24", "--snapshot-every", "4", "--publish-every-s", "600"]


def test_the_command_goes_on_over_a_broker_that_was_killed_too(
    whole: Publication, fresh: Publication, tmp_path: Path
) -> None:
    with KafkaBroker(tmp_path / "broker.log") as broker:
        fill(broker)
        with Child(command(broker, fresh), log=tmp_path / "first.log") as trainer:
            wait_until(lambda: bool(fresh.versions()) and fresh.versions()[-1].number >= 4, 120)
            trainer.kill()
        assert trainer.code == -signal.SIGKILL
        broker.kill()
        broker.start()
        fill(broker)
        with Child(command(broker, fresh), log=tmp_path / "second.log") as again:
            assert again.wait(120) == 0, again.log_text()
    result = json.loads(again.log_text().splitlines()[-1])["result"]
    assert result["events"] == TOTAL
    assert result["rejected"]["malformed message"] > 0
    assert newest_files(fresh) == newest_files(whole)


def has_begun(trainer: Child) -> bool:
    return not trainer.alive() or '"progress"' in trainer.log_text()


@pytest.mark.long
def test_the_command_killed_at_random_ends_as_a_run_over_the_events(
    broker: KafkaBroker, whole: Publication, fresh: Publication, tmp_path: Path
) -> None:
    rng = random.Random(int(time.time()))
    killed = 0
    for _ in range(int(os.environ.get("EMBERTIDE_KILLS", "10"))):
        with Child(command(broker, fresh), log=tmp_path / "killed.log") as trainer:
            wait_until(functools.partial(has_begun, trainer), 120)
            time.sleep(rng.uniform(0, 1.5))
            if trainer.alive():
                trainer.kill()
                killed += 1
    assert killed > 0
    with Child(command(broker, fresh), log=tmp_path / "last.log") as last:
        assert last.wait(120) == 0, last.log_text()
    assert newest_files(fresh) == newest_files(whole)
