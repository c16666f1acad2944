"""Serving /metrics for Prometheus from a command."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from embertide.trainer.errors import ConfigurationError

PREFIX = "embertide_trainer_"


def counter_family(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    """Return counters of one name, by the values of a label."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


@contextlib.contextmanager
def served(port: int, page: Collector) -> Iterator[None]:
    """Serve /metrics on all addresses while the context lives.

    Raises:
        ConfigurationError: The port cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(page)
    try:
        server, thread = start_http_server(port, registry=registry)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"--metrics-port {port} cannot be used: {error}; give another"
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class CountersPage(Collector):
    """Counters of one name, read at each scrape."""

    def __init__(self, name: str, text: str, counters: Callable[[], Mapping[str, int]]) -> None:
        """Show what `counters` gives as PREFIX + NAME{what}."""
        self._name, self._text, self._counters = name, text, counters

    def collect(self) -> Iterator[Metric]:
        """Return them as they are now."""
        yield counter_family(self._name, self._text, "what", self._counters())
