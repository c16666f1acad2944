"""Every credential of a closed fleet is replaced while requests are answered.

None fails, nothing is restarted, and what was replaced opens nothing any more.
"""

import contextlib
import functools
import itertools
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import redis
from closed import RULES, ClosedFleet
from fleet import is_right
from repeated import Repeated
from waiting import wait_until

from bench.authority import Authority
from embertide._common.redis_url import client_of
from embertide.server.adapters.tls import TlsFolder, dial
from embertide.server.cli.control_client import Caller, CallError
from embertide.v1 import control_pb2, node_pb2, node_pb2_grpc

SEEN_S = 4.0  # files are looked at every two seconds
STATUS = control_pb2.ControlServiceGetStatusRequest()
ROLES = ("reader", "operator", "node", "control", "trainer", "redis")


class Asker(Repeated):
    """Asks a node all the time, over one connection or over a new one each time."""

    def __init__(self, fleet: ClosedFleet, node: str, *, fresh: bool) -> None:
        super().__init__(every_s=0.05 if fresh else 0.01)
        self._fleet, self._address, self._fresh = fleet, fleet.nodes[node], fresh
        self._tls = TlsFolder(fleet.tls("node"))
        self._rng = np.random.default_rng(7 + fresh)
        self._channel = self._dial()
        self.answers, self.newest, self.faults = 0, 0, list[str]()

    def _dial(self) -> grpc.Channel:
        return dial(self._address, self._tls)

    def act(self) -> None:
        bags = self._fleet.model.draw(self._rng, 4)
        request = node_pb2.ReadRequest(
            keys=[key for bag in bags for key in bag], lengths=[len(bag) for bag in bags]
        )
        channel = self._dial() if self._fresh else self._channel
        try:
            answer = node_pb2_grpc.NodeServiceStub(channel).Read(request, timeout=5)
        except grpc.RpcError as error:
            self.faults.append(f"fresh={self._fresh}: {error.code().name}: {error.details()}")
            return
        finally:
            if self._fresh:
                channel.close()
        if not is_right(self._fleet.model, bags, answer):
            self.faults.append(f"a wrong answer at version {answer.version.number}")
        self.answers += 1
        self.newest = max(self.newest, answer.version.number)


class Publisher(Repeated):
    """Publishes two versions a second."""

    def __init__(self, fleet: ClosedFleet) -> None:
        super().__init__(every_s=0.5)
        self._model = fleet.model

    def act(self) -> None:
        if self._model.publish() % 8 == 0:
            self._model.snapshot(self._model.newest)


def have_reached(askers: list[Asker], version: int) -> bool:
    return all(each.newest >= version for each in askers)


def call(fleet: ClosedFleet, token: str, tls: Path) -> str:
    """The outcome of GetStatus by a token, from a certificate."""
    with contextlib.closing(Caller(fleet.control, token or None, tls=TlsFolder(tls))) as caller:
        try:
            caller.call("GetStatus", STATUS)
        except CallError as error:
            return error.code
    return "OK"


def is_shut(address: str, tls: Path) -> bool:
    """Whether a node takes no connection from a certificate."""
    with dial(address, TlsFolder(tls)) as channel:
        try:
            node_pb2_grpc.NodeServiceStub(channel).GetStatus(
                node_pb2.NodeServiceGetStatusRequest(), timeout=5
            )
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


def rotate_tokens(fleet: ClosedFleet) -> None:
    nobody = fleet.authority.issue(fleet.folder / "nobody")
    tokens, own = fleet.folder / "tokens", fleet.folder / "token"
    old = tokens.read_text()
    new = "".join(f"{role}:new-token-of-{role}s\n" for role in ("reader", "operator", "node"))
    tokens.write_text(old + new)
    before = own.read_text()
    # Accepted everywhere before it is sent, and sent by all before the old one is not accepted.
    for lines in (
        before + "new-token-of-nodes\n",
        "new-token-of-nodes\n" + before,
        "new-token-of-nodes\n",
    ):
        own.write_text(lines)
        time.sleep(SEEN_S)
    tokens.write_text(new)
    wait_until(lambda: call(fleet, "readers-token-of-tests", nobody) == "UNAUTHENTICATED")
    assert call(fleet, "new-token-of-readers", nobody) == "OK"


