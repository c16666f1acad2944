"""The bus as the control plane sees it: the newest version that a publisher committed."""

import contextlib
import threading
import time
from typing import Any

import redis
from google.protobuf.message import DecodeError

from embertide.server.adapters.redis import connect
from embertide.v1 import update_pb2

_TIMEOUT_S = 0.5
_FRESH_S = 1.0


class Bus:
    """The newest commit, as of a second ago at most. Thread-safe.

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
        self._newest: update_pb2.Version | None = None
        self.missed = 0

    def newest(self) -> update_pb2.Version | None:
        """Return the newest committed version; None: there is none, or the bus does not answer."""
        with self._lock:
            if time.monotonic() - self._asked_s >= _FRESH_S:
                self._newest = None
                try:
                    self._newest = self._ask()
                except (redis.RedisError, DecodeError):
                    self.missed += 1
                self._asked_s = time.monotonic()
            return self._newest

    def _ask(self) -> update_pb2.Version | None:
        entries: Any = self._redis.xrevrange(self._commits, count=1)
        for _, fields in entries:
            return update_pb2.GlobalCommit.FromString(fields[b"m"]).version
        return None

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(redis.RedisError):
            self._redis.close()
