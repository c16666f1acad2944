"""Going on: yesterday's folder, today's same command (claim A.9).

Each pair trains in a folder, changes what a day changes (a file has grown, a process was killed,
the machine is another one), and gives the same command again. It went on if that ended well and all
events were learned, each once. Pairs with object storage and an empty folder are compared, byte by
byte, with a run that nothing stopped.
"""

import contextlib
import dataclasses
import functools
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from buckets import S3
from days_of_news import CACHE, TRAINER, event_at, news
from kafka_broker import KafkaBroker, messages_of
from snapshots import newest_files

from embertide.server.adapters.process import Child
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.data.base import Batch, news_schema
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.redis_stream import EventSender, StreamConfig
from embertide.trainer.publish.folder import Publication

_WAIT_S = 300.0
_CALL = """
import sys, embertide
done = embertide.train(data=sys.argv[1], folder=sys.argv[2], program_cache=sys.argv[3])
print(done.events)
"""


class WrongError(Exception):
    """A pair did not go on; the text says how."""


# --- events ---------------------------------------------------------------------------------------


def table(batches: Sequence[Batch]) -> pa.Table:
    """Return news as columns."""
    columns: dict[str, Any] = {"ts": [], "y": []}
    schema = news_schema()
    names = [each.column for each in schema.features if each.transform == "key"]
    columns |= {name: [] for name in names}
    for batch in batches:
        columns["ts"].append(batch.ts_ms_B // 1000)
        columns["y"].append(batch.label_B.astype(np.int8))
        for f, name in enumerate(names):
            columns[name].append(batch.keys_BF[:, f])
    return pa.table({name: np.concatenate(parts) for name, parts in columns.items()})


# --- one pair -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Where a pair works, and how it trains."""

    folder: Path
    s3: S3 | None = None  # where buckets are made

    def bucket(self) -> str:
        """Return the URL of a new bucket with a prefix."""
        assert self.s3 is not None
        return self.s3.bucket()

    @property
    def publication(self) -> Path:
        """The publication that is trained into."""
        return self.folder / "pub"

    def command(self, *arguments: object, into: Path | None = None) -> list[str]:
        """Return the command that trains."""
        said = [*TRAINER, "train", str(into or self.publication), "--json", "--cache", str(CACHE)]
        return [*said, *map(str, arguments)]

    def train(self, *arguments: object, into: Path | None = None) -> dict[str, Any]:
        """Train to the end of the events; return the result."""
        done = subprocess.run(
            self.command(*arguments, into=into),
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise WrongError(f"exit status {done.returncode}: {done.stderr.strip()[-400:]}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["result"]
        return result

    def call(self, data: Path) -> int:
        """Train by `embertide.train()`; return how many events are learned."""
        said = [sys.executable, "-c", _CALL, str(data), str(self.publication), str(CACHE)]
        done = subprocess.run(said, capture_output=True, text=True, timeout=_WAIT_S, check=False)
        if done.returncode:
            raise WrongError(f"embertide.train: {done.stderr.strip()[-300:]}")
        return int(done.stdout.split()[-1])

    def learned(self, wanted: int, *arguments: object) -> dict[str, Any]:
        """Train, and see that as many events are learned."""
        result = self.train(*arguments)
        if result["events"] != wanted:
            raise WrongError(f"{result['events']} events are learned, {wanted} were there")
        return result

    def stop(
        self, ready: Callable[[list[dict[str, Any]]], bool], by: int, *arguments: object
    ) -> None:
        """Train until what it printed is as wanted, then send a signal."""
        log = self.folder / f"stopped-{time.monotonic_ns()}.log"
        with Child(self.command(*arguments), log=log) as child:
            deadline = time.monotonic() + _WAIT_S
            while not ready(_progress(child.log_text())):
                if not child.alive() or time.monotonic() > deadline:
                    raise WrongError(f"it ended before it was stopped: {child.log_text()[-300:]}")
                time.sleep(0.05)
            os.kill(child.pid, by)
            child.wait(_WAIT_S)

    def write(self, name: str, batches: Sequence[Batch]) -> int:
        """Write events to a file of the format that its name says; return how many."""
        path, events = self.folder / name, table(batches)
        if name.endswith(".parquet"):
            pq.write_table(events, path)
        elif name.endswith(".gz"):
            with gzip.open(path, "wb") as out:
                pyarrow.csv.write_csv(events, out)
        else:
            pyarrow.csv.write_csv(events, path)
        return len(events)

    def same_as(self, other: Path) -> None:
        """See that the newest snapshots are the same, byte by byte."""
        mine, theirs = (newest_files(Publication(each)) for each in (self.publication, other))
        wrong = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
        if wrong:
            raise WrongError(f"{len(wrong)} files differ, as {wrong[0]}")


def _progress(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found.append(json.loads(line)["progress"])
    return found


def _has_published(seen: list[dict[str, Any]], version: int = 4) -> bool:
    return bool(seen) and seen[-1]["version"] >= version and seen[-1]["checkpoints"] >= 1


# --- files ----------------------------------------------------------------------------------------


def more_files(work: Work, *, before: int = 2, after: int = 3, more: Sequence[object] = ()) -> None:
    """A glob of days, and more days."""
    days = news(after, views_per_hour=100)
    data = work.folder / "day-*.parquet"
    learned = sum(work.write(f"day-{d:02}.parquet", [days[d]]) for d in range(before))
    work.learned(learned, "--data", data, *more)
    learned += sum(work.write(f"day-{d:02}.parquet", [days[d]]) for d in range(before, after))
    work.learned(learned, "--data", data, *more)


def longer_file(work: Work, *, name: str, more: Sequence[object] = ()) -> None:
    """A file that is written again with more rows behind."""
    days = news(3)
    for upto in (1, 3):
        learned = work.write(name, days[:upto])
        work.learned(learned, "--data", work.folder / name, *more)


def same_again(work: Work) -> None:
    """Nothing is new."""
    learned = work.write("news.parquet", news(2))
    first = work.learned(learned, "--data", work.folder / "news.parquet")
    again = work.learned(learned, "--data", work.folder / "news.parquet")
    if again["version"] != first["version"]:
        raise WrongError("a version came out of nothing")


def guessed(work: Work) -> None:
    """A run's file that `init` wrote, and the file that it is of has grown."""
    days = news(3)
    learned = work.write("news.parquet", days[:1])
    path, run = work.folder / "news.parquet", work.folder / "run.py"
    made = [*TRAINER, "init", str(path), "-o", str(run), "--time", "ts", "--label", "y"]
    done = subprocess.run(made, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongError(f"init: {done.stderr[-300:]}")
    work.learned(learned, "--config", run)
    learned = work.write("news.parquet", days)
    work.learned(learned, "--config", run)


def first_events(work: Work) -> None:
    """`--events`, and more of them."""
    work.write("news.parquet", news(3))
    work.train("--data", work.folder / "news.parquet", "--events", 500)
    result = work.train("--data", work.folder / "news.parquet", "--events", 1700)
    if not 1690 <= result["events"] <= 1700:
        raise WrongError(f"{result['events']} events of 1700 are learned")


def more_hours(work: Work) -> None:
    """The made-up news, for longer."""
    total = [NewsSource(NewsConfig(hours=hours, seed=1)).total_events() for hours in (2, 4)]
    for events, hours in zip(total, (2, 4), strict=True):
        assert events is not None
        work.learned(events, "--demo", "--hours", hours)


def by_both(work: Work, *, function_first: bool) -> None:
    """`embertide.train()` and the command, one after the other."""
    days = news(3)
    path = work.folder / "news.parquet"
    for upto, by_function in ((1, function_first), (3, not function_first)):
        learned = work.write("news.parquet", days[:upto])
        found = work.call(path) if by_function else work.train("--data", path)["events"]
        if found != learned:
            raise WrongError(f"{found} events are learned, {learned} were there")


# --- stopped --------------------------------------------------------------------------------------


def stopped(work: Work, *, by: int) -> None:
    """A run that was stopped or killed half way ends as one that nothing stopped."""
    said = ("--demo", "--hours", 12)
    work.stop(_has_published, by, *said)
    total = NewsSource(NewsConfig(hours=12, seed=1)).total_events()
    assert total is not None
    work.learned(total, *said)
    if by == signal.SIGKILL:
        whole = work.folder / "whole"
        work.train(*said, into=whole)
        work.same_as(whole)


# --- object storage -------------------------------------------------------------------------------


def other_machine(work: Work, *, empty: bool) -> None:
    """A file has grown, and the folder is there or not: the copy in storage leads on."""
    days, url = news(3), work.bucket()
    path, whole = work.folder / "news.parquet", work.folder / "whole"
    for upto in (1, 3):
        learned = work.write("news.parquet", days[:upto])
        work.learned(learned, "--data", path, "--storage", url)
        work.train("--data", path, into=whole)
        if empty and upto == 1:
            shutil.rmtree(work.publication)
    work.same_as(whole)


def lost_machine(work: Work) -> None:
    """The trainer is killed and its machine is gone: the same bytes as of a run never stopped."""
    said, url = ("--demo", "--hours", 12), work.bucket()

    def is_copied(seen: list[dict[str, Any]]) -> bool:
        return _has_published(seen) and seen[-1]["storage"]["snapshots"] >= 1

    work.stop(is_copied, signal.SIGKILL, *said, "--storage", url)
    shutil.rmtree(work.publication)
    work.train(*said, "--storage", url)
    whole = work.folder / "whole"
    work.train(*said, into=whole)
    work.same_as(whole)


# --- live -----------------------------------------------------------------------------------------


def _all_learned(wanted: int) -> Callable[[list[dict[str, Any]]], bool]:
    return lambda seen: bool(seen) and seen[-1]["events"] >= wanted


def live_redis(work: Work) -> None:
    """A Redis Stream, and more of it; a stream has no end, so the run is stopped."""
    days = news(2)
    with RedisServer(RedisOptions(log=work.folder / "redis.log")) as server:
        config = StreamConfig(url=server.url, quiet_s=0.3)
        sender, learned = EventSender(config, news_schema()), 0
        said = ("--data", f"{server.url}#{config.stream}")
        for day in days:
            for begin in range(0, len(day), 500):
                sender.send(_cut(day, begin, begin + 500))
            learned += len(day)
            work.stop(_all_learned(learned - 1), signal.SIGTERM, *said)


def _cut(batch: Batch, begin: int, end: int) -> Batch:
    from embertide.trainer.data.limit import take

    return take(batch, begin, min(end, len(batch)))


def live_kafka(work: Work, *, storage: bool) -> None:
    """A topic of Kafka with a partition that is late; with storage the folder is lost."""
    days = news(2, views_per_hour=100)
    url = work.bucket() if storage else None
    with KafkaBroker(work.folder / "broker.log") as broker:
        broker.make("news", 2)
        data = broker.url("news", quiet_s=0.3, messages=50)
        said = ("--data", data, *(("--storage", url) if url else ()))
        late_B = days[0].ts_ms_B // 1000 % 2 == 1
        half = days[0].ts_ms_B < np.median(days[0].ts_ms_B)
        schema = news_schema()

        def add(part: int, batch: Batch, which_B: Any) -> int:
            rows = np.flatnonzero(which_B)
            broker.add(
                "news", [m for r in rows for m in messages_of(schema, event_at(batch, r))], part
            )
            return len(rows)

        learned = add(0, days[0], ~late_B) + add(1, days[0], late_B & half)
        waited = work.publication / "silences.jsonl"
        # Not by its progress: that comes with batches, and the last ones may come at once.
        work.stop(
            lambda _: waited.is_file() and '"end"' in waited.read_text(), signal.SIGTERM, *said
        )
        kept = work.folder / "kept"
        shutil.copytree(work.publication, kept)
        if storage:
            shutil.rmtree(work.publication)
        learned += add(1, days[0], late_B & ~half) + add(0, days[1], days[1].ts_ms_B >= 0)
        rest = ("--events", learned)
        work.learned(learned, *said, *rest)
        work.train("--data", data, *rest, into=kept)
        work.same_as(kept)


PAIRS: dict[str, Callable[[Work], None]] = {
    "a glob with one more day": more_files,
    "a glob with nine more days": functools.partial(more_files, before=1, after=10),
    "a Parquet file that grew": functools.partial(longer_file, name="news.parquet"),
    "a CSV file that grew": functools.partial(longer_file, name="news.csv"),
    "a compressed CSV file that grew": functools.partial(longer_file, name="news.csv.gz"),
    "a file that did not change": same_again,
    "a run's file of init, its input grew": guessed,
    "--events, more of them": first_events,
    "--demo, for longer": more_hours,
    "the command, then embertide.train()": functools.partial(by_both, function_first=False),
    "embertide.train(), then the command": functools.partial(by_both, function_first=True),
    "--publish-every-s and --snapshot-every": functools.partial(
        longer_file, name="news.parquet", more=("--publish-every-s", 900, "--snapshot-every", 3)
    ),
    "--prune-ratio": functools.partial(longer_file, name="news.parquet", more=("--prune-ratio", 2)),
    "an SSD tier": functools.partial(longer_file, name="news.parquet", more=("--ssd-mib", 64)),
    "two ranks": functools.partial(longer_file, name="news.parquet", more=("--nproc", 2)),
    "stopped half way (SIGTERM)": functools.partial(stopped, by=signal.SIGTERM),
    "killed half way (SIGKILL)": functools.partial(stopped, by=signal.SIGKILL),
    "object storage, the folder is there": functools.partial(other_machine, empty=False),
    "object storage, an empty folder": functools.partial(other_machine, empty=True),
    "object storage, killed, an empty folder": lost_machine,
    "a Redis Stream, stopped, more events": live_redis,
    "a topic of Kafka, a late partition": functools.partial(live_kafka, storage=False),
    "Kafka, object storage, an empty folder": functools.partial(live_kafka, storage=True),
}
