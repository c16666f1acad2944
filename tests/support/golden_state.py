"""The state that a build's control plane left in the state store in the middle of a reshard.

Run as a program by that build, in its tree, it makes tests/golden/state-N anew:

    PYTHONPATH=tests/support:tests/control python golden_state.py tests/golden/state-N

Each message is a file of the bytes that the store holds; state.json has them all as JSON.
"""

import json
import sys
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from simulation import Simulation, make_node, make_tables

from embertide.server.adapters.state import MemoryState
from embertide.v1 import control_pb2, plan_pb2

OPERATION = "golden"
TARGET = {(0, 0): 1, (0, 1): 2, (0, 2): 2, (0, 3): 1, (1, 0): 2}
"""Node that each (table, bucket) goes to."""


def make_fleet() -> Simulation:
    fleet = Simulation(make_tables(user=3, item=1), expect=3, deadline_ms=100)
    for index in range(3):
        fleet.add(make_node(f"node-{index}", devices=2))
    return fleet


def messages(store: MemoryState) -> dict[str, Message]:
    """All that the store holds, by the file that it goes to."""
    saved = store.load()
    assert saved.plan is not None
    return {
        "plan.pb": saved.plan.whole(),
        **{f"nodes/{name}.pb": each for name, each in saved.nodes.items()},
        **{f"operations/{name}.pb": each for name, each in saved.operations.items()},
    }


def as_json(found: dict[str, Message]) -> dict[str, object]:
    return {
        name: MessageToDict(each, preserving_proto_field_name=True) for name, each in found.items()
    }


def main(out: Path) -> None:
    fleet = make_fleet()
    while not fleet.core.epoch or any(node.held_epoch < 1 for node in fleet.nodes.values()):
        fleet.step()
    request = control_pb2.StartReshardRequest(
        operation_id=OPERATION, budget=control_pb2.ReshardBudget(buckets_at_once=2)
    )
    request.target.base_epoch = fleet.core.epoch
    for (table, bucket), node in TARGET.items():
        request.target.assignments.add(
            table_id=table, bucket_begin=bucket, bucket_count=1, owners=[plan_pb2.Owner(node=node)]
        )
    fleet.core.start(request, fleet.now_ms)
    fleet.settle()
    while not any(each.joining for each in fleet.plan().assignments):
        fleet.step()
    found = messages(fleet.store)
    for name, each in found.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(each.SerializeToString(deterministic=True))
    (out / "state.json").write_text(json.dumps(as_json(found), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
