"""Two Triton nodes, a control plane, and buckets that move while both are asked and versions come.

`EMBERTIDE_CHECK_SECONDS` sets how long the traffic runs at least (5 by default).
"""

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checker import CONFIG, TABLES, CheckerPublisher, Traffic
from pair import Pair, start_pair
from repeated import Repeated
from serving import Client, metric, parameters
from tritonclient.utils import InferenceServerException
from waiting import wait_until

from embertide.server.adapters import triton
from embertide.server.adapters.redis import RedisOptions, RedisServer

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "cache" / "dense"
SECONDS = float(os.environ.get("EMBERTIDE_CHECK_SECONDS", "5"))
BUCKETS = [(t.name, b) for t in TABLES for b in range(1 << t.bucket_bits)]


@dataclasses.dataclass
class Site:
    """A fleet of two Triton nodes."""

    directory: Path
    publisher: CheckerPublisher
    pair: Pair

    def swap(self, operation: str, *words: str) -> None:
        """Move every other bucket to the other node, and all others to the other device."""
        plan = self.pair.ask("plan", "show")
        now = self.pair.owners()
        assignments = []
        for i, (table, bucket) in enumerate(BUCKETS):
            node, device = now[table, bucket][0].split("/")
            if i % 2:
                device = str(1 - int(device))
            else:
                node = "node-1" if node == "node-0" else "node-0"
            where = f"{node}/{device}"
            assignments.append({"table": table, "buckets": str(bucket), "owners": [where]})
        target = self.directory / f"{operation}.json"
        target.write_text(
            json.dumps({"base_epoch": int(plan["epoch"]), "assignments": assignments})
        )
        self.pair.ask("reshard", "--target", str(target), "--id", operation, *words)

    def operation(self, operation: str) -> Any:
        listed = self.pair.ask("reshard", "list")["operations"]
        return next(each for each in listed if each["id"] == operation)

    def state_of(self, operation: str) -> str:
        return str(self.operation(operation)["state"]).removeprefix("OPERATION_STATE_").lower()


@pytest.fixture
def site(tmp_path: Path, server_options: triton.ServerOptions) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        options = RedisOptions(log=tmp_path / "redis.log")
        redis = stack.enter_context(RedisServer(options))
        publisher = CheckerPublisher(tmp_path / "publication", redis.url, CACHE)
        pair = start_pair(
            stack,
            tmp_path,
            server_options,
            redis.url,
            model=CONFIG.name,
            publications=(publisher.publication.path,) * 2,
        )
        yield Site(tmp_path, publisher, pair)


class _Versions(Repeated):
    """Publishes eight versions a second, a snapshot every sixth."""

    def __init__(self, publisher: CheckerPublisher) -> None:
        super().__init__(every_s=1 / 8)
        self._publisher = publisher
        self.start()

    def act(self) -> None:
        self._publisher.publish(self._publisher.newest + 1)
        if self._publisher.newest % 6 == 0:
            self._publisher.snapshot(self._publisher.newest)

    def stop(self) -> None:
        super().stop()
        assert self.error is None, self.error


