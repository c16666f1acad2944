"""Serving /metrics for Prometheus: few connections at once, and the silent are hung up on."""

import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from embertide.trainer.errors import ConfigurationError

PREFIX = "embertide_trainer_"
_CONNECTIONS_MAX = 256  # each is a thread while it lasts
_SILENCE_S = 10.0


def counter_family(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    """Return counters of one name, by the values of a label."""
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


class _Request(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape is no event."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    # Connections that come together; with five, as the standard library has it, others wait for
    # seconds until they try again.
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self.refused = 0
        self._free = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection where there is room."""
        if not self._free.acquire(blocking=False):
            self.refused += 1
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: who hung up does not get an answer."""


class _Refused(Collector):
    def __init__(self, server: _Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "embertide_metrics_connections_refused",
            f"Over {_CONNECTIONS_MAX} at once.",
            self._server.refused,
        )


@contextlib.contextmanager
def served(port: int, page: Collector) -> Iterator[None]:
    """Serve /metrics on all addresses while the context lives.

    Raises:
        ConfigurationError: The port cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(page)
    try:
        server = make_server(
            "0.0.0.0", port, make_wsgi_app(registry), server_class=_Server, handler_class=_Request
        )
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"--metrics-port {port} cannot be used: {error}; give another"
        ) from error
    assert isinstance(server, _Server)
    registry.register(_Refused(server))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
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
