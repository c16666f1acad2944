"""The demo's reshard: half way, every device gives half of its buckets to the next one.

Four devices stand in a ring over the two nodes, so that half of the buckets move and half of those
across nodes. It goes in steps, as the demo's loop comes by:

    waiting    until the replay is half way, and waits for the copy
    comparing  the copy is loaded; a few answers are compared before anything moves
    moving     the operation runs
    settling   what was sent before its end is answered
    done       the copy is unloaded, and reshard.json says what moved
"""

import json
import time
from collections.abc import Mapping
from typing import Any

from embertide.server.cli.control_plane import Caller, enum_name, new_id
from embertide.server.cli.demo.fleet import DemoFleet
from embertide.server.cli.demo.options import UNMOVED_MODEL, DemoError, DemoOptions
from embertide.server.core.plan.layout import Holders, Place, assignments_of, devices, layout_of
from embertide.v1 import control_pb2, plan_pb2

_SHARE = 0.5  # of the events, scored before it begins
_QUIET_ANSWERS = 200  # compared before anything moves; of a short stream a fiftieth of its answers
_QUIET_EVENTS = 12_800
# Few at a time, so that traffic meets every step; a short stream would end before the reshard does.
_AT_ONCE, _AT_ONCE_SHORT = 4, 64
_LONG_STREAM = 500_000
_SETTLE_S = 1.0
_PATIENCE_S = 120.0


def shifted(plan: plan_pb2.Plan) -> list[plan_pb2.Assignment]:
    """Return half of each device's buckets, owned by the next device of the ring."""
    ring = sorted(devices(plan.topology))
    held_by: dict[Place, int] = dict.fromkeys(ring, 0)
    moved = {}
    for bucket, holders in sorted(layout_of(plan.assignments).items()):
        [owner] = holders.owners
        held_by[owner] += 1
        if held_by[owner] % 2:
            moved[bucket] = Holders((ring[(ring.index(owner) + 1) % len(ring)],))
    return assignments_of(moved)


class DemoReshard:
    """One reshard under traffic. Used by one thread."""

    def __init__(self, options: DemoOptions, fleet: DemoFleet, stream: Mapping[str, Any]) -> None:
        """Move nothing yet."""
        self.phase = "waiting"
        self.operation = control_pb2.Operation(id=new_id())
        self._options, self._fleet = options, fleet
        self._events = int(stream["events"])
        self._caller = Caller(fleet.control, None)
        self._moves: list[control_pb2.BucketMove] = []
        self._began_ms = 0
        self._ended_s = 0.0

    @property
    def begins_at(self) -> int:
        """The event before which the replay waits for the copy."""
        return int(_SHARE * self._events)

    def facts(self, replay: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a person watches."""
        return {
            "phase": self.phase,
            "buckets_done": self.operation.buckets_done,
            "buckets_total": self.operation.buckets_total,
            "compared": replay.get("compared", 0),
            "changed": replay.get("changed", 0),
        }

    def step(self, replay: Mapping[str, Any]) -> None:
        """Do what the time has come for, knowing the replay's progress.

        Raises:
            ProcessError: The copy is not loaded, or the operation ends short of its goal.
        """
        if self.phase == "waiting" and replay.get("awaits_copy"):
            self._fleet.load_unmoved(UNMOVED_MODEL)
            self.phase = "comparing"
        elif self.phase == "comparing":
            quiet = min(_QUIET_ANSWERS, self._events // _QUIET_EVENTS)
            if replay["compared"] >= quiet:
                self._start()
        elif self.phase == "moving":
            self._look()
        elif self.phase == "settling" and time.monotonic() - self._ended_s > _SETTLE_S:
            self._finish()

    def end(self, replay: Mapping[str, Any]) -> None:
        """Bring it to its end once the replay has ended.

        Raises:
            ProcessError: As `step`, or it does not end in two minutes.
        """
        end_s = time.monotonic() + _PATIENCE_S
        while self.phase in ("moving", "settling"):
            if time.monotonic() > end_s:
                raise DemoError(f"the reshard does not end: {self.operation.message}")
            self.step(replay)
            time.sleep(0.05)

    def _start(self) -> None:
        plan = self._caller.plan()
        request = control_pb2.StartReshardRequest(
            operation_id=self.operation.id,
            target=control_pb2.ReshardTarget(base_epoch=plan.epoch, assignments=shifted(plan)),
            budget=control_pb2.ReshardBudget(
                buckets_at_once=_AT_ONCE if self._events >= _LONG_STREAM else _AT_ONCE_SHORT
            ),
            reason="the demo: half of the buckets to the next device",
        )
        self._began_ms = time.time_ns() // 1_000_000
        answer = self._caller.call("StartReshard", request, 30.0)
        self.operation, self._moves = answer.operation, list(answer.moves)
        self.phase = "moving"

    def _look(self) -> None:
        request = control_pb2.GetOperationRequest(id=self.operation.id)
        self.operation = self._caller.call("GetOperation", request).operation
        if not self.operation.ended_ms:
            return
        if self.operation.state != control_pb2.OPERATION_STATE_SUCCEEDED:
            state = enum_name(control_pb2.OperationState, self.operation.state).lower()
            raise DemoError(f"the reshard {state}: {self.operation.message}")
        self._ended_s = time.monotonic()
        self.phase = "settling"

    def _finish(self) -> None:
        self._fleet.unload(UNMOVED_MODEL)
        plan = self._caller.plan()
        moved: dict[int, list[int]] = {table.id: [] for table in plan.tables}
        for move in self._moves:
            moved[move.table_id].append(move.bucket)
        # The features in their order, each with the bits and moved buckets of its table.
        newest = max(self._options.publication.glob("snapshots/*/manifest.json"))
        features = json.loads(newest.read_text())["features"]
        tables = {table.name: table for table in plan.tables}
        said = {
            "began_ms": self._began_ms,
            "ended_ms": self.operation.ended_ms,
            "buckets": sum(1 << table.bucket_bits for table in plan.tables),
            "buckets_moved": len(self._moves),
            "buckets_moved_to_other_nodes": sum(
                move.source.node != move.target.node for move in self._moves
            ),
            "bytes_moved": self.operation.bytes_done,
            "features": [
                (tables[each["table"]].bucket_bits, sorted(moved[tables[each["table"]].id]))
                for each in features
            ],
        }
        self._options.reshard.write_text(json.dumps(said) + "\n")
        self._caller.close()
        self.phase = "done"
