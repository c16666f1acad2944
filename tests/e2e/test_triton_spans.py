"""Spans of OpenTelemetry that the stock front end makes, below that of the caller."""

import http.server
import secrets
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from serving import Client, beside
from typer.testing import CliRunner
from waiting import wait_until

from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports
from embertide.server.cli.app import app

KEYS = [[7, 3, 14, 101], [0, 1, 21, 102]]


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans as OTLP over HTTP."""

    def __init__(self) -> None:
        self.taken = b""
        super().__init__(("127.0.0.1", 0), Taker)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def text(self) -> str:
        return self.taken.decode("utf-8", "replace").lower()


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
    traces = [secrets.token_hex(16) for _ in range(3)]
    url = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
    # A caller's own trace has spans whatever the share of others is.
    more = {"front": "triton", "spans_to": url, "spans_every": 1000}
    options = beside(server_options, tmp_path / "models", tmp_path / "log", ["lookup"], **more)
    triton.write_model(options.repository, "lookup", triton.ModelOptions(snapshot=snapshot[0]))
    with triton.TritonServer(options) as stock:
        client = Client("grpc", stock)
        for _ in range(20):
            client.rectangular(KEYS)
        for trace in traces:
            parent = f"00-{trace}-{secrets.token_hex(8)}-01"
            client.rectangular(KEYS, headers={"traceparent": parent})
        # As digits in JSON.
        wait_until(lambda: all(trace in collector.text() for trace in traces))
        assert collector.text().count('"name":"inferrequest"') == len(traces)
        client.raw.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--spans-to", "http://collector:4318/v1/traces"), "give http://HOST:4317"),
        (("--spans-every", "5"), "there are no spans without --spans-to"),
    ],
)
def test_the_command_says_what_its_options_need(
    given: Sequence[str],
    told: str,
    snapshot: tuple[Path, Any],
    backends: Path,
    tmp_path: Path,
) -> None:
    names = ("--grpc-port", "--metrics-port")
    ports = [str(each) for pair in zip(names, free_ports(2), strict=True) for each in pair]
    where = (
        "--name",
        "lookup",
        "--directory",
        str(tmp_path / "serve"),
        "--backends",
        str(backends),
    )
    done = CliRunner().invoke(
        app, ["serve", str(snapshot[0]), "--kind", "lookup", *where, *ports, *given]
    )
    assert done.exit_code == 1, done.output
    assert told in " ".join(done.output.split())
