"""The events of a fleet, as pages show them: those that the control plane keeps."""

from typing import NamedTuple

from embertide.server.cli.timeline import KINDS, kind_name
from embertide.server.console.source import Reading
from embertide.v1 import control_pb2

SHOWN_MAX = 300


class Row(NamedTuple):
    """An event.

    Attributes:
        at_ms: Wall clock of the last time.
        kind: One of `KINDS`.
        what: A sentence.
        who: Who did it; empty: nobody did.
        why: The reason that was given, or the cause.
        since_ms: Wall clock of the first time; 0: it happened once.
    """

    at_ms: int
    kind: str
    what: str
    who: str
    why: str
    since_ms: int

    def matches(self, text: str) -> bool:
        """Return whether any of its words holds a text, in any case."""
        return text.casefold() in " ".join((self.what, self.who, self.why)).casefold()


def rows_of(reading: Reading) -> list[Row]:
    """Return what happened, newest first."""
    rows = [_row(each) for each in reading.events]
    return sorted(rows, key=lambda row: row.at_ms, reverse=True)


def rows_like(reading: Reading, kind: str, text: str) -> list[Row]:
    """Return what happened of a kind, with a text; empty: any."""
    return [
        row
        for row in rows_of(reading)
        if (kind not in KINDS or row.kind == kind) and row.matches(text)
    ]


def _row(event: control_pb2.FleetEvent) -> Row:
    repeats = event.first_ms and event.first_ms != event.at_ms
    return Row(
        event.at_ms,
        kind_name(event),
        event.text,
        event.author,
        event.why,
        event.first_ms if repeats else 0,
    )
