"""Random reads from the SSD tier against RocksDB and fio: `make bench-ssd`.

Rows of 128 floats, 5.7 M of them; the store's whole DDR budget, index included, and RocksDB's block
cache are a tenth of their bytes. Both read past the page cache, batches of 2,048 uniform keys; of
one, to see what a request waits for.
fio reads blocks of the store's own log, as many in flight as the store keeps.
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from matplotlib.figure import Figure

from bench import costs, report
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError
from bench.store import programs

PROGRAM = "ssd_peer"
FOLDER = BUILD / "bench" / "ssd"
_DIM = 128
_MEMORY_SHARE = 0.1
_DEPTH = 128  # kReadDepth of backend_cpp/ssd/block_file.h
_RUN_S = 3.0
_BATCH = 2048
_THREADS = (1, 2, 4, 8, 16, 32)
# Bars: rows/s at one thread, rows per CPU-second at the peer's best, blocks/s of fio's.
_MIN_RATE, _MIN_PER_CPU, _MIN_OF_URING, _MIN_OF_AIO = 5.0, 1.5, 0.8, 0.7


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The reads of one run of ssd_peer."""

    rows: int
    seconds: float
    cpu_seconds: float
    blocks: int

    @property
    def rows_per_s(self) -> float:
        """Return the throughput."""
        return self.rows / self.seconds

    @property
    def rows_per_cpu_s(self) -> float:
        """Return what a second of one core is worth, the kernel's part of it included."""
        return self.rows / self.cpu_seconds


