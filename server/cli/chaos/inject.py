"""Makes the faults of a round happen, each at its time, and ends each."""

import contextlib
import dataclasses
import functools
import heapq
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import redis

from embertide.server.adapters.redis import connect
from embertide.server.cli.chaos.faults import Fault
from embertide.server.cli.chaos.fleet import Fleet
from embertide.server.cli.chaos.links import Harm
from embertide.server.cli.chaos.replay import Replay

_TIMEOUT_S = 0.5
_MEMORY_BYTES = 1 << 30  # of the bus, as RedisOptions has it
_FULL_SHARE = 0.9  # of what Redis holds
_BALLAST = ".ballast"
_BALLAST_STEP = 1 << 20
_COUNTING = "while True: pass"
_WRITING = "while :; do dd if=/dev/zero of={path} bs=1M count=32 oflag=dsync status=none; done"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """A bit of a file that was flipped."""

    path: str
    at: int
    bytes: int


def _nothing() -> None:
    """End what ends by itself."""


class Injector:
    """The faults of one round. Used by the thread that started the fleet.

    Attributes:
        flips: Bits of files that were flipped.
        skipped: Faults that found nothing to harm, and why.
    """

    def __init__(
        self, fleet: Fleet, replay: Replay, faults: Sequence[Fault], begun_s: float
    ) -> None:
        """Take the faults of a round that began at a time of the monotonic clock."""
        self._fleet, self._replay = fleet, replay
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._open: list[Callable[[], None]] = []  # what ends the faults that have begun
        self._harms: dict[str, list[tuple[Fault, Harm]]] = {}
        self.flips: list[Flip] = []
        self.skipped: list[str] = []
        for fault in faults:
            self._at(begun_s + fault.at_s, functools.partial(self._begin, fault))

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_s, next(self._order), act))

    def step(self) -> bool:
        """Do what is due; return whether there is more to come."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        return bool(self._due)

    def end(self) -> None:
        """End all faults that have begun, and begin no other."""
        self._due = []
        for undo in list(self._open):
            self._close(undo)

    def _begin(self, fault: Fault) -> None:
        getattr(self, "_" + fault.kind.replace("-", "_"))(fault)

    def _until(self, fault: Fault, undo: Callable[[], None]) -> None:
        """Let a fault last, and undo it then."""
        self._open.append(undo)
        self._at(time.monotonic() + fault.for_s, lambda: self._close(undo))

    def _close(self, undo: Callable[[], None]) -> None:
        self._open.remove(undo)
        undo()

    # --- processes --------------------------------------------------------------------------------

    def _kill(self, fault: Fault) -> None:
        self._fleet.kill(fault.target, fault.for_s)
        self._until(fault, _nothing)

    def _stop(self, fault: Fault) -> None:
        self._fleet.stop(fault.target, fault.for_s)
        self._until(fault, _nothing)

    # --- links ------------------------------------------------------------------------------------

    def _harm(self, fault: Fault, harm: Harm) -> None:
        """Harm a link; where faults overlap, it is as all of them together make it."""
        harms = self._harms.setdefault(fault.target, [])
        entry = (fault, harm)
        harms.append(entry)
        self._set(fault.target)

        def undo() -> None:
            harms.remove(entry)
            self._set(fault.target)

        self._until(fault, undo)

    def _set(self, link: str) -> None:
        harms = [harm for _, harm in self._harms[link]]
        together = Harm(
            delay_s=sum(each.delay_s for each in harms),
            loss=max((each.loss for each in harms), default=0.0),
            stall=any(each.stall for each in harms),
            cut=any(each.cut for each in harms),
            flip=max((each.flip for each in harms), default=0.0),
        )
        self._fleet.links.set(link, together)

    def _delay(self, fault: Fault) -> None:
        self._harm(fault, Harm(delay_s=fault.amount / 1e3))

    def _loss(self, fault: Fault) -> None:
        self._harm(fault, Harm(loss=fault.amount))

    def _stall(self, fault: Fault) -> None:
        self._harm(fault, Harm(stall=True))

    def _cut(self, fault: Fault) -> None:
        self._harm(fault, Harm(cut=True))

    def _flip_messages(self, fault: Fault) -> None:
        self._harm(fault, Harm(flip=fault.amount))

    # --- files ------------------------------------------------------------------------------------

    def _files(self, what: str) -> list[Path]:
        """Return the files of a kind that are newest, and that the replay has read."""
        publication = self._fleet.options.publication
        if what.startswith("plan-"):
            path = self._fleet.plan_file(f"node-{what.removeprefix('plan-')}")
            return [path] if path.is_file() else []
        folder, pattern, mark = {
            "delta": ("deltas", "p-*.delta", "commit.pb"),
            "commit": ("deltas", "commit.pb", "commit.pb"),
            "dense": ("deltas", "dense.safetensors", "commit.pb"),
            "snapshot": ("snapshots", "**/*", "manifest.json"),
            "checkpoint": ("checkpoints", "*", "checkpoint.json"),
        }[what]
        newest = self._replay.advance()
        for each in sorted((publication / folder).glob(f"*/{mark}"), reverse=True):
            if int(each.parent.name.partition("-")[0]) <= newest:
                found = sorted(each.parent.glob(pattern))
                # The program is one file that all snapshots link to: without it nobody serves.
                return [path for path in found if path.is_file() and path.suffix != ".pt2"]
        return []

    def _flip_file(self, fault: Fault) -> None:
        files = [path for path in self._files(fault.target) if path.stat().st_size]
        if not files:
            self.skipped.append(f"{fault.line()}: there is no such file")
            return
        # Which bit follows from the fault, as all else does.
        path = files[int(fault.at_s * 1000) % len(files)]
        data = path.read_bytes()
        at = int(fault.at_s * 7919) % len(data)
        # Written anew: other snapshots may have a link to the same file.
        harmed = path.with_name(f".{path.name}.harmed")
        harmed.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        harmed.rename(path)
        self.flips.append(Flip(path=str(path), at=at, bytes=len(data)))

    # --- Redis ------------------------------------------------------------------------------------

    def _bus(self, fault: Fault, act: Callable[[redis.Redis], object]) -> None:
        try:
            with connect(self._fleet.bus_url, _TIMEOUT_S) as client:
                act(client)
        except redis.RedisError as error:
            self.skipped.append(f"{fault.line()}: {error}")

    def _flush(self, fault: Fault) -> None:
        self._bus(fault, lambda client: client.flushall())

    def _full(self, fault: Fault) -> None:
        def fill(client: redis.Redis) -> None:
            used = int(client.info("memory")["used_memory"])
            client.config_set("maxmemory", int(used * _FULL_SHARE))

        self._bus(fault, fill)
        self._until(
            fault,
            lambda: self._bus(fault, lambda client: client.config_set("maxmemory", _MEMORY_BYTES)),
        )

    # --- the machine ------------------------------------------------------------------------------

    def _disk_full(self, fault: Fault) -> None:
        path = self._fleet.options.publication / _BALLAST
        with path.open("wb", buffering=0) as file:
            for begin in itertools.count(0, _BALLAST_STEP):
                try:
                    os.posix_fallocate(file.fileno(), begin, _BALLAST_STEP)
                except OSError:
                    break
            # The rest of the last step.
            file.seek(0, os.SEEK_END)
            with contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        self._until(fault, lambda: path.unlink(missing_ok=True))

    def _busy_cpu(self, fault: Fault) -> None:
        count = round(fault.amount) * (os.cpu_count() or 1)
        command = ["timeout", str(fault.for_s), sys.executable, "-c", _COUNTING]
        for _ in range(count):
            self._fleet.run_beside(command)
        self._until(fault, _nothing)

    def _busy_disk(self, fault: Fault) -> None:
        path = self._fleet.options.directory / "busy.bin"
        script = _WRITING.format(path=f"'{path}'")
        self._fleet.run_beside(["timeout", str(fault.for_s), "sh", "-c", script])
        self._until(fault, _nothing)

    def _clock(self, fault: Fault) -> None:
        path = self._fleet.clock_file(fault.target)
        path.write_text(f"{fault.amount:+.0f}\n")

        def undo() -> None:
            path.write_text("+0\n")

        self._until(fault, undo)
