"""The front door's benchmarks: right answers are told from wrong ones, and endings are counted."""

import argparse
import collections
import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from bench import perf
from bench.frames import DATA, END_STREAM, HEADERS, RST_STREAM, frame
from bench.front import callers, conformance, speed, storm, targets
from bench.front.questions import INFER, NODE_LOOKUP, NODE_READ, Question, compared_of, read, write
from bench.servers import Variant
from embertide.server.adapters.process import Child
from embertide.v1 import node_pb2


def _answer(value: bytes, **more: Any) -> bytes:
    said = service_pb2.ModelInferResponse(model_name="m", raw_output_contents=[value], **more)
    said.outputs.add(name="SCORE", datatype="FP32", shape=[1])
    encoded: bytes = said.SerializeToString()
    return encoded


def test_an_answer_is_right_by_its_tensors_alone() -> None:
    question = Question(INFER, b"", compared_of(INFER, _answer(b"abcd")))
    assert question.right(_answer(b"abcd", id="another"))
    assert not question.right(_answer(b"abce"))
    assert not question.right(b"")
    assert Question(INFER, b"").right(b"anything")


def test_of_what_peers_answer_their_rows_and_sums_are_compared() -> None:
    def looked_up(value: float, newest: int) -> bytes:
        said = node_pb2.LookupResponse(results=[node_pb2.LookupResult(sums=[value])])
        said.versions.newest.number = newest
        encoded: bytes = said.SerializeToString()
        return encoded

    def read_as(value: float, source: int, version: int = 1) -> bytes:
        said = node_pb2.ReadResponse(embeddings=[value], sources=bytes([source]))
        said.version.number = version
        encoded: bytes = said.SerializeToString()
        return encoded

    lookup = Question(NODE_LOOKUP, b"", compared_of(NODE_LOOKUP, looked_up(0.5, 1)))
    assert lookup.right(looked_up(0.5, 2))
    assert not lookup.right(looked_up(0.25, 1))
    reading = Question(NODE_READ, b"", compared_of(NODE_READ, read_as(0.5, 1)))
    assert reading.right(read_as(0.5, 3))
    assert not reading.right(read_as(0.25, 1))
    assert not reading.right(read_as(0.5, 1, version=2))


def test_questions_are_read_as_they_were_written(tmp_path: Path) -> None:
    questions = [Question(INFER, b"\0\1", b""), Question("/a/B", b"", b"x" * 70_000)]
    write(tmp_path / "questions", questions)
    assert read(tmp_path / "questions") == questions


def test_a_call_that_found_no_server_is_made_again() -> None:
    tally = callers.Tally(2)
    endings = iter(["UNAVAILABLE", "right", "wrong"])
    while tally.take():
        tally.note("plain", next(endings))
    assert tally.ended == {"plain: UNAVAILABLE": 1, "plain: right": 1, "plain: wrong": 1}


def test_what_waited_and_was_not_answered_is_told_from_what_was_given_up() -> None:
    chunk = {
        "ended": {
            "threads": {"plain: right": 5, "plain: INTERNAL why": 2, "cancel: CANCELLED": 3},
            "frames": {"plain: UNAVAILABLE": 7, "never ended: sent": 4, "deadline: wrong": 1},
        }
    }
    total = storm.counts([chunk, chunk])
    assert (total["right"], total["wrong"]) == (10, 2)
    assert storm.unanswered(total) == 4
    assert (total["CANCELLED"], total["UNAVAILABLE"], total["sent"]) == (6, 14, 8)


def _chunk(ends: dict[str, int], memory_mib: list[int]) -> dict[str, Any]:
    samples = [(float(n), mib << 20, 50, 20) for n, mib in enumerate(memory_mib)]
    return {
        "calls": 1000,
        "seconds": 2.0,
        "ended": {"threads": {"plain: right": 1000}},
        "ends": ends,
        "down_s": [0.5] * sum(ends.values()),
        "samples": samples,
    }


def test_a_storm_holds_or_does_not() -> None:
    def met(*chunks: dict[str, Any]) -> dict[str, bool]:
        return {row.metric: row.met for row in storm.rows_of("it", chunks) if row.claim}

    assert all(met(_chunk({}, [100] * 20)).values())
    grown = met(_chunk({}, list(range(100, 500, 20))))
    assert [metric for metric, held in grown.items() if not held] == ["memory is flat"]
    refused = _chunk({}, [100] * 20)
    refused["ended"]["threads"]["deadline: UNAVAILABLE"] = 1
    assert met(refused)["waited for, not answered"]
    refused["ended"]["threads"]["plain: UNAVAILABLE"] = 1
    assert not met(refused)["waited for, not answered"]
    ended = met(_chunk({"signal 11 (SIGSEGV)": 2}, [100] * 20))
    assert not ended["ends of the server"]


