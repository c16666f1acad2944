"""The journal: events of the timeline as lines of the log, each of which has its time."""

import collections
import logging
from collections.abc import Callable, Iterable

from embertide._common.quoting import terminal_text
from embertide.v1 import control_pb2

_log = logging.getLogger(__name__)
# Whoever notices these says so in lines of its own.
_SAID_ELSEWHERE = (control_pb2.EVENT_KIND_REFUSED, control_pb2.EVENT_KIND_TASK)


class Journal:
    """Says what was written. Used by one thread at a time.

    Attributes:
        counts: Events by name: node_died, node_returned, operation_succeeded, ...
    """

    def __init__(self, model: str, say: Callable[..., None] = _log.info) -> None:
        """Begin; lines name the model."""
        self.counts: collections.Counter[str] = collections.Counter()
        self._model = model
        self._say = say

    def wrote(self, events: Iterable[control_pb2.FleetEvent | None]) -> None:
        """Log what has happened; an event that goes on is logged once."""
        for event in events:
            if event is None or (event.times > 1 and event.first_ms != event.at_ms):
                continue
            self.counts[event.name] += 1
            if event.kind not in _SAID_ELSEWHERE:
                author = f" (by {event.author})" if event.author else ""
                why = f"; {event.why}" if event.why else ""
                self._say("%s: %s", self._model, terminal_text(f"{event.text}{author}{why}"))
