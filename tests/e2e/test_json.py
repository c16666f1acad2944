"""Inferences over HTTP with JSON, by curl's means and by the client that Triton's users have."""

import dataclasses
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import beside
from tritonclient import grpc as over_grpc
from tritonclient import http as over_http
from waiting import wait_until

from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports
from embertide.server.cli.metrics_page import MetricsPage

MODEL = "lookup"
TOKEN = "a-token-of-a-reader-of-tests"
KEYS = np.array([[0, 1, 14, 100], [7, 2, 14, 3]], np.int64)


@pytest.fixture(scope="module")
def server(
    server_options: triton.ServerOptions,
    snapshot: tuple[Path, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[triton.TritonServer]:
    folder = tmp_path_factory.mktemp("json")
    (folder / "tokens").write_text(f"reader/ada:{TOKEN}\nreader@other:{TOKEN}-of-another\n")
    options = beside(
        server_options,
        folder / "models",
        folder / "triton.log",
        [MODEL],
        tokens=folder / "tokens",
        known_callers=True,
    )
    options = dataclasses.replace(options, http_port=free_ports(1)[0])
    model = triton.ModelOptions(snapshot=snapshot[0], max_batch_size=64)
    triton.write_model(options.repository, MODEL, model)
    with triton.TritonServer(options) as running:
        yield running
        assert running.alive(), running.log_text()


def body(keys: Any = KEYS, **more: Any) -> dict[str, Any]:
    tensor = {"name": "KEYS", "datatype": "INT64", "shape": list(keys.shape), "data": keys.tolist()}
    return {"inputs": [tensor], **more}


def ask(
    server: triton.TritonServer,
    path: str,
    data: bytes | None = None,
    token: str = TOKEN,
    **headers: str,
) -> tuple[int, Any]:
    """The status, and what was answered."""
    sent = {key.replace("_", "-"): value for key, value in headers.items()}
    if token:
        sent["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"http://{server.http}/v2{path}", data, sent)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def infer(server: triton.TritonServer, asked: Any, **more: Any) -> tuple[int, Any]:
    data = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    return ask(server, f"/models/{MODEL}/infer", data, **more)


def begin(server: triton.TritonServer, *headers: str) -> tuple[int, Any]:
    """The answer to headers alone: nothing of the body is sent."""
    host, _, port = server.http.rpartition(":")
    lines = (f"POST /v2/models/{MODEL}/infer HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}")
    with socket.create_connection((host, int(port)), 10) as talk:
        talk.sendall("\r\n".join((*lines, *headers, "", "")).encode())
        answer = HTTPResponse(talk)
        answer.begin()
        return answer.status, json.loads(answer.read())


def refusals(server: triton.TritonServer) -> float:
    return MetricsPage(server.metrics()).sum("embertide_front_refused_total")


def test_the_answer_is_that_of_grpc(server: triton.TritonServer) -> None:
    code, answer = infer(server, body(id="7", outputs=[{"name": "EMBEDDING"}]))
    assert code == 200, answer
    with over_grpc.InferenceServerClient(server.grpc) as client:
        tensor = over_grpc.InferInput("KEYS", KEYS.shape, "INT64")
        tensor.set_data_from_numpy(KEYS)
        token = {"authorization": f"Bearer {TOKEN}"}
        wanted = client.infer(MODEL, [tensor], headers=token).as_numpy("EMBEDDING")
    (output,) = answer["outputs"]
    got = np.array(output["data"], np.float32).reshape(output["shape"])
    np.testing.assert_array_equal(got, wanted)
    assert (output["name"], answer["model_name"], answer["id"]) == ("EMBEDDING", MODEL, "7")
    assert answer["parameters"]["version"] >= 1


def test_tritons_client_without_binary_tensors_works(server: triton.TritonServer) -> None:
    with over_http.InferenceServerClient(server.http) as client:
        token = {"Authorization": f"Bearer {TOKEN}"}
        assert client.is_model_ready(MODEL, headers=token)
        assert client.get_model_metadata(MODEL, headers=token)["inputs"][0]["name"] == "KEYS"
        tensor = over_http.InferInput("KEYS", KEYS.shape, "INT64")
        tensor.set_data_from_numpy(KEYS, binary_data=False)
        wanted = over_http.InferRequestedOutput("EMBEDDING", binary_data=False)
        found = client.infer(MODEL, [tensor], outputs=[wanted], headers=token)
        assert found.as_numpy("EMBEDDING").shape[0] == len(KEYS)
        tensor.set_data_from_numpy(KEYS, binary_data=True)
        with pytest.raises(Exception, match="not taken in binary"):
            client.infer(MODEL, [tensor], headers=token)


def test_what_is_refused_says_why_and_is_counted(server: triton.TritonServer) -> None:
    before = refusals(server)
    small = json.dumps(body()).encode()
    refused = {
        401: infer(server, small, token=""),
        403: infer(server, small, token=f"{TOKEN}-of-another"),
        413: begin(server, "Content-Length: 4194305"),
        415: infer(server, small, Content_Encoding="gzip"),
    }
    assert {wanted: code for wanted, (code, _) in refused.items()} == {c: c for c in refused}
    assert all(answer["error"] for _, answer in refused.values())
    bad = {
        b"{": "the body is no JSON",
        b"[" * 100_000: "the body is nested more than 16 deep",
        b'{"inputs": [{"name": "KEYS", "datatype": "INT64", "shape": [1], "data": ["a"]}]}': (
            'input "KEYS": "a" is no INT64'
        ),
    }
    for data, why in bad.items():
        assert infer(server, data) == (400, {"error": why})
    assert refusals(server) == before + len(refused) + len(bad)
    # Refusals of the model, and models that are not there, are told as over gRPC.
    huge = {"name": "KEYS", "datatype": "INT64", "shape": [1, 2**63 - 1], "data": [1]}
    code, answer = infer(server, {"inputs": [huge]})
    assert code == 400
    assert "KEYS" in answer["error"]
    assert ask(server, "/models/nobody/infer", small)[0] in (400, 404)
    assert ask(server, "/models/nobody/ready")[0] in (400, 404, 503)
    assert ask(server, "/repository/index", b"{}")[0] == 404
    assert infer(server, small)[0] == 200


def test_chunks_silence_and_callers_that_leave_cost_nothing(server: triton.TritonServer) -> None:
    host, _, port = server.http.rpartition(":")
    path = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    chunked = (path + "Transfer-Encoding: chunked\r\n\r\n" + "1\r\n{\r\n" * 1000).encode()
    whole = json.dumps(body()).encode()
    left = (path + f"Content-Length: {len(whole)}\r\n\r\n").encode() + whole
    silent = (path + "Content-Length: 4000000\r\n\r\n{").encode()
    kept = []
    for n, said in enumerate((chunked, left, silent) * 20):
        talk = socket.create_connection((host, int(port)), 5)
        talk.sendall(said)
        if n % 2:
            talk.close()
        else:
            kept.append(talk)
    assert infer(server, body())[0] == 200
    for talk in kept:
        talk.close()

    def is_idle() -> bool:
        page = MetricsPage(server.metrics())
        return page.sum("embertide_front_inferences") == 0

    wait_until(is_idle)
    assert infer(server, body())[0] == 200


def test_a_node_that_asks_for_certificates_alone_has_no_http(
    server_options: triton.ServerOptions, tmp_path: Path
) -> None:
    options = beside(server_options, tmp_path, tmp_path / "log", [MODEL], tls=tmp_path)
    options = dataclasses.replace(options, http_port=free_ports(1)[0])
    with pytest.raises(triton.TritonError, match="can show a token alone"):
        triton.TritonServer(options)