class Peer:
    """The program with both sides in it, its rows loaded."""

    def __init__(
        self, program: Path, directory: Path, *, rows: int, dim: int, memory_bytes: int
    ) -> None:
        """Start it in a directory of its own; loading takes a minute or two."""
        command = [str(program), str(directory), str(rows), str(dim), str(memory_bytes)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.loaded = self._answer()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"ssd_peer ended with {self._process.wait(timeout=60)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, who: str, engine: str = "-", threads: int = 1, *, batch: int = _BATCH) -> Run:
        """Ask one side for a while."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{who} {engine} {threads} {_RUN_S} {batch}\n")
        self._process.stdin.flush()
        run = Run(**self._answer())
        CONSOLE.print(
            f"[dim]{who} {engine}, {threads} threads, batches of {batch}: "
            f"{run.rows_per_s:,.0f} rows/s, {run.rows_per_cpu_s:,.0f} rows/CPU-s"
        )
        return run


def _fio(engine: str) -> float:
    """Return fio's blocks a second from the store's log."""
    command = [
        *("fio", "--name=read", f"--filename={FOLDER / 'device-0.log'}", "--readonly"),
        *("--rw=randread", "--bs=4k", "--direct=1", f"--ioengine={engine}", f"--iodepth={_DEPTH}"),
        *(f"--runtime={_RUN_S}", "--time_based", "--norandommap", "--randrepeat=0"),
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"fio: {done.stderr.strip()}")
    rate = float(json.loads(done.stdout)["jobs"][0]["read"]["iops"])
    CONSOLE.print(f"[dim]fio {engine}: {rate:,.0f} blocks/s")
    return rate


def build() -> Path:
    """Build the program with both sides in it, and return where it lies."""
    return programs.build(PROGRAM, "apt-get install librocksdb-dev, `make cpp`")


def load(program: Path, directory: Path, rows: int) -> Peer:
    """Return a program with so many rows of this benchmark's dimension and memory."""
    memory_bytes = int(rows * 4 * _DIM * _MEMORY_SHARE)
    return Peer(program, directory, rows=rows, dim=_DIM, memory_bytes=memory_bytes)


Curves = dict[str, list[Run]]


def _measure(rows: int, repetitions: int) -> tuple[list[report.Row], Curves, dict[str, Any]]:
    if shutil.which("fio") is None:
        raise BenchError("fio is missing: apt-get install fio")
    CONSOLE.print(f"loading {rows:,} rows of {4 * _DIM} bytes into both")
    with programs.folder(FOLDER) as path, load(build(), path, rows) as peer:
        curves: Curves = {
            "RocksDB MultiGet": [peer.run("rocksdb", threads=threads) for threads in _THREADS],
            "SSD tier, io_uring": [peer.run("store", "io_uring", threads) for threads in _THREADS],
        }
        by_cpu = [run.rows_per_cpu_s for run in curves["RocksDB MultiGet"]]
        best = _THREADS[by_cpu.index(max(by_cpu))]
        names = ("uring", "aio", "pread", "one", "best", "uring alone", "one alone")
        runs: dict[str, list[Run]] = {name: [] for name in names}
        fio: dict[str, list[float]] = {"uring": [], "aio": []}
        for _ in range(repetitions):
            runs["uring"].append(peer.run("store", "io_uring"))
            fio["uring"].append(_fio("io_uring"))
            runs["one"].append(peer.run("rocksdb"))
            runs["aio"].append(peer.run("store", "libaio"))
            fio["aio"].append(_fio("libaio"))
            runs["best"].append(peer.run("rocksdb", threads=best))
            runs["pread"].append(peer.run("store", "pread"))
            runs["uring alone"].append(peer.run("store", "io_uring", batch=1))
            runs["one alone"].append(peer.run("rocksdb", batch=1))
        loaded = peer.loaded

    def blocks(name: str) -> list[float]:
        return [run.blocks / run.seconds for run in runs[name]]

    def rates(name: str) -> list[float]:
        return [run.rows_per_s for run in runs[name]]

    def per_cpu(name: str) -> list[float]:
        return [run.rows_per_cpu_s for run in runs[name]]

    case = f"SSD {rows / 1e6:.2g} M x {4 * _DIM} B, DDR {_MEMORY_SHARE:.0%}"
    compared = []
    for name, ours, theirs, peer_name, target in (
        ("io_uring, one thread", rates("uring"), rates("one"), "MultiGet", _MIN_RATE),
        ("libaio, one thread", rates("aio"), rates("one"), "MultiGet", _MIN_RATE),
        ("pread, one thread", rates("pread"), rates("one"), "MultiGet", 1.0),  # no bar of its own
    ):
        metric = (f"{case}, {name}", "rows/s", "rows/s")
        compared.append(
            report.compare(
                metric, ours, theirs, peer_name=peer_name, better="higher", target=target
            )
        )
    compared.append(
        report.compare(
            (f"{case}, io_uring, one thread", "rows per CPU-second", "rows/s"),
            per_cpu("uring"),
            per_cpu("best"),
            peer_name=f"MultiGet, {best} threads",
            better="higher",
            target=_MIN_PER_CPU,
        )
    )
    alone = report.compare(
        (f"{case}, io_uring, one row at a time", "time of a row", "us"),
        [1e6 / rate for rate in rates("uring alone")],
        [1e6 / rate for rate in rates("one alone")],
        peer_name="MultiGet",
        better="lower",
        target=1.0,  # no bar of its own
    )
    compared.append(alone)
    costs.note("ssd_us", row_bytes=4 * _DIM, us=alone.ours, by="make bench-ssd")
    costs.note("ssd_more_us", row_bytes=4 * _DIM, us=1e6 / compared[0].ours, by="make bench-ssd")
    for name, engine, target in (
        ("uring", "io_uring", _MIN_OF_URING),
        ("aio", "libaio", _MIN_OF_AIO),
    ):
        compared.append(
            report.compare(
                (f"{case}, {engine}, one thread", "4 KiB blocks/s", "blocks/s"),
                blocks(name),
                fio[name],
                peer_name=f"fio {engine}, depth {_DEPTH}",
                better="higher",
                target=target,
            )
        )
    return compared, curves, loaded


def _draw(curves: Curves, output: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    for place, title in enumerate(("rows/s", "rows per CPU-second"), start=1):
        axes = figure.add_subplot(1, 2, place)
        for name, runs in curves.items():
            values = [run.rows_per_s if place == 1 else run.rows_per_cpu_s for run in runs]
            axes.plot(_THREADS, values, marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(_THREADS, [str(threads) for threads in _THREADS])
        axes.set_xlabel("threads")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend()
    figure.savefig(output, metadata={"Date": None})


def run(given: argparse.Namespace) -> Iterator[report.Row]:
    """Yield the rows of the report; draws both sides' rates by threads."""
    rows, curves, loaded = _measure(given.rows, given.repetitions)
    _draw(curves, given.out / "store_ssd_threads.svg")
    CONSOLE.print(
        f"{loaded['ddr_rows_share']:.1%} of the rows lay in DDR, index {loaded['index_bytes']:,} "
        f"bytes; loading wrote {loaded['write_amplification']:.2f} bytes a byte of row"
    )
    yield from rows
