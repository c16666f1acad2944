"""Rows of one table read from copies, on the news file: 1 % of the keys, two nodes.

A model learns from the file and publishes; then the file is replayed version by version: at each
one the clicks of the time after it are read, in order. Two fleets of two nodes answer the same
requests at the same versions: one keeps copies of 1 % of the articles shown, the other none. Every
answer of one is compared with the other's.

Each node owns half of the articles. Of the reads of the other half it is told what the copies
answered; half of 1 % a node, so that both nodes together hold copies of 1 % of the rows.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench import report
from bench.nodes import Node, start_nodes
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError
from embertide.trainer.data import open_events
from embertide.trainer.data.keys import buckets_of
from embertide.v1 import node_pb2

FOLDER = BUILD / "bench" / "drift"
TABLE = "cand"
_EVERY_S = 1800  # of event time, between versions
_DAY_MS = 86_400_000
_EVENTS_A_REQUEST = 16
_IN_FLIGHT = 4
_TRIES = 50
_MIN_LOCAL, _MIN_FEWER = 0.55, 2.0


def publish(data: Path) -> Path:
    """Return the publication of a model that learned from all of a file; made once.

    Raises:
        BenchError: Training failed.
    """
    folder = FOLDER / f"news-{_EVERY_S}"
    if (folder / "whole").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    CONSOLE.print(f"[dim]a model learns from {data}: some minutes")
    command = [sys.executable, "-m", "embertide.server.cli", "train", str(folder), "--data"]
    command += [str(data), "--publish-every-s", str(_EVERY_S), "--snapshot-every", "100000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"training failed: {done.stderr[-500:]}")
    (folder / "whole").touch()
    return folder


class Release:
    """A publication whose versions come one by one."""

    def __init__(self, whole: Path, folder: Path) -> None:
        """Begin with the first snapshot alone."""
        shutil.rmtree(folder, ignore_errors=True)
        self._whole, self.folder = whole, folder
        first = min((whole / "snapshots").iterdir())
        (folder / "snapshots").mkdir(parents=True)
        (folder / "deltas").mkdir()
        shutil.copytree(first, folder / "snapshots" / first.name, copy_function=os.link)
        if (whole / "deltas" / first.name).exists():
            self.release(first.name)

    def release(self, name: str) -> None:
        """Let a version appear."""
        beside = self.folder / f".{name}"
        shutil.copytree(self._whole / "deltas" / name, beside, copy_function=os.link)
        beside.rename(self.folder / "deltas" / name)


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """A version, and the events that are read at it."""

    number: int
    folder: str
    day: int
    keys_BF: NDArray[np.int64]


def versions(whole: Path, data: Path, features: Sequence[str]) -> Iterator[Version]:
    """Yield every version with the events between its watermark and the next one's."""
    lines = [json.loads(line) for line in (whole / "versions.jsonl").read_text().splitlines()]
    marks = [line["watermark_ms"] for line in lines]
    source = open_events(str(data))
    columns = [[each.name for each in source.schema.features].index(name) for name in features]
    at, kept = -1, list[NDArray[np.int64]]()
    for batch in source.batches(batch_size=65_536):
        # The version whose watermark is the last before each event.
        of_B = np.searchsorted(marks, batch.ts_ms_B) - 1
        for which in np.unique(of_B):
            if which != at:
                if at >= 0 and kept:
                    yield _version(lines[at], kept)
                at, kept = which, []
            kept.append(batch.keys_BF[of_B == which][:, columns])
    if at >= 0 and kept:
        yield _version(lines[at], kept)


def _version(line: dict[str, int], kept: Sequence[NDArray[np.int64]]) -> Version:
    folder = f"{line['number']:012d}-{line['lineage']:06d}"
    return Version(
        line["number"], folder, line["watermark_ms"] // _DAY_MS, np.concatenate(list(kept))
    )


@dataclasses.dataclass(slots=True)
class Day:
    """The counts of a day.

    Attributes:
        far_reads: Reads of articles that the node asked does not own.
        hot_reads: Those of them that copies answered.
        bytes: By fleet, with copies and without: of the questions and answers about the table,
            those that keep the copies up to date included.
    """

    reads: int = 0
    far_reads: int = 0
    hot_reads: int = 0
    bytes: tuple[int, int] = (0, 0)


class _Asked:
    """A request on its way to a node of each fleet."""

    def __init__(self, request: node_pb2.ReadRequest, nodes: Sequence[Node]) -> None:
        """Send it."""
        self._request, self._nodes = request, nodes
        self.send()

    def send(self) -> None:
        """Send it again."""
        self.answers = [node.stub.Read.future(self._request, timeout=10) for node in self._nodes]


