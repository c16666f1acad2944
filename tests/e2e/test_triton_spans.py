"""Spans of OpenTelemetry that the stock front end makes, below that of the caller."""

import http.server
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Client, beside
from waiting import wait_until

from embertide.server.adapters import triton

KEYS = [[7, 3, 14, 101], [0, 1, 21, 102]]


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans as OTLP over HTTP."""

    def __init__(self) -> None:
        self.taken = b""
        super().__init__(("127.0.0.1", 0), Taker)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Taker(http.server.BaseHTTPRequestHandler):
    """Keeps what comes."""

    server: Collector

    def do_POST(self) -> None:
        self.server.taken += self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running
        running.shutdown()


def test_spans_have_the_trace_of_the_caller(
    server_options: triton.ServerOptions,
    snapshot: tuple[Path, Any],
    tmp_path: Path,
    collector: Collector,
) -> None:
    trace = secrets.token_hex(16)
    url = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
    arguments = (  # as docs/serving.md has them
        *("--trace-config=mode=opentelemetry", "--trace-config=level=TIMESTAMPS"),
        *("--trace-config=rate=1", f"--trace-config=opentelemetry,url={url}"),
    )
    more = {"front": "triton", "extra": arguments}
    options = beside(server_options, tmp_path / "models", tmp_path / "log", ["lookup"], **more)
    triton.write_model(options.repository, "lookup", triton.ModelOptions(snapshot=snapshot[0]))
    with triton.TritonServer(options) as stock:
        client = Client("grpc", stock)
        client.rectangular(KEYS, headers={"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"})
        # As digits in JSON.
        wait_until(lambda: trace in collector.taken.decode("utf-8", "replace").lower())
        client.raw.close()
