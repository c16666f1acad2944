"""Eight nodes hold one model: whatever moves meanwhile, each answer is that of a single store.

`EMBERTIDE_CHECK_SECONDS` sets how long the random operations run (5 by default; 60 for the record).
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from checker import bucket_of
from fleet import (
    CONFIG,
    DIM,
    TABLE_OF_FEATURE,
    TABLES,
    FleetSite,
    NodeProcess,
    is_right,
    start_fleet,
)
from waiting import wait_until

from embertide.v1 import node_pb2, update_pb2

SECONDS = float(os.environ.get("EMBERTIDE_CHECK_SECONDS", "5"))
NODES, DEVICES = 8, 2
_REMOTE, _UNANSWERED, _HOT = 3, 6, 7


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FleetSite]:
    more = {"ddr_bytes": 32 << 20, "max_degraded_share": 0}  # an answer is right, or there is none
    with start_fleet(tmp_path, nodes=NODES, devices=DEVICES, seed=5, **more) as running:
        yield running


def owner_of(site: FleetSite, bag: int, key: int) -> int:
    """The node that owns a key of the bag at that place."""
    table = TABLE_OF_FEATURE[bag % len(CONFIG.features)]
    return site.writer.owners[table, bucket_of(TABLES[table], key)][0][0]


def _read(site: FleetSite, node: NodeProcess, rng: np.random.Generator) -> "node_pb2.ReadResponse":
    bags = site.model.draw(rng, samples=6)
    answer = node.read(bags)
    assert is_right(site.model, bags, answer), f"{node.name}: {bags}, {answer}"
    return answer


def test_random_operations_equal_a_single_store(site: FleetSite) -> None:
    rng = np.random.default_rng(1)
    end = time.monotonic() + SECONDS
    answers, unanswered, moved, remote, hot, last = 0, 0, 0, 0, 0, [0] * NODES
    buckets = list(site.writer.owners)
    steps: Iterator[int] = iter(())
    epoch = site.writer.epoch
    while time.monotonic() < end or moved < 2:
        for n in rng.integers(0, NODES, 20):
            try:
                answer = _read(site, site.nodes[n], rng)
            except grpc.RpcError as error:
                # On a machine that is busy elsewhere a peer may miss five beats.
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                unanswered += 1
                continue
            assert answer.version.number >= last[n], f"node-{n} went back"
            last[n] = answer.version.number
            remote += answer.sources.count(_REMOTE)
            hot += answer.sources.count(_HOT)
            answers += 1
        if rng.random() < 0.5:
            site.model.publish()
            if site.model.newest % 5 == 0:
                site.model.snapshot(site.model.newest)
        if all(node.acts_by(epoch) for node in site.nodes):
            step = next(steps, None)
            if step is None:
                moved += 1
                chosen = rng.permutation(len(buckets))[:9]
                places = {
                    buckets[i]: (int(rng.integers(NODES)), int(rng.integers(DEVICES)))
                    for i in chosen
                }
                moves = {
                    which: place
                    for which, place in places.items()
                    if place not in site.writer.owners[which]
                }
                steps = site.writer.move(moves)
                step = next(steps)
            epoch = step
    print(
        f"{answers} answers, {moved} moves of 9, {remote} remote keys, {hot} from copies, "
        f"{site.model.newest} versions"
    )
    assert min(last) >= site.model.newest - 8  # the window, and no node was left behind
    assert unanswered <= answers / 50
    assert remote + hot > answers  # seven of eight keys are elsewhere
    assert min(remote, hot) > 0
    wait_until(lambda: all(node.acts_by(epoch) for node in site.nodes))


def test_a_dead_owner_costs_what_max_degraded_share_allows(site: FleetSite) -> None:
    rng = np.random.default_rng(2)
    victim = site.nodes[3]
    asker = site.nodes[0]
    victim.process.kill()
    wait_until(lambda: asker.status().counters["peer_death"] >= 1)
    bags = site.model.draw(rng, samples=50)
    lost = [owner_of(site, b, key) == 3 for b, bag in enumerate(bags) for key in bag]
    refusal = rf"no owner answers for {sum(lost)} of {len(lost)} keys \({sum(lost)} dead\)"
    with pytest.raises(grpc.RpcError, match=refusal) as refused:
        asker.read(bags)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert asker.status().counters["degraded_keys_dead"] == sum(lost)
    site.options["max_degraded_share"] = 1
    asker.stop()
    asker = site.nodes[0] = site.start(0)
    wait_until(lambda: asker.acts_by(site.writer.epoch))
    wait_until(lambda: asker.reaches_all(NODES - 1))
    answer = asker.read(bags)
    zero = np.zeros(DIM, np.float32)
    assert [source == _UNANSWERED for source in answer.sources] == lost
    values = np.array(answer.embeddings, np.float32).reshape(-1, DIM)
    for b, bag in enumerate(bags):
        if len(bag) == 1 and owner_of(site, b, bag[0]) == 3:
            assert np.array_equal(values[b], zero)
    # The others go on with new versions, and the node that comes back catches up.
    site.model.publish()
    wait_until(lambda: asker.read([[1], [2], [3], [4]]).version.number == site.model.newest)
    victim.channel.close()
    site.nodes[3] = site.start(3)
    wait_until(lambda: site.nodes[3].acts_by(site.writer.epoch))

    def whole() -> bool:
        bags = site.model.draw(rng, samples=50)
        return is_right(site.model, bags, asker.read(bags))

    wait_until(whole)


def test_bad_requests_are_refused_by_name(site: FleetSite) -> None:
    stub = site.nodes[0].stub
    part = node_pb2.LookupPart(
        version=update_pb2.Version(lineage=1, number=1),
        table_id=0,
        keys=[1],
        pooling=node_pb2.PART_POOLING_ROWS,
    )

    def refused(request: "node_pb2.LookupRequest") -> str:
        with pytest.raises(grpc.RpcError) as caught:
            stub.Lookup(request, timeout=2.0)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        return str(caught.value.details())

    def changed(**fields: object) -> "node_pb2.LookupRequest":
        copy = node_pb2.LookupPart()
        copy.CopyFrom(part)
        for name, value in fields.items():
            if isinstance(value, list):
                del getattr(copy, name)[:]
                getattr(copy, name).extend(value)
            else:
                setattr(copy, name, value)
        return node_pb2.LookupRequest(parts=[copy], plan_epoch=1)

    assert "table 77" in refused(changed(table_id=77))
    assert "no key" in refused(changed(keys=[]))
    assert "neither rows nor sums" in refused(changed(pooling=0))
    sums = node_pb2.PART_POOLING_SUM
    assert "ascend" in refused(changed(pooling=sums, bag_offsets=[0, 2], bag_keys=[0]))
    assert "names key 9 of 1" in refused(changed(pooling=sums, bag_offsets=[0, 1], bag_keys=[9]))
    part.version.number = 10**6
    gone = stub.Lookup(node_pb2.LookupRequest(parts=[part], plan_epoch=1), timeout=2.0)
    assert gone.results[0].refusal == node_pb2.LOOKUP_REFUSAL_VERSION_GONE
    with pytest.raises(grpc.RpcError, match="lengths; give samples x 4"):
        site.nodes[0].read([[1]])
