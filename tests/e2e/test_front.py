"""Our front end tells what it counts, where the time of requests went, and which were slow."""

import json
import re
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from serving import Client, beside, parameters
from tritonclient.utils import InferenceServerException
from waiting import wait_until

from embertide._common.direct_http import open_url
from embertide.server.adapters import server_command, triton
from embertide.server.adapters.installation import find_installation
from embertide.server.adapters.process import Child
from embertide.server.cli.metrics_page import MetricsPage

STAGES = ["lookup", "net", "parse", "peers", "queue", "send"]
KEYS = [[7, 3, 14, 101], [0, 1, 21, 102]]
ASKED = 40


@pytest.fixture
def client(server: triton.TritonServer) -> Iterator[Client]:
    made = Client("grpc", server)
    yield made
    made.raw.close()


def page_of(server: triton.TritonServer) -> MetricsPage:
    return MetricsPage(server.metrics())


def slow_of(server: triton.TritonServer) -> Any:
    address = server.options.reached(server.options.metrics_port)
    with open_url(f"http://{address}/slow", 10) as reply:
        assert reply.headers["Content-Type"] == "application/json"
        return json.load(reply)


def test_where_the_time_of_requests_went(server: triton.TritonServer, client: Client) -> None:
    ok = {"method": "ModelInfer", "code": "OK"}
    before = page_of(server)
    for number in range(ASKED):
        # A caller's own word for the front's question is not heard, whatever it is.
        asked = [None, {"embertide_stages": True}, {"embertide_stages": "x"}][number % 3]
        said = parameters(client.rectangular(KEYS, parameters=asked))
        assert "version" in said
        assert not [name for name in said if name.startswith("embertide_stage")]

    def grown(now: MetricsPage, name: str, **labels: str) -> float:
        return now.sum(name, **labels) - before.sum(name, **labels)

    # An answer is counted once gRPC has taken it, which the caller does not wait for.
    wait_until(lambda: grown(page_of(server), "embertide_front_calls_total", **ok) == ASKED)
    wait_until(lambda: grown(page_of(server), "embertide_front_request_us_count") == ASKED)
    wait_until(lambda: page_of(server).sum("embertide_front_inferences") == 0)
    now = page_of(server)
    assert now.labels("embertide_front_stage_us_count", "stage") == STAGES
    for stage in STAGES:
        assert grown(now, "embertide_front_stage_us_count", stage=stage) == ASKED
    spent = {each: grown(now, "embertide_front_stage_us_sum", stage=each) for each in STAGES}
    whole = grown(now, "embertide_front_request_us_sum")
    assert min(spent[each] for each in ("parse", "queue", "lookup", "send")) > 0
    assert spent["net"] == spent["peers"] == 0  # a lookup, of a node alone
    assert sum(spent.values()) <= whole * (1 + 1e-9)
    assert now.sum("embertide_front_bytes") == 0
    assert now.sum("embertide_front_connections") >= 1
    assert now.sum("embertide_front_limit", of="inferences") == 4096
    # Codes without a call are shown as 0, so that a rate sees the first call.
    codes = now.labels("embertide_front_calls_total", "code", method="ModelInfer")
    assert {"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED"} <= {*codes}


def test_the_slowest_are_named(server: triton.TritonServer, client: Client) -> None:
    client.rectangular(KEYS)
    wait_until(lambda: bool(slow_of(server)["minute"]))
    for calls in slow_of(server).values():
        assert 1 <= len(calls) <= 32
        assert calls == sorted(calls, key=lambda call: -call["us"])
        for call in calls:
            named = {"ended_ms", "model", "us", "stages_us", "samples", "version"}
            assert set(call) - {"trace"} == named
            assert sorted(call["stages_us"]) == STAGES
            assert sum(call["stages_us"].values()) <= call["us"] * (1 + 1e-9)


@pytest.mark.parametrize("how", ["parameter", "metadata"])
def test_a_slow_request_is_found_by_the_trace_of_its_caller(
    server: triton.TritonServer, client: Client, how: str
) -> None:
    trace = secrets.token_hex(16)
    given = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}
    more = {"parameters": given} if how == "parameter" else {"headers": given}

    def asked() -> bool:
        client.rectangular(KEYS * 16, **more)  # slower than most
        return trace in [call.get("trace") for call in slow_of(server)["minute"]]

    wait_until(asked)


def test_what_is_no_trace_is_not_kept(server: triton.TritonServer, client: Client) -> None:
    odd = f"00-{'g' * 32}-{'1' * 16}-01"
    for given in ({"parameters": {"traceparent": odd}}, {"parameters": {"traceparent": 7}}):
        client.rectangular(KEYS, **given)
    client.rectangular(KEYS, headers={"traceparent": odd})
    kept = [call.get("trace", "") for calls in slow_of(server).values() for call in calls]
    assert all(re.fullmatch("([0-9a-f]{32})?", trace) for trace in kept)


def test_refused_calls_are_counted(server: triton.TritonServer, client: Client) -> None:
    def counted(code: str, method: str) -> float:
        now = page_of(server)
        return now.sum("embertide_front_calls_total", method=method, code=code)

    def unknown() -> float:
        return page_of(server).sum("embertide_front_refused_total", reason="method")

    ended, missing, refused = (
        counted("UNIMPLEMENTED", "other"),
        counted("NOT_FOUND", "ModelInfer"),
        unknown(),
    )
    with pytest.raises(InferenceServerException, match="absent"):
        client.rectangular(KEYS, model="absent")
    with grpc.insecure_channel(server.grpc) as channel:
        call: Any = channel.unary_unary("/inference.GRPCInferenceService/Absent")
        with pytest.raises(grpc.RpcError, match="this server has no Absent"):
            call(b"")
    wait_until(lambda: counted("UNIMPLEMENTED", "other") == ended + 1)
    wait_until(lambda: counted("NOT_FOUND", "ModelInfer") == missing + 1)
    assert unknown() == refused + 1


def test_a_page_that_cannot_be_served_ends_the_start_in_good_order(
    server_options: triton.ServerOptions, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    options = beside(server_options, tmp_path / "models", tmp_path / "log", [])
    words, environment = server_command.command(options, find_installation(options.triton))
    with socket.create_server(("127.0.0.1", options.metrics_port)):
        child = Child(words, log=options.log, environment=environment)
        assert child.wait(60) == 2, child.log_text()
    at = f"127.0.0.1:{options.metrics_port}"
    assert f"health and metrics cannot be answered at {at}: the address is" in child.log_text()
