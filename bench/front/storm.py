"""A storm of calls that are not waited for: does the server live, and is it right all the while?

Callers in Python, by threads, by asyncio and by frames of their own, and in C++, over eight
connections together: deadlines of 0.1 to 10 ms, cancels after as long, streams reset after their
headers, in their message and while they are answered, streams that end too early or never, and
connections reset. Every answer is compared with that of a quiet server, bit for bit. A server that
ends is started again, and counted. Right answers about models are those of a stock server that
holds all of them; of what nodes ask one another, those that the node gave before.

A storm is made in chunks, which are kept in `build/bench/front`: one that was stopped goes on.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from bench import report
from bench.front import callers, questions, targets
from bench.front.targets import Kept, Site, Target
from bench.servers import BUILD, ROOT, BenchError, build_target
from embertide.server.adapters.process import how_ended

CLAIM = "B.1"
_CONNECTIONS = 2  # of each kind of caller
_SAMPLE_S = 1.0
_LONGEST_S = 1000.0  # of a chunk
_FLAT = 1.1
_SLACK_BYTES, _SLACK_FILES = 32 << 20, 16
_MIB = 1 << 20
# Which callers make how much of the calls.
SHARES = {"threads": 0.15, "asyncio": 0.15, "frames": 0.3, "c++": 0.4}


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The resources that a server's processes had at a time, together."""

    at_s: float
    rss_bytes: int
    files: int
    threads: int


