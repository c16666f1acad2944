"""The bus as the control plane sees it: versions, what was decided on them, and who publishes."""

import contextlib
import threading
import time
from typing import Any

import redis
from google.protobuf.message import DecodeError

from embertide.server.adapters.promotion import read_promotion
from embertide.server.adapters.redis import connect
from embertide.server.core.news import News
from embertide.v1 import control_pb2, update_pb2

_TIMEOUT_S = 0.5
_FRESH_S = 1.0
_MODELS_MAX = 256
_COMMITS_MAX = 16  # that are read at a time: one with dense tensors may have a megabyte
_SIGN_KEPT_MS = 7 * 86_400_000  # docs/formats.md, "Bus": its age is what is gone of that


class Bus:
    """The newest commit and the trainer, as of a second ago at most. Thread-safe.

    Attributes:
        missed: Times that the Redis did not answer.
    """

    def __init__(self, url: str, model: str) -> None:
        """Name the Redis and the model; connects when first asked.

        Raises:
            ValueError: The URL is not one of Redis.
        """
        self._redis = connect(url, _TIMEOUT_S)
        self._commits = f"e:{{{model}:commit}}:log"  # docs/formats.md, "Bus"
        self._lock = threading.Lock()
        self._asked_s = -_FRESH_S
        self._trainer = f"e:{{{model}:commit}}:trainer"
        self._promoted = f"e:{{{model}:commit}}:promoted"
        self._newest: update_pb2.Version | None = None
        self._sign: control_pb2.TrainerStatus | None = None
        self.missed = 0

    def newest(self) -> update_pb2.Version | None:
        """Return the newest committed version; None: there is none, or the bus does not answer."""
        with self._lock:
            self._look()
            return self._newest

    def trainer(self) -> control_pb2.TrainerStatus | None:
        """Return who trains; None: nobody has for a week, or the bus does not answer."""
        with self._lock:
            self._look()
            return self._sign

    def news(self, number: int, lineage: int) -> News:
        """Return the versions after one, oldest first, at most 16; (0, 0): the newest 16.

        With what was decided on versions, the trainer, and how full the bus is. What cannot be
        known now is left out.
        """
        newest, trainer = self.newest(), self.trainer()
        lost = newest is not None and newest.number < number and newest.lineage > lineage
        try:
            pipe: Any = self._redis.pipeline(transaction=False)
            if number and not lost:  # a bus that lost its log begins anew
                pipe.xrange(self._commits, min=f"({number}-{lineage}", count=_COMMITS_MAX)
            else:
                pipe.xrevrange(self._commits, count=_COMMITS_MAX)
            pipe.get(self._promoted)
            pipe.xlen(self._commits)
            pipe.info("memory")
            entries, record, versions, memory = pipe.execute()
            commits = [update_pb2.GlobalCommit.FromString(each[b"m"]) for _, each in entries]
            return News(
                commits=sorted(commits, key=lambda each: each.version.number),
                bus=control_pb2.BusStatus(
                    used_bytes=int(memory["used_memory"]),
                    max_bytes=int(memory.get("maxmemory", 0)),
                    versions=versions,
                ),
                promotion=read_promotion(record) if record else None,
                trainer=trainer,
            )
        except (redis.RedisError, DecodeError, ValueError):
            self.missed += 1
            return News(trainer=trainer)

    def _look(self) -> None:
        if time.monotonic() - self._asked_s < _FRESH_S:
            return
        self._newest = self._sign = None
        try:
            self._ask()
        except (redis.RedisError, DecodeError):
            self.missed += 1
        self._asked_s = time.monotonic()

    def _ask(self) -> None:
        pipe: Any = self._redis.pipeline(transaction=False)
        pipe.xrevrange(self._commits, count=1)
        pipe.get(self._trainer)
        pipe.pttl(self._trainer)
        entries, sign, left_ms = pipe.execute()
        for _, fields in entries:
            self._newest = update_pb2.GlobalCommit.FromString(fields[b"m"]).version
        if sign is not None:
            self._sign = control_pb2.TrainerStatus(
                sign=update_pb2.TrainerSign.FromString(sign),
                age_ms=max(0, _SIGN_KEPT_MS - left_ms),
            )

    def models(self) -> list[str]:
        """Return the models of which a trainer has left a sign on this bus, ascending, 256 at most.

        Raises:
            redis.RedisError: It does not answer.
        """
        found: set[str] = set()
        for key in self._redis.scan_iter(match="e:{*:commit}:trainer", count=1000):
            found.add(key.decode("utf-8", "replace")[len("e:{") : -len(":commit}:trainer")])
            if len(found) == _MODELS_MAX:
                break
        return sorted(found)

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(redis.RedisError):
            self._redis.close()