class Replay:
    """Sends the same requests to both fleets, and compares."""

    def __init__(
        self, fleets: Sequence[Sequence[Node]], table: int, column: int, bucket_bits: int
    ) -> None:
        """Take two fleets of two nodes; the table is read by the feature of `column`."""
        self._fleets = fleets
        self._table, self._column, self._bits = table, column, bucket_bits
        self.days: dict[int, Day] = {}
        self.compared = self.different = self.apart = 0
        self._before = [self._asked(fleet) for fleet in fleets]

    def _asked(self, fleet: Sequence[Node]) -> tuple[int, int]:
        """Return reads of copies, all of the one table, and bytes asked about it."""
        hot = sum(node.status().counters["hot_read"] for node in fleet)
        traffic = [node.traffic().get(self._table) for node in fleet]
        return hot, sum(each.bytes for each in traffic if each is not None)

    def at(self, version: Version) -> None:
        """Read the events of a version."""
        day = self.days.setdefault(version.day, Day())
        keys_BF = version.keys_BF
        waiting = []
        for n, first in enumerate(range(0, len(keys_BF), _EVENTS_A_REQUEST)):
            part = keys_BF[first : first + _EVENTS_A_REQUEST]
            shown = part[:, self._column].astype(np.uint64)
            owner = (buckets_of(shown, self._bits) + self._table) % 2
            day.reads += len(shown)
            day.far_reads += int((owner != n % 2).sum())
            request = node_pb2.ReadRequest(lengths=[1] * part.size)
            request.keys.extend(part.astype(np.uint64).ravel().tolist())
            waiting.append(_Asked(request, [fleet[n % 2] for fleet in self._fleets]))
            if len(waiting) == _IN_FLIGHT:
                self._compare(waiting.pop(0))
        for each in waiting:
            self._compare(each)
        now = [self._asked(fleet) for fleet in self._fleets]
        day.hot_reads += now[0][0] - self._before[0][0]
        size = [after[1] - before[1] for after, before in zip(now, self._before, strict=True)]
        day.bytes = (day.bytes[0] + size[0], day.bytes[1] + size[1])
        self._before = now

    def _compare(self, asked: _Asked) -> None:
        """Compare two answers; where a fleet was a moment behind, it is asked again."""
        for attempt in range(_TRIES):
            answers = [each.result() for each in asked.answers]
            numbers = {answer.version.number for answer in answers}
            if len(numbers) == 1:
                break
            self.apart += 1
            time.sleep(0.01 * attempt)
            asked.send()
        for answer in answers:
            answer.ClearField("sources")  # they say where rows came from
        self.compared += 1
        self.different += answers[0] != answers[1]


def measure(data: Path) -> list[report.Row]:
    """Return the rows of 19.1.

    Raises:
        BenchError: A node or the training failed.
    """
    whole = publish(data)
    release = Release(whole, FOLDER / "live")
    snapshot = min((release.folder / "snapshots").iterdir())
    manifest = json.loads((snapshot / "manifest.json").read_text())
    features = [each["name"] for each in manifest["features"]]
    table = next(each for each in manifest["tables"] if each["name"] == TABLE)
    source = open_events(str(data))
    column = [each.name for each in source.schema.features].index(TABLE)
    shown = [np.unique(batch.keys_BF[:, column]) for batch in source.batches(batch_size=1 << 20)]
    distinct = np.unique(np.concatenate(shown))
    rows = len(distinct) // 100 // 2
    others = {each["name"]: 0 for each in manifest["tables"] if each["name"] != TABLE}
    CONSOLE.print(f"[dim]{len(distinct):,} keys of {TABLE}: copies of {rows} rows a node")
    with contextlib.ExitStack() as stack:
        fleets = [
            stack.enter_context(
                start_nodes(FOLDER / name, release.folder, 2, hot_rows={**others, TABLE: limit})
            )
            for name, limit in (("hot", rows), ("alone", 0))
        ]
        replay = Replay(fleets, table["id"], features.index(TABLE), table["bucket_bits"])
        for version in versions(whole, data, features):
            if version.number > 1:
                release.release(version.folder)
            for node in (*fleets[0], *fleets[1]):
                node.await_version(version.number)
            replay.at(version)
            if version.number % 48 == 0:
                CONSOLE.print(f"[dim]version {version.number}: {_said(replay)}")
        counters = [dict(node.status().counters) for node in fleets[0]]
    CONSOLE.print(f"[dim]{_said(replay)}")
    for each in counters:
        named = {name: count for name, count in each.items() if name.startswith("hot")}
        CONSOLE.print(f"[dim]{json.dumps(named)}")
    return _rows(replay, rows)


def _local(day: Day) -> float:
    return day.hot_reads / max(day.far_reads, 1)


def _said(replay: Replay) -> str:
    last = replay.days[max(replay.days)]
    return (
        f"day {max(replay.days)}: {_local(last):.3f} of far reads from copies, bytes "
        f"{last.bytes[1] / max(last.bytes[0], 1):.2f}x fewer; {replay.different} of "
        f"{replay.compared} answers differ; {replay.apart} were at two versions and asked again"
    )


def _rows(replay: Replay, rows: int) -> list[report.Row]:
    days = [replay.days[day] for day in sorted(replay.days)]
    case = f"news, two nodes, {rows} rows of {TABLE} a node"
    far = sum(day.far_reads for day in days)
    hot = sum(day.hot_reads for day in days)
    CONSOLE.print(
        f"[dim]all days: {hot / far:.4f} of {far:,} far reads from copies; "
        f"{1 - (far - hot) / sum(day.reads for day in days):.4f} of all reads of {TABLE} local; "
        "bytes "
        f"{sum(d.bytes[1] for d in days) / sum(d.bytes[0] for d in days):.2f}x fewer"
    )
    return [
        report.measure(
            (case, "far reads answered from copies, a day", "share"),
            [_local(day) for day in days],
            better="higher",
            target=_MIN_LOCAL,
            claim="19.1",
        ),
        report.compare(
            (case, f"bytes asked about {TABLE}, a day: plan alone / with copies", "bytes"),
            [float(day.bytes[1]) for day in days],
            [float(day.bytes[0]) for day in days],
            peer_name="with copies",
            better="higher",
            target=_MIN_FEWER,
            claim="19.1",
        ),
        report.measure(
            (case, f"of {replay.compared:,} answers, equal to those of the plan alone", "share"),
            [float(replay.different == 0)],
            better="higher",
            target=1,
            claim="19.1",
        ),
    ]
