"""Speed through two doors to the same backend and models, in turn: `--target PEER OURS`.

front_load (load.cc) sends ranking and lookup at batch 1, 64 and 256, over one connection and over
eight; and lookups beside `fill`, a backend that only fills its output, through the same door.
perf_analyzer would hide the server: a call costs it some 390 us of CPU, this caller 50 to 60.
"""

import argparse
import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import models, perf, report
from bench.front import questions, targets
from bench.front.questions import Question
from bench.front.targets import Site, Target
from bench.servers import BUILD, BenchError, Kind, Variant, build_target, make_backends, write_model
from bench.shapes import Shape
from embertide.server.adapters import triton

CLAIM = "B.3"
BATCHES = (1, 64, 256)
_THROUGHPUT = {1: 1.3, 64: 1.1, 256: 1.0}
_P99 = 0.8
_OF_FILL = 0.9
_SECONDS = 2.5  # of a run
_AT_ONCE = 4
_QUESTIONS = 32
_CALLER = BUILD / "cpp" / "bench" / "front" / "front_load"
KINDS = ("ranking", "lookup", "fill")
OURS: dict[Kind, Variant] = {
    kind: Variant(side="ours", kind=kind, instances=2, threads=1) for kind in ("ranking", "lookup")
}
FILL = Variant(side="fill", kind="lookup")


class Speeds:
    """Measures loads through doors."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        """Build the caller; what it sends is kept in a folder."""
        build_target("front_load")
        self._shape, self._folder = shape, folder

    def _questions(self, variant: Variant, batch: int) -> Path:
        """Return the file of different requests of a model, written once."""
        path = self._folder / f"{variant.model}-{batch}"
        if not path.exists():
            made = questions.requests(
                variant.kind, batch, _QUESTIONS, shape=self._shape, model=variant.model
            )
            # Sums of a batch are rounded by who else is in it: no answer is compared.
            questions.write(
                path, [Question(questions.INFER, each.SerializeToString()) for each in made]
            )
        return path

    def measure(
        self, target: Target, variant: Variant, batch: int, connections: int
    ) -> perf.Measured:
        """Run the caller once.

        Raises:
            BenchError: Calls failed.
        """
        at_once = max(_AT_ONCE, connections)
        command = [_CALLER, target.address, self._questions(variant, batch)]
        ran = subprocess.run(
            [*map(str, command), str(connections), str(at_once), str(_SECONDS)],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode != 0:
            raise BenchError(f"front_load failed: {ran.stderr[-500:]}")
        said = json.loads(ran.stdout)
        if said["failed"]:
            raise BenchError(f"{said['failed']} calls of {variant.model} failed at {target.name}")
        sys.stderr.write(
            f"{target.name}: {variant.model} b{batch} c{connections}: "
            f"{said['requests_per_s']:,.0f}/s, p99 {said['p99_us']:,.0f} us\n"
        )
        return perf.Measured(
            requests_per_s=said["requests_per_s"],
            latency_us_p99=said["p99_us"],
            report=ran.stdout,
        )

    def in_turn(
        self,
        sides: Sequence[tuple[Target, Variant]],
        batch: int,
        connections: int,
        repetitions: int,
    ) -> list[list[perf.Measured]]:
        """Measure the sides one after the other, so many times."""
        series: list[list[perf.Measured]] = [[] for _ in sides]
        for _ in range(repetitions):
            for side, measured in zip(sides, series, strict=True):
                measured.append(self.measure(*side, batch, connections))
        return series


@contextlib.contextmanager
def opened(names: Sequence[str], shape: Shape, folder: Path) -> Iterator[list[Target]]:
    """Start servers by name over the models that are measured."""
    backends = make_backends(triton.find_backends() / triton.BACKEND, ("fill",))
    files = models.make(shape, BUILD)
    repository = folder / "repository"
    shutil.rmtree(repository, ignore_errors=True)
    for variant in (*OURS.values(), FILL):
        write_model(repository, variant, shape, files)
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                targets.TARGETS[name](
                    Site(folder=folder / f"{n}-{name}", repository=repository, backends=backends)
                )
            )
            for n, name in enumerate(names)
        ]


def _words(connections: int) -> str:
    return "one connection" if connections == 1 else f"{connections} connections"


def rows_of(
    doors: Sequence[Target], speeds: Speeds, options: argparse.Namespace
) -> Iterator[report.Row]:
    """Measure all doors in turn, and give the rows of each beside the first."""
    kinds: list[Kind] = [kind for kind in OURS if kind in options.kind]
    for kind, batch, connections in itertools.product(kinds, BATCHES, options.connections):
        sides = [(door, OURS[kind]) for door in doors]
        peer, *others = speeds.in_turn(sides, batch, connections, options.repetitions)
        for ours, measured in zip(doors[1:], others, strict=True):
            case = f"{kind}, batch {batch}, {_words(connections)}, {ours.name}"
            name = f"{doors[0].name}, the same model"
            yield perf.compare_throughput(
                case, measured, peer, peer_name=name, target=_THROUGHPUT[batch], claim=CLAIM
            )
            yield perf.compare_p99(case, measured, peer, peer_name=name, target=_P99, claim=CLAIM)
    for ours, batch in itertools.product(doors[1:], BATCHES if "fill" in options.kind else ()):
        sides = [(ours, FILL), (ours, OURS["lookup"])]
        fill, mine = speeds.in_turn(sides, batch, 1, options.repetitions)
        yield perf.compare_throughput(
            f"lookup, batch {batch}, one connection, {ours.name}",
            mine,
            fill,
            peer_name="a backend that only fills its output",
            target=_OF_FILL,
            claim=CLAIM,
        )


def run(options: argparse.Namespace) -> Iterator[report.Row]:
    """Measure each target after the first beside it; one alone beside another of its kind."""
    names = options.target if len(options.target) > 1 else options.target * 2
    shape = Shape(name="criteo", rows=options.rows)
    base = BUILD / "bench" / "front"
    base.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=base) as folder,
        opened(names, shape, Path(folder)) as doors,
    ):
        yield from rows_of(doors, Speeds(shape, Path(folder)), options)
