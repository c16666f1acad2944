"""A fleet that is closed to strangers: TLS both ways, tokens, a Redis with users, two nodes."""

import contextlib
import sys
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import grpc
from fleet import BINARY, CONFIG, ROOT, Model
from tls_redis import TlsRedis
from waiting import wait_until

from bench.authority import Authority
from embertide.server.adapters.process import Child, free_ports
from embertide.server.adapters.tls import TlsFolder, dial
from embertide.server.cli.control_client import Caller, CallError
from embertide.v1 import control_pb2, node_pb2, node_pb2_grpc

# As docs/security.md gives them; there the bus and the state are two servers.
RULES = {
    "trainer": "~e:* +@read +@write +@scripting +@transaction +@connection -@dangerous +info",
    "node": "%R~e:* %R~c:* ~e:*:node* +@read +sadd +set +@connection -@dangerous",
    "control": "%R~e:* ~e:*:rollback ~c:* +@read +@write +@scripting +@transaction +@connection "
    "+time -@dangerous +info",
    "keeper": "+acl +config +@connection",
}
TOKENS = {role: f"{role}s-token-of-tests" for role in ("reader", "operator", "node", "trainer")}
# Tokens of another model.
ADS_TOKENS = {role: f"{role}s-token-of-ads" for role in ("reader", "operator", "node")}


class ClosedFleet:
    """Everything runs once it is made. A context manager.

    Attributes:
        authority: Signed all certificates.
        control: HOST:PORT of the control plane.
        nodes: Addresses of the nodes, by name.
        probes: Where health is answered in plain text, by process.
        model: The model that they serve.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self.authority = Authority()
        for role in ("reader", "operator", "node", "control", "trainer", "redis"):
            self.authority.issue(self.tls(role), "" if role == "redis" else role)
        redis_port, control_port, *ports = free_ports(7)
        self.control = f"127.0.0.1:{control_port}"
        self.nodes = {f"node-{n}": f"127.0.0.1:{port}" for n, port in enumerate(ports[:2])}
        self.probes = {
            name: f"127.0.0.1:{port}"
            for name, port in zip(("control", *self.nodes), ports[2:], strict=True)
        }
        for role in RULES:
            (folder / f"{role}.password").write_text(f"{role}-hush\n")
        (folder / "tokens").write_text("".join(f"{r}:{t}\n" for r, t in TOKENS.items()))
        with (folder / "tokens").open("a") as more:
            more.writelines(f"{role}@ads:{token}\n" for role, token in ADS_TOKENS.items())
        (folder / "token").write_text(TOKENS["node"] + "\n")
        users = [f"{role} on >{role}-hush {rules}" for role, rules in RULES.items()]
        self.redis = self._stack.enter_context(
            TlsRedis(folder, self.tls("redis"), redis_port, users)
        )
        self.model = Model(
            folder / "publication", self.url("trainer"), ROOT / "build" / "cache" / "dense", seed=3
        )
        self.processes: dict[str, Child] = {}
        self._start("control", self._control_words())
        for name in self.nodes:
            self._start(name, self._node_words(name))
        self._stack.callback(lambda: [each.stop() for each in self.processes.values()])
        try:
            wait_until(self._is_whole, 60)
        except BaseException:
            self._stack.close()
            raise

    def tls(self, role: str) -> Path:
        """Return the folder of a role's certificate."""
        return self.folder / "tls" / role

    def url(self, user: str) -> str:
        """Return the URL of the Redis for one of its users."""
        tls = self.tls("control" if user == "control" else "node")
        query = {
            "password_file": self.folder / f"{user}.password",
            "ssl_ca_certs": tls / "ca.crt",
            "ssl_certfile": tls / "tls.crt",
            "ssl_keyfile": tls / "tls.key",
        }
        words = "&".join(f"{name}={quote(str(value))}" for name, value in query.items())
        return f"rediss://{user}@127.0.0.1:{self.redis.port}/0?{words}"

    def _control_words(self) -> list[str]:
        return [
            *(sys.executable, "-m", "embertide.server.cli", "control"),
            *("--state", self.url("control"), "--bus", self.url("control")),
            *("--model", CONFIG.name, "--listen", self.control, "--expect-nodes", "2"),
            *("--tls", str(self.tls("control")), "--tokens", str(self.folder / "tokens")),
            *("--health-listen", self.probes["control"]),
            *("--heartbeat-ms", "100", "--directory", str(self.folder / "control")),
        ]

    def _node_words(self, name: str) -> list[str]:
        return [
            *(str(BINARY), "--node", name, "--peer-address", self.nodes[name]),
            *("--publication", str(self.folder / "publication")),
            *("--state", self.url("node"), "--bus", self.url("node"), "--control", self.control),
            *("--tls", str(self.tls("node")), "--token-file", str(self.folder / "token")),
            *("--health-listen", self.probes[name]),
            *("--ddr-bytes", str(32 << 20), "--devices", "1"),
        ]

    def _start(self, name: str, words: list[str]) -> None:
        self.processes[name] = Child(words, log=self.folder / f"{name}.log")

    def caller(self, role: str) -> Caller:
        """Return calls of the control plane by a role's certificate."""
        return Caller(self.control, None, tls=TlsFolder(self.tls(role)))

    def node(self, name: str, role: str = "node") -> Any:
        """Return a stub of a node by a role's certificate."""
        channel = dial(self.nodes[name], TlsFolder(self.tls(role)))
        self._stack.callback(channel.close)
        return node_pb2_grpc.NodeServiceStub(channel)

    def _is_whole(self) -> bool:
        for name, each in self.processes.items():
            assert each.alive(), f"{name}: {each.log_text()}"
        with contextlib.closing(self.caller("reader")) as caller:
            try:
                status = caller.call("GetStatus", control_pb2.ControlServiceGetStatusRequest())
            except CallError:
                return False
        if not status.plan_epoch:
            return False
        try:
            said = [
                self.node(name).GetStatus(node_pb2.NodeServiceGetStatusRequest(), timeout=2)
                for name in self.nodes
            ]
        except grpc.RpcError:
            return False
        return all(
            each.plan_epoch and each.counters["peers_alive"] == 1 and each.versions.newest.number
            for each in said
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
