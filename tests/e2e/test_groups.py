"""A group is added to a fleet that serves, and the one that was there first is removed.

All of it real processes: Redis, control plane, two nodes of group 0 from the start, two of group 1
later. Every node is asked from its start to its end and each answer is compared with the model;
versions are published all the time. No request fails.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import grpc
import numpy as np
import pytest
from controlled import Control, Versions
from fleet import CONFIG, TABLES, Model, NodeProcess, is_right
from grpc_health.v1 import health_pb2, health_pb2_grpc
from repeated import Repeated
from typer.testing import CliRunner
from waiting import wait_until

from embertide.server.adapters.process import free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.adapters.state import RedisState
from embertide.server.cli.app import app
from embertide.v1 import control_pb2

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "cache" / "dense"
BUCKETS = sum(1 << table.bucket_bits for table in TABLES)
_REMOTE = 3  # of SOURCE


class Asker(Repeated):
    """Asks one node all the time. Any error ends it, and the test."""

    def __init__(self, model: Model, node: NodeProcess, seed: int) -> None:
        super().__init__(every_s=0.01)
        self._model, self._node = model, node
        self._rng = np.random.default_rng(seed)
        self.answers = self.version = 0

    def act(self) -> None:
        bags = self._model.draw(self._rng, samples=3)
        answer = self._node.read(bags)
        assert is_right(self._model, bags, answer), f"{self._node.name}: {bags}, {answer}"
        assert answer.version.number >= self.version, f"{self._node.name} went back"
        self.version = answer.version.number
        self.answers += 1


class Site:
    """A context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._stack = directory, contextlib.ExitStack()
        (self._control_port,) = free_ports(1)
        server = RedisServer(RedisOptions(log=directory / "redis.log"))
        self.url = self._stack.enter_context(server).url
        self.state = RedisState(self.url, CONFIG.name)
        self._stack.callback(self.state.close)
        self.model = Model(directory / "publication", self.url, CACHE, seed=5)
        log = directory / "control.log"
        self.control = Control(f"127.0.0.1:{self._control_port}", self.url, log, expect=2)
        self._stack.callback(self.control.stop)
        self.askers: dict[str, Asker] = {}
        self.nodes: dict[str, NodeProcess] = {}

    def start(self, name: str, group: int) -> None:
        node = NodeProcess(
            name,
            free_ports(1)[0],
            self.directory / f"{name}.log",
            publication=self.directory / "publication",
            state=self.url,
            bus=self.url,
            control=f"127.0.0.1:{self._control_port}",
            group=group,
            devices=2,
            ddr_bytes=32 << 20,
            max_degraded_share=0,
        )
        self._stack.callback(node.stop)
        self.nodes[name] = node

    def ask(self, *names: str) -> None:
        for name in names:
            asker = self.askers[name] = Asker(self.model, self.nodes[name], len(self.askers))
            asker.start()
            self._stack.callback(asker.stop)

    def answered(self, name: str, more: int) -> None:
        """Wait until a node has answered so often again."""
        until = self.askers[name].answers + more
        wait_until(lambda: self.askers[name].answers > until or bool(self.askers[name].error))
        self.check()

    def check(self) -> None:
        for name, asker in self.askers.items():
            assert asker.error is None, f"{name}: {asker.error}"

    def is_ready(self, name: str) -> bool:
        """Return the state that a load balancer goes by."""
        stub = health_pb2_grpc.HealthStub(self.nodes[name].channel)
        with contextlib.suppress(grpc.RpcError):
            status = stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0).status
            return bool(status == health_pb2.HealthCheckResponse.SERVING)
        return False

    def begun(self, name: str) -> bool:
        with contextlib.suppress(grpc.RpcError):
            return self.nodes[name].status().versions.newest.number > 0
        return False

    def command(self, *words: str) -> str:
        """Run `embertide` here; return what it prints."""
        done = CliRunner().invoke(app, [*words, "--control", f"127.0.0.1:{self._control_port}"])
        assert done.exit_code == 0, done.output
        return done.stdout

    def owned(self) -> dict[str, int]:
        """Buckets by node."""
        plan = self.state.load().plan
        assert plan is not None
        counts = dict.fromkeys((node.name for node in plan.head.topology.nodes), 0)
        for held in plan.layout.values():
            for at in held.owners:
                counts[plan.head.topology.nodes[at.node].name] += 1
        return counts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path) as site:
        yield site


