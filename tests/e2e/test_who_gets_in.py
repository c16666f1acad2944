"""Every RPC of ours as everybody, over real sockets: who is let in is what docs/security.md says.

Triton's doors are in test_doors.py.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import grpc
import pytest
from closed import ADS_TOKENS, TOKENS, ClosedFleet
from fleet import CONFIG
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.authority import Authority
from embertide._common.redis_url import client_of
from embertide.server.adapters.tls import TlsFolder
from embertide.server.services.identity import ROLES
from embertide.v1 import control_pb2, node_pb2

ROOT = Path(__file__).parents[2]
SERVICES = {
    "ControlService": control_pb2.DESCRIPTOR.services_by_name["ControlService"],
    "NodeService": node_pb2.DESCRIPTOR.services_by_name["NodeService"],
}
_LINE = re.compile(r"\| (ControlService|NodeService) \| ([A-Za-z, ]+) \| ([a-z, ]+) \|")
Rpc = tuple[str, str]


def page() -> dict[Rpc, frozenset[str]]:
    """The roles that may call each RPC, as the page has it."""
    text = (ROOT / "docs" / "security.md").read_text()
    return {
        (service, rpc): frozenset(roles.split(", "))
        for service, rpcs, roles in _LINE.findall(text)
        for rpc in rpcs.split(", ")
    }


def test_the_page_has_every_rpc_once_and_roles_that_exist() -> None:
    every = [(name, each.name) for name, service in SERVICES.items() for each in service.methods]
    named = [
        rpc
        for _, rpcs, _ in _LINE.findall((ROOT / "docs" / "security.md").read_text())
        for rpc in rpcs.split(", ")
    ]
    assert sorted(named) == sorted(rpc for _, rpc in every)
    assert set(page()) == set(every)
    assert set().union(*page().values()) <= set(ROLES)


@dataclasses.dataclass(frozen=True)
class Caller:
    """Somebody, and who he is to each service: a role, or the code that he gets."""

    name: str
    credentials: grpc.ChannelCredentials | None  # None: plain text
    token: str = ""
    control: str = "UNAUTHENTICATED"
    node: str = "UNAUTHENTICATED"


def callers(fleet: ClosedFleet) -> Iterator[Caller]:
    of = fleet.authority.issue
    made = fleet.folder / "callers"
    past = datetime.timedelta(hours=-1)
    nowhere = {"control": "UNAVAILABLE", "node": "UNAVAILABLE"}
    yield Caller("plain text", None, **nowhere)
    yield Caller("plain text, a token", None, TOKENS["operator"], **nowhere)
    trust = (fleet.tls("node") / "ca.crt").read_bytes()
    yield Caller("no certificate", grpc.ssl_channel_credentials(trust), **nowhere)
    yield Caller(
        "no certificate, a token", grpc.ssl_channel_credentials(trust), TOKENS["node"], **nowhere
    )
    nobody = TlsFolder(of(made / "nobody")).channel()
    yield Caller("a certificate without a role", nobody)
    yield Caller("a guess", nobody, "guess")
    yield Caller("half a token", nobody, TOKENS["operator"][:-1])
    unknown = TlsFolder(of(made / "unknown", uri="spiffe://test/role/king")).channel()
    yield Caller("a role that nobody knows", unknown)
    stranger = Authority()
    for role in ROLES:
        mine = TlsFolder(fleet.tls(role)).channel()
        yield Caller(f"{role} by certificate", mine, control=role, node=role)
        token = TOKENS.get(role, "")
        if token:
            here = role if role == "node" else "UNAUTHENTICATED"
            yield Caller(f"{role} by token", nobody, token, control=role, node=here)
        other = TlsFolder(of(made / f"ads-{role}", f"{role}/model/ads")).channel()
        refused = {"control": "PERMISSION_DENIED", "node": "PERMISSION_DENIED"}
        yield Caller(f"{role} of another model", other, **refused)
        old = TlsFolder(of(made / f"old-{role}", role, valid=past)).channel()
        yield Caller(f"{role} that has expired", old, **nowhere)
        false = stranger.issue(made / f"false-{role}", role)
        (false / "ca.crt").write_bytes(trust)
        yield Caller(f"{role} of another authority", TlsFolder(false).channel(), **nowhere)
    for role, token in ADS_TOKENS.items():
        yield Caller(f"{role} of another model by token", nobody, token, "PERMISSION_DENIED")


def outcome(channel: Any, service: str, rpc: str, token: str) -> str:
    """The code of a call with an empty message, which no RPC takes for more than a question."""
    method = SERVICES[service].methods_by_name[rpc]
    path = f"/embertide.v1.{service}/{rpc}"
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    try:
        if method.client_streaming:
            list(channel.stream_stream(path)(iter([b""]), timeout=10, metadata=metadata))
        elif method.server_streaming:
            list(channel.unary_stream(path)(b"", timeout=10, metadata=metadata))
        else:
            channel.unary_unary(path)(b"", timeout=10, metadata=metadata)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def judge(who: str, allowed: Set[str], got: str) -> str:
    """Why an outcome is wrong; empty if it is right."""
    refusals = ("UNAUTHENTICATED", "PERMISSION_DENIED", "UNAVAILABLE")
    if who.isupper():
        return "" if got == who else f"wants {who}"
    if who in allowed:
        return f"{who} may" if got in refusals else ""
    return "" if got == "PERMISSION_DENIED" else f"{who} may not"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClosedFleet]:
    with ClosedFleet(tmp_path_factory.mktemp("closed")) as running:
        yield running


def test_nobody_gets_in_but_whom_the_page_names(fleet: ClosedFleet) -> None:
    allowed = page()
    addresses = {"ControlService": fleet.control, "NodeService": fleet.nodes["node-0"]}
    wrong, tried, let_in = [], 0, 0
    for each in callers(fleet):
        for service, address in addresses.items():
            channel = (
                grpc.insecure_channel(address)
                if each.credentials is None
                else grpc.secure_channel(address, each.credentials)
            )
            with channel:
                for method in SERVICES[service].methods:
                    got = outcome(channel, service, method.name, each.token)
                    who = each.control if service == "ControlService" else each.node
                    why = judge(who, allowed[service, method.name], got)
                    tried += 1
                    let_in += bool(why) and "may not" in why
                    if why:
                        wrong.append(f"{each.name}: {service}.{method.name}: {got}, {why}")
    assert not wrong, "\n".join(wrong)
    assert (tried > 600, let_in) == (True, 0)


def test_a_named_node_speaks_for_itself_alone(fleet: ClosedFleet) -> None:
    tls = TlsFolder(fleet.authority.issue(fleet.folder / "named", "node/name/node-0"))
    channel: Any
    with grpc.secure_channel(fleet.control, tls.channel()) as channel:

        def call(name: str) -> str:
            beat = control_pb2.HeartbeatRequest(node=name, incarnation="x", sequence=1)
            try:
                channel.unary_unary("/embertide.v1.ControlService/Heartbeat")(
                    beat.SerializeToString(), timeout=5
                )
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        assert call("node-1") == "PERMISSION_DENIED"
        assert call("node-0") == "FAILED_PRECONDITION"  # it is another incarnation
        beats = [
            control_pb2.StreamBeatsRequest(beat=control_pb2.HeartbeatRequest(node=name))
            for name in ("node-0", "node-1")
        ]
        stream = channel.stream_stream("/embertide.v1.ControlService/StreamBeats")
        with pytest.raises(grpc.RpcError) as caught:
            list(stream(iter([beats[1].SerializeToString()]), timeout=5))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_health_asks_for_a_certificate_and_no_role(fleet: ClosedFleet) -> None:
    nobody = TlsFolder(fleet.authority.issue(fleet.folder / "probe"))
    for address in (fleet.control, *fleet.nodes.values()):
        with grpc.secure_channel(address, nobody.channel()) as channel:
            said = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5
            )
        assert said.status == health_pb2.HealthCheckResponse.SERVING


def test_nobody_watches_health(fleet: ClosedFleet) -> None:
    with grpc.insecure_channel(fleet.probes["control"]) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="x" * 1000), timeout=5
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(watching)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_probes_ask_for_health_in_plain_text_and_for_nothing_else(fleet: ClosedFleet) -> None:
    channel: Any
    for address in fleet.probes.values():
        with grpc.insecure_channel(address) as channel:
            said = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5
            )
            assert said.status == health_pb2.HealthCheckResponse.SERVING
            for service, each in SERVICES.items():
                for method in each.methods:
                    assert outcome(channel, service, method.name, TOKENS["operator"]) == (
                        "UNIMPLEMENTED"
                    )


def test_the_audit_names_who_may_not_and_nobody_else(fleet: ClosedFleet) -> None:
    lines = (fleet.folder / "control" / "audit.jsonl").read_text().splitlines()
    audit = [json.loads(line) for line in lines]
    assert {each["rpc"] for each in audit} >= {"RegisterNode", "RemoveNode", "StartReshard"}
    assert {"none", "open", ""}.isdisjoint(each["role"] for each in audit)
    assert any(each["outcome"] == "PERMISSION_DENIED" for each in audit)
    assert all(token not in "".join(lines) for token in TOKENS.values())


def test_redis_lets_users_do_what_they_need_alone(fleet: ClosedFleet) -> None:
    node = client_of(fleet.url("node"))
    plan = f"c:{{{CONFIG.name}}}:plan:1"
    assert node.get(plan)
    for refused in (
        lambda: node.set(plan, b"mine"),
        lambda: node.xadd(f"e:{{{CONFIG.name}:commit}}:log", {"m": b"mine"}),
        lambda: node.flushall(),
        lambda: node.config_get("*"),
    ):
        with pytest.raises(Exception, match="permissions"):
            refused()
    node.close()
