"""How a node ends that `embertide serve` runs, and its connections."""

import contextlib
import http.client
import time
from pathlib import Path
from typing import Any

import grpc
from served import answer, serving
from serving import MODULES, wait_until

MOST_S = 8.0  # 3 s for requests in flight; a busy machine takes longer to end processes


def test_a_connection_that_is_kept_does_not_hold_up_the_end(
    snapshot: tuple[Path, Any], tmp_path: Path, backends: Path
) -> None:
    with contextlib.ExitStack() as stack, serving(snapshot[0], tmp_path, backends) as addresses:
        kept = stack.enter_context(
            contextlib.closing(http.client.HTTPConnection(addresses["http"]))
        )
        kept.request("GET", "/v2/health/ready")
        assert kept.getresponse().read() == b""
        with MODULES["grpc"].InferenceServerClient(addresses["grpc"]) as raw:
            assert answer(raw, "grpc") > 0
        ending = time.monotonic()
    assert time.monotonic() - ending < MOST_S


def test_connections_of_grpc_end_by_age_and_no_call_with_them(
    snapshot: tuple[Path, Any], tmp_path: Path, backends: Path
) -> None:
    with serving(snapshot[0], tmp_path, backends) as addresses:
        states: list[grpc.ChannelConnectivity] = []
        with grpc.insecure_channel(addresses["grpc"]) as channel:
            channel.subscribe(states.append, try_to_connect=True)
            wait_until(lambda: grpc.ChannelConnectivity.READY in states, 10)
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
