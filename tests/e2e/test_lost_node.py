"""A node is killed under traffic and comes back: only keys that nobody could answer are degraded,
only while it is away, and each of them is marked.
"""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from fleet import FleetSite, NodeProcess, is_right, keys_of, start_fleet
from repeated import Repeated
from waiting import wait_until

pytestmark = pytest.mark.alone

_DEFAULT, _UNANSWERED = 4, 6  # of SOURCE
_AWAY_S = 3.0
_SETTLES_S = 2.0  # from ready to the last degraded answer, at most
_CALM = 200  # answers of each before the kill, and after the node has settled


@dataclasses.dataclass
class Seen:
    """The answers of one node."""

    answers: int = 0
    keys: int = 0
    degraded_s: list[float] = dataclasses.field(default_factory=list)  # a time for each such key
    refused_s: list[float] = dataclasses.field(default_factory=list)  # a time for each request
    faults: list[str] = dataclasses.field(default_factory=list)


class Asker(Repeated):
    """Asks one node all the time, and compares each answer with the model."""

    def __init__(self, site: FleetSite, node: NodeProcess, seed: int) -> None:
        super().__init__(every_s=0.005)
        self._site, self._node = site, node
        self._rng = np.random.default_rng(seed)
        self.seen = Seen()
        self.start()

    def answered(self, more: int) -> None:
        """Wait for so many answers."""
        until = self.seen.answers + more
        wait_until(lambda: self.seen.answers >= until or self.error is not None)

    def act(self) -> None:
        bags = self._site.model.draw(self._rng, samples=4)
        try:
            answer = self._node.read(bags)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            self.seen.refused_s.append(time.monotonic())
            return
        now_s, keys = time.monotonic(), keys_of(bags)
        rows = self._site.model.versions[answer.version.number]
        unanswered = {
            key for key, source in zip(keys, answer.sources, strict=True) if source == _UNANSWERED
        }
        silent = [
            key
            for key, source in zip(keys, answer.sources, strict=True)
            if source == _DEFAULT and key in rows
        ]
        if silent or not is_right(self._site.model, bags, answer, unanswered):
            self.seen.faults.append(f"{silent}: {answer}")
        self.seen.answers += 1
        self.seen.keys += len(keys)
        marked = sum(source == _UNANSWERED for source in answer.sources)
        self.seen.degraded_s += [now_s] * marked


class Versions(Repeated):
    """Publishes five versions a second, a snapshot every eighth."""

    def __init__(self, site: FleetSite) -> None:
        super().__init__(every_s=0.2)
        self._model = site.model
        self.start()

    def act(self) -> None:
        if self._model.publish() % 8 == 0:
            self._model.snapshot(self._model.newest)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FleetSite]:
    # Nothing is refused: what is not answered by its row must show as degraded.
    with start_fleet(tmp_path, nodes=3, devices=1, seed=9, max_degraded_share=1) as running:
        yield running


def test_answers_are_degraded_only_while_an_owner_is_away(site: FleetSite) -> None:
    versions = Versions(site)
    askers = [Asker(site, node, seed) for seed, node in enumerate(site.nodes[:2])]
    for asker in askers:
        asker.answered(_CALM)
    victim = site.nodes[2]
    killed_s = time.monotonic()
    victim.process.kill()
    time.sleep(_AWAY_S)
    victim.channel.close()
    site.nodes[2] = site.start(2)
    wait_until(lambda: site.nodes[2].acts_by(site.writer.epoch), every_s=0.01)
    ready_s = time.monotonic()
    time.sleep(_SETTLES_S)
    for asker in askers:
        asker.answered(_CALM)
    for each in (*askers, versions):
        each.stop()
        assert each.error is None, each.error
    for asker, node in zip(askers, site.nodes, strict=False):
        seen = asker.seen
        degraded_s = np.array(seen.degraded_s)
        print(
            f"{node.name}: {seen.answers} answers, {seen.keys} keys, {len(degraded_s)} degraded, "
            f"{np.sum(degraded_s < killed_s)} of them before the kill and "
            f"{np.sum(degraded_s > ready_s)} after the node was ready again, the last "
            f"{max(seen.degraded_s, default=ready_s) - ready_s:+.2f} s from then; "
            f"away {ready_s - killed_s:.2f} s; {len(seen.refused_s)} requests refused"
        )
        assert not seen.faults, seen.faults[:3]
        assert seen.answers > 100
        assert len(degraded_s) > 0, "a third of the keys was away"
        assert not np.any(degraded_s < killed_s)
        assert np.all(degraded_s <= ready_s + _SETTLES_S)
        assert not seen.refused_s
        counters = node.status().counters
        counted = sum(counters[name] for name in counters if name.startswith("degraded_keys_"))
        assert counted == len(degraded_s)
    assert site.model.newest > 10
