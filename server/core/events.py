"""The record of what happened to the fleet: events, of each kind the newest ones."""

from collections.abc import Iterable, Iterator, Mapping

from embertide.server.core.errors import invalid
from embertide.server.core.pagination import page_of
from embertide.server.core.state import EVENTS_KEPT
from embertide.v1 import control_pb2

FleetEvent = control_pb2.FleetEvent
TEXT_BYTES_MAX = 256


class Events:
    """Events by kind and number; of each kind the newest 500, so that none drives out others."""

    def __init__(self) -> None:
        """Begin with none."""
        self._by_kind: dict[int, dict[int, FleetEvent]] = {}

    def __iter__(self) -> Iterator[FleetEvent]:
        """Yield them, newest first."""
        every = [each for held in self._by_kind.values() for each in held.values()]
        return iter(sorted(every, key=lambda each: each.number, reverse=True))

    def of(self, kind: int) -> Iterator[FleetEvent]:
        """Yield those of a kind, newest first."""
        return reversed(list(self._by_kind.get(kind, {}).values()))

    @property
    def last_number(self) -> int:
        """Number of the newest one. 0: there is none."""
        return max((next(reversed(held)) for held in self._by_kind.values() if held), default=0)

    def restore(self, saved: Mapping[str, FleetEvent]) -> None:
        """Hold what was written, and nothing else."""
        self._by_kind = {}
        for each in sorted(saved.values(), key=lambda each: each.number):
            self._by_kind.setdefault(each.kind, {})[each.number] = each

    def too_many(self, more: Iterable[FleetEvent]) -> list[int]:
        """Return the numbers of those that go if `more` come, which are newer."""
        coming: dict[int, list[int]] = {}
        for each in more:
            coming.setdefault(each.kind, []).append(each.number)
        found: list[int] = []
        for kind, numbers in coming.items():
            found += [*self._by_kind.get(kind, {}), *numbers][:-EVENTS_KEPT]
        return found

    def take(self, written: Mapping[str, FleetEvent | None]) -> None:
        """Take in what was written; None: it went."""
        for name, each in written.items():
            if each is not None:
                self._by_kind.setdefault(each.kind, {})[each.number] = each
                continue
            for held in self._by_kind.values():
                held.pop(int(name), None)

    def as_written(self) -> dict[str, FleetEvent | None]:
        """Return all of them, as they are written."""
        return {str(each.number): each for each in self}

    def page(self, request: control_pb2.ListEventsRequest) -> control_pb2.ListEventsResponse:
        """Return a page, newest first.

        Raises:
            RefusedError: The page is too long, or its token is not of ours.
        """
        if (size := len(request.text.encode())) > TEXT_BYTES_MAX:
            raise invalid(f"text is {size} bytes; at most {TEXT_BYTES_MAX}")
        text = request.text.casefold()
        asked = (
            each
            for each in self
            if request.kind in (control_pb2.EVENT_KIND_UNSPECIFIED, each.kind)
            and each.at_ms >= request.since_ms
            and (not request.until_ms or (each.first_ms or each.at_ms) <= request.until_ms)
            and (not text or text in _words(each))
        )
        events, more = page_of(request).cut(asked, lambda each: each.number)
        return control_pb2.ListEventsResponse(events=events, next_page_token=more)


def _words(event: FleetEvent) -> str:
    return " ".join((event.text, event.why, event.author, event.subject)).casefold()
