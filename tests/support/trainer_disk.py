"""A full disk under a trainer: its publication with the checkpoints, its log, its temporary folder.

Cases as those of full_disk.py (claim A.8). The trainer reads a Redis Stream to which twenty events
a second are added, each three seconds of event time after the one before; a version is due each
second or so, and a checkpoint with every fifth.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from days_of_news import CACHE, TRAINER, event_at, news
from full_disk import Seen, busier, fill, small_disk, use_of, within

from bench.servers import BenchError
from embertide.server.adapters.process import Child
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.data.base import news_schema
from embertide.trainer.data.redis_stream import STREAM, EventSender, StreamConfig
from embertide.trainer.publish.folder import Publication

_STARTS_S, _SAYS_S, _FULL_S, _HEALS_S = 120.0, 20.0, 20.0, 10.0
_EVERY_S, _EVENT_MS = 0.05, 3000


class Sending:
    """Adds events to a stream until its end, in `with`."""

    def __init__(self, url: str, stream: str = STREAM) -> None:
        """Name the Redis, and the stream there."""
        self._sender = EventSender(StreamConfig(url=url, stream=stream), news_schema())
        (self._news,) = news(1, views_per_hour=1500)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.sent = 0

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S) and self.sent < len(self._news):
            event = event_at(self._news, self.sent)
            event.ts_ms_B[0] = self._news.ts_ms_B[0] + self.sent * _EVENT_MS
            self._sender.send(event)
            self.sent += 1

    def __enter__(self) -> "Sending":
        """Begin."""
        self._thread.start()
        return self

    def end(self) -> int:
        """Stop; return how many events were added."""
        self._ended.set()
        self._thread.join()
        return self.sent

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.end()


class _Trainer:
    """A trainer of a stream, and what it is seen to do."""

    def __init__(
        self, stack: contextlib.ExitStack, base: Path, folder: Path, log: Path, **env: str
    ) -> None:
        redis_log = base / "redis.log"
        server = stack.enter_context(RedisServer(RedisOptions(log=redis_log)))
        self.sending = stack.enter_context(Sending(server.url))
        self.publication, self._log = Publication(folder / "pub"), log
        self.command = [*TRAINER, "train", str(self.publication.path), "--json", "--log", str(log)]
        self.command += ["--data", server.url, "--cache", str(CACHE), "--batch-size", "8"]
        self.command += ["--publish-every-s", "60", "--snapshot-every", "5"]
        self.child = stack.enter_context(
            Child(self.command, log=base / "trainer.out", environment={**os.environ, **env})
        )
        if within(_STARTS_S, lambda: self.version() > 6) is None:
            raise BenchError(f"the trainer does not start: {self.child.log_text()[-500:]}")

    def version(self) -> int:
        """Return the newest version in the folder."""
        return max((each.number for each in self.publication.versions()), default=0)

    def lines(self) -> list[dict[str, Any]]:
        """Return what its log has."""
        found = []
        for line in self._log.read_text().splitlines() if self._log.is_file() else ():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def says(self, *words: str) -> int:
        """Return how many messages have these words, in its log or its output."""
        said = [str(each.get("message", "")) for each in self.lines()]
        return sum(all(word in each for word in words) for each in said)

    def end(self) -> dict[str, Any]:
        """Stop it once it has learned all; return its result."""
        sent = self.sending.end()
        within(30, lambda: f'"events": {sent}' in self.child.log_text())
        os.kill(self.child.pid, signal.SIGTERM)
        self.child.wait(120)
        result: dict[str, Any] = json.loads(self.child.log_text().splitlines()[-1])["result"]
        return result


def publication(base: Path) -> Seen:
    """The folder of versions, snapshots and checkpoints is full."""
    folder = base / "publication"
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_disk(folder, 64))
        trainer = _Trainer(stack, base, folder, base / "publication.jsonl")
        before = use_of(trainer.child.pid, _FULL_S)
        filler = fill(folder)
        words = (f"{trainer.publication.path} has no room", "free")
        named = within(_SAYS_S, lambda: trainer.says(*words) > 0) is not None
        full = use_of(trainer.child.pid, _FULL_S)
        stood = trainer.version()
        filler.unlink()
        heals_s = within(_HEALS_S, lambda: trainer.version() > stood)
        lives = trainer.child.alive()
        result = trainer.end()
        whole = result["events"] == trainer.sending.sent
        checkpoints = result["checkpoints"]
        return Seen(
            core=full.core - before.core,
            amplification=full.written / max(1, before.written),
            named=named and trainer.says("not published") == 1,
            lives=lives and whole and checkpoints["saved"] > 2,
            heals_s=heals_s,
        )


def log(base: Path) -> Seen:
    """The folder of `--log` is full, and that of what it prints."""
    folder = base / "log"
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_disk(folder, 1))
        trainer = _Trainer(stack, base, base / "log-publication", folder / "train.jsonl")
        before = use_of(trainer.child.pid, _FULL_S)
        filler = fill(folder)
        said = f"{folder}/train.jsonl has no room"  # once the last page is full
        named = within(60, lambda: said in trainer.child.log_text()) is not None
        full = use_of(trainer.child.pid, _FULL_S)
        version, lines = trainer.version(), len(trainer.lines())
        filler.unlink()
        # Progress comes every ten seconds.
        heals_s = within(_HEALS_S + 10, lambda: len(trainer.lines()) > lines)
        lives = trainer.child.alive() and within(10, lambda: trainer.version() > version)
        otherwise = busier(before, use_of(trainer.child.pid, _FULL_S))
        result = trainer.end()
        return Seen(
            core=full.core - otherwise.core,
            amplification=full.written / max(1, otherwise.written),
            named=named,
            lives=bool(lives) and result["events"] == trainer.sending.sent,
            heals_s=None if heals_s is None else max(0.0, heals_s - 10),
        )


def temporary(base: Path) -> Seen:
    """The temporary folder is full: a run goes on; one that has to compile says what it lacks."""
    folder = base / "temporary"
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_disk(folder, 2))
        env = {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")}
        trainer = _Trainer(stack, base, base / "temporary-run", base / "temporary.jsonl", **env)
        before = use_of(trainer.child.pid, _FULL_S)
        filler = fill(folder)
        full = use_of(trainer.child.pid, _FULL_S)
        version = trainer.version()
        goes_on = within(_HEALS_S, lambda: trainer.version() > version) is not None
        said = [*TRAINER, "train", str(base / "compiles"), "--demo", "--hours", "1"]
        done = subprocess.run(
            said,
            capture_output=True,
            text=True,
            env={**os.environ, **env},
            timeout=600,
            check=False,
        )
        named = f"{folder}" in done.stderr and "has no room" in done.stderr
        named = named and "Traceback" not in done.stderr and done.returncode == 1
        filler.unlink()
        otherwise = busier(before, use_of(trainer.child.pid, _FULL_S))
        result = trainer.end()
        return Seen(
            core=full.core - otherwise.core,
            amplification=full.written / max(1, otherwise.written),
            named=named,
            lives=goes_on and result["events"] == trainer.sending.sent,
            heals_s=0.0 if goes_on else None,
        )


CASES: tuple[Callable[[Path], Seen], ...] = (publication, log, temporary)