def rotate_certificates(fleet: ClosedFleet) -> None:
    """Change the authority: both are trusted, then all are of the new one, then it alone is."""
    old, new = fleet.authority, Authority("the next one")
    for role in ROLES:
        old.trust(fleet.tls(role), new)
    fleet.redis.reload("keeper", "keeper-hush")
    time.sleep(SEEN_S)
    for role in ROLES:
        new.issue(fleet.tls(role), "" if role == "redis" else role, trusts=(old,))
    fleet.redis.reload("keeper", "keeper-hush")
    time.sleep(SEEN_S)
    for role in ROLES:
        new.trust(fleet.tls(role))
    fleet.redis.reload("keeper", "keeper-hush")
    fleet.authority = new
    left = old.issue(fleet.folder / "left", "reader")
    (left / "ca.crt").write_bytes((fleet.tls("reader") / "ca.crt").read_bytes())
    wait_until(lambda: call(fleet, "", left) == "UNAVAILABLE")
    assert call(fleet, "", fleet.tls("reader")) == "OK"
    for address in fleet.nodes.values():
        wait_until(functools.partial(is_shut, address, left))


def rotate_passwords(fleet: ClosedFleet) -> None:
    keeper = f"keeper on >keeper-hush {RULES['keeper']}"
    users = {role: rules for role, rules in RULES.items() if role != "keeper"}
    both = [f"{role} on >{role}-hush >new-{role} {rules}" for role, rules in users.items()]
    fleet.redis.write_users([*both, keeper])
    fleet.redis.reload("keeper", "keeper-hush")
    for role in users:
        (fleet.folder / f"{role}.password").write_text(f"new-{role}\n")
    alone = [f"{role} on >new-{role} {rules}" for role, rules in users.items()]
    fleet.redis.write_users([*alone, keeper])
    fleet.redis.reload("keeper", "keeper-hush")
    with client_of(fleet.url("node")) as client:
        assert client.ping()
    (fleet.folder / "node.password").rename(fleet.folder / "kept")
    (fleet.folder / "node.password").write_text("node-hush\n")
    with client_of(fleet.url("node")) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    (fleet.folder / "kept").rename(fleet.folder / "node.password")


def test_every_credential_is_replaced_and_no_request_fails(tmp_path: Path) -> None:
    threads = threading.active_count()
    with ClosedFleet(tmp_path) as fleet:
        pids = {name: each.pid for name, each in fleet.processes.items()}
        ways = itertools.product(fleet.nodes, (False, True))
        askers = [Asker(fleet, node, fresh=fresh) for node, fresh in ways]
        with contextlib.ExitStack() as stack:
            for each in (Publisher(fleet), *askers):
                each.start()
                stack.callback(each.stop)
            for rotate in (rotate_tokens, rotate_certificates, rotate_passwords):
                rotate(fleet)
                # The new certificates work: versions still come, by the bus as by files.
                version = fleet.model.newest + 2
                wait_until(functools.partial(have_reached, askers, version))
            assert [each.error for each in askers] == [None] * len(askers)
            faults = [fault for each in askers for fault in each.faults]
            answers = sum(each.answers for each in askers)
        assert not faults, f"{len(faults)} of {answers}: {faults[:5]}"
        assert answers > 500
        assert {name: each.pid for name, each in fleet.processes.items() if each.alive()} == pids
        for name in fleet.nodes:
            said = fleet.node(name).GetStatus(node_pb2.NodeServiceGetStatusRequest(), timeout=5)
            assert said.counters["peers_alive"] == 1
        assert threading.active_count() < threads + 100, "credentials leave threads behind"
