"""The bus as the control plane sees it: versions, what was decided on them, and who publishes.

All of it is read but orders to roll back, which are written.
"""

import contextlib
import threading
import time
from typing import Any

import redis
from google.protobuf.message import DecodeError

from embertide.server.adapters.promotion import read_promotion
from embertide.server.adapters.redis import connect
from embertide.server.core.news import News, RollbackNews, trainer_state
from embertide.v1 import control_pb2, update_pb2

_TIMEOUT_S = 0.5
_FRESH_S = 1.0
_MODELS_MAX = 256
_COMMITS_MAX = 16  # that are read at a time: one with dense tensors may have a megabyte
ORDER_KEPT_S = 60
"""An order that no trainer has taken is dropped after so long."""
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
        self._order = f"e:{{{model}:commit}}:rollback"
        self._outcome = f"e:{{{model}:commit}}:rolled_back"
        self._newest: update_pb2.Version | None = None
        self._sign: control_pb2.TrainerStatus | None = None
        self._away = False
        self._was_silent = False  # the trainer, when Redis answered last
        self._answers_s: float | None = None  # since when, after it was away; None: always
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
            pipe.get(self._order)
            pipe.get(self._outcome)
            entries, record, versions, order, outcome = pipe.execute()
            commits = [update_pb2.GlobalCommit.FromString(each[b"m"]) for _, each in entries]
            return News(
                commits=sorted(commits, key=lambda each: each.version.number),
                bus=self._status(versions),
                promotion=read_promotion(record) if record else None,
                trainer=trainer,
                rollback=_rollback(order, outcome),
            )
        except (redis.RedisError, DecodeError, ValueError):
            self.missed += 1
            return News(trainer=trainer)

    def _status(self, versions: int) -> control_pb2.BusStatus:
        status = control_pb2.BusStatus(versions=versions)
        # Overlays of Kubernetes that were made before 0.3 let this user read keys alone.
        with contextlib.suppress(redis.exceptions.NoPermissionError):
            memory: Any = self._redis.info("memory")
            status.used_bytes = int(memory["used_memory"])
            status.max_bytes = int(memory.get("maxmemory", 0))
        return status

    def rollback(self) -> RollbackNews:
        """Return the order to roll back that waits, and what has become of the last one taken.

        Raises:
            redis.RedisError: The bus does not answer.
        """
        found: Any = self._redis.mget(self._order, self._outcome)
        return _rollback(*found)

    def order_rollback(self, order: update_pb2.RollbackOrder) -> None:
        """Order a version to be restored; an order that waits already stays as it is.

        Raises:
            redis.RedisError: The bus does not answer, or refuses.
        """
        message = order.SerializeToString()
        self._redis.set(self._order, message, ex=ORDER_KEPT_S, nx=True)

    def _look(self) -> None:
        if time.monotonic() - self._asked_s < _FRESH_S:
            return
        self._newest = self._sign = None
        try:
            self._ask()
        except (redis.RedisError, DecodeError):
            self.missed += 1
            self._away = True
        self._asked_s = time.monotonic()

    def _note_answer(self) -> None:
        """Note that Redis answered; who was silent before it was away is silent still."""
        now_s = time.monotonic()
        if self._away:
            self._away = False
            self._answers_s = None if self._was_silent else now_s
        if self._sign is not None:
            if self._answers_s is not None:
                self._sign.answers_ms = round(1000 * (now_s - self._answers_s))
            self._was_silent = trainer_state(self._sign) == "silent"

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
        self._note_answer()

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


def _rollback(order: bytes | None, outcome: bytes | None) -> RollbackNews:
    return RollbackNews(
        update_pb2.RollbackOrder.FromString(order) if order else None,
        update_pb2.RollbackOutcome.FromString(outcome) if outcome else None,
    )
