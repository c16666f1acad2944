"""A full disk, a folder at a time (claim A.8).

Each case has a file system of a few MiB to itself (a tmpfs, so it needs root), lets a process of
ours run into its end, and asks: what of a core it takes while the disk is full beyond what it takes
otherwise, how many bytes it writes, whether its status or log name the cause and the folder, and
how long after there is room again it is healed. One function a case.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import grpc

from bench import models, nodes
from bench.servers import BUILD, BenchError
from bench.shapes import Shape
from bench.versions import Versions
from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.v1 import control_pb2, control_pb2_grpc, node_pb2, node_pb2_grpc

_MIB = 1 << 20
_FULL_S = 20.0  # how long the disk stays full
_HEALS_S, _SAYS_S, _STARTS_S, _LOOK_S = 10.0, 10.0, 60.0, 0.05


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Callable[[int], None]]:
    """Mount a file system of so many MiB at a folder; what it gives changes the size.

    Raises:
        BenchError: This user may not.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def mount(*words: str) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", *words, "tmpfs", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            raise BenchError(f"{folder}: no file system can be mounted: {done.stderr.strip()}")

    mount("-o", f"size={mib}m")
    try:
        yield lambda size: mount("-o", f"remount,size={size}m")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(folder: Path) -> Path:
    """Fill a disk to the last byte; return the file that does."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """The resources that a process used in a while."""

    core: float  # share of one
    written: int  # bytes, of all its files


def use_of(pid: int, seconds: float) -> Use:
    """Return what a process uses from now on, for so long."""

    def read() -> tuple[float, int]:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = int(fields[11]) + int(fields[12])
        io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return ticks / os.sysconf("SC_CLK_TCK"), int(io["wchar"])

    (cpu, written), began = read(), time.monotonic()
    time.sleep(seconds)
    now, passed = read(), time.monotonic() - began
    return Use(core=(now[0] - cpu) / passed, written=now[1] - written)


def busier(*uses: Use) -> Use:
    """Return the most that was used in any of some times, of each resource.

    What is written beside the full folder grows with the rows of a model, so a time before the disk
    was full says too little of the time after it: one before and one after enclose it.
    """
    return Use(core=max(each.core for each in uses), written=max(each.written for each in uses))


def within(seconds: float, holds: Callable[[], bool]) -> float | None:
    """Return the seconds until it holds; None: it does not in time."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if holds():
            return time.monotonic() - began
        time.sleep(_LOOK_S)
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The effects of a full disk.

    Attributes:
        core: Share of a core beyond what the process takes otherwise.
        amplification: Bytes written while it was full, as a part of those that had to be written.
        named: Whether the cause and the folder were said.
        lives: Whether the process does.
        heals_s: Seconds from room to health; None: not in time.
    """

    core: float
    amplification: float
    named: bool
    lives: bool
    heals_s: float | None


# --- nodes ------------------------------------------------------------------------------------


class _Node:
    """A node alone in its fleet, and its publication."""

    def __init__(
        self, stack: contextlib.ExitStack, base: Path, shape: Shape, words: list[str], log: Path
    ) -> None:
        files = models.make(shape, BUILD)
        (port,) = free_ports(1)
        bus = stack.enter_context(RedisServer(RedisOptions(log=base / "redis.log")))
        self.versions = Versions(base / "publication", bus.url, shape, files, 1.0)
        address = f"127.0.0.1:{port}"
        nodes.publish_plan(bus.url, shape.name, nodes.make_plan(files.snapshot, [address]))
        command = [str(BUILD / "cpp" / "embertide_node"), "--numa-nodes", "none"]
        command += ["--publication", str(self.versions.publication.path), "--bus", bus.url]
        command += ["--state", bus.url, "--node", "node-0", "--peer-address", address, *words]
        self.child = stack.enter_context(Child(command, log=log))
        self._stub = node_pb2_grpc.NodeServiceStub(
            stack.enter_context(grpc.insecure_channel(address))
        )
        if within(_STARTS_S, lambda: self.version() > 0) is None:
            raise BenchError(f"the node does not start: {self.child.log_text()}")

    def status(self) -> node_pb2.NodeServiceGetStatusResponse:
        """Return its status; an empty one: it does not answer."""
        with contextlib.suppress(grpc.RpcError):
            answer: node_pb2.NodeServiceGetStatusResponse = self._stub.GetStatus(
                node_pb2.NodeServiceGetStatusRequest(), timeout=2.0
            )
            return answer
        return node_pb2.NodeServiceGetStatusResponse()

    def version(self) -> int:
        """Return the newest version that it answers at; 0: none."""
        return self.status().newest_pinned.number

    def task(self, name: str) -> node_pb2.TaskHealth:
        """Return how a task is."""
        found = [each for each in self.status().tasks if each.name == name]
        return found[0] if found else node_pb2.TaskHealth()

    def names(self, task: str, *words: str) -> bool:
        """Return whether its status and its log say of a task that it fails, with these words."""

        def said() -> bool:
            error = self.task(task).error
            return self.task(task).state == "failing" and all(word in error for word in words)

        lines = self.child.log_text().splitlines()
        logged = any(f"task {task} fails" in line for line in lines)
        return within(_SAYS_S, said) is not None and logged

    def has_newest(self) -> bool:
        """Return whether it answers at the newest version but one."""
        return bool(self.versions.log) and self.version() >= self.versions.log[-1].number - 1


def ssd_folder(base: Path) -> Seen:
    """A node most of whose rows lie on an SSD, whose folder is full."""
    folder = base / "ssd"
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_disk(folder, 128))
        words = ["--ddr-bytes", str(12 * _MIB), "--ssd-bytes", str(256 * _MIB)]
        words += ["--ssd-directory", str(folder / "node"), "--ssd-engine", "pread"]
        words += ["--ssd-seal-interval-ms", "0"]
        shape = Shape(name="edges-disk", rows=150_000, tables=2, buckets=4)
        node = _Node(stack, base, shape, words, base / "ssd-node.log")
        stack.enter_context(node.versions)
        before = use_of(node.child.pid, _FULL_S)
        filler = fill(folder)
        if within(60, lambda: node.task("ssd-writes").state == "failing") is None:
            raise BenchError("the SSD folder is full, and the node writes nothing to it")
        full = use_of(node.child.pid, _FULL_S)
        named = node.names("ssd-writes", "No space left on device", str(folder))
        named = named and node.names("follower", "No space left on device", str(folder))
        filler.unlink()
        heals_s = within(
            _HEALS_S, lambda: node.task("ssd-writes").state == "running" and node.has_newest()
        )
        return Seen(
            core=full.core - before.core,
            amplification=full.written / before.written,
            named=named,
            lives=node.child.alive(),
            heals_s=heals_s,
        )


def seals(base: Path) -> Seen:
    """A node whose seals find no room."""
    folder = base / "seals"
    with contextlib.ExitStack() as stack:
        resize = stack.enter_context(small_disk(folder, 4))
        words = ["--ddr-bytes", str(64 * _MIB), "--ssd-bytes", str(64 * _MIB)]
        words += ["--ssd-directory", str(folder / "node"), "--ssd-engine", "pread"]
        words += ["--ssd-seal-interval-ms", "60000", "--ssd-seal-bytes", "0"]
        shape = Shape(name="edges-disk", rows=150_000, tables=2, buckets=4)
        node = _Node(stack, base, shape, words, base / "seals-node.log")
        before = use_of(node.child.pid, _FULL_S)
        if within(90, lambda: node.task("seals").state == "failing") is None:
            raise BenchError("the node writes no seal that finds no room")
        full = use_of(node.child.pid, _FULL_S)
        named = node.names("seals", "No space left on device", str(folder))
        resize(128)
        heals_s = within(_HEALS_S, lambda: node.task("seals").state == "running")
        return Seen(
            core=full.core - before.core,
            amplification=full.written / shape.row_bytes,
            named=named,
            lives=node.child.alive(),
            heals_s=heals_s,
        )


def log_and_plan(base: Path) -> Seen:
    """A node whose log and whose plan's file lie on a full disk."""
    folder = base / "log"
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_disk(folder, 1))
        plan = folder / "plan" / "plan.bin"
        shape = Shape(name="edges-disk", rows=150_000, tables=2, buckets=4)
        words = ["--ddr-bytes", str(64 * _MIB), "--plan-file", str(plan)]
        filler = fill(folder)
        node = _Node(stack, base, shape, words, folder / "node.log")
        stack.enter_context(node.versions)
        full = use_of(node.child.pid, _FULL_S)
        task = node.task("plan-keeper")
        named = task.state == "failing" and "No space left on device" in task.error
        named = named and str(folder) in task.error
        versions = node.has_newest()
        filler.unlink()
        heals_s = within(
            _HEALS_S, lambda: plan.exists() and node.task("plan-keeper").state == "running"
        )
        after = use_of(node.child.pid, _FULL_S)
        return Seen(
            core=full.core - after.core,
            amplification=full.written / plan.stat().st_size,
            named=named,
            lives=node.child.alive() and versions,
            heals_s=heals_s,
        )


