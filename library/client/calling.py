"""The state that both clients share: endpoints, their health, and counters.

The endpoint that is asked is the first of the list that is well. One that failed, or stands still,
comes last until it answers again: calls under way may do that, and a question whether the model is
ready, which nobody waits for.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Collection, Sequence

from tritonclient.grpc import service_pb2

from embertide._common import kserve
from embertide.client.settings import Settings

_REST_S, _MAX_REST_S = 0.05, 0.5  # of an endpoint that failed, before it is looked at again
_MAX_AILING = 4096  # pairs of endpoint and model that are remembered
_CLOSE_S = 1.0  # that `close` waits for calls under way


@dataclasses.dataclass(slots=True)
class _Ailing:
    """An endpoint that failed for a model; times are of the monotonic clock."""

    times: int
    failed_s: float
    rests_until_s: float
    looked_at: bool = False  # by a question that is not answered yet


class Calling:
    """Endpoints, how they are, and counters. Thread-safe."""

    def __init__(self, endpoints: str | Sequence[str], settings: Settings) -> None:
        """Name the endpoints, host:port of gRPC; nothing is sent yet.

        Raises:
            ValueError: An endpoint is none, or a token would travel to it in plain text.
        """
        self.endpoints = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        self.settings = settings
        if not self.endpoints:
            raise ValueError("there is no endpoint; give host:port of a node's gRPC")
        for each in self.endpoints:
            settings.check(each)
        credentials = settings.credentials()
        self.lines = [
            kserve.Line(each, credentials, max_answer_bytes=settings.max_answer_bytes)
            for each in self.endpoints
        ]
        self._stuck_s = settings.patience_s(settings.timeout_s, len(self.endpoints))
        self._lock = threading.Lock()
        self._ailing: dict[tuple[int, str], _Ailing] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += by

    def counters(self) -> dict[str, int]:
        """Return what was counted since the start, and `unheard`, which is of now."""
        with self._lock:
            counts = dict(self._counts)
        return {**counts, "unheard": sum(line.unheard for line in self.lines)}

    def close(self) -> None:
        """Take no more calls, and wait a moment for those that are under way."""
        end_s = time.monotonic() + _CLOSE_S
        for line in self.lines:
            line.close(max(0.0, end_s - time.monotonic()))

    def choose(self, model: str, asked: Collection[int], busy: Collection[int]) -> int | None:
        """Return the endpoint to ask, if possible one that was not `asked` yet.

        That is the first one that is well; else the one that failed longest ago, and last those
        that stand still. None: all are `busy`.
        """
        ranks = []
        with self._lock:
            for at, line in enumerate(self.lines):
                if at not in busy:
                    ailing = self._ailing.get((at, model))
                    failed_s = 0.0 if ailing is None else ailing.failed_s
                    ranks.append((at in asked, line.silent_s() >= self._stuck_s, failed_s, at))
        return min(ranks)[-1] if ranks else None

    def leave(self, at: int, model: str, *, looked: bool = False) -> None:
        """Note that an endpoint failed for a model; `looked`: as `look_after` asked it."""
        now_s = time.monotonic()
        with self._lock:
            if len(self._ailing) >= _MAX_AILING:
                self._ailing.clear()
            before = self._ailing.get((at, model))
            times = 1 if before is None else before.times + 1
            rest_s = min(_REST_S * 2.0 ** min(times, 10), _MAX_REST_S)
            asked = before is not None and before.looked_at and not looked
            self._ailing[at, model] = _Ailing(times, now_s, now_s + rest_s, asked)
            if before is None and len(self.endpoints) > 1:
                self._counts["endpoints_left"] += 1

    def well(self, at: int, model: str) -> None:
        """Note that an endpoint answered."""
        if (at, model) in self._ailing:
            with self._lock:
                self._ailing.pop((at, model), None)

    def look_after(self, model: str, metadata: kserve.Metadata) -> None:
        """Ask the endpoints that failed a while ago whether they are ready; it does not wait."""
        if not self._ailing or len(self.endpoints) == 1:
            return
        now_s = time.monotonic()
        with self._lock:
            due = [
                (at, ailing)
                for (at, of), ailing in self._ailing.items()
                if of == model and now_s >= ailing.rests_until_s and not ailing.looked_at
            ]
            for _, ailing in due:
                ailing.looked_at = True
        for at, _ in due:
            self._look(at, model, metadata)

    def _look(self, at: int, model: str, metadata: kserve.Metadata) -> None:
        def done(sent: kserve.Sent, outcome: kserve.Outcome) -> None:
            if outcome.error is None and outcome.reply.ready:
                self.well(at, model)
            else:
                self.leave(at, model, looked=True)

        request = service_pb2.ModelReadyRequest(name=model)
        try:
            self.lines[at].start("ModelReady", request, done, metadata).forget()
        except kserve.CallError:
            self.leave(at, model, looked=True)
