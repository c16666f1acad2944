"""Serving /metrics for Prometheus: few connections at once, and the silent are hung up on."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from embertide._common.page_server import CONNECTIONS_MAX, PageServer, serving
from embertide._common.quoting import terminal_text
from embertide.trainer.commands.listening import METRICS_HOST
from embertide.trainer.errors import ConfigurationError

PREFIX = "embertide_trainer_"


def counter_family(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return counters of one name, by the values of a label."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


class _Refused(Collector):
    def __init__(self, server: PageServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "embertide_metrics_connections_refused",
            f"Hung up on, as there were over {CONNECTIONS_MAX} at once.",
            self._server.refused,
        )


@contextlib.contextmanager
def served(port: int, page: Collector, host: str = METRICS_HOST) -> Iterator[None]:
    """Serve /metrics on an address of this machine while the context lives.

    Raises:
        ConfigurationError: The address or the port cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(page)
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(serving(host, port, make_wsgi_app(registry)))
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigurationError(
                f"--metrics-port {port} on {terminal_text(host)} cannot be used: {error}; give "
                "another, or another --metrics-host"
            ) from error
        registry.register(_Refused(server))
        yield


class CountersPage(Collector):
    """Counters of one name, read at each scrape."""

    def __init__(self, name: str, text: str, counters: Callable[[], Mapping[str, int]]) -> None:
        """Show what `counters` gives as PREFIX + NAME{what}."""
        self._name, self._text, self._counters = name, text, counters

    def collect(self) -> Iterator[Metric]:
        """Return them as they are now."""
        yield counter_family(self._name, self._text, "what", self._counters())
