"""Events that happen at a pace: taken from a reservoir in Redis, and added to the live stream.

The reservoir is a stream that `embertide send-events` fills in advance, in the same Redis. Moving
an entry keeps its id, which says which events it holds, so the trainer sees one unbroken stream.
"""

import json
import re
import threading
import time
from pathlib import Path
from typing import Any, Self

import redis

from embertide.server.adapters.process import Child
from embertide.server.adapters.redis import connect
from embertide.server.cli.chaos.options import ChaosError
from embertide.server.cli.processes import TRAINER

STREAM = "e:{events}:log"
_RESERVOIR = "e:{reservoir}:log"
_ENTRY_EVENTS = 64  # so that events come evenly
_FILL_EVENTS = 60_000
_LOW_EVENTS = 30_000
_HOURS = 10_000  # of synthetic news: more than anybody waits for
_KEPT_ENTRIES = 4_000
_TICK_S = 0.05
_TIMEOUT_S = 1.0


class Feed(threading.Thread):
    """Moves events from the reservoir to the live stream. A context manager that ends it."""

    def __init__(self, url: str, data: str | None, events_per_s: float, log: Path) -> None:
        """Fill the reservoir; no event happens yet.

        Raises:
            ChaosError: The events cannot be read.
        """
        super().__init__(daemon=True)
        self._url, self._data, self._rate, self._log = url, data, events_per_s, log
        self._redis = connect(url, _TIMEOUT_S)
        self._next = 0  # event that is not in the reservoir yet
        self._left = 0  # events in the reservoir
        self._flows, self._ended = threading.Event(), threading.Event()
        self._fill: Child | None = None
        self.events = 0  # that have happened
        while self._left <= _LOW_EVENTS and not self._all_sent:
            self.step()
            time.sleep(_TICK_S)

    @property
    def _all_sent(self) -> bool:
        """Whether the reservoir has got all events that there are."""
        return self._next < 0

    @property
    def exhausted(self) -> bool:
        """Whether all events that there are have happened."""
        return self._all_sent and self._left <= 0

    def step(self) -> None:
        """Fill the reservoir if it runs low; called often, by the thread that starts processes.

        Raises:
            ChaosError: The events cannot be read.
        """
        if self._fill is not None and not self._fill.alive():
            text, code = self._fill.log_text(), self._fill.code
            self._fill = None
            if code == 0:
                said = json.loads(text[text.index("{") :])
                self._left += said["events"]
                self._next = said["next"] if said["events"] else -1
            elif stopped := re.search(r"go on with --start (\d+)", text):
                reached = int(stopped[1])
                self._left, self._next = self._left + reached - self._next, reached
            elif self._left <= 0:
                raise ChaosError(f"no events can be had:\n{text}")
        if self._fill is None and self._left <= _LOW_EVENTS and not self._all_sent:
            words = [f"{self._url}#{_RESERVOIR}", "--batch-size", str(_ENTRY_EVENTS)]
            words += ["--start", str(self._next), "--events", str(self._next + _FILL_EVENTS)]
            words += ["--data", self._data] if self._data else ["--demo", "--hours", str(_HOURS)]
            self._fill = Child([*TRAINER, "send-events", *words, "--json"], log=self._log)

    def run(self) -> None:
        """Let events happen at the pace; what a Redis that was away missed is not made up."""
        after, due = "-", time.monotonic()
        while not self._ended.wait(_TICK_S):
            if not self._flows.is_set():
                due = time.monotonic()
                continue
            try:
                while due <= time.monotonic() and self._flows.is_set():
                    moved = self._move(after)
                    if not moved:
                        due = time.monotonic()
                        break
                    after, count = moved
                    self.events += count
                    self._left -= count
                    due += count / self._rate
            except redis.RedisError:
                due = time.monotonic()

    def _move(self, after: str) -> tuple[str, int] | None:
        """Move the next entry; return where to go on, and its number of events."""
        found: Any = self._redis.xrange(_RESERVOIR, after, count=1)
        if not found:
            return None
        id, fields = found[0]
        first, _, count = id.decode().partition("-")
        if int(count):
            try:
                self._redis.xadd(STREAM, fields, id=id, maxlen=_KEPT_ENTRIES, approximate=True)
            except redis.ResponseError as error:
                # The reply to the first attempt was lost; the entry is there.
                if "equal or smaller" not in str(error):
                    raise
        self._redis.xdel(_RESERVOIR, id)
        return f"({first}-{count}", int(count)

    def flow(self, flows: bool) -> None:
        """Let events happen, or none."""
        if flows:
            self._flows.set()
        else:
            self._flows.clear()

    def __enter__(self) -> Self:
        """Begin; events flow once they are let."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End it."""
        self._ended.set()
        self.join()
        if self._fill is not None:
            self._fill.stop()
        self._redis.close()
