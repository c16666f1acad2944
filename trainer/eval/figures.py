"""The figures of a replay, made from its records and the input alone.

`measure` is what the demo reports and what its proof computes again. It also counts what must not
be: rows answered by a version that had learned from the event, groups of one ts that were split
over versions or requests, rows that are not of the input.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embertide.trainer.data.base import Batch, EventSource
from embertide.trainer.errors import TrainerError
from embertide.trainer.eval.metrics import HOUR_MS, auc
from embertide.trainer.eval.moves import MovedKeys, Reshard
from embertide.trainer.eval.prequential import Prequential
from embertide.trainer.eval.records import Records

WINDOW = 0.4
"""Daily AUC is averaged over the days after this share of them: a model is then warmed up."""

_BATCH = 65_536
Ints = NDArray[np.int64]


class ProofError(TrainerError):
    """Records and input do not belong together."""

    remedy = "run it again, and report it if it stays"


@dataclasses.dataclass(frozen=True, slots=True)
class VersionLog:
    """The publisher's notes on its versions: arrays by version number."""

    watermark_ms: Mapping[int, int]
    committed_ms: Mapping[int, int]

    @classmethod
    def read(cls, path: Path) -> "VersionLog":
        """Read versions.jsonl; of a number that two lineages used, the later watermark counts.

        Raises:
            ProofError: There is none.
        """
        watermark_ms: dict[int, int] = {}
        committed_ms: dict[int, int] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise ProofError(f"{path} is missing: give the publication's versions.jsonl") from None
        for line in lines:
            try:
                said = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut by a kill: its version never came
            number = said["number"]
            watermark_ms[number] = max(said["watermark_ms"], watermark_ms.get(number, -(2**63)))
            committed_ms[number] = said["committed_ms"]
        return cls(watermark_ms, committed_ms)

    def watermarks(self, version_B: Ints) -> Ints:
        """Return the watermark of every row's version.

        Raises:
            ProofError: A version was never published.
        """
        numbers, inverse = np.unique(version_B, return_inverse=True)
        unknown = [n for n in numbers.tolist() if n not in self.watermark_ms]
        if unknown:
            raise ProofError(f"version {unknown[0]} answered, but the publisher never noted it")
        each = np.array([self.watermark_ms[n] for n in numbers.tolist()], np.int64)
        return each[inverse]


@dataclasses.dataclass(slots=True)
class _Scores:
    """The rows of one replay, ascending by event."""

    event: Ints
    score: NDArray[np.float32]
    version: Ints

    @classmethod
    def read(cls, path: Path) -> "_Scores":
        try:
            table = pq.read_table(path, columns=["event", "score", "version"])
        except FileNotFoundError:
            raise ProofError(f"{path} is missing: give the folder that `replay` wrote") from None
        columns = [table.column(name).to_numpy() for name in table.column_names]
        event = columns[0]
        if (np.diff(event) <= 0).any():
            raise ProofError(f"{path}: an event stands twice, or out of order")
        return cls(*columns)

    def rows_of(self, batch: Batch) -> tuple[Ints, Ints]:
        """Return (positions in the batch, positions here) of the events that both have."""
        begin = int(np.searchsorted(self.event, batch.event_B[0]))
        end = int(np.searchsorted(self.event, batch.event_B[-1], side="right"))
        here = np.arange(begin, end)
        there = np.searchsorted(batch.event_B, self.event[begin:end])
        same = batch.event_B[np.minimum(there, len(batch) - 1)] == self.event[begin:end]
        return there[same], here[same]


@dataclasses.dataclass(slots=True)
class _Faults:
    """Counts of faults, which must all be 0."""

    missing_rows: int = 0  # of the input without a score
    learned_rows: int = 0  # answered by a version whose watermark is not before the event
    split_groups: int = 0  # of one ts, over two versions


def _window(first_day: int, last_day: int) -> range:
    days = last_day - first_day + 1
    return range(first_day + math.ceil(WINDOW * days), last_day + 1)


def _mean(daily: Mapping[int, float], days: range) -> float | None:
    found = [daily[day] for day in days if not math.isnan(daily.get(day, math.nan))]
    return float(np.mean(found)) if found else None


