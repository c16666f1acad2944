"""perf_analyzer: the last wheel that carries it, in an environment of its own, and what it reports.

The binary needs `libb64.so.0d` of Debian (package libb64-0d) and `libcudart.so.12`, which another
wheel brings.
"""

import csv
import dataclasses
import math
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bench.report import Row, compare
from bench.servers import BUILD, BenchError

_WHEELS = ("tritonclient==2.50.0", "nvidia-cuda-runtime-cu12==12.9.79")
_ENVIRONMENT = BUILD / "bench" / "venv"
# Three windows are what perf_analyzer averages; with a wide tolerance they are also the only ones.
_WINDOWS = 3
_TOLERANCE_PERCENT = 999
_TIMEOUT_S = 120
# The complaints of perf_analyzer when a window saw no answer, as on a machine that others keep
# busy. The windows of the next attempts are longer.
_UNMEASURED = ("Failed to obtain stable measurement", "No valid requests recorded")
_LONGER = (1, 4, 16)
# Clients that wait for an answer at any time: FACTS of the project are measured with two.
CONCURRENCY = 2

Protocol = Literal["grpc", "http"]


class UnmeasuredError(BenchError):
    """No window saw a load answered, long ones neither."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A load of perf_analyzer: its requests, its target and its duration.

    Attributes:
        connections: Over which it spreads its clients; None: as its library does, one for six.
    """

    model: str
    url: str
    data: Path
    batch: int = 1  # perf_analyzer's -b: samples of a rectangular request
    window_ms: int = 300
    protocol: Protocol = "grpc"
    concurrency: int = CONCURRENCY
    connections: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The report of one run of perf_analyzer."""

    requests_per_s: float
    latency_us_p99: float
    report: str  # where the time went, for a reader
    said: str = ""  # all that perf_analyzer printed


def environment() -> Path:
    """Return the environment of perf_analyzer, making it if need be.

    Raises:
        BenchError: The wheels cannot be installed.
    """
    if not (_ENVIRONMENT / "bin" / "perf_analyzer").is_file():
        venv.create(_ENVIRONMENT, with_pip=True, clear=True)
        command = [str(_ENVIRONMENT / "bin" / "pip"), "install", "-q", *_WHEELS]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BenchError(f"perf_analyzer cannot be installed:\n{result.stderr}")
    return _ENVIRONMENT


def _variables(load: Load) -> dict[str, str]:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment() / "lib" / version / "site-packages"
    libraries = packages / "nvidia" / "cuda_runtime" / "lib"
    variables = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    if load.connections is not None:
        clients = math.ceil(load.concurrency / load.connections)
        variables["TRITON_CLIENT_GRPC_CHANNEL_MAX_SHARE_COUNT"] = str(clients)
    return variables


def _command(load: Load, report: Path) -> list[str]:
    return [
        str(environment() / "bin" / "perf_analyzer"),
        *("-m", load.model, "-u", load.url, "-i", load.protocol, "-b", str(load.batch)),
        *("--concurrency-range", str(load.concurrency), "--input-data", str(load.data)),
        *("--measurement-interval", str(load.window_ms), "--max-trials", str(_WINDOWS)),
        *("--stability-percentage", str(_TOLERANCE_PERCENT), "-f", str(report)),
    ]


def read_report(text: str, batch: int) -> Measured:
    """Read perf_analyzer's CSV of one concurrency."""
    row = next(csv.DictReader(text.splitlines()), None)
    if row is None:
        raise BenchError("perf_analyzer's report has no line")
    return Measured(
        requests_per_s=float(row["Inferences/Second"]) / batch,
        latency_us_p99=float(row["p99 latency"]),
        report=", ".join(f"{name} {value}" for name, value in row.items()),
    )


def _attempt(load: Load) -> tuple[Measured | None, str]:
    """Run perf_analyzer once; None if it has no measurement. Return what it said, too."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.csv"
        result = subprocess.run(
            _command(load, report),
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
            env=_variables(load),
        )
        said = f"{result.stdout}{result.stderr}"
        if "libb64" in said:
            raise BenchError("perf_analyzer needs libb64: apt-get install libb64-0d")
        if result.returncode != 0 or not report.is_file():
            return None, said
        measured = read_report(report.read_text(), load.batch)
    if measured.requests_per_s <= 0:
        return None, said
    return dataclasses.replace(measured, said=said), said


def run(load: Load) -> Measured:
    """Measure a load.

    Raises:
        UnmeasuredError: No request was answered, or too few to say a rate.
        BenchError: perf_analyzer complains.
    """
    said = ""
    complaint = f"perf_analyzer on {load.model} by {load.protocol} failed:\n"
    for longer in _LONGER:
        longer_load = dataclasses.replace(load, window_ms=longer * load.window_ms)
        measured, said = _attempt(longer_load)
        if measured is not None:
            return measured
        if not any(each in said for each in _UNMEASURED):
            raise BenchError(complaint + said)
    raise UnmeasuredError(complaint + said)


def compare_throughput(
    case: str,
    ours: Sequence[Measured],
    peer: Sequence[Measured],
    *,
    peer_name: str,
    target: float,
    claim: str = "",
) -> Row:
    """Return the row of requests per second of two interleaved series."""
    return compare(
        (case, "throughput", "requests/s"),
        [each.requests_per_s for each in ours],
        [each.requests_per_s for each in peer],
        peer_name=peer_name,
        better="higher",
        target=target,
        claim=claim,
    )


def compare_p99(
    case: str,
    ours: Sequence[Measured],
    peer: Sequence[Measured],
    *,
    peer_name: str,
    target: float,
    claim: str = "",
) -> Row:
    """Return the row of p99 latencies of two interleaved series."""
    return compare(
        (case, "p99 latency", "us"),
        [each.latency_us_p99 for each in ours],
        [each.latency_us_p99 for each in peer],
        peer_name=peer_name,
        better="lower",
        target=target,
        claim=claim,
    )