def test_each_kind_of_call_is_drawn_as_often_as_it_says() -> None:
    rng = random.Random(1)
    drawn = collections.Counter(callers.drawn(rng, callers.WIRE) for _ in range(20_000))
    assert set(drawn) == set(callers.WIRE)
    for kind, share in callers.WIRE.items():
        assert drawn[kind] / 20_000 == pytest.approx(share, abs=0.015)
    moments_s = [callers.moment_s(rng) for _ in range(1000)]
    assert 0.1e-3 <= min(moments_s) < 0.2e-3 < 5e-3 < max(moments_s) <= 10e-3


# --- callers of a server that is ours to command --------------------------------------------------


class _Door(grpc.GenericRpcHandler):
    """Answers any call with the same bytes, in a few milliseconds; notes what it was asked."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.asked: list[bytes] = []

    def service(self, details: Any) -> Any:
        def answer(request: bytes, context: Any) -> bytes:
            self.asked.append(request)
            time.sleep(0.002)
            return self._answer

        return grpc.unary_unary_rpc_method_handler(answer)


@contextlib.contextmanager
def _open(door: _Door) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(8), [door])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def _called(kind: str, address: str, path: Path, answer: bytes) -> collections.Counter[str]:
    write(
        path, [Question(INFER, b"ask" * 9000, compared_of(INFER, answer)), Question(INFER, b"ask")]
    )
    job = callers.Job(kind=kind, address=address, questions=str(path), calls=200, seed=3)
    tally = callers.Tally(job.calls)
    callers.KINDS[kind](job, read(path), tally)
    return tally.ended


@pytest.mark.parametrize("kind", callers.KINDS)
def test_callers_count_how_their_calls_end(kind: str, tmp_path: Path) -> None:
    with _open(_Door(_answer(b"abcd"))) as address:
        ended = _called(kind, address, tmp_path / "questions", _answer(b"abcd"))
    total = storm.counts([{"ended": {kind: ended}}])
    assert ended.total() == 200
    assert not total["wrong"]
    assert not total["UNAVAILABLE"]
    assert not storm.unanswered(total), ended
    assert ended["plain: right"] > 15, ended
    if kind == "frames":
        assert min(ended[f"{each}: sent"] for each in ("never ended", "reset in the message")) > 3
        assert sum(n for name, n in ended.items() if name.endswith("aborted")) > 1
    else:
        assert min(total["CANCELLED"], total["DEADLINE_EXCEEDED"], total["right"]) > 10, ended


@pytest.mark.parametrize("kind", callers.KINDS)
def test_callers_see_an_answer_with_one_wrong_bit(kind: str, tmp_path: Path) -> None:
    with _open(_Door(_answer(b"abcd"))) as address:
        ended = _called(kind, address, tmp_path / "questions", _answer(b"abce"))
    assert ended["plain: wrong"] > 5
    assert ended["plain: right"] > 5  # of the question that any answer answers


def test_what_differs_is_seen_by_a_client_of_bytes() -> None:
    case = conformance.Case("ModelInfer", "good", (b"ask",))
    with (
        _open(_Door(_answer(b"abcd"))) as address,
        grpc.insecure_channel(address) as channel,
    ):
        said = conformance.ask(channel, case)
        stream = conformance.ask(channel, conformance.Case("ModelStreamInfer", "none", ()))
    assert (said.status, said.message) == ("OK", "")
    assert json.loads(said.body)["rawOutputContents"] == ["YWJjZA=="]
    assert stream.status != "OK"  # it answers calls of one message alone


class _Ending:
    """A server of nothing, whose process ends when told to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.process = self._started()

    def _started(self) -> Child:
        return Child(["sleep", "60"], log=self._folder / "log")

    @property
    def grpc(self) -> str:
        return "127.0.0.1:1"

    def alive(self) -> bool:
        return self.process.alive()

    def answers(self) -> bool:
        return self.alive()

    def restart(self) -> None:
        self.process = self._started()

    def stop(self) -> int:
        return self.process.stop()


def test_a_server_that_ends_is_started_again_and_counted(tmp_path: Path) -> None:
    server = _Ending(tmp_path)
    with targets.Kept(server) as kept:
        for n in range(2):
            server.process.kill()
            deadline = time.monotonic() + 10
            while len(kept.down_s) <= n and time.monotonic() < deadline:
                kept.await_answers()
                time.sleep(0.01)
        assert kept.ends == {"signal 9 (SIGKILL)": 2}
        assert len(kept.down_s) == 2
        kept.check()
    assert not server.alive()