def _clean(values: Mapping[int, float]) -> dict[str, float]:
    return {str(key): value for key, value in values.items() if not math.isnan(value)}


class _Hour:
    """Labels and both scores of the clock hour in which the copy was made.

    Until then the copy was the served model, and its scores are the served ones.
    """

    def __init__(self) -> None:
        self.hour: int | None = None
        self.parts: list[tuple[Any, Any, Any, Any]] = []

    def add(self, batch: Batch, served_B: Any, frozen_B: Any) -> None:
        scored = ~np.isnan(frozen_B)
        hour_B = batch.ts_ms_B // HOUR_MS
        if self.hour is None and scored.any():
            self.hour = int(hour_B[int(np.argmax(scored))])
        # Before the copy is made, any batch may end in its hour.
        wanted = int(hour_B[-1]) if self.hour is None else self.hour
        mine = (hour_B == wanted) & ~np.isnan(served_B)
        self.parts = [part for part in self.parts if part[0][0] == wanted]
        if mine.any():
            copy_B = np.where(scored, frozen_B, served_B)
            columns = (hour_B, batch.label_B, served_B, copy_B)
            hours, label, served, copy = (column[mine] for column in columns)
            self.parts.append((hours, label, served, copy))

    def figures(self) -> dict[str, Any]:
        if self.hour is None:
            return {}
        _, label, served, copy = (np.concatenate(part) for part in zip(*self.parts, strict=True))
        return {
            "hour": self.hour,
            "events": len(label),
            "served_auc": auc(label, served),
            "frozen_auc": auc(label, copy),
        }


def measure(
    source: EventSource,
    records: Records,
    versions: VersionLog,
    frozen: Records | None = None,
    reshard: Reshard | None = None,
) -> dict[str, Any]:
    """Return the figures of a replay as JSON values.

    Args:
        source: The input, from its start.
        records: The answers of the served model.
        versions: The publisher's notes.
        frozen: The answers of a copy that stopped learning, to the events that it had not learned.
        reshard: The reshard that moved buckets while the served model answered.

    Raises:
        ProofError: A row is of no event of the input, or of a version that never was.
    """
    served = _Scores.read(records.scores)
    copy = _Scores.read(frozen.scores) if frozen else None
    watermark_N = versions.watermarks(served.version)
    auc_served, auc_frozen, faults, hour = Prequential(), Prequential(), _Faults(), _Hour()
    seen = 0
    moved = MovedKeys(reshard, records) if reshard else None
    staleness_ms: list[Ints] = []
    for batch in source.batches(batch_size=_BATCH):
        there, here = served.rows_of(batch)
        if moved is not None:
            moved.add(batch)
        seen += len(here)
        faults.missing_rows += len(batch) - len(here)
        if len(here) == 0:
            continue
        ts_ms_B, label_B = batch.ts_ms_B[there], batch.label_B[there]
        auc_served.add(ts_ms_B, label_B, served.score[here])
        faults.learned_rows += int((watermark_N[here] >= ts_ms_B).sum())
        same_ts = ts_ms_B[1:] == ts_ms_B[:-1]
        faults.split_groups += int((same_ts & (np.diff(served.version[here]) != 0)).sum())
        staleness_ms.append((ts_ms_B - watermark_N[here]).astype(np.int32))
        if copy is not None:
            there_f, here_f = copy.rows_of(batch)
            auc_frozen.add(batch.ts_ms_B[there_f], batch.label_B[there_f], copy.score[here_f])
            both = np.full((2, len(batch)), np.nan, np.float32)
            both[0, there], both[1, there_f] = served.score[here], copy.score[here_f]
            hour.add(batch, both[0], both[1])
    if seen < len(served.event):
        raise ProofError(
            f"{len(served.event) - seen} scored rows are of no event of the input: give the "
            "data of the replay"
        )
    return {
        "events": seen,
        **_aucs(auc_served, auc_frozen if frozen else None),
        "freezing_hour": hour.figures(),
        **dataclasses.asdict(faults),
        **_staleness(np.concatenate(staleness_ms)),
        **_requests(records, versions),
        **_checks(records),
        "reshard": moved.figures() if moved else None,
    }


