"""Triton's own APIs in a node that `embertide serve` started: who gets in, over HTTP and gRPC.

Each API is called as it is meant to be, so that a refusal is the door's.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Addresses, answer, serving
from serving import MODULES
from tritonclient.utils import InferenceServerException

from embertide.server.adapters import triton
from embertide.server.adapters.installation import find_installation

Nodes = dict[tuple[str, bool], Addresses]
KEY = "k" * 40
HEADERS = {"http": triton.ADMIN_HEADER, "grpc": triton.GRPC_ADMIN_HEADER}
# Our front end over gRPC, and tritonserver's over both.
WAYS = [("own", "grpc"), ("triton", "grpc"), ("triton", "http")]
# How our own says that it has no such thing for anybody.
ABSENT = "this server has no |parameters of a load are not taken"

# By name: what an operator asks for, and what everybody may.
OPERATORS: dict[str, Callable[[Any, dict[str, str]], Any]] = {
    "index": lambda raw, key: raw.get_model_repository_index(headers=key),
    "load": lambda raw, key: raw.load_model("lookup", headers=key),
    "load another configuration": lambda raw, key: raw.load_model(
        "lookup", headers=key, config='{"backend": "embertide", "max_batch_size": 1}'
    ),
    "unload": lambda raw, key: raw.unload_model("absent", headers=key),
    "shared memory": lambda raw, key: raw.get_system_shared_memory_status(headers=key),
    "map shared memory": lambda raw, key: raw.register_system_shared_memory(
        "mine", "/absent", 64, headers=key
    ),
    "GPU memory": lambda raw, key: raw.get_cuda_shared_memory_status(headers=key),
    "trace": lambda raw, key: raw.get_trace_settings(headers=key),
    "set trace": lambda raw, key: raw.update_trace_settings(
        settings={"trace_level": ["OFF"]}, headers=key
    ),
    "log": lambda raw, key: raw.get_log_settings(headers=key),
    "set log": lambda raw, key: raw.update_log_settings({"log_verbose_level": 0}, headers=key),
}
ALL: dict[str, Callable[[Any], Any]] = {
    "live": lambda raw: raw.is_server_live(),
    "ready": lambda raw: raw.is_server_ready(),
    "model ready": lambda raw: raw.is_model_ready("lookup"),
    "server": lambda raw: raw.get_server_metadata(),
    "model": lambda raw: raw.get_model_metadata("lookup"),
    "configuration": lambda raw: raw.get_model_config("lookup"),
    "statistics": lambda raw: raw.get_inference_statistics("lookup"),
}
# The answers of these doors once they are open; where there are several, by version or build of the
# server.
SAID = {
    # Until 2.67, and after: closed to everybody unless --allow-client-shm=true.
    "map shared memory": "nable to open shared memory|Client shared memory is disabled",
    "load another configuration": 'parameter "kind" is missing',
}
if "--trace-config" not in find_installation().options():  # built without
    SAID |= dict.fromkeys(("trace", "set trace"), "does not support trac")


@pytest.fixture(scope="module")
def nodes(
    snapshot: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory, backends: Path
) -> Iterator[Nodes]:
    """By front end, and whether there is a key."""
    directory = tmp_path_factory.mktemp("doors")
    file = directory / "admin-key"
    file.write_text(KEY + "\n")
    with contextlib.ExitStack() as stack:
        yield {
            (front, keyed): stack.enter_context(
                serving(
                    snapshot[0],
                    directory / f"{front}-{keyed}",
                    backends,
                    *(("--admin-key-file", str(file)) if keyed else ()),
                    http=front == "triton",
                )
            )
            for front in ("own", "triton")
            for keyed in (False, True)
        }


@contextlib.contextmanager
def client(protocol: str, addresses: Addresses) -> Iterator[Any]:
    with MODULES[protocol].InferenceServerClient(addresses[protocol]) as raw:
        yield raw


def refusal(front: str) -> str:
    return f"restricted|{ABSENT}" if front == "own" else "restricted"


@pytest.mark.parametrize(("front", "protocol"), WAYS)
@pytest.mark.parametrize("door", OPERATORS)
def test_nobody_gets_in_without_a_key_to_be_had(
    nodes: Nodes, front: str, protocol: str, door: str
) -> None:
    with client(protocol, nodes[front, False]) as raw:
        for headers in ({}, {HEADERS[protocol]: ""}, {HEADERS[protocol]: KEY}):
            with pytest.raises(InferenceServerException, match=refusal(front)):
                OPERATORS[door](raw, headers)
        assert answer(raw, protocol) > 0


@pytest.mark.parametrize(("front", "protocol"), WAYS)
@pytest.mark.parametrize("door", OPERATORS)
def test_the_key_opens_and_no_other_does(
    nodes: Nodes, front: str, protocol: str, door: str
) -> None:
    header = HEADERS[protocol]
    with client(protocol, nodes[front, True]) as raw:
        for headers in ({}, {header: KEY[:-1]}, {header: KEY + "k"}, {"authorization": KEY}):
            with pytest.raises(InferenceServerException, match=refusal(front)):
                OPERATORS[door](raw, headers)
        if front == "own" and door not in ("index", "load", "unload"):
            with pytest.raises(InferenceServerException, match=ABSENT):
                OPERATORS[door](raw, {header: KEY})
        elif door in SAID:
            with pytest.raises(InferenceServerException, match=SAID[door]):
                OPERATORS[door](raw, {header: KEY})
        else:
            OPERATORS[door](raw, {header: KEY})


@pytest.mark.parametrize(("front", "protocol"), WAYS)
@pytest.mark.parametrize("door", ALL)
def test_scores_and_what_they_need_are_open_to_all(
    nodes: Nodes, front: str, protocol: str, door: str
) -> None:
    with client(protocol, nodes[front, False]) as raw:
        assert ALL[door](raw)
        assert answer(raw, protocol) > 0