def test_buckets_move_under_traffic_and_versions(site: Site) -> None:
    before = site.pair.owners()
    traffics = [Traffic(node, models=("rank",)) for node in site.pair.nodes]
    versions = _Versions(site.publisher)
    end = time.monotonic() + SECONDS
    moved = 0
    while time.monotonic() < end or moved % 2 == 0:  # an odd number, or all is where it was
        moved += 1
        site.swap(f"move-{moved}")
        while (state := site.state_of(f"move-{moved}")) != "succeeded":
            assert state in ("pending", "running"), state
    status = site.pair.ask("status")
    assert site.publisher.newest - 30 < status["newest_committed"] <= site.publisher.newest
    assert 0 <= status["versions_behind"] < 30
    versions.stop()
    findings = [traffic.stop() for traffic in traffics]
    assert [traffic.errors for traffic in traffics] == [[], []]
    after = site.pair.owners()
    assert all(after[which] != before[which] for which in BUCKETS)
    across = sum(a[0].split("/")[0] != before[w][0].split("/")[0] for w, a in after.items())
    assert across >= len(BUCKETS) // 3
    for node, found in zip(site.pair.nodes, findings, strict=True):
        page = node.metrics()
        remote, hot = (
            metric(page, "embertide_lookup_keys_total", source=source)
            for source in ("remote", "hot")
        )
        print(
            f"{found.answers} answers of {len(found.versions)} versions, {remote:.0f} remote keys "
            f"and {hot:.0f} from copies"
        )
        assert (found.mixed, found.back) == (0, 0)
        assert found.answers > 50
        assert len(found.versions) > 3
        assert remote + hot > found.answers
        assert min(remote, hot) > 0
        assert metric(page, "embertide_degraded_keys_total") == 0


def test_a_p99_budget_halts_a_reshard_while_requests_are_slower(site: Site) -> None:
    traffics = [Traffic(node, models=("rank",)) for node in site.pair.nodes]
    wait_until(lambda: all(traffic.findings.answers > 10 for traffic in traffics))
    before = site.pair.owners()
    site.swap("halted", "--p99-ms", "0.001")
    wait_until(lambda: "waits: p99 of node-" in str(site.operation("halted").get("message")))
    assert site.state_of("halted") == "running"
    assert site.pair.owners() == before
    for traffic in traffics:
        traffic.stop()
        assert traffic.errors == []
    # A second without requests has no p99.
    wait_until(lambda: site.state_of("halted") == "succeeded")
    assert all(owners != before[which] for which, owners in site.pair.owners().items())


def test_a_drained_node_owns_nothing_and_answers_and_undo_gives_it_back(site: Site) -> None:
    before = site.pair.owners()
    traffics = [Traffic(node, models=("rank",)) for node in site.pair.nodes]
    versions = _Versions(site.publisher)
    dry = site.pair.ask("node", "drain", "node-1", "--dry-run")
    assert site.pair.owners() == before
    said = site.pair.command("node", "drain", "node-1", "--id", "away", "--watch")
    assert f"moves {len(dry['moves'])} buckets" in said
    drained = site.pair.owners()
    assert not [at for owners in drained.values() for at in owners if at.startswith("node-1/")]
    answers = traffics[1].findings.answers
    wait_until(lambda: traffics[1].findings.answers > answers + 20)
    site.pair.command("reshard", "undo", "away", "--watch")
    assert site.pair.owners() == before
    versions.stop()
    for traffic in traffics:
        found = traffic.stop()
        assert traffic.errors == []
        assert (found.mixed, found.back) == (0, 0)
    _expect_that_a_lost_node_is_said(site)


def _expect_that_a_lost_node_is_said(site: Site) -> None:
    """Requests that need too much of a node that is away fail by name; none reads defaults."""
    alive, lost = site.pair.nodes
    client = Client("grpc", alive)
    keys = np.arange(32, dtype=np.int64).reshape(16, 2)
    whole = client.send({"KEYS": keys}, model="rank", outputs=["SCORE", "SOURCE"])
    assert int(parameters(whole)["degraded_keys"]) == 0
    os.kill(lost.pid, signal.SIGKILL)
    wait_until(lambda: metric(alive.metrics(), "embertide_peers_alive") == 0)
    with pytest.raises(InferenceServerException, match=r"no owner answers for \d+ of 32 keys \("):
        client.send({"KEYS": keys + 1_000_000}, model="rank")  # of those before there are copies
    client.raw.close()

    def counted(name: str, reason: str) -> float:
        return metric(alive.metrics(), name, reason=reason)

    wait_until(lambda: counted("embertide_requests_refused_total", "degraded") == 1)
    assert counted("embertide_degraded_keys_total", "dead") > 0