def _aucs(served: Prequential, frozen: Prequential | None) -> dict[str, Any]:
    daily = served.daily()
    if not daily:
        raise ProofError("no event was scored: give more events")
    window = _window(min(daily), max(daily))
    # A stream of one day has no later days: all of it counts.
    window = window if len(window) else range(min(daily), max(daily) + 1)
    frozen_daily = frozen.daily() if frozen else {}
    return {
        "served_auc": _mean(daily, window),
        "frozen_auc": _mean(frozen_daily, window),
        "window_days": [window.start, window.stop - 1],
        "served_auc_by_day": _clean(daily),
        "served_unstable_days": [
            day for day, each in served.daily_summaries().items() if each.is_unstable
        ],
        "served_last_fifth": served.fifths()[-1].as_json(),
        "served_auc_by_hour": _clean(served.hourly()),
        "frozen_auc_by_day": _clean(frozen_daily),
        "frozen_auc_by_hour": _clean(frozen.hourly() if frozen else {}),
    }


def _staleness(staleness_ms: NDArray[Any]) -> dict[str, float]:
    p50, p99 = np.percentile(staleness_ms, (50, 99))
    return {"staleness_event_p50_s": float(p50) / 1000, "staleness_event_p99_s": float(p99) / 1000}


def _requests(records: Records, versions: VersionLog) -> dict[str, Any]:
    table = pq.read_table(records.requests)
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    latency = np.percentile(columns["latency_us"], (50, 99)) / 1000
    sent_ms = columns["sent_ms"]
    answered_ms = sent_ms + columns["latency_us"] // 1000
    numbers, inverse = np.unique(columns["version"], return_inverse=True)
    first_ms = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(first_ms, inverse, answered_ms)
    committed_ms = np.array([versions.committed_ms[number] for number in numbers.tolist()])
    # The first version waits for the node to start: it says nothing of freshness.
    since_ms = np.maximum(first_ms - committed_ms, 0)[1:]
    fresh = np.percentile(since_ms if len(since_ms) else [0], (50, 99)) / 1000
    return {
        "requests": len(table),
        "p50_ms": float(latency[0]),
        "p99_ms": float(latency[1]),
        "freshness_p50_s": float(fresh[0]),
        "freshness_p99_s": float(fresh[1]),
        "latency_by_hour": _by_hour(columns["ts_ms"], columns["latency_us"]),
        "versions_answered": len(numbers),
        "steps_back": sum(
            _steps_back(sent_ms[mine], answered_ms[mine], columns["version"][mine])
            for mine in (columns["node"] == node for node in np.unique(columns["node"]))
        ),
    }


def _checks(records: Records) -> dict[str, int]:
    """Count checks, over the whole replay."""
    if not records.checks.is_file():
        return {"checks": 0, "check_events": 0, "failed_checks": 0}
    table = pq.read_table(records.checks, columns=["events", "failures"])
    events, failures = (int(table.column(name).to_numpy().sum()) for name in table.column_names)
    return {"checks": len(table), "check_events": events, "failed_checks": failures}


def _by_hour(ts_ms: Ints, latency_us: Ints) -> dict[str, list[float]]:
    """Return p50 and p99 in ms by hour of event time."""
    hours = ts_ms // HOUR_MS
    found = {}
    for hour in np.unique(hours).tolist():
        p50, p99 = np.percentile(latency_us[hours == hour], (50, 99))
        found[str(hour)] = [float(p50) / 1000, float(p99) / 1000]
    return found


def _steps_back(sent_ms: Ints, answered_ms: Ints, version: Ints) -> int:
    """Count requests answered by an older version than one answered before they were sent.

    Of one node: what two nodes answer may lie a beat apart.
    """
    order = np.argsort(answered_ms, kind="stable")
    newest = np.maximum.accumulate(version[order])
    before = np.searchsorted(answered_ms[order], sent_ms)  # strictly earlier, in whole ms
    known = np.where(before > 0, newest[np.maximum(before - 1, 0)], 0)
    return int((version < known).sum())
