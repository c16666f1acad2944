"""Speed of this checkout beside an earlier one: store, training, serving, measured in turn.

`git worktree add ../before COMMIT && make -C ../before dev cpp`, then
`python -m bench.beside --before ../before`. Each side runs its own programs and its own compiled
parts, through commands that both have; requests of serving are made once, and one caller sends them
to both.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from bench import models, parts, report
from bench.front import questions, targets
from bench.front.questions import Question
from bench.servers import BUILD, ROOT, BenchError, build_target
from bench.shapes import Shape
from embertide.server.adapters.process import Child, free_ports

CLAIM = "C.4"
_LEAST = 0.95
_SHAPE = Shape(name="criteo", rows=200_000)
_EVENTS = 30_000
_SECONDS = 2.5  # of a run of calls
_READY_S = 120.0
_CALLER = BUILD / "cpp" / "bench" / "front" / "front_load"
# Looks up and learns batches of 1,024 samples, 26 keys each, for so long; rows that are there.
_STORE = """
import json, time
import numpy as np
from bench.shapes import Shape
from embertide.trainer.embedding.store import EmbeddingStore
rows = EmbeddingStore(Shape(name="criteo", rows=200_000).config(), seed=1)
rng = np.random.default_rng(1)
batches = [rng.integers(0, 20_000, (1024, 26)) for _ in range(32)]
def lookups(): rows.eval(); [rows(each) for each in batches]
def steps():
    rows.train()
    for each in batches:
        rows(each).sum().backward(); rows.step()
steps()
found = {}
for name, work in (("lookups", lookups), ("training steps", steps)):
    took = []
    for _ in range(7):
        began = time.perf_counter(); work(); took.append(time.perf_counter() - began)
    found[name] = len(batches) * 1024 / sorted(took)[len(took) // 2]
print(json.dumps(found))
"""

Figures = dict[tuple[str, str, str], float]  # by case, metric and unit


def _python(tree: Path) -> Path:
    return tree / ".venv" / "bin" / "python"


def _ran(tree: Path, *words: str) -> str:
    # A checkout imports its own benchmarks.
    ran = subprocess.run(
        [_python(tree), *words], cwd=tree, capture_output=True, text=True, check=False
    )
    if ran.returncode != 0:
        raise BenchError(f"{tree}: {' '.join(words)[:80]} failed: {ran.stderr[-800:]}")
    return ran.stdout


def _store(tree: Path) -> Figures:
    said = json.loads(_ran(tree, "-c", _STORE).splitlines()[-1])
    return {("store, 1,024 samples of 26 keys", name, "samples/s"): said[name] for name in said}


def _training(tree: Path) -> Figures:
    with tempfile.TemporaryDirectory(dir=BUILD / "bench") as folder:
        words = ("-m", "embertide.trainer", "train", f"{folder}/run", "--demo")
        before, began = os.times(), time.perf_counter()
        _ran(tree, *words, "--events", str(_EVENTS))
        took_s, after = time.perf_counter() - began, os.times()
    used_s = sum(after[2:4]) - sum(before[2:4])  # of children
    case = f"embertide train --demo, {_EVENTS:,} events"
    return {(case, "events a second", "1/s"): _EVENTS / took_s, (case, "CPU", "s"): used_s}


class _Served:
    """One model that both checkouts serve, each by `embertide serve`."""

    def __init__(self, kind: str, batch: int, folder: Path) -> None:
        self.kind, self.batch, self._folder = kind, batch, folder
        self._requests = folder / f"{kind}-{batch}"
        made = questions.requests(kind, batch, 32, shape=_SHAPE, model="model")
        questions.write(
            self._requests, [Question(questions.INFER, each.SerializeToString()) for each in made]
        )

    def figures(self, address: str) -> Figures:
        words = [_CALLER, address, self._requests, 4, 4, _SECONDS]
        ran = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise BenchError(f"front_load failed: {ran.stderr[-500:]}")
        said = json.loads(ran.stdout)
        if said["failed"]:
            raise BenchError(f"{said['failed']} calls failed")
        case = f"serve, {self.kind}, batch {self.batch}"
        return {
            (case, "requests a second", "1/s"): said["requests_per_s"],
            (case, "p99", "us"): said["p99_us"],
        }


@contextlib.contextmanager
def _serving(tree: Path, kind: str, snapshot: Path, folder: Path) -> Iterator[str]:
    """Serve a snapshot by a checkout until the block ends; yield where."""
    port, metrics = free_ports(2)
    command = [str(_python(tree)), "-m", "embertide.server.cli", "serve", str(snapshot)]
    command += ["--kind", kind, "--name", "model", "--directory", str(folder / "node")]
    command += ["--grpc-port", str(port), "--metrics-port", str(metrics)]
    child = Child(command, log=folder / "serve.log")
    try:
        address = f"127.0.0.1:{port}"
        until = time.monotonic() + _READY_S
        ask = next(questions.requests(kind, 1, 1, shape=_SHAPE, model="model"))
        while not targets.heard(address, questions.INFER, ask.SerializeToString()):
            if time.monotonic() > until:
                raise BenchError(f"{tree} does not serve after {_READY_S:.0f} s")
            time.sleep(0.2)
        yield address
    finally:
        child.stop()


def in_turn(
    sides: tuple[Callable[[], Figures], Callable[[], Figures]], repetitions: int
) -> Iterator[report.Row]:
    """Measure ours and the earlier one, first once for nothing, and give a row a figure."""
    series: list[dict[tuple[str, str, str], list[float]]] = [{}, {}]
    for turn in range(repetitions + 1):
        for side, measured in zip(sides, series, strict=True):
            for name, value in side().items():
                if turn:
                    measured.setdefault(name, []).append(value)
                    sys.stderr.write(f"{', '.join(name)}: {value:,.1f}\n")
    for name, ours in series[0].items():
        # Less time is better, and more of anything else.
        better: Literal["higher", "lower"] = "lower" if name[2] in ("s", "us") else "higher"
        yield report.compare(
            name,
            ours,
            series[1][name],
            peer_name="the earlier commit",
            better=better,
            target=1 / _LEAST if better == "lower" else _LEAST,
            claim=CLAIM,
        )


def run(before: Path, repetitions: int) -> Iterator[report.Row]:
    """Measure both checkouts."""
    if not _python(before).exists():
        raise BenchError(f"{before} is not built: run make dev cpp there")
    trees = (ROOT, before.resolve())
    for measure in (_store, _training):
        ours, theirs = (functools.partial(measure, tree) for tree in trees)
        yield from in_turn((ours, theirs), repetitions)
    build_target("front_load")
    snapshot = models.make(_SHAPE, BUILD).snapshot
    for kind in ("lookup", "ranking"):
        with contextlib.ExitStack() as stack:
            folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(3)]
            addresses = [
                stack.enter_context(_serving(tree, kind, snapshot, folder))
                for tree, folder in zip(trees, folders, strict=False)
            ]
            for batch in (1, 64, 256):
                served = _Served(kind, batch, folders[2])
                ours, theirs = (functools.partial(served.figures, at) for at in addresses)
                yield from in_turn((ours, theirs), repetitions)


def main() -> None:
    """Write the rows."""
    parser = parts.options("beside", __doc__)
    parser.add_argument("--before", type=Path, required=True, help="a built checkout to measure by")
    parts.command(
        "beside an earlier commit", lambda given: run(given.before, given.repetitions), parser
    )


if __name__ == "__main__":
    main()
