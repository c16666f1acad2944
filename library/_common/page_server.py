"""A server of small pages over HTTP, as /metrics: few connections, and none lasts for long.

The standard library's, and prometheus_client's with it, has neither bound.
"""

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from embertide._common.background import BackgroundTask

CONNECTIONS_MAX = 256  # each is a thread while it lasts
_TOTAL_S = 10.0  # that a connection may take, however it drips
_LOOK_EVERY_S = 0.5


class _Request(WSGIRequestHandler):
    timeout = _TOTAL_S  # of one read

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape is no event."""


class PageServer(socketserver.ThreadingMixIn, WSGIServer):
    """Serves pages to a bounded number of connections, each for a bounded time.

    Attributes:
        refused: Connections that were hung up on, as there were too many at once.
    """

    daemon_threads = True
    block_on_close = False
    # Connections that come together; with five, as the standard library has it, others wait for
    # seconds until they try again.
    request_queue_size = 128
    timeout = _LOOK_EVERY_S  # of a wait for the next connection

    def __init__(self, address: tuple[str, int], *arguments: Any) -> None:
        self.refused = 0
        self._open: dict[socket.socket, float] = {}  # since when, the oldest first
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, *arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection; where there are too many, the oldest one makes room for it."""
        with self._lock:
            self._open[request] = time.monotonic()
            oldest = next(iter(self._open)) if len(self._open) > CONNECTIONS_MAX else None
        if oldest is not None:
            self.refused += 1
            self._hang_up(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection, and close it."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Hang up on who takes too long; called at least twice a second."""
        before = time.monotonic() - _TOTAL_S
        with self._lock:
            late = [each for each, since in self._open.items() if since < before]
        for each in late:
            self._hang_up(each)

    def _hang_up(self, request: socket.socket) -> None:
        with self._lock:
            self._open.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)  # its thread, which reads, then closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: who hung up does not get an answer."""


@contextlib.contextmanager
def serving(host: str, port: int, app: Callable[..., Any]) -> Iterator[PageServer]:
    """Serve a WSGI application while the context lives, in the background.

    Args:
        host: Address of this machine, without brackets.
        port: 0 takes a free one.
        app: It answers each request in a thread of its own.

    Raises:
        OSError: The address cannot be listened on.
        OverflowError: The port is none.
        UnicodeError: The host is none.
    """
    server = make_server(host, port, app, server_class=PageServer, handler_class=_Request)
    assert isinstance(server, PageServer)

    def serve(_stop: threading.Event) -> float:
        server.handle_request()
        server.service_actions()
        return 0.0

    task = BackgroundTask("metrics", serve)
    task.start()
    try:
        yield server
    finally:
        task.stop()
        server.server_close()
