"""`embertide slow` shows a node's page of slow requests, and refuses what is none."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from commands import embertide


class Node:
    """Answers every request with a text."""

    def __init__(self) -> None:
        self.text = ""
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(node.text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/slow"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("EMBERTIDE_CONFIG", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    node = Node()
    thread = threading.Thread(target=node.server.serve_forever, args=(0.01,))
    thread.start()
    yield node
    node.server.shutdown()
    thread.join()
    node.server.server_close()


def call(us: float, **more: object) -> dict[str, object]:
    stages = {"parse": 20.0, "queue": 1500.0, "peers": 6000.0, "lookup": 400.0, "net": 900.0}
    return {
        "ended_ms": round(time.time() * 1000) - 4000,
        "model": "news",
        "us": us,
        "stages_us": stages,
        **more,
    }


def test_stages_of_the_slowest_are_shown(node: Node) -> None:
    slowest = call(9000.0, samples=64, version=7)
    node.text = json.dumps({"minute": [slowest, call(800.0, model="\x1b[2J")], "hour": []})
    shown = embertide("slow", "--url", node.url)
    assert shown.exit_code == 0, shown.output
    row = next(line for line in shown.output.splitlines() if "9.00" in line)
    assert row.split()[:1] == ["news"]
    assert row.split()[-9:] == ["9.00", "0.02", "1.50", "6.00", "0.40", "0.90", "-", "64", "7"]
    assert "\x1b" not in shown.output
    facts = json.loads(embertide("slow", "--url", node.url, "--json").output)["slow"]
    assert facts[0] == {**slowest, "trace": ""}
    assert [each["us"] for each in facts] == [9000.0, 800.0]
    hour = embertide("slow", "--url", node.url, "--span", "hour")
    assert "no request was answered in the last hour" in hour.output


@pytest.mark.parametrize(
    "text",
    [
        *("", "nv_inference_count 1", "[]", "7", "{}", '{"minute": 3}', "[" * 100_000),
        json.dumps({"minute": [{"us": 1.0}]}),
        json.dumps({"minute": [call(1.0, ended_ms=4000) | {"us": "x"}]}),
        json.dumps({"minute": [call(1.0, ended_ms=4000) | {"stages_us": [1]}]}),
    ],
)
def test_what_is_no_such_page_is_refused(node: Node, text: str) -> None:
    node.text = text
    refused = embertide("slow", "--url", node.url)
    assert refused.exit_code == 2
    said = " ".join(refused.output.split())
    assert "it is no page of slow requests" in said
    assert "give --url http://HOST:8002/slow" in said


def test_a_node_that_does_not_answer_is_named(node: Node) -> None:
    missing = embertide("slow", "--url", "http://127.0.0.1:1/slow")
    assert missing.exit_code == 1
    assert "no node answers at http://127.0.0.1:1/slow" in " ".join(missing.output.split())
