"""How a node ends that `embertide serve` runs, and its connections."""

import contextlib
import http.client
import json
import select
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from served import answer, serving
from serving import MODULES
from waiting import wait_until

MAX_S = 8.0  # 3 s for requests in flight; a busy machine takes longer to end processes


@pytest.mark.alone
def test_a_connection_that_is_kept_does_not_hold_up_the_end(
    snapshot: tuple[Path, Any], tmp_path: Path, backends: Path
) -> None:
    with (
        contextlib.ExitStack() as stack,
        serving(snapshot[0], tmp_path, backends, http=True) as addresses,
    ):
        kept = stack.enter_context(
            contextlib.closing(http.client.HTTPConnection(addresses["http"]))
        )
        kept.request("GET", "/v2/health/ready")
        assert kept.getresponse().read() == b""
        with MODULES["grpc"].InferenceServerClient(addresses["grpc"]) as raw:
            assert answer(raw, "grpc") > 0
        ending = time.monotonic()
    assert time.monotonic() - ending < MAX_S


@pytest.mark.alone
def test_kept_connections_end_between_requests_while_the_node_leaves(
    snapshot: tuple[Path, Any], tmp_path: Path, backends: Path
) -> None:
    """A caller that asks on over each connection sees it end where it would ask next.

    One question of eight callers may cross the end: whoever looks whether a connection still
    stands, and then asks, can be too late by a moment.
    """
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(contextlib.ExitStack())
        addresses = node.enter_context(
            serving(snapshot[0], tmp_path, backends, "--leave-s", "6", http=True)
        )
        body = json.dumps(
            {
                "inputs": [
                    {"name": "KEYS", "shape": [1, 4], "datatype": "INT64", "data": [0, 1, 7, 9]}
                ]
            }
        )
        callers = [http.client.HTTPConnection(addresses["http"], timeout=10) for _ in range(8)]
        asked = dict.fromkeys(range(len(callers)), 0)
        left: dict[int, float] = {}
        crossed = list[int]()
        faults = list[str]()

        def ask(caller: http.client.HTTPConnection) -> None:
            caller.request("POST", "/v2/models/lookup/infer", body)
            answer = caller.getresponse()
            answer.read()
            assert answer.status == 200

        def ask_on(number: int) -> None:
            caller = callers[number]
            try:
                caller.connect()
                while not select.select([caller.sock], [], [], 0.003 * number)[0]:
                    try:
                        ask(caller)
                    except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                        # The question crossed the end on its way: callers ask again then, over a
                        # new connection, as RFC 9112 says, and are answered.
                        crossed.append(number)
                        caller.close()
                        ask(caller)
                        break
                    asked[number] += 1
                left[number] = time.monotonic()
            except (OSError, AssertionError) as error:
                faults.append(f"{number}: {type(error).__name__}: {error}")
            finally:
                caller.close()

        threads = [threading.Thread(target=ask_on, args=(number,)) for number in asked]
        for each in threads:
            each.start()
        wait_until(lambda: min(asked.values()) > 20)
        told = time.monotonic()
        node.close()
        ended = time.monotonic()
        for each in threads:
            each.join()
    assert not faults
    # Between looking and asking a thread here may wait for its turn while the node ends the rest:
    # two did in one run of many. Ends regardless of requests would cross with nearly all.
    assert len(crossed) < len(callers) / 2
    assert len(left) == len(callers)
    assert min(left.values()) - told > 1.5, "load balancers learn of it first"
    assert 6 <= ended - told < 6 + MAX_S
    # Those that rest between requests go well before the end.
    assert sum(at - told < 5 for at in left.values()) >= len(callers) - 1


@pytest.mark.parametrize("http", [False, True], ids=["own", "triton"])
def test_connections_of_grpc_end_by_age_and_no_call_with_them(
    snapshot: tuple[Path, Any], tmp_path: Path, backends: Path, http: bool
) -> None:
    with serving(snapshot[0], tmp_path, backends, http=http) as addresses:
        states: list[grpc.ChannelConnectivity] = []
        with grpc.insecure_channel(addresses["grpc"]) as channel:
            channel.subscribe(states.append, try_to_connect=True)
            wait_until(lambda: grpc.ChannelConnectivity.READY in states)
            client = MODULES["grpc"].InferenceServerClient(addresses["grpc"])
            asked = 0
            while states.count(grpc.ChannelConnectivity.IDLE) < 2 and asked < 2000:
                assert answer(client, "grpc") > 0
                asked += 1
                time.sleep(0.01)
            client.close()
        # Idle before it connected, and again when its age was over.
        assert states.count(grpc.ChannelConnectivity.IDLE) >= 2
        assert asked > 100
