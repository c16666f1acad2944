"""A server that runs and answers nobody is ended and started again; one that is slow is not."""

import logging
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from serving import metric
from waiting import wait_until

import embertide
from embertide._common import kserve
from embertide.server.adapters.silence import MIN_S
from embertide.server.adapters.tiny_inference import request_of

Front = Literal["own", "triton"]
FRONTS: tuple[Front, ...] = ("own", "triton")


@pytest.fixture(params=FRONTS)
def node(
    request: pytest.FixtureRequest,
    snapshot: tuple[Path, Any],
    tmp_path: Path,
    backends: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[embertide.Served]:
    monkeypatch.setenv("EMBERTIDE_BACKENDS", str(backends))
    with embertide.serve(
        snapshot[0],
        kind="lookup",
        model="lookup",
        folder=tmp_path,
        front=request.param,
        silent_s=MIN_S,
    ) as served:
        yield served


def pid_of(node: embertide.Served) -> int:
    return node._server.pid


def counted(node: embertide.Served, name: str) -> float:
    """Return a metric of the server."""
    with urllib.request.urlopen(node.metrics, timeout=5) as page:
        return metric(page.read().decode(), name)


def asked(node: embertide.Served) -> float:
    """Return the number of inferences that the server has answered."""
    return counted(node, "nv_inference_request_success")


def asked_more(node: embertide.Served, than: float) -> bool:
    return asked(node) > than


def test_one_that_stands_still_is_ended_and_started_again(
    node: embertide.Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pid = pid_of(node)
    wait_until(lambda: asked(node) >= 1, 10)  # it is asked, and answers
    assert counted(node, "nv_inference_request_failure") == 0
    os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    wait_until(lambda: node.silences == 1, 3 * MIN_S)
    assert time.monotonic() - began_s > 0.7 * MIN_S
    wait_until(lambda: any("serves again" in each.message for each in caplog.records))
    assert not Path(f"/proc/{pid}").exists()
    assert (node.restarts, node.silences) == (1, 1)
    text = caplog.text
    assert "stands still: it runs, and answered none of 3 inferences in 4 s; it is ended" in text
    assert "ended by signal 9 (SIGKILL)" in text
    wait_until(lambda: asked(node) >= 1, 10)  # the one that came is asked
    assert counted(node, "embertide_server_restarts_total") == 1
    assert counted(node, "embertide_server_silences_total") == 1


def test_one_that_answers_late_is_left_alone(node: embertide.Served) -> None:
    """As on a machine with far too much to do: it runs for a moment, now and then."""
    pid = pid_of(node)
    began_s = time.monotonic()
    while time.monotonic() < began_s + 2 * MIN_S:
        answered = asked(node)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.4 * MIN_S)  # how long it is away is the case; less than it may be silent
        os.kill(pid, signal.SIGCONT)
        wait_until(partial(asked_more, node, answered))
    assert (node.silences, node.restarts, pid_of(node)) == (0, 0, pid)


def test_the_question_is_a_request_that_the_model_takes(node: embertide.Served) -> None:
    from tritonclient.grpc import service_pb2

    with kserve.Line(node.grpc) as line:
        config = line.call("ModelConfig", service_pb2.ModelConfigRequest(name="lookup"), 10).config
        answer = line.infer(request_of(config), 10)
    assert kserve.arrays_of(answer)["VERSION"].shape == (1, 1)
    assert counted(node, "embertide_lookup_keys_total") == 0
