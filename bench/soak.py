"""A fleet left alone for half an hour, and what it takes over time: `make soak`.

The fleet of `embertide chaos` without faults: a trainer that learns from live events, a control
plane, two Triton nodes, two Redis, clients that check every answer. Every few seconds each
process's resident bytes, descriptors and threads, the bytes in both Redis, in the SSD logs and in
the publication, and the latency of requests are noted. What is flat may not grow, by a line fitted
to the last two thirds, by more than a small share of its mean; the first third is warm-up.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import redis

from bench import parts, plot, report
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError
from embertide.server.adapters.process import interrupt_on_signals
from embertide.server.cli.chaos.options import ChaosOptions
from embertide.server.cli.chaos.rounds import Chaos
from embertide.server.cli.common_options import DEFAULT_BACKENDS, DEFAULT_CACHE

_FOLDER = BUILD / "bench" / "soak"
_EVERY_S = 5.0
_SAID_EVERY = 12  # samples
_WARM_UP = 1 / 3
_MIN_SAMPLES = 12
_MAX_GROWTH = 0.1  # of the mean, over the last two thirds
_FLAT = ("rss", "descriptors", "threads", "p99")

Sample = dict[str, float]


def _of_process(pid: int) -> tuple[float, float, float]:
    """Return a process's resident MiB, descriptors and threads."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    rss_kib = float(fields["VmRSS"].split()[0])
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return rss_kib / 1024, descriptors, float(fields["Threads"])


def _folder_mib(folder: Path) -> float:
    """Return what a folder takes on the drive; files may go while it is looked at."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(place) / name).lstat().st_blocks * 512
    return total / 2**20


def _sample(chaos: Chaos, at_s: float) -> Sample:
    """Look at everything once.

    Raises:
        BenchError: An answer was wrong, or a process ended.
    """
    fleet, sample = chaos.fleet, {"at_s": at_s}
    if fleet.endings:
        ending = fleet.endings[0]
        raise BenchError(f"{ending.name} ended with {ending.code}: {ending.log}")
    for name in fleet.names:
        child = fleet.child(name)
        if child is not None:
            rss, descriptors, threads = _of_process(child.pid)
            sample |= {f"rss {name}": rss, f"descriptors {name}": descriptors}
            sample[f"threads {name}"] = threads
    for name, url in (("bus", fleet.bus_url), ("state", fleet.state_url)):
        with redis.Redis.from_url(url) as client:
            sample[f"redis {name}"] = int(client.info("memory")["used_memory"]) / 2**20
    for name in ("ssd", "publication", "state"):
        sample[f"drive {name}"] = _folder_mib(fleet.options.directory / name)
    asked, wrong = chaos.traffic.take()
    if wrong:
        raise BenchError(f"{len(wrong)} answers are wrong: {wrong[0]}")
    took = [each.took_s for each in asked if not each.failure]
    sample["requests"] = len(asked)
    sample["answers"] = sum(each.keys for each in asked)
    sample["failed"] = sum(bool(each.failure) or bool(each.degraded) for each in asked)
    if took:
        sample["p50"], sample["p99"] = np.percentile(took, [50, 99]) * 1e3
    sample["version"] = chaos.replay.newest
    return sample


def _run(minutes: float, events_per_s: float) -> list[Sample]:
    options = ChaosOptions(
        directory=_FOLDER,
        backends=DEFAULT_BACKENDS,
        cache=DEFAULT_CACHE,
        events_per_s=events_per_s,
        versions_per_snapshot=50,
    )
    options.empty()
    samples: list[Sample] = []
    lines = _FOLDER / "samples.jsonl"
    with Chaos(options, CONSOLE.print) as chaos, lines.open("w") as file:
        begun_s = time.monotonic()
        while (at_s := time.monotonic() - begun_s) < 60 * minutes:
            if at_s < _EVERY_S * (len(samples) + 1):
                chaos.tick()
                continue
            samples.append(_sample(chaos, at_s))
            file.write(json.dumps(samples[-1]) + "\n")
            file.flush()
            if len(samples) % _SAID_EVERY == 0:
                CONSOLE.print(f"[dim]{_line(samples[-1])}")
    return samples


def _line(sample: Mapping[str, float]) -> str:
    resident = {k: v for k, v in sample.items() if k.startswith("rss ")}
    rss = ", ".join(f"{name[4:]} {mib:.0f}" for name, mib in resident.items())
    return (
        f"{sample['at_s'] / 60:.1f} min: version {sample['version']:.0f}; MiB: {rss}; p99 "
        f"{sample.get('p99', float('nan')):.1f} ms, {sample['failed']:.0f} failed"
    )


def growth(at_s: Sequence[float], values: Sequence[float]) -> float:
    """Return by which share of its mean a line through the values rises from first to last."""
    slope = float(np.polyfit(at_s, values, 1)[0])
    mean = float(np.mean(values))
    return slope * (at_s[-1] - at_s[0]) / mean if mean else 0.0


def _rows(samples: Sequence[Sample]) -> list[report.Row]:
    warm = samples[int(len(samples) * _WARM_UP) :]
    at_s = [each["at_s"] for each in warm]
    case = f"{samples[-1]['at_s'] / 60:.0f} minutes"
    rows = []
    for name in samples[-1]:
        series = [each[name] for each in warm if name in each]
        if name.partition(" ")[0] in _FLAT and len(series) == len(warm):
            rows.append(
                report.measure(
                    (case, f"growth of {name}", "share of its mean"),
                    [growth(at_s, series)],
                    better="lower",
                    target=_MAX_GROWTH,
                    claim="18.10",
                )
            )
    for name in ("redis bus", "redis state", "drive ssd", "drive publication", "drive state"):
        series = [each[name] for each in warm]
        rows.append(
            report.measure((case, f"most {name}", "MiB"), [max(series)], better="lower", target=0)
        )
    for name in ("requests", "answers", "failed"):
        total = sum(each[name] for each in samples)
        rows.append(report.measure((case, name, "count"), [total], better="lower", target=0))
    return rows


def _draw(samples: Sequence[Sample], path: Path) -> None:
    for what, unit in (
        ("rss", "MiB"),
        ("descriptors", "count"),
        ("threads", "count"),
        ("redis", "MiB"),
        ("drive", "MiB"),
        ("p", "ms"),
    ):
        names = [name for name in samples[-1] if name.split(" ")[0].rstrip("0123456789") == what]
        lines = {
            name: [(each["at_s"] / 60, each[name], 0.0) for each in samples if name in each]
            for name in names
        }
        label = "latency" if what == "p" else what
        picture = path.with_suffix(f".{label}.svg")
        plot.curves("Left alone", ("minutes", f"{label}, {unit}"), lines, picture, in_time=True)


def _measure(given: argparse.Namespace) -> Iterator[report.Row]:
    interrupt_on_signals()
    if given.again:
        samples = [json.loads(line) for line in given.again.read_text().splitlines()]
    else:
        samples = _run(given.minutes, given.events_per_s)
    if len(samples) < _MIN_SAMPLES:
        raise BenchError(f"{len(samples)} samples say nothing: take a minute at least")
    yield from _rows(samples)
    _draw(samples, given.out)


if __name__ == "__main__":
    parser = parts.options("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--events-per-s", type=float, default=400.0)
    parser.add_argument("--again", type=Path, help="make the report of a samples.jsonl again")
    parts.command("A fleet left alone", _measure, parser, barred=True)
