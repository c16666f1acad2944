"""Requests to the Service all the time, from a pod, and what became of them."""

import dataclasses
import json
import subprocess
import threading
import time
from typing import Any

from bench.cluster import Cluster


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """The outcome of the requests of a while.

    Attributes:
        answers: By kind of client.
        failed: Kind and error of each failure.
        degraded: Answers with keys that nobody answered for.
        degraded_s: From the first such answer to the last.
    """

    answers: dict[str, int]
    failed: list[str]
    degraded: int
    degraded_s: float


class Traffic:
    """Follows what the pod says. Thread-safe."""

    def __init__(self, cluster: Cluster) -> None:
        """Begin to follow it."""
        self._cluster = cluster
        self._lines: list[tuple[float, dict[str, Any]]] = []
        self._ended = False
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._ended:
            command = self._cluster.words("logs", "-f", "asker", "--since=1s")
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.startswith("{"):
                    self._lines.append((time.monotonic(), json.loads(line)))
            self._process.wait()
            self._process.stdout.close()
            time.sleep(0.2)

    def between(self, begin: float, end: float) -> Answers:
        """Return what was heard in a while, by time.monotonic()."""
        heard = [(at, line) for at, line in self._lines if begin <= at <= end]
        answers: dict[str, int] = {}
        for _, line in heard:
            for kind, count in line.get("answers", {}).items():
                answers[kind] = answers.get(kind, 0) + count
        failed = [f"{line['kind']}: {line['failed']}" for _, line in heard if "failed" in line]
        degraded = [at for at, line in heard if "degraded" in line]
        lasted = degraded[-1] - degraded[0] if degraded else 0.0
        return Answers(answers, failed, len(degraded), lasted)

    def close(self) -> None:
        """Follow it no more."""
        self._ended = True
        if self._process is not None:
            self._process.kill()
        self._thread.join()
