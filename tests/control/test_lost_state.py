"""A state store that loses its keys under a fleet: noticed, and the fleet goes on."""

import pytest
import redis
from control_bench import Bench
from waiting import wait_until

from embertide.server.adapters.state import RedisState
from embertide.server.core import lost_state
from embertide.server.core.plan.adoption import EPOCHS_ABOVE
from embertide.v1 import control_pb2

SUCCEEDED = control_pb2.OPERATION_STATE_SUCCEEDED


def flush(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.flushall()


def newest_epoch(url: str) -> int:
    store = RedisState(url, "news")
    try:
        plan = store.load().plan
        return plan.epoch if plan is not None else 0
    finally:
        store.close()


def test_a_control_plane_that_runs_writes_all_of_it_again(bench: Bench) -> None:
    control = bench.control()
    nodes = [bench.node(name, control.address) for name in ("node-0", "node-1")]
    client = bench.client(control.address)
    wait_until(lambda: all(node.held().epoch for node in nodes))
    client.reshard("d1", drain_node="node-1")
    wait_until(lambda: client.operation("d1").state == SUCCEEDED)
    before = nodes[0].held().epoch
    flush(bench.url)
    wait_until(lambda: newest_epoch(bench.url) > EPOCHS_ABOVE)
    wait_until(lambda: all(node.held().epoch > before + EPOCHS_ABOVE - 1 for node in nodes))
    assert not control.driver.superseded.is_set(), "nobody took over"
    assert control.driver.counts["state_restored"] == 1
    assert client.operation("d1").state == SUCCEEDED, "what was done is known"
    client.reshard("u1", undo_operation="d1")
    wait_until(lambda: client.operation("u1").state == SUCCEEDED)
    assert nodes[0].held().epoch > before + EPOCHS_ABOVE


def test_a_successor_adopts_what_nodes_hold(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    control = bench.control()
    nodes = [bench.node(name, control.address) for name in ("node-0", "node-1")]
    wait_until(lambda: all(node.held().epoch for node in nodes))
    client = bench.client(control.address)
    client.reshard("d1", drain_node="node-1")
    wait_until(lambda: client.operation("d1").state == SUCCEEDED)
    before = nodes[0].held()
    control.stop()
    flush(bench.url)
    successor = bench.control()
    for node in nodes:
        node.point_at(successor.address)
    client = bench.client(successor.address)
    status = control_pb2.ControlServiceGetStatusRequest()
    told = [before.epoch] * 2
    wait_until(lambda: [n.plan_epoch for n in client.call("GetStatus", status).nodes] == told)
    request = control_pb2.StartReshardRequest(operation_id="d2", drain_node="node-0")
    assert "plan adopt" in client.refused("StartReshard", request)[1]
    adopt = control_pb2.AdoptPlanRequest(request_id="a1", reason="it was flushed")
    # Not the time that has passed, but what it is compared with: then no machine is too slow.
    monkeypatch.setattr(lost_state, "FOUND_AGAIN_MS", 3_600_000)
    code, why = client.refused("AdoptPlan", adopt)
    assert (code, "may take 3600 s to find it" in why) == ("FAILED_PRECONDITION", True)
    monkeypatch.setattr(lost_state, "FOUND_AGAIN_MS", 0)
    answer = client.call("AdoptPlan", adopt, 20.0)
    assert answer.plan_epoch == before.epoch + EPOCHS_ABOVE
    assert {each.node: each.buckets for each in answer.nodes} == {"node-0": 20, "node-1": 0}
    wait_until(lambda: all(node.held().epoch == answer.plan_epoch for node in nodes))
    assert [each.owners for each in nodes[0].held().assignments] == [
        each.owners for each in before.assignments
    ]
    target = control_pb2.ReshardTarget(base_epoch=answer.plan_epoch)
    run = target.assignments.add(table_id=0, bucket_begin=0, bucket_count=4)
    run.owners.add(node=1)
    client.reshard("r1", target=target)
    wait_until(lambda: client.operation("r1").state == SUCCEEDED)
    assert all(node.held().epoch > answer.plan_epoch for node in nodes), "they follow it"
