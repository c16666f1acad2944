"""How soon a trained row is served, and what it costs who asks: `make bench-fresh`.

A publisher changes 1 % of a million rows five times a second, 50,000 rows/s, while both nodes
answer. Load with versions and load without take turns: in closed loop for throughput, at half of
that rate for the p99 of requests and for freshness, and once more to see when nodes commit.
Freshness counts from when a version's rows have their values until an answer of a node first says
that version or a later one. The stages on the way are when its records are made, its files written,
the bus has it, a node has staged and committed it, and an answer shows it.

Shapes: V versions.
"""

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bench import keys, parts, plot, report
from bench.fleet import MODEL, Commits, Fleet, start_fleet
from bench.load import Seen, encode
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError
from bench.shapes import Shape
from bench.versions import CHANGED_SHARE, Stages

_FOLDER = BUILD / "bench" / "fresh"
_TABLES, _VERSIONS_PER_S = 8, 5
_BATCH, _REQUESTS = 64, 256
_SETTLE_S = 1.0
_RATE_SHARE = 0.5
_MAX_FRESH_S, _MIN_RATE, _MAX_P99 = 1.0, 0.9, 1.5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A stretch of load with versions, or without."""

    seen: Seen
    stages: Sequence[Stages]
    committed: Sequence[Sequence[tuple[int, float]]]  # by node


def _requests(shape: Shape) -> list[bytes]:
    keys_NFL, _ = keys.draw(shape, _BATCH * _REQUESTS)
    return [encode(MODEL, batch_BF) for batch_BF in np.split(keys_NFL[:, :, 0], _REQUESTS)]


def _turn(
    fleet: Fleet, rate: float | None, seconds: float, *, versions: bool, watch: bool = False
) -> Turn:
    """Ask for a while; the time before a load has settled does not count."""
    fleet.versions.flow(versions)
    watched = [Commits(peer) for peer in fleet.peers] if watch else []
    for each in watched:
        each.start()
    fleet.clients.start(rate)
    time.sleep(_SETTLE_S)
    begin = time.time()
    time.sleep(seconds)
    end = time.time()
    seen = fleet.clients.stop()
    for each in watched:
        each.end()
    inside = [each for each in fleet.versions.log if begin <= each.trained <= end - 1.0]
    return Turn(
        seen=seen.between(begin, end), stages=inside, committed=[each.seen for each in watched]
    )


def first_at_least(
    pairs: Sequence[tuple[int, float]], numbers_V: NDArray[np.int64]
) -> Iterator[float]:
    """Yield for each version when it or a later one was first seen; NaN: never."""
    ordered = sorted(pairs, key=lambda pair: pair[1])
    highest = list(itertools.accumulate((version for version, _ in ordered), max))
    for number in numbers_V:
        at = int(np.searchsorted(highest, number))
        yield ordered[at][1] if at < len(ordered) else float("nan")


def _stages(turn: Turn) -> dict[str, NDArray[np.float64]]:
    """Return the seconds from training to each stage, of every version."""
    trained_V = np.array([each.trained for each in turn.stages])
    numbers_V = np.array([each.number for each in turn.stages], np.int64)
    log = turn.seen.log[turn.seen.log["version"] >= 0]
    answers = list(zip(log["version"].tolist(), log["ended"].tolist(), strict=True))
    last = {
        "records made": [each.taken for each in turn.stages],
        "files written": [each.written for each in turn.stages],
        "on the bus": [each.sent for each in turn.stages],
    }
    if turn.committed:
        by_node = [list(first_at_least(each, numbers_V)) for each in turn.committed]
        last["committed by both nodes"] = list(np.max(by_node, axis=0))
    last["visible to a client"] = list(first_at_least(answers, numbers_V))
    return {name: np.array(times) - trained_V for name, times in last.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Repetition:
    """Five turns, one after the other."""

    quiet_per_s: float
    busy_per_s: float
    quiet_p99_us: float
    busy_p99_us: float
    rows_per_s: float
    failed: int
    stages: dict[str, list[float]]  # s from training, a version each

    def line(self) -> str:
        """Describe it for people."""
        visible = np.array(self.stages["visible to a client"])
        return (
            f"{self.quiet_per_s:,.0f} -> {self.busy_per_s:,.0f} requests/s, p99 "
            f"{self.quiet_p99_us:,.0f} -> {self.busy_p99_us:,.0f} us; "
            f"{self.rows_per_s:,.0f} rows/s, visible after "
            f"{np.nanpercentile(visible, 99):.3f} s (p99), {self.failed} failed"
        )


def _repetition(fleet: Fleet, shape: Shape, seconds: float, rate: float) -> Repetition:
    turns = [
        _turn(fleet, each, seconds, versions=versions)
        for each in (None, rate)
        for versions in (False, True)
    ]
    # Watching the nodes takes of the cores that requests need: in a turn of its own.
    watched = _turn(fleet, rate, seconds, versions=True, watch=True)
    fleet.versions.flow(False)
    fleet.versions.snapshot()
    quiet, busy, quiet_at, busy_at = turns
    rows = int(shape.rows * CHANGED_SHARE) * shape.tables
    stages = {name: each.tolist() for name, each in (_stages(watched) | _stages(busy_at)).items()}
    return Repetition(
        quiet_per_s=quiet.seen.requests_per_s,
        busy_per_s=busy.seen.requests_per_s,
        quiet_p99_us=quiet_at.seen.latency_us_p99,
        busy_p99_us=busy_at.seen.latency_us_p99,
        rows_per_s=rows * len(busy_at.stages) / (seconds - 1.0),
        failed=sum(turn.seen.failed for turn in (*turns, watched)),
        stages=stages,
    )


def _rows(repetitions: Sequence[Repetition], shape: Shape) -> list[report.Row]:
    case = f"{shape.tables}x{shape.rows}x{shape.dim}, {_VERSIONS_PER_S} versions/s"
    rows = [
        report.compare(
            (f"{case}, closed loop", "throughput", "requests/s"),
            [each.busy_per_s for each in repetitions],
            [each.quiet_per_s for each in repetitions],
            peer_name="quiet bus",
            better="higher",
            target=_MIN_RATE,
            claim="18.1",
        ),
        report.compare(
            (f"{case}, half rate", "p99 latency", "us"),
            [each.busy_p99_us for each in repetitions],
            [each.quiet_p99_us for each in repetitions],
            peer_name="quiet bus",
            better="lower",
            target=_MAX_P99,
            claim="18.1",
        ),
        report.measure(
            (f"{case}, half rate", "changed rows a second", "rows/s"),
            [each.rows_per_s for each in repetitions],
            better="higher",
            target=0,
        ),
    ]
    for name in repetitions[0].stages:
        p99 = [float(np.nanpercentile(each.stages[name], 99)) for each in repetitions]
        visible = name == "visible to a client"
        rows.append(
            report.measure(
                (f"{case}, half rate", f"p99 from training until {name}", "s"),
                p99,
                better="lower",
                target=_MAX_FRESH_S if visible else 0,
                claim="18.1" if visible else "",
            )
        )
    return rows


def _measure(fleet: Fleet, shape: Shape, repetitions: int, seconds: float) -> list[Repetition]:
    sustained = _turn(fleet, None, seconds, versions=True).seen.requests_per_s
    rate = _RATE_SHARE * sustained
    CONSOLE.print(f"[dim]{sustained:,.0f} requests/s with versions; the rate is {rate:,.0f}")
    done = []
    for n in range(repetitions):
        done.append(_repetition(fleet, shape, seconds, rate))
        CONSOLE.print(f"[dim]{n + 1}/{repetitions} {done[-1].line()}")
    return done


def _run(given: argparse.Namespace) -> Iterator[report.Row]:
    shape = Shape(name="fresh", rows=given.rows, tables=_TABLES, buckets=16)
    with start_fleet(_FOLDER, shape, _requests(shape), _VERSIONS_PER_S) as fleet:
        done = _measure(fleet, shape, given.repetitions, given.seconds)
    yield from _rows(done, shape)
    details = given.out.with_suffix(".repetitions.json")
    details.write_text(json.dumps([dataclasses.asdict(each) for each in done]) + "\n")
    pooled = {
        name: [value for each in done for value in each.stages[name]] for name in done[0].stages
    }
    plot.histograms("From training to", "s", pooled, given.out.with_suffix(".svg"))
    if failed := sum(each.failed for each in done):
        raise BenchError(f"{failed} requests failed")


if __name__ == "__main__":
    parser = parts.options("fresh", __doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each of five turns")
    parser.add_argument("--rows", type=int, default=125_000, help="of a table, of eight")
    parts.command("Freshness under load", _run, parser)