def test_one_group_takes_over_from_another_and_no_request_fails(site: Site) -> None:
    old, new = ("a-0", "a-1"), ("b-0", "b-1")
    for name in old:
        site.start(name, 0)
    wait_until(lambda: all(map(site.is_ready, old)))
    versions = Versions(site.model)
    versions.start()
    site.ask(*old)

    # Those of the new group answer from the start, by asking the old one, and are not ready.
    for name in new:
        site.start(name, 1)
    wait_until(lambda: all(map(site.begun, new)))
    site.ask(*new)
    for name in new:
        site.answered(name, 20)
    assert not any(map(site.is_ready, new))
    assert site.owned() == {"a-0": 13, "a-1": 12}
    said = site.command("node", "add-group", "1", "--dry-run")
    assert f"would move {BUCKETS} buckets" in said
    assert "b-1/1" in said
    site.command("node", "add-group", "1", "--buckets-at-once", "8", "--watch")
    wait_until(lambda: all(map(site.is_ready, (*old, *new))))
    site.check()
    assert site.owned() == {"a-0": 13, "a-1": 12, "b-0": 13, "b-1": 12}

    # Both groups answer the same at the same version.
    bags = site.model.draw(np.random.default_rng(9), samples=50)
    answers = [site.nodes[name].read(bags) for name in (*old, *new)]
    assert all(is_right(site.model, bags, answer) for answer in answers)

    site.command("node", "remove-group", "0", "--watch")
    wait_until(lambda: not any(map(site.is_ready, old)))
    assert all(map(site.is_ready, new))
    site.check()
    assert site.owned() == {"a-0": 0, "a-1": 0, "b-0": 13, "b-1": 12}
    # Those that own nothing are asked on: the new group answers for them.
    wait_until(lambda: site.nodes["a-0"].status().counters["buckets_held"] == 0)
    answer = site.nodes["a-0"].read(bags)
    assert is_right(site.model, bags, answer)
    assert answer.sources.count(_REMOTE) > 0
    for name in old:
        site.askers[name].stop()
        site.nodes[name].process.stop()
        site.command("node", "remove", name)
    for name in new:
        site.answered(name, 20)
    versions.stop()
    assert versions.error is None
    site.check()
    status = site.control.caller.call("GetStatus", control_pb2.ControlServiceGetStatusRequest())
    assert [each.node.name for each in status.nodes] == ["b-0", "b-1"]
    counts = {name: asker.answers for name, asker in site.askers.items()}
    print(f"{counts} answers, {site.model.newest} versions, 0 failed")
    assert min(counts.values()) > 50


def test_a_group_that_loses_a_node_asks_the_other_and_no_request_fails(site: Site) -> None:
    """Killed, and stopped so that it takes connections and says nothing."""
    names = ("a-0", "a-1", "b-0", "b-1")
    site.start("a-0", 0)
    site.start("a-1", 0)
    wait_until(lambda: all(map(site.is_ready, names[:2])))
    versions = Versions(site.model)
    versions.start()
    for name in names[2:]:
        site.start(name, 1)
    wait_until(lambda: all(map(site.begun, names)))
    site.command("node", "add-group", "1", "--watch")
    wait_until(lambda: all(map(site.is_ready, names)))
    rest = ("a-0", "b-0", "b-1")
    site.ask(*rest)
    wait_until(lambda: all(site.askers[name].answers > 20 for name in rest))
    before = site.nodes["a-0"].status()
    assert before.counters["peers_alive"] == 1, "of its own group"
    assert before.counters["next_owner"] == 0, (
        "nobody asks another group as long as his own answers"
    )

    os.kill(site.nodes["a-1"].process.pid, signal.SIGSTOP)
    site.answered("a-0", 100)
    site.nodes["a-1"].process.kill()
    site.answered("a-0", 100)
    version = site.askers["a-0"].version
    after = site.nodes["a-0"].status()
    assert after.counters["next_owner"] > 0
    degraded = [n for name, n in after.counters.items() if name.startswith("degraded_keys")]
    assert degraded
    assert not any(degraded)

    # It comes back and is asked again.
    site.start("a-1", 0)
    wait_until(lambda: site.begun("a-1"))
    wait_until(lambda: site.nodes["a-0"].status().counters["peers_alive"] == 1)
    wait_until(lambda: site.askers["a-0"].version > version)
    site.answered("a-0", 20)  # requests that began before it was heard of are over
    asked = site.nodes["a-0"].status().counters["next_owner"]
    site.answered("a-0", 50)
    assert site.nodes["a-0"].status().counters["next_owner"] == asked
    versions.stop()
    assert versions.error is None
    site.check()