class _Served:
    """A connection that a test answers by hand."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def answer(self, frames: bytes) -> threading.Thread:
        """Send these frames to who connects next, once the call has ended."""

        def serve() -> None:
            with self._listener:
                talk, _ = self._listener.accept()
            with talk:
                heard = b""
                while frame(DATA, END_STREAM, 1, _MESSAGE) not in heard:
                    heard += talk.recv(4096)
                talk.sendall(frames)
                with contextlib.suppress(ConnectionResetError):
                    talk.recv(4096)

        thread = threading.Thread(target=serve)
        thread.start()
        return thread


_HEAD = frame(HEADERS, 4, 1, b"\x20\x88")  # a size of HPACK's table, and `:status: 200`
_MESSAGE = b"\0" + struct.pack(">I", 3) + b"ask"


@pytest.mark.parametrize(
    ("frames", "answer"),
    [
        (_HEAD + frame(DATA, 0, 1, b"\0\0\0\0\2ok"), b"ok"),
        (_HEAD + frame(DATA, 0, 1, b"\0\0\0\0\2o") + frame(DATA, 0, 1, b"k"), b"ok"),
        (b"", None),
        (_HEAD + frame(DATA, 0, 1, b"<html>"), None),
    ],
)
def test_answers_are_read_from_frames(frames: bytes, answer: bytes | None) -> None:
    served = _Served()
    ended = frame(HEADERS, 5, 1, b"") if answer else frame(RST_STREAM, 0, 1, b"\0\0\0\2")
    thread = served.answer(frames + ended)
    wire = callers.Wire(served.address)
    stream = wire.begin(Question(INFER, b"ask"))
    wire.send(stream, _MESSAGE, end=True)
    assert wire.answer(stream) == answer
    wire.abort()
    thread.join()


def test_every_method_of_the_protocol_is_tried_well_and_badly() -> None:
    made = list(conformance.cases("/key"))
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for method in service.methods:
        names = [case.name for case in made if case.method == method.name]
        assert any(name.startswith("good") or "handle" in name for name in names), method.name
        assert "no message" in names, method.name


def test_a_difference_is_named() -> None:
    good, other = conformance.Answer("OK", "", "{}"), conformance.Answer("OK", "", "[]")
    failed = conformance.Answer("NOT_FOUND", "no", "")
    assert conformance._difference(good, good) == ""
    assert conformance._difference(good, other) == "answer"
    assert conformance._difference(good, failed) == "status"
    case = conformance.Case("ServerLive", "good", (b"",))
    rows = list(conformance.rows_of("it", "stock", [case, case], [[good, good], [good, failed]]))
    assert [row.ours for row in rows] == [1.0, 1.0]


def test_a_proxy_without_a_server_is_told_from_an_error() -> None:
    served = _Served()
    page = frame(HEADERS, 4, 1, b"\x48\x03503") + frame(DATA, END_STREAM, 1, b"<html>")
    thread = served.answer(page)
    wire = callers.Wire(served.address)
    stream = wire.begin(Question(INFER, b"ask"))
    wire.send(stream, _MESSAGE, end=True)
    with pytest.raises(callers.GoneError):
        wire.answer(stream)
    wire.abort()
    thread.join()


class _Told(speed.Speeds):
    """The speeds that a caller would measure, given by a test."""

    def __init__(self, rates: dict[str, float]) -> None:
        self.seen: list[tuple[str, int, int]] = []
        self._rates = rates

    def measure(
        self, target: targets.Target, variant: Variant, batch: int, connections: int
    ) -> perf.Measured:
        self.seen.append((target.name, batch, connections))
        slower = 0.5 if variant == speed.FILL else 1.0
        rate = slower * self._rates[target.name]
        return perf.Measured(requests_per_s=rate, latency_us_p99=9.0, report="")


def test_doors_are_measured_in_turn_beside_the_first(tmp_path: Path) -> None:
    told = _Told({"peer": 100.0, "ours": 130.0})
    server = _Ending(tmp_path)
    doors = [targets.Target(name, server, name) for name in ("peer", "ours")]
    options = argparse.Namespace(kind=speed.KINDS, connections=[8], repetitions=5)
    rows = list(speed.rows_of(doors, told, options))
    server.stop()
    assert told.seen[:4] == [("peer", 1, 8), ("ours", 1, 8)] * 2
    found = {(row.case, row.metric): row for row in rows}
    small = found["ranking, batch 1, 8 connections, ours", "throughput"]
    assert (small.ratio, small.target, small.met) == (1.3, 1.3, True)
    assert not found["lookup, batch 256, 8 connections, ours", "p99 latency"].met
    assert found["lookup, batch 64, one connection, ours", "throughput"].ratio == 2.0
    assert len(rows) == 2 * 3 * 2 + 3
    assert {row.n for row in rows} == {5}
