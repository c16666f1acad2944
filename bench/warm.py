"""A warm-up of a node that starts, and its first requests: `python -m bench.warm`.

A node has a fifth of its rows in DDR and all others on an SSD; keys follow Zipf's laws. It is asked
until it has been for a while, and ends. Then two nodes start in turns, on folders of their own: one
that made the lookups of its sample again, one that did not. Both are asked at the same fixed rate
from the moment that they are ready, for keys of the same laws, but in other requests than those
that the sample was drawn of. Keys read from the SSD and latencies are of the first second.

Neither keeps a seal, so a start reads the snapshot: that is what a new machine does.
"""

import argparse
import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench import keys, models, parts, report
from bench.load import Clients, Seen, encode
from bench.report import CONSOLE
from bench.servers import BUILD
from bench.shapes import Shape
from embertide.server.adapters import triton
from embertide.server.cli.metrics_page import MetricsPage

_FOLDER = BUILD / "bench" / "warm"
_MODEL = "warm"
_BATCH, _LEARNED, _ASKED = 64, 3000, 1000  # requests that the sample is drawn of, and others
_LEARN_S, _FIRST_S = 15.0, 1.0
_RATE = 300.0  # requests a second
_DDR_SHARE = 0.2
_ENTRY_BYTES = 24.5  # an index entry, as full as tables of this size are
_SIDES = {"cold": 0, "warm": 16 << 20}


def _options(shape: Shape, folder: Path, sample_bytes: int) -> triton.ModelOptions:
    rows = shape.tables * shape.rows
    ddr_bytes = rows * (_ENTRY_BYTES + _DDR_SHARE * (4 * shape.dim + 16)) + (8 << 20)
    return triton.ModelOptions(
        kind="lookup",
        snapshot=models.make(shape, BUILD).snapshot,
        devices=1,
        ddr_budget_bytes=int(ddr_bytes),
        ssd_budget_bytes=3 * rows * (4 * shape.dim + 16),
        ssd_directory=folder / "ssd",
        ssd_seal_interval_ms=0,
        warm_up_bytes=sample_bytes,
        warm_up_file=folder / "warm_up.keys" if sample_bytes else None,
    )


@contextlib.contextmanager
def _node(shape: Shape, side: str) -> Iterator[triton.TritonServer]:
    folder = _FOLDER / side
    repository = folder / "models"
    shutil.rmtree(repository, ignore_errors=True)
    shutil.rmtree(folder / "ssd", ignore_errors=True)
    repository.mkdir(parents=True)
    triton.write_model(repository, _MODEL, _options(shape, folder, _SIDES[side]))
    options = triton.ServerOptions(
        repository=repository,
        backends=BUILD / "cpp" / "backends",
        log=folder / "node.log",
        explicit=True,
        models=(_MODEL,),
    )
    with triton.TritonServer(options) as server:
        yield server


def _from_ssd(server: triton.TritonServer) -> float:
    return MetricsPage(server.metrics()).sum("embertide_lookup_keys_total", source="ssd")


def _ask(
    server: triton.TritonServer, requests: Sequence[bytes], seconds: float, rate: float | None
) -> tuple[Seen, float]:
    """Ask for a while; return what came of it, and the keys that were read from the SSD."""
    before = _from_ssd(server)
    with Clients([server.grpc], requests) as clients:
        clients.start(rate)
        time.sleep(seconds)
        seen = clients.stop()
    time.sleep(1.1)  # counts are published each second
    return seen, _from_ssd(server) - before


def _measure(given: argparse.Namespace) -> Iterator[report.Row]:
    shape = Shape(name="warm", rows=given.rows, tables=8, dim=32)
    count = _LEARNED + _ASKED
    keys_NFL, _ = keys.draw(shape, _BATCH * count)
    requests = [encode(_MODEL, each) for each in np.split(keys_NFL[:, :, 0], count)]
    asked = requests[_LEARNED:]
    shutil.rmtree(_FOLDER, ignore_errors=True)
    figures: dict[str, dict[str, list[float]]] = {
        side: {"start": [], "p99": [], "p50": [], "ssd": [], "failed": []} for side in _SIDES
    }
    with _node(shape, "warm") as server:
        _ask(server, requests[:_LEARNED], _LEARN_S, None)
    for n in range(given.repetitions):
        for side, found in figures.items():
            began = time.perf_counter()
            with _node(shape, side) as server:
                found["start"].append(time.perf_counter() - began)
                first = 100 * n % _ASKED
                seen, from_ssd = _ask(server, asked[first:] + asked[:first], _FIRST_S, _RATE)
                latency_ms = 1e3 * (seen.log["ended"] - seen.log["due"])
                found["p50"].append(float(np.median(latency_ms)))
                found["p99"].append(seen.latency_us_p99 / 1e3)
                found["ssd"].append(from_ssd)
                found["failed"].append(float(seen.failed))
        CONSOLE.print(f"[dim]{n + 1}/{given.repetitions} {figures}")
    case = f"{shape.tables * shape.rows:,} rows, a fifth in DDR, {_RATE:.0f} requests of {_BATCH}/s"
    for key, metric, unit in (
        ("ssd", "keys read from the SSD in the first second", "keys"),
        ("p50", "median latency of the first second", "ms"),
        ("p99", "p99 of the first second", "ms"),
        ("start", "from the start until it is ready", "s"),
    ):
        yield report.compare(
            (case, metric, unit),
            figures["warm"][key],
            figures["cold"][key],
            peer_name="no warm-up",
            better="lower",
            target=0,
        )
    yield report.measure(
        (case, "failed requests", "requests"),
        [max(figures["warm"]["failed"])],
        better="lower",
        target=0,
    )


if __name__ == "__main__":
    parser = parts.options("warm", __doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="of a table, of eight")
    parts.command("A node that starts", _measure, parser)
