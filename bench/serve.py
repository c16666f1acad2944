"""Serving, ours against torch in Triton, in its Python backend and in C++: `make bench-serve`.

All sides hold the same weights in one tritonserver and get the same requests from perf_analyzer
over gRPC. First each side's variants (instances, threads, dynamic batching) are tried once a case,
then the best of each are measured in turn, ours, peer, ours, peer. Before that the answers of all
sides must agree.
"""

import argparse
import dataclasses
import itertools
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype

from bench import aoti, keys, models, parts, perf, report, vectors
from bench.report import CONSOLE
from bench.servers import (
    BUILD,
    BenchError,
    BenchServer,
    Form,
    Kind,
    Side,
    Variant,
    make_backends,
)
from bench.shapes import Shape

_AGREE = 1e-5
# Distinct requests of a case; perf_analyzer sends them in a circle.
_REQUESTS = 32
_SMALL_SAMPLES = 4096
# The window of one repetition: perf_analyzer runs three of them, and its start costs as much again.
_WINDOW_MS = 300
_PILOT_WINDOW_MS = 150
_CLAIM, _CLAIM_OF_AOTI = "23.4", "F.3"
_PEER_NAMES: dict[Side, str] = {
    "python": "Triton Python backend, torch",
    "aoti": "AOTInductor with EmbeddingBag",
    "fill": "C++ backend that only fills the output",
}


