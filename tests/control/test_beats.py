"""Beats over one stream a node, and how often a large fleet beats."""

import queue
from collections.abc import Iterator

import grpc
import pytest
from control_bench import Bench
from fake_node import TABLES
from simulation import first_beat, make_node, make_registration, make_tables
from waiting import wait_until

from embertide.server.core.fleet import BEATS_MISSED, Fleet
from embertide.v1 import control_pb2, control_pb2_grpc


class Beating:
    """The stream of a node that has registered."""

    def __init__(self, address: str, name: str, timeout_s: float = 10.0) -> None:
        stub = control_pb2_grpc.ControlServiceStub(grpc.insecure_channel(address))
        self._name, self._sequence = name, 0
        self._beats: queue.Queue[control_pb2.StreamBeatsRequest | None] = queue.Queue()
        self.answers = stub.StreamBeats(self._next(), timeout=timeout_s)

    def _next(self) -> Iterator[control_pb2.StreamBeatsRequest]:
        while (beat := self._beats.get()) is not None:
            yield beat

    def beat(self, incarnation: str = "") -> None:
        self._sequence += 1
        beat = control_pb2.HeartbeatRequest(
            node=self._name, incarnation=incarnation or f"{self._name}-1", sequence=self._sequence
        )
        self._beats.put(control_pb2.StreamBeatsRequest(beat=beat))

    def answer(self) -> control_pb2.HeartbeatResponse:
        return next(self.answers).response

    def end(self) -> None:
        self._beats.put(None)
        assert not list(self.answers)


def test_a_stream_is_answered_when_there_is_something_new(bench: Bench) -> None:
    control = bench.control(expect=2)
    client = bench.client(control.address)
    for name in ("node-0", "node-1"):
        node = make_node(name, address="127.0.0.1:1")
        client.call("RegisterNode", make_registration(node, TABLES))
    stream = Beating(control.address, "node-0")
    stream.beat()
    client.call("Heartbeat", first_beat(make_node("node-1")))
    first = stream.answer()
    assert first.heartbeat_interval_ms == control.driver.options.heartbeat_ms
    for _ in range(20):
        stream.beat()
    status = control_pb2.ControlServiceGetStatusRequest()
    wait_until(lambda: client.call("GetStatus", status).plan_epoch == 1)
    if not first.plan_epoch:
        stream.beat()
        assert stream.answer().plan_epoch == 1
    stream.end()


@pytest.mark.parametrize(
    ("name", "incarnation", "code"),
    [("nobody", "x", "NOT_FOUND"), ("node-0", "an older start", "FAILED_PRECONDITION")],
)
def test_a_beat_that_is_refused_ends_the_stream(
    bench: Bench, name: str, incarnation: str, code: str
) -> None:
    control = bench.control()
    client = bench.client(control.address)
    node = make_node("node-0", address="127.0.0.1:1")
    client.call("RegisterNode", make_registration(node, TABLES))
    stream = Beating(control.address, name)
    stream.beat(incarnation)
    with pytest.raises(grpc.RpcError) as refused:
        stream.answer()
    assert refused.value.code().name == code


def test_a_stream_ends_within_the_hour(bench: Bench) -> None:
    stream = Beating(bench.control().address, "node-0", timeout_s=9000.0)
    with pytest.raises(grpc.RpcError, match="an hour at most"):
        stream.answer()


def test_the_interval_grows_with_the_fleet() -> None:
    fleet = Fleet("news", 200)
    for index in range(1000):
        name = f"node-{index}"
        fleet.register(make_registration(make_node(name), make_tables(user=1)), now_ms=0)
        assert fleet.tell_interval(name) == max(200, index + 1)
    assert not fleet.alive("node-0", BEATS_MISSED * 1000 + 1)
    assert fleet.alive("node-0", BEATS_MISSED * 1000)
    # Until a node has heard of a shorter interval it beats at the longer one.
    for index in range(1, 1000):
        fleet.remove(f"node-{index}", 0)
    fleet.tell_interval("node-0")
    assert not fleet.alive("node-0", BEATS_MISSED * 200 + 1)


def test_after_a_start_nodes_have_time_to_find_the_control_plane_and_no_more() -> None:
    fleet = Fleet("news", 200)
    registration = make_registration(make_node("node-0"), make_tables(user=1))
    fleet.restore({"node-0": registration}, now_ms=1000)
    # A new pod is reached once its Service lists it: 8 s on a real node.
    assert fleet.alive("node-0", 1000 + 14_900)
    assert not fleet.alive("node-0", 1000 + 15_100)
