"""Two control planes and one lease: who leads, and what is left when the leader is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import redis
from control_bench import Client
from fake_node import TABLES
from simulation import make_node, make_registration
from waiting import wait_until

from embertide.server.adapters import state as states
from embertide.server.adapters.process import free_ports
from embertide.server.adapters.state import MemoryState, RedisState
from embertide.server.core.errors import SupersededError
from embertide.server.core.state import StateStore, Writes
from embertide.server.services.standby import Standby
from embertide.v1 import control_pb2

STATUS = control_pb2.ControlServiceGetStatusRequest()


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, redis_url: str) -> Iterator[StateStore]:
    if request.param == "memory":
        yield MemoryState()
        return
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    kept = RedisState(redis_url, "news")
    yield kept
    kept.close()


def test_one_at_a_time_has_the_lease(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "LEASE_MS", 100)
    first, _ = store.try_term("a:1")
    assert first == 1
    assert store.try_term("b:1") == (0, "a:1")
    for _ in range(5):
        time.sleep(0.05)
        assert store.renew(first, "a:1")
    assert store.try_term("b:1") == (0, "a:1")
    wait_until(lambda: store.try_term("b:1")[0] == 2)
    # The first one wakes up: it has no lease, and writes nothing.
    assert not store.renew(first, "a:1")
    store.release(first)
    assert store.try_term("c:1") == (0, "b:1")
    with pytest.raises(SupersededError):
        store.commit(first, Writes(nodes={"node-0": None}))
    store.release(2)
    assert store.try_term("c:1") == (3, "")
    assert store.take_term("d:1") == 4  # an operator starts one that does not wait
    assert not store.renew(3, "c:1")


def test_one_that_stands_by_names_the_leader() -> None:
    store = MemoryState()
    store.take_term("leader:7070")
    with Standby("127.0.0.1:0", store) as standby:
        stopping = threading.Event()
        waiting = threading.Thread(target=standby.wait, args=(stopping,))
        waiting.start()
        client = Client(standby.address)
        wait_until(lambda: "leader:7070" in client.refused("GetStatus", STATUS)[1])
        assert client.refused("GetStatus", STATUS)[0] == "UNAVAILABLE"
        with pytest.raises(grpc.RpcError, match="stands by"):
            next(client.stub.StreamBeats(iter(()), timeout=5))
        client.channel.close()
        stopping.set()
        waiting.join()


def start(state: str, folder: Path, port: int, *more: str) -> "subprocess.Popen[bytes]":
    binary = str(Path(sys.executable).with_name("embertide"))
    command = [binary, "control", "--standby", "--state", state]
    command += ["--listen", f"127.0.0.1:{port}", "--directory", str(folder / str(port)), *more]
    with (folder / f"{port}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def leads(client: Client) -> bool:
    with contextlib.suppress(grpc.RpcError):
        return bool(client.call("GetStatus", STATUS, 1.0))
    return False


def test_one_whose_state_and_audit_are_elsewhere_needs_no_folder(
    redis_url: str, tmp_path: Path
) -> None:
    """A container may have a file system that it cannot write to, as k8s/base/control.yaml has."""
    with redis.Redis.from_url(redis_url) as database:
        database.flushall()
    (port,) = free_ports(1)
    (tmp_path / "file").touch()
    more = ("--directory", str(tmp_path / "file" / "absent"), "--audit", "/dev/stdout")
    process = start(redis_url, tmp_path, port, *more)
    client = Client(f"127.0.0.1:{port}")
    try:
        wait_until(lambda: leads(client) or process.poll() is not None, 30.0)
        log = tmp_path / f"{port}.log"
        assert process.poll() is None, log.read_text()
        node = make_node("node-0", address="127.0.0.1:1")
        client.call("RegisterNode", make_registration(node, TABLES))
        assert '"rpc": "RegisterNode"' in log.read_text()
    finally:
        process.kill()
        process.wait()
        client.channel.close()


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_another_leads_within_seconds(redis_url: str, tmp_path: Path, how: signal.Signals) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    ports = free_ports(2)
    processes = [start(redis_url, tmp_path, port) for port in ports]
    clients = [Client(f"127.0.0.1:{port}") for port in ports]
    try:
        wait_until(lambda: any(map(leads, clients)), 30.0)
        leader = 0 if leads(clients[0]) else 1
        other = clients[1 - leader]
        wait_until(lambda: str(ports[leader]) in other.refused("GetStatus", STATUS)[1], 30.0)
        node = make_node("node-0", address="127.0.0.1:1")
        clients[leader].call("RegisterNode", make_registration(node, TABLES))
        os.kill(processes[leader].pid, how)
        killed_s = time.monotonic()
        wait_until(lambda: leads(other), 15.0)
        assert time.monotonic() - killed_s < 8
        assert [each.node.name for each in other.call("GetStatus", STATUS).nodes] == ["node-0"]
        if how == signal.SIGSTOP:
            os.kill(processes[leader].pid, signal.SIGCONT)
            assert processes[leader].wait(10) != 0
            assert leads(other)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for each in clients:
            each.channel.close()
