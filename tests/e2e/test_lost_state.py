"""A state store that loses its keys while the control plane is away: each a process of its own.

Nodes serve on by the plan that they have. The next control plane plans nothing that they would not
follow, says so, and goes on from what they hold once it is told to.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from commands import embertide
from controlled import Control
from fleet import CONFIG, Model, NodeProcess, is_right, keys_of
from repeated import Repeated
from waiting import wait_until

from embertide.server.adapters.process import free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.core.plan.adoption import EPOCHS_ABOVE

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
NODES = 2
_UNANSWERED = 6  # Source of a key that no owner answered
_FOUND_AGAIN_MS = 1000


class Asker(Repeated):
    """Asks a node all the time; every answer is whole and right, whoever is away."""

    def __init__(self, model: Model, node: NodeProcess) -> None:
        super().__init__(every_s=0.02)
        self.answers = 0
        self._model, self._node = model, node
        self._rng = np.random.default_rng(1)
        self.start()

    def act(self) -> None:
        bags = self._model.draw(self._rng, samples=2)
        answer = self._node.read(bags)
        assert _UNANSWERED not in answer.sources, keys_of(bags)
        assert is_right(self._model, bags, answer)
        self.answers += 1


class Site:
    """Two Redis servers, a control plane and two nodes."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        bus, state = (
            stack.enter_context(RedisServer(RedisOptions(log=folder / f"{name}.log")))
            for name in ("bus", "state")
        )
        self.folder, self.state_url = folder, state.url
        control, *ports = free_ports(1 + NODES)
        self.address = f"127.0.0.1:{control}"
        self.model = Model(folder / "publication", bus.url, CACHE, seed=5)
        self.control = self.start_control("first")
        stack.callback(lambda: self.control.stop())
        self.nodes = [
            NodeProcess(
                f"node-{n}",
                port,
                folder / f"node-{n}.log",
                publication=folder / "publication",
                state=state.url,
                bus=bus.url,
                control=self.address,
                devices=2,
                ddr_bytes=32 << 20,
                plan_file=folder / f"plan-{n}.bin",
                max_degraded_share=0,
            )
            for n, port in enumerate(ports)
        ]
        stack.callback(lambda: [node.stop() for node in self.nodes])
        self.await_plan(1)

    def start_control(self, name: str) -> Control:
        return Control(
            self.address,
            self.state_url,
            self.folder / f"{name}.log",
            NODES,
            beat_ms=10_000,  # a busy machine makes no node dead
            found_again_ms=_FOUND_AGAIN_MS,
        )

    def await_plan(self, epoch: int) -> None:
        wait_until(lambda: all(each.acts_by(epoch) for each in self.nodes), 60)
        wait_until(lambda: all(each.reaches_all(NODES) for each in self.nodes), 60)

    def say(self, *words: object) -> Any:
        done = embertide(*words, "--control", self.address, "--json")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def refuses(self, *words: object) -> str:
        done = embertide(*words, "--control", self.address)
        return done.stderr if done.exit_code == 1 else ""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(tmp_path, stack)


def test_a_fleet_goes_on_from_what_its_nodes_hold(site: Site) -> None:
    assert site.say("node", "drain", "node-1", "--watch")["state"].endswith("SUCCEEDED")
    before = site.say("plan", "show")
    epoch = int(before["epoch"])
    askers = [Asker(site.model, node) for node in site.nodes]
    site.control.kill()
    with redis.Redis.from_url(site.state_url) as state:
        assert state.keys(f"c:{{{CONFIG.name}}}:*")
        state.flushall()
    site.control = site.start_control("second")
    # It notices once the nodes have found it, and does not move what they would not follow.
    drain = ("node", "drain", "node-0")
    wait_until(lambda: "embertide plan adopt" in site.refuses(*drain), 60)
    wait_until(lambda: not site.refuses("plan", "adopt", "--dry-run"), 60)
    assert all(node.acts_by(epoch) for node in site.nodes)
    adopted = site.say("plan", "adopt", "--reason", "its keys were deleted")
    assert int(adopted["plan_epoch"]) == epoch + EPOCHS_ABOVE
    site.await_plan(epoch + EPOCHS_ABOVE)
    after = site.say("plan", "show")
    assert after["assignments"] == before["assignments"]
    # Operations are followed again, and no answer noticed any of it.
    assert site.say("node", "drain", "node-0", "--watch")["state"].endswith("SUCCEEDED")
    owners = [
        after["topology"]["nodes"][owner["node"]]["name"]
        for each in site.say("plan", "show")["assignments"]
        for owner in each["owners"]
    ]
    assert set(owners) == {"node-1"}
    site.model.publish()
    wait_until(
        lambda: all(n.status().versions.newest.number == site.model.newest for n in site.nodes), 20
    )
    for each in askers:
        each.stop()
        assert each.error is None, each.error
        assert each.answers > 20
