"""A server that ends under its callers is started again, by the command and from Python."""

import logging
import os
import re
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from served import answer, serving
from serving import MODULES, metric
from tritonclient.utils import InferenceServerException
from waiting import wait_until

import embertide
from embertide.server.adapters.kept_server import KeptServer

# From the end of a server to its successor's start: half a second to see it, and the machine's.
START_S = 2.0


def server_at(address: str) -> int:
    """The process id of the server whose gRPC listens at `address`."""
    word = f"--grpc={address}".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if word in words and b"embertide_server" in words[0]:
            return int(path.parent.name)
    raise AssertionError(f"no server listens at {address}")


def page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answered:
        return str(answered.read().decode())


def end_and_await(pid: int, how: signal.Signals, ask: Any, timeout_s: float = 30.0) -> float:
    """End a server; return the seconds until it answered again."""
    os.kill(pid, how)
    ended = time.monotonic()

    def answers() -> bool:
        try:
            ask()
        except InferenceServerException:
            return False
        return True

    wait_until(lambda: not Path(f"/proc/{pid}").exists(), every_s=0.01)
    wait_until(answers, timeout_s, every_s=0.02)
    return time.monotonic() - ended


def ask_anew(address: str) -> None:
    """Ask over a new connection: gRPC waits between tries of one that was lost."""
    with MODULES["grpc"].InferenceServerClient(address) as client:
        answer(client, "grpc")


def await_restarts(count: int, log: Path, metrics: str) -> None:
    """Wait until a number of restarts has been said, and counted."""
    name = "embertide_server_restarts_total"
    wait_until(lambda: log.read_text().count("serves again") == count)
    wait_until(lambda: metric(page(metrics), name) == count)


@pytest.mark.alone
def test_serve_starts_a_server_again_that_was_killed_under_a_client(
    snapshot: tuple[Path, Any], tmp_path: Path, backends: Path
) -> None:
    log = tmp_path / "serve.log"
    with serving(snapshot[0], tmp_path, backends) as addresses:
        with MODULES["grpc"].InferenceServerClient(addresses["grpc"]) as client:
            version = answer(client, "grpc")
            for count, how in enumerate((signal.SIGKILL, signal.SIGSEGV), 1):
                pid = server_at(addresses["grpc"])
                took_s = end_and_await(pid, how, lambda: ask_anew(addresses["grpc"]))
                assert server_at(addresses["grpc"]) != pid
                assert answer(client, "grpc") == version
                await_restarts(count, log, addresses["metrics"])
                said = log.read_text()
                assert f"embertide_server ended by signal {how.value} ({how.name})" in said
                took, loads = re.findall(r"(\d+\.\d) s after it ended \((\d+\.\d) s of", said)[-1]
                pause_s = count - 1  # the second end comes soon after the first
                assert float(took) - float(loads) < START_S + pause_s
                assert took_s < START_S + pause_s + float(loads)
        assert "(restart 2; its log: " in said
        assert (tmp_path / "node.log.1").stat().st_size > 0


def test_serve_of_python_starts_it_again_and_logs_it(
    snapshot: tuple[Path, Any],
    tmp_path: Path,
    backends: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("EMBERTIDE_BACKENDS", str(backends))
    with (
        caplog.at_level(logging.WARNING),
        embertide.serve(snapshot[0], kind="lookup", model="lookup", folder=tmp_path) as node,
    ):
        assert node.http is None
        pid = server_at(node.grpc)
        end_and_await(pid, signal.SIGKILL, lambda: ask_anew(node.grpc))
        wait_until(lambda: any("serves again" in each.message for each in caplog.records))
        assert (node.alive(), node.restarts) == (True, 1)
        again = server_at(node.grpc)
    assert again != pid
    assert not Path(f"/proc/{again}").exists()


def test_a_watch_that_fails_or_has_no_thread_is_told_and_goes_on(
    snapshot: tuple[Path, Any], tmp_path: Path, backends: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its rounds raise; a server that ends meanwhile is started again after."""
    monkeypatch.setenv("EMBERTIDE_BACKENDS", str(backends))
    begin, poll = threading.Thread.start, KeptServer.poll
    fault: list[BaseException] = [RuntimeError("can't start new thread")]

    def start(thread: threading.Thread) -> None:
        if thread.name == "kept-server" and fault:
            raise fault[0]
        begin(thread)

    def failing(kept: KeptServer) -> bool:
        if fault:
            raise fault[0]
        return poll(kept)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(KeptServer, "poll", failing)
    with embertide.serve(snapshot[0], kind="lookup", model="lookup", folder=tmp_path) as node:
        assert node.unwatched == "RuntimeError: can't start new thread"
        fault.clear()
        wait_until(lambda: node.unwatched == "")
        for count, error in enumerate((ValueError("odd"), MemoryError(), SystemExit(3)), 1):
            fault.append(error)
            wait_until(lambda: type(fault[0]).__name__ in node.unwatched)
            pid = server_at(node.grpc)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not node.alive())
            assert node.restarts == count - 1
            fault.clear()
            wait_until(lambda: node.alive() and node._server.answers())
            assert (node.restarts, node.unwatched) == (count, "")


def test_http_is_closed_unless_it_is_asked_for(
    snapshot: tuple[Path, Any], tmp_path: Path, backends: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Port 8000 and whatever else Triton would open by itself."""
    monkeypatch.setenv("EMBERTIDE_BACKENDS", str(backends))
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    with embertide.serve(
        snapshot[0], kind="lookup", model="lookup", folder=tmp_path, start_timeout_s=60
    ) as node:
        ports = {node.grpc.rpartition(":")[2], node.metrics.rpartition(":")[2].partition("/")[0]}
        assert listening(server_at(node.grpc)) == set(map(int, ports))
        # The startup probe of Kubernetes asks this in its place.
        with grpc.insecure_channel(node.grpc) as channel:
            said = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert said.status == health_pb2.HealthCheckResponse.SERVING


def listening(pid: int) -> set[int]:
    """The TCP ports at which a process listens."""
    inodes = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        found = re.fullmatch(r"socket:\[(\d+)\]", str(each.readlink()))
        inodes |= {found[1]} if found else set()
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