Targets = dict[Side, tuple[float, float]]  # by peer; with AVX2, and with AVX-512


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kind of request, and what ours / peer must reach in requests per second."""

    kind: Kind
    batch: int
    targets: Targets

    def target(self, peer: Side, *, avx512: bool) -> float:
        """Return what ours / peer must reach on such a CPU."""
        return self.targets[peer][avx512]

    def name(self, shape: Shape) -> str:
        """Name the case in the report."""
        form = f"{shape.tables}x{shape.rows}x{shape.dim}"
        keys_a_feature = f", {shape.bag} keys a feature" if shape.bag > 1 else ""
        return f"{self.kind} {form}{keys_a_feature}, batch {self.batch}"


# Issue 23 sets them for two cores with AVX2 and for four with AVX-512, in this order; issue F those
# beside AOTInductor.
_CRITEO: tuple[tuple[Kind, int, Targets], ...] = (
    ("ranking", 1, {"python": (2.8, 3.6), "aoti": (1.0, 1.0)}),
    ("ranking", 64, {"python": (1.8, 2.4), "aoti": (1.05, 1.05)}),
    ("ranking", 256, {"python": (1.4, 1.7), "aoti": (1.05, 1.05)}),
    ("lookup", 1, {"python": (2.9, 2.8), "fill": (0.9, 0.9)}),
    ("lookup", 64, {"python": (2.4, 2.3), "fill": (0.75, 0.8)}),
    ("lookup", 256, {"python": (2.0, 1.9), "fill": (0.7, 0.7)}),
)
CRITEO = tuple(Case(kind=kind, batch=batch, targets=each) for kind, batch, each in _CRITEO)
BAGS = (Case(kind="ranking", batch=64, targets={"python": (1.4, 1.4)}),)


def variants(side: Side, kind: Kind, *, stacked: bool) -> list[Variant]:
    """Return what a side may choose from: no instance has more threads than there are cores."""
    most = 1 if side == "fill" else min(3, os.cpu_count() or 1)
    threads = range(1, most + 1)
    forms: Sequence[Form] = ("",)
    if side == "aoti":
        forms = aoti.FORMS
    elif side == "python" and stacked:
        forms = ("stacked",)
    grid = itertools.product(forms, (1, 2), threads, (True, False))
    return [
        Variant(
            side=side,
            kind=kind,
            instances=instances,
            threads=each,
            batching=batching,
            form=form,
        )
        for form, instances, each, batching in grid
    ]


def write_data(shape: Shape, kind: Kind, batch: int) -> Path:
    """Write what perf_analyzer sends of a kind and batch, and return the file."""
    path = BUILD / "bench" / "data" / f"{shape.name}-{kind}-{batch}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    count = _REQUESTS if shape.bag > 1 else max(_REQUESTS, _SMALL_SAMPLES // batch)
    made = keys.requests(shape, batch=batch, count=count, dense=kind == "ranking")
    path.write_text(json.dumps(made, separators=(",", ":")))
    return path


class Bench:
    """The measurements of one shape."""

    def __init__(self, server: BenchServer, cases: Sequence[Case], *, stacked: bool) -> None:
        """Make the cases' requests."""
        self.server, self.shape, self.cases = server, server.shape, cases
        self.stacked = stacked or self.shape.bag > 1
        self._data = {case: write_data(self.shape, *case) for case in cases_by_data(cases)}

    def measure(self, variant: Variant, case: Case, window_ms: int) -> perf.Measured:
        """Run perf_analyzer once."""
        load = perf.Load(
            model=self.server.load(variant),
            url=self.server.triton.grpc,
            data=self._data[case.kind, case.batch],
            batch=1 if self.shape.bag > 1 else case.batch,
            window_ms=window_ms,
        )
        measured = perf.run(load)
        CONSOLE.print(
            f"[dim]{variant.model} b{case.batch}: {measured.requests_per_s:,.0f}/s,"
            f" p99 {measured.latency_us_p99:,.0f} us"
        )
        return measured

    # --- agreement --------------------------------------------------------------------------------

    def answer(self, variant: Variant, batch: int) -> NDArray[np.float32]:
        """Return a variant's scores, or embeddings, of a request of `batch` samples."""
        keys_NFL, dense_ND = keys.draw(self.shape, batch)
        if self.shape.bag > 1:
            lengths = np.full((1, batch * self.shape.tables), self.shape.bag, np.int32)
            arrays: dict[str, NDArray[Any]] = {
                "KEYS": keys_NFL.reshape(1, -1),
                "LENGTHS": lengths,
                "DENSE": dense_ND.reshape(1, -1),
            }
        else:
            arrays = {"KEYS": keys_NFL[:, :, 0], "DENSE": dense_ND}
        if variant.kind == "lookup":
            del arrays["DENSE"]
        inputs = []
        for name, array in arrays.items():
            tensor = tritonclient.grpc.InferInput(
                name, array.shape, np_to_triton_dtype(array.dtype)
            )
            tensor.set_data_from_numpy(np.ascontiguousarray(array))
            inputs.append(tensor)
        result = self.server.client.infer(self.server.load(variant), inputs)
        name = "SCORE" if variant.kind == "ranking" else "EMBEDDING"
        return np.asarray(result.as_numpy(name), np.float32)

    def check(self, ours: Variant, peer: Variant, batch: int) -> None:
        """Prove that both sides answer alike, and that the answers differ from each other.

        Raises:
            BenchError: They do not.
        """
        a, b = self.answer(ours, batch), self.answer(peer, batch)
        if a.shape != b.shape:
            raise BenchError(f"{ours.model} answers {a.shape}, {peer.model} {b.shape}")
        worst = float(np.abs(a - b).max())
        if worst > _AGREE:
            raise BenchError(f"{ours.model} and {peer.model} differ by {worst:.2g}")
        if batch > 1 and float(a.std()) < 100 * _AGREE:
            raise BenchError(f"{ours.model} answers nearly the same for all keys")
        CONSOLE.print(f"{ours.model} and {peer.model} agree within {worst:.2g}, batch {batch}")

    # --- measuring --------------------------------------------------------------------------------

    def choose(self, side: Side, kind: Kind) -> dict[int, Variant]:
        """Return the fastest variant of a side by batch; one that answers next to nothing loses.

        Raises:
            BenchError: None of them can be measured at some batch.
        """
        cases = [case for case in self.cases if case.kind == kind]
        best: dict[int, tuple[float, Variant]] = {}
        for variant in variants(side, kind, stacked=self.stacked):
            before = {each for _, each in best.values()}
            for case in cases:
                try:
                    rate = self.measure(variant, case, _PILOT_WINDOW_MS).requests_per_s
                except perf.UnmeasuredError:
                    CONSOLE.print(f"[yellow]{variant.model} b{case.batch}: not measured, left out")
                    continue
                if rate > best.get(case.batch, (0.0, variant))[0]:
                    best[case.batch] = (rate, variant)
            losers = (before | {variant}) - {each for _, each in best.values()}
            self.server.unload(losers)
        if lost := [case.batch for case in cases if case.batch not in best]:
            raise BenchError(f"no variant of {side} {kind} can be measured at batches {lost}")
        return {batch: variant for batch, (_, variant) in best.items()}

    def _interleave(
        self, case: Case, sides: Sequence[Variant], repetitions: int
    ) -> list[list[perf.Measured]]:
        series: list[list[perf.Measured]] = [[] for _ in sides]
        for _ in range(repetitions):
            for i, variant in enumerate(sides):
                series[i].append(self.measure(variant, case, _WINDOW_MS))
        return series

    def run(self, repetitions: int) -> Iterator[list[report.Row]]:
        """Choose, prove and measure every case; give its rows before the next one is measured."""
        for kind in dict.fromkeys(case.kind for case in self.cases):
            cases = [case for case in self.cases if case.kind == kind]
            names: list[Side] = ["ours", *cases[0].targets]
            chosen = {side: self.choose(side, kind) for side in names}
            for case in cases:
                sides = [chosen[side][case.batch] for side in names]
                for peer in sides[1:]:
                    if peer.side != "fill":
                        self.check(sides[0], peer, case.batch)
                series = self._interleave(case, sides, repetitions)
                yield rows_of(case, self.shape, sides, series, avx512="avx512" in vectors.here())
            self.server.unload({each for side in chosen.values() for each in side.values()})


