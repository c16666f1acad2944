"""News from outside a driver's core: the bus, and nodes that were refused."""

from typing import Protocol

from embertide._common.background import Health
from embertide.server.core.news import News
from embertide.server.services.registrations import RefusedRegistrations
from embertide.v1 import node_pb2


class BusSource(Protocol):
    """Reads the bus."""

    def news(self, number: int, lineage: int) -> News:
        """Return versions after one, what was decided on versions, and the trainer's sign."""


class Outside:
    """Hears of versions, the trainer and refused registrations."""

    def __init__(self, bus: BusSource | None, registrations: RefusedRegistrations) -> None:
        """Take the bus; None: there is none. And who was refused."""
        self._bus, self._registrations = bus, registrations

    def news(self, number: int, lineage: int) -> News:
        """Return what is new after a version; (0, 0): the newest ones."""
        news = self._bus.news(number, lineage) if self._bus is not None else News()
        return news._replace(refused=self._registrations.newest())


def task_health(health: Health) -> node_pb2.TaskHealth:
    """Return how a task of this process is, as messages say it."""
    return node_pb2.TaskHealth(
        name=health.name,
        state=health.state.value,
        failures=health.failures,
        error=health.error,
        since_ms=round(health.since_s * 1000),
    )