# --- the control plane --------------------------------------------------------------------------


class _Control:
    """A control plane with a state store of its own, whose lease is written each second."""

    def __init__(self, stack: contextlib.ExitStack, base: Path, directory: Path) -> None:
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "embertide.server.cli", "control", "--model", "edges"]
        command += ["--listen", f"127.0.0.1:{port}", "--directory", str(directory)]
        self.child = stack.enter_context(Child(command, log=base / "control.log"))
        self._stub = control_pb2_grpc.ControlServiceStub(
            stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
        )
        if within(_STARTS_S, lambda: not self.refusal()) is None:
            raise BenchError(f"the control plane does not start: {self.child.log_text()}")

    def refusal(self) -> str:
        """Return why its status cannot be had, or which of its tasks fail; empty: all is well."""
        try:
            answer: control_pb2.ControlServiceGetStatusResponse = self._stub.GetStatus(
                control_pb2.ControlServiceGetStatusRequest(), timeout=2.0
            )
        except grpc.RpcError as error:
            return str(cast(Any, error).details())
        return " ".join(each.error for each in answer.tasks if each.state != "running")


def state_store(base: Path) -> Seen:
    """A control plane whose own state store lies on a full disk."""
    folder = base / "state"
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_disk(folder, 8))
        control = _Control(stack, base, folder / "control")
        appended = folder / "control" / "state" / "appendonly.aof"
        size = appended.stat().st_size
        before = use_of(control.child.pid, _FULL_S)
        to_write = before.written + appended.stat().st_size - size
        filler = fill(folder)
        words = (str(folder), "No space left on device")

        def says() -> bool:
            said = control.refusal()
            return all(word in said for word in words)

        named = within(60, says) is not None  # once the last page of the file is full
        full = use_of(control.child.pid, _FULL_S)
        lines = control.child.log_text().splitlines()
        named = named and any(all(word in line for word in words) for line in lines)
        filler.unlink()
        heals_s = within(_HEALS_S, lambda: not control.refusal())
        return Seen(
            core=full.core - before.core,
            amplification=full.written / to_write,
            named=named,
            lives=control.child.alive(),
            heals_s=heals_s,
        )


CASES: tuple[Callable[[Path], Seen], ...] = (
    ssd_folder,
    seals,
    log_and_plan,
    state_store,
)