def rows_of(
    case: Case,
    shape: Shape,
    sides: Sequence[Variant],
    series: Sequence[Sequence[perf.Measured]],
    *,
    avx512: bool,
) -> list[report.Row]:
    """Return the rows of a case: its first side, ours, against each of the others."""
    ours, case_name = series[0], case.name(shape)
    rows = []
    for variant, peer in zip(sides[1:], series[1:], strict=True):
        name = f"{_PEER_NAMES[variant.side]} ({variant.label}; ours {sides[0].label})"
        target = case.target(variant.side, avx512=avx512)
        claim = _CLAIM_OF_AOTI if variant.side == "aoti" else _CLAIM
        rows.append(
            perf.compare_throughput(
                case_name, ours, peer, peer_name=name, target=target, claim=claim
            )
        )
        if variant.side != "fill":
            rows.append(
                perf.compare_p99(case_name, ours, peer, peer_name=name, target=1.0, claim=claim)
            )
    return rows


def beside(peers: Collection[Side], cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return the cases with these peers alone, without those that have none of them."""
    held = [
        dataclasses.replace(case, targets={p: t for p, t in case.targets.items() if p in peers})
        for case in cases
    ]
    return tuple(case for case in held if case.targets)


def cases_by_data(cases: Sequence[Case]) -> list[tuple[Kind, int]]:
    """Return the distinct inputs of cases."""
    return list(dict.fromkeys((case.kind, case.batch) for case in cases))


def _options() -> argparse.ArgumentParser:
    parser = parts.options("serve", __doc__)
    parser.add_argument("--only", choices=("criteo", "bags"), help="one of the two models")
    parser.add_argument("--rows", type=int, default=200_000, help="of each criteo table")
    parser.add_argument("--bag-rows", type=int, default=10_000_000, help="of all bag tables")
    parser.add_argument("--kind", choices=("ranking", "lookup"), help="cases of one kind")
    parser.add_argument("--peer", choices=_PEER_NAMES, help="measure beside this one alone")
    parser.add_argument(
        "--stacked", action="store_true", help="the Python peer stacks its tables in one"
    )
    parser.add_argument("--backend", type=Path, default=BUILD / "cpp" / "backends" / "embertide")
    return parser


def _plan(arguments: argparse.Namespace) -> list[tuple[Shape, tuple[Case, ...]]]:
    bags = Shape(name="bags", rows=arguments.bag_rows // 26, dim=64, bag=20)
    plan = [(Shape(name="criteo", rows=arguments.rows), CRITEO), (bags, BAGS)]
    kinds = {arguments.kind} if arguments.kind else {"ranking", "lookup"}
    peers = [arguments.peer] if arguments.peer else list(_PEER_NAMES)
    chosen = [
        (shape, beside(peers, [case for case in cases if case.kind in kinds]))
        for shape, cases in plan
        if arguments.only in (None, shape.name)
    ]
    return [(shape, cases) for shape, cases in chosen if cases]


def _measure(arguments: argparse.Namespace) -> Iterator[report.Row]:
    backends = make_backends(arguments.backend)
    for shape, cases in _plan(arguments):
        CONSOLE.print(f"[bold]{shape.name}[/bold]: {shape.row_bytes / 1e9:.2f} GB of rows")
        files = models.make(shape, BUILD)
        with BenchServer(backends, shape, files) as server:
            bench = Bench(server, cases, stacked=arguments.stacked)
            for found in bench.run(arguments.repetitions):
                yield from found


if __name__ == "__main__":
    parts.command("Serving: ours against the peers", _measure, _options())