class Watched:
    """Looks at a target's processes once a second. A context manager."""

    def __init__(self, target: Target) -> None:
        """Take whose server it is."""
        self.samples: list[Sample] = []
        self._target, self._ended = target, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._began = time.monotonic()

    def _look(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            processes = (self._target.server.process, *self._target.beside)
            folders = [Path(f"/proc/{each.pid}") for each in processes]
            with contextlib.suppress(OSError, ValueError, IndexError):
                pages = sum(int((each / "statm").read_text().split()[1]) for each in folders)
                self.samples.append(
                    Sample(
                        time.monotonic() - self._began,
                        pages * os.sysconf("SC_PAGE_SIZE"),
                        sum(len(list((each / "fd").iterdir())) for each in folders),
                        sum(len(list((each / "task").iterdir())) for each in folders),
                    )
                )

    def __enter__(self) -> Self:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()


def _command(kind: str, job: callers.Job) -> list[str]:
    if kind == "c++":
        program = BUILD / "cpp" / "bench" / "front" / "front_storm"
        words = (job.address, job.questions, job.calls, job.seed, job.connections)
        return [str(program), *map(str, words)]
    return [sys.executable, "-m", "bench.front.callers", json.dumps(dataclasses.asdict(job))]


def call(target: Target, path: Path, calls: int, seed: int) -> dict[str, dict[str, int]]:
    """Have all callers make so many calls; return how they ended, by kind of caller.

    Raises:
        BenchError: A caller fails, or takes too long.
    """
    running = {}
    with contextlib.ExitStack() as stack:
        for n, (kind, share) in enumerate(SHARES.items()):
            job = callers.Job(
                kind=kind,
                address=target.address,
                questions=str(path),
                calls=max(1, round(share * calls)),
                seed=seed * len(SHARES) + n,
                connections=_CONNECTIONS,
            )
            process = subprocess.Popen(
                _command(kind, job), stdout=subprocess.PIPE, cwd=ROOT, text=True
            )
            stack.callback(process.kill)
            running[kind] = process
        ended = {}
        until = time.monotonic() + _LONGEST_S
        for kind, process in running.items():
            try:
                said, _ = process.communicate(timeout=max(1.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise BenchError(f"callers by {kind} do not end in {_LONGEST_S:.0f} s") from None
            if process.returncode != 0:
                raise BenchError(f"callers by {kind} ended with {process.returncode}")
            ended[kind] = json.loads(said.splitlines()[-1])
    return ended


def _chunk(target: Target, kept: Kept, path: Path, calls: int, seed: int) -> dict[str, Any]:
    ends, down = collections.Counter(kept.ends), len(kept.down_s)
    began = time.monotonic()
    with Watched(target) as watched:
        ended = call(target, path, calls, seed)
    kept.check()
    found = collections.Counter(kept.ends - ends)
    found.update(
        f"beside it, {how_ended(each.code or 0)}" for each in target.beside if not each.alive()
    )
    return {
        "calls": calls,
        "seed": seed,
        "seconds": time.monotonic() - began,
        "ended": ended,
        "ends": dict(found),
        "down_s": kept.down_s[down:],
        "samples": [dataclasses.astuple(each) for each in watched.samples],
    }


# --- what is kept ---------------------------------------------------------------------------------


def _kept_file(name: str) -> Path:
    return BUILD / "bench" / "front" / f"storm_{name}.json"


def _former(path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.fresh or not path.is_file():
        return []
    held = json.loads(path.read_text())
    same = held["commit"] == report.commit(ROOT) and held["seed"] == options.seed
    return list(held["chunks"]) if same else []


def _keep(path: Path, options: argparse.Namespace, chunks: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {"commit": report.commit(ROOT), "seed": options.seed, "chunks": chunks}
    path.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


def storm(
    target: Target, options: argparse.Namespace, path: Path, known: Path
) -> list[dict[str, Any]]:
    """Make the chunks that are not made yet, and return all.

    Args:
        target: That answers.
        options: The command's options.
        path: Where chunks are kept.
        known: The questions.
    """
    chunks = _former(path, options)
    done = sum(each["calls"] for each in chunks)
    first = questions.read(known)[0]
    at = target.address if target.peers else None
    with Kept(target.server, (first.path, first.request), at) as kept:
        while done < options.calls:
            calls = min(options.chunk, options.calls - done)
            seed = options.seed * 100_000 + len(chunks)
            chunks.append(_chunk(target, kept, known, calls, seed))
            done += calls
            _keep(path, options, chunks)
            _say(target, chunks[-1], done)
        alive = target.server.answers()
    if not alive and not chunks[-1]["ends"]:
        raise BenchError(f"{target.name} does not answer after the storm")
    return chunks


def _say(target: Target, chunk: dict[str, Any], done: int) -> None:
    last = chunk["samples"][-1] if chunk["samples"] else (0, 0, 0, 0)
    sys.stderr.write(
        f"{target.name}: {done:,} calls, {chunk['calls'] / chunk['seconds']:,.0f}/s, "
        f"ends {chunk['ends']}, {last[1] / _MIB:.0f} MiB, {last[2]} files, {last[3]} threads\n"
    )


# --- rows -----------------------------------------------------------------------------------------


def counts(chunks: Sequence[dict[str, Any]]) -> collections.Counter[str]:
    """Count how calls of all callers ended: right, wrong, cancelled, and so on."""
    total: collections.Counter[str] = collections.Counter()
    for chunk in chunks:
        for ended in chunk["ended"].values():
            for name, count in ended.items():
                kind, _, ending = name.partition(": ")
                total[ending if ending in _ENDINGS else f"{kind}: {ending}"] += count
    return total


_ENDINGS = {
    *("right", "wrong", "DEADLINE_EXCEEDED", "CANCELLED", "UNAVAILABLE", "sent", "aborted"),
}


def unanswered(total: collections.Counter[str]) -> int:
    """Return the calls that waited and got an error of the server's, or nothing.

    While a server is away, some proxies have words of gRPC's for it, which are counted here.
    """
    return sum(count for name, count in total.items() if name.startswith("plain: "))


def _growth(samples: Sequence[Sequence[float]], column: int) -> tuple[float, float]:
    """Return the medians after the first tenth, and at the end."""
    values = [each[column] for each in samples]
    tenth = max(1, len(values) // 10)
    first = values[tenth : 2 * tenth] or values
    return statistics.median(first), statistics.median(values[-tenth:])


def rows_of(name: str, chunks: Sequence[dict[str, Any]]) -> Iterator[report.Row]:
    """Give the rows of one target."""
    calls, total = sum(each["calls"] for each in chunks), counts(chunks)
    ends = sum(sum(each["ends"].values()) for each in chunks)
    case = f"storm of {calls:,} calls, {name}"

    def row(metric: str, unit: str, value: float, target: float | None = None) -> report.Row:
        return report.measure(
            (case, metric, unit),
            [value],
            better="lower",
            target=target or 0,
            claim="" if target is None else CLAIM,
        )

    def holds(metric: str, held: bool) -> report.Row:
        name = (case, metric, "1: yes")
        return report.measure(name, [float(held)], better="higher", target=1, claim=CLAIM)

    yield row("ends of the server", "count", ends, 0)
    yield row("ends in a million calls", "count", 1e6 * ends / calls)
    yield row("wrong answers", "count", total["wrong"], 0)
    # Who waits may not find no server where none has ended. (A node says UNAVAILABLE of a call
    # whose time has passed, too: such are not meant.)
    every = [ended for chunk in chunks for ended in chunk["ended"].values()]
    away = sum(ended.get("plain: UNAVAILABLE", 0) for ended in every)
    lost = unanswered(total) + (0 if ends else away)
    yield row("waited for, not answered", "count", lost, 0)
    yield row("answered right", "count", total["right"])
    yield row("their deadline passed", "count", total["DEADLINE_EXCEEDED"])
    yield row("cancelled", "count", total["CANCELLED"])
    yield row("reset or left, on the wire", "count", total["sent"] + total["aborted"])
    yield row("found no server", "count", total["UNAVAILABLE"])
    others = sum(count for ending, count in total.items() if ending not in _ENDINGS)
    yield row("ended otherwise", "count", others - unanswered(total))
    seconds = sum(each["seconds"] for each in chunks)
    yield row("calls a second", "1/s", calls / seconds)
    down_s = [each for chunk in chunks for each in chunk["down_s"]]
    if down_s:
        yield row("away after an end", "s", statistics.median(down_s))
    samples = [each for chunk in chunks for each in chunk["samples"]]
    if samples and not ends:
        first, last = _growth(samples, 1)
        yield holds("memory is flat", last <= _FLAT * first + _SLACK_BYTES)
        yield row("memory at the end", f"times {first / _MIB:.0f} MiB", last / first)
        first, last = _growth(samples, 2)
        yield holds("descriptors are flat", last <= _FLAT * first + _SLACK_FILES)
        yield row("descriptors at the end", f"times {first:.0f}", last / first)
    for ending, count in total.most_common():
        if ending not in _ENDINGS:
            sys.stderr.write(f"{name}: {count} x {ending}\n")


def run(options: argparse.Namespace) -> Iterator[report.Row]:
    """Storm each target in turn."""
    if "c++" in SHARES:
        build_target("front_storm")
    (BUILD / "bench" / "front").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD / "bench" / "front") as made:
        folder = Path(made)
        repository = targets.small_repository(folder / "repository")
        known = folder / "questions"
        # Right is what the stock server answers while nothing else is asked.
        with targets.TARGETS["stock"](
            Site(folder=folder / "quiet", repository=repository)
        ) as quiet:
            questions.write(known, questions.make(quiet.address))
        for name in options.target:
            site = Site(folder=folder / name, repository=repository)
            with targets.TARGETS[name](site) as target:
                asked = known
                if target.peers:
                    asked = folder / f"questions-{name}"
                    questions.write(asked, questions.of_peers(target.address))
                chunks = storm(target, options, _kept_file(name), asked)
            yield from rows_of(target.name, chunks)
