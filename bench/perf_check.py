"""perf_analyzer drives our models as a user would: `make perf-check`.

Lookup and ranking, by gRPC and by HTTP, with the Zipf keys of `bench/data/zipf_keys.json`, which
the lookup model is sent without their dense features. It passes when perf_analyzer complains of
nothing and every run is answered.
"""

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Literal

from rich.console import Console

from bench import models, perf
from bench.keys import SMALL, small_shape
from bench.servers import BUILD, BenchError
from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports

_CONSOLE = Console(highlight=False)
_DIRECTORY = BUILD / "bench" / "perf_check"
_BATCH = 4
_WINDOW_MS = 300
# Words of perf_analyzer, or of the server through it, when something is not right.
_COMPLAINTS = ("error", "warning", "fail", "invalid", "unexpected")

Kind = Literal["lookup", "ranking"]
_KINDS: tuple[Kind, ...] = ("lookup", "ranking")
_WAYS: tuple[tuple[triton.Front, perf.Protocol], ...] = (
    ("own", "grpc"),
    ("triton", "grpc"),
    ("triton", "http"),
)


def complaints(said: str) -> list[str]:
    """Return the lines of perf_analyzer's output that complain."""
    lines = said.splitlines()
    return [line for line in lines if any(word in line.lower() for word in _COMPLAINTS)]


def _lookup_keys() -> Path:
    """Write the committed requests without what a lookup model does not take."""
    entries = json.loads(SMALL.read_text(encoding="utf-8"))["data"]
    path = _DIRECTORY / "lookup_keys.json"
    path.write_text(json.dumps({"data": [{"KEYS": entry["KEYS"]} for entry in entries]}))
    return path


def _start(snapshot: Path, backends: Path, *, stock: bool) -> triton.TritonServer:
    repository = _DIRECTORY / "repository"
    for kind in _KINDS:
        triton.write_model(repository, kind, triton.ModelOptions(snapshot=snapshot, kind=kind))
    http, grpc, metrics = free_ports(3)
    return triton.TritonServer(
        triton.ServerOptions(
            repository=repository,
            backends=backends,
            log=_DIRECTORY / f"{'stock' if stock else 'own'}.log",
            front="triton" if stock else "own",
            http_port=http if stock else None,
            grpc_port=grpc,
            metrics_port=metrics,
        )
    )


def check(backends: Path) -> list[str]:
    """Run every combination and return what perf_analyzer complained of.

    Raises:
        BenchError: A run failed.
    """
    shutil.rmtree(_DIRECTORY, ignore_errors=True)
    _DIRECTORY.mkdir(parents=True)
    data = {"lookup": _lookup_keys(), "ranking": SMALL}
    found = []
    snapshot = models.make(small_shape(), BUILD).snapshot
    with (
        _start(snapshot, backends, stock=False) as own,
        _start(snapshot, backends, stock=True) as stock,
    ):
        for kind, (front, protocol) in itertools.product(_KINDS, _WAYS):
            server = own if front == "own" else stock
            load = perf.Load(
                model=kind,
                url=server.grpc if protocol == "grpc" else server.http,
                data=data[kind],
                batch=_BATCH,
                window_ms=_WINDOW_MS,
                protocol=protocol,
            )
            measured = perf.run(load)
            _CONSOLE.print(
                f"{kind} at {front} by {protocol}: {measured.requests_per_s:,.0f} requests/s"
            )
            found += [
                f"{kind} at {front} by {protocol}: {line}" for line in complaints(measured.said)
            ]
    return found


def main() -> int:
    """Check, and say what is wrong."""
    try:
        found = check(BUILD / "cpp" / "backends")
    except (BenchError, triton.TritonError) as error:
        found = [str(error)]
    for line in found:
        _CONSOLE.print(f"[red]perf-check: {line}", markup=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
