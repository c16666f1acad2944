"""embertide.Client while real nodes end, stand still and come back.

EMBERTIDE_CALLS sets how many calls a rolling restart meets, at the least (500).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import rolling
from rolling import Kind, Node

# Both run the same steps (library/client/call.py), so that one of them is enough each day.
LONG = pytest.mark.parametrize("kind", ["threads", pytest.param("asyncio", marks=pytest.mark.long)])
BOTH = pytest.mark.parametrize("kind", rolling.KINDS)
CALLS = int(os.environ.get("EMBERTIDE_CALLS", "500"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    folder = tmp_path_factory.mktemp("restart")
    with rolling.serving(rolling.write_model(folder), folder, nodes=2) as running:
        yield running


@LONG
def test_no_call_fails_while_nodes_are_restarted_one_after_another(
    nodes: list[Node], kind: Kind
) -> None:
    traffic = rolling.roll(nodes, kind, CALLS)
    assert not traffic.failures()
    assert {each.node for each in traffic.asked()} == {"node-0", "node-1"}


@pytest.mark.long
@BOTH
def test_no_call_fails_while_nodes_are_restarted_in_kubernetes_order(
    tmp_path: Path, kind: Kind
) -> None:
    with rolling.serving(rolling.write_model(tmp_path), tmp_path, nodes=3, leave_s=3) as nodes:
        assert not rolling.roll(nodes, kind, CALLS).failures()


@LONG
def test_a_node_that_stands_still_is_left_and_taken_again(nodes: list[Node], kind: Kind) -> None:
    traffic, inside = rolling.stand_still(nodes, kind, for_s=1.5)
    assert not traffic.failures()
    # With a call of 2 s and two endpoints, the other one is asked after two thirds of a second.
    assert max(each.took_s for each in inside) < rolling.TIMEOUT_S
    assert sum(each.took_s > 0.6 for each in inside) <= 2 * rolling.AT_ONCE
    assert {each.node for each in inside} == {"node-0", "node-1"}


@pytest.mark.long
@pytest.mark.alone
@BOTH
def test_a_node_that_is_back_is_used_again(nodes: list[Node], kind: Kind) -> None:
    (took_s,) = rolling.come_back(nodes, kind, away_s=3.0, times=1)
    assert took_s < 2


@BOTH
def test_callers_that_wait_no_longer_do_not_end_a_node(nodes: list[Node], kind: Kind) -> None:
    before = nodes[0].pids()
    usual_s = rolling.usual_s(nodes[0])  # by this machine, so that many calls are late
    counters = rolling.impatient(nodes[0], kind, calls=1000, wait_s=(0.5 * usual_s, 1.2 * usual_s))
    assert nodes[0].pids() == before
    assert counters["late_calls"] > 20, "else nothing was tried"
