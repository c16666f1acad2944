"""Consoles for tests, each with its server."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from made_fleet import MadeFleet
from visitor import Visitor

from embertide.server.console.app import Console, ConsoleOptions
from embertide.server.console.server import ConsoleServer, HttpsFolder
from embertide.server.console.views import VIEWS

OF_THE_FLEET = [path for path, _, _ in VIEWS.values()]
PATHS = [*OF_THE_FLEET, "/sizing"]


class Served(NamedTuple):
    """A console and where it listens."""

    console: Console
    address: str

    def visitor(self, token: str | None = None) -> Visitor:
        """A visitor, logged in if a token is given."""
        visitor = Visitor(self.address)
        if token is not None:
            answer = visitor.log_in(token)
            assert answer.status == 303, answer.text
        return visitor


@contextlib.contextmanager
def served(
    dial: Any, control: str = "127.0.0.1:7070", https: HttpsFolder | None = None
) -> Iterator[Served]:
    """A console that dials as it is told."""
    console = Console(ConsoleOptions(control=control, dial=dial, https=https is not None))
    try:
        with ConsoleServer(console.app, "127.0.0.1:0", https) as server:
            yield Served(console, server.address)
    finally:
        console.close()


@contextlib.contextmanager
def made(told: dict[str, Any], **options: Any) -> Iterator[tuple[Served, MadeFleet]]:
    """A console of a made-up fleet."""
    fleet = MadeFleet(told, **options)
    with served(fleet.dial) as each:
        yield each, fleet
