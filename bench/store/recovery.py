"""A node's start after SIGKILL, from the seal of its SSD tier and from its snapshot.

2 GB of rows of 512 bytes, DDR a tenth of that with its index. By turns, the files out of the page
cache before each start: a start on an empty directory (all rows from the snapshot), a seal,
SIGKILL, a start from the seal, SIGKILL.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import report
from bench.report import CONSOLE
from bench.servers import BUILD, BenchError
from bench.store import programs

_FOLDER = BUILD / "bench" / "recovery"
_ROWS, _DIM = 4_000_000, 128
_REPETITIONS = report.MIN_REPETITIONS


def _forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Recovery:
    """The program of one build, with a folder of its own."""

    def __init__(self, program: Path, folder: Path) -> None:
        """Use an empty folder."""
        self._program = program
        self._folder = folder

    def _words(self, mode: str, rows: int, *more: object) -> list[str]:
        return [mode, str(self._folder), str(rows), str(_DIM), *map(str, more)]

    def write(self, rows: int) -> None:
        """Write the snapshot that starts read."""
        programs.run(self._program, *self._words("write", rows))

    def start(self, rows: int, *, from_seal: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a start said when it was ready, and when it had a seal; ends it by SIGKILL.

        A start that is not to be from a seal loses the SSD tier's files before.
        """
        if not from_seal:
            shutil.rmtree(self._folder / "ssd", ignore_errors=True)
        _forget(self._folder)
        command = [str(self._program), *self._words("start", rows)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            said = [json.loads(process.stdout.readline() or "{}") for _ in range(2)]
        finally:
            process.kill()
            process.wait()
        if not said[1] or said[0]["from_seal"] != from_seal or said[0]["rows"] != rows:
            raise BenchError(f"a start that was to be from_seal={from_seal} said {said}")
        return said[0], said[1]


def _starts(recovery: Recovery) -> Iterator[report.Row]:
    recovery.write(_ROWS)
    ready: dict[str, list[float]] = {"seal": [], "snapshot": []}
    sealed = []
    for _ in range(_REPETITIONS):
        from_snapshot, seal = recovery.start(_ROWS, from_seal=False)
        from_seal, _ = recovery.start(_ROWS, from_seal=True)
        ready["snapshot"].append(from_snapshot["seconds"])
        ready["seal"].append(from_seal["seconds"])
        sealed.append(seal)
        CONSOLE.print(
            f"[dim]ready after {from_snapshot['seconds']:.2f} s from the snapshot "
            f"({from_snapshot['ssd_rows']:,} rows on the SSD), {from_seal['seconds']:.2f} s from a "
            f"seal of {seal['bytes']:,} bytes, written in {seal['sealed_seconds']:.2f} s"
        )
    yield report.compare(
        (f"{_ROWS / 1e6:.2g} M x {4 * _DIM} B, DDR 10%", "start to ready after SIGKILL", "s"),
        ready["seal"],
        ready["snapshot"],
        peer_name="without a seal",
        better="lower",
        target=0.5,
    )


def run() -> Iterator[report.Row]:
    """Yield the rows of the report."""
    program = programs.build("recovery")
    with programs.folder(_FOLDER) as folder:
        yield from _starts(Recovery(program, folder))
