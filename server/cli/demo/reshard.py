"""The demo's reshard: half way the traffic shifts to one node, and the control plane follows it.

Until then requests come to both nodes in turn, and the control plane only looks (mode advise). Then
four of five come to node-0, as when a load balancer takes another site out, and the control plane
may act (mode auto): what moves, and when, is its own decision. It goes in steps, as the demo's loop
comes by:

    waiting    until the replay is half way, and waits for the copy
    comparing  the copy is loaded; a few answers are compared before anything may move
    watching   the traffic has shifted; the control plane has not decided to move anything yet
    moving     its operation runs
    settling   what was sent before its end is answered
    measuring  the control plane measures what the operation has saved, still beside the copy
    done       the copy is unloaded, and reshard.json says what was decided, moved and saved
"""

import json
import time
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from embertide.server.cli.control_client import Caller, enum_name
from embertide.server.cli.demo.fleet import DemoFleet
from embertide.server.cli.demo.options import UNMOVED_MODEL, DemoError, DemoOptions
from embertide.server.core.drift.options import MODES, ModeName
from embertide.server.core.plan.names import changes
from embertide.v1 import control_pb2, plan_pb2

_SHARE = 0.5  # of the events, scored before it begins
_QUIET_ANSWERS = 200  # compared before anything moves; of a short stream a fiftieth of its answers
_QUIET_EVENTS = 12_800
_MIN_S = 60.0  # that the stream lasts
_SETTLE_S = 1.0
_PATIENCE_S = 120.0
_DECISION_FIELDS = (
    "why",
    "triggers",
    "planner",
    "predicted_gain",
    "measured_gain",
    "measured_ms",
    "explanation",
)
SHIFTED_SHARE = 0.8
"""Share of the requests that come to the first node in the second half."""


class DemoReshard:
    """One reshard under traffic. Used by one thread."""

    def __init__(self, options: DemoOptions, fleet: DemoFleet, stream: Mapping[str, Any]) -> None:
        """Move nothing yet."""
        self.phase = "waiting"
        self.operation = control_pb2.Operation()
        self._options, self._fleet = options, fleet
        self._events = int(stream["events"])
        self._caller = Caller(fleet.control, None)
        self._decision = control_pb2.Decision()
        self._plan_before = plan_pb2.Plan()
        self._shifted_ms = 0
        self._ended_s = 0.0

    @property
    def begins_at(self) -> int:
        """The event before which the replay waits for the copy."""
        return int(_SHARE * self._events)

    @property
    def events_per_s(self) -> float:
        """At most so many come: the control plane needs some seconds to see what changes."""
        return self._events / _MIN_S

    def facts(self, replay: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a person watches."""
        return {
            "phase": self.phase,
            "why": self._decision.why,
            "buckets_done": self.operation.buckets_done,
            "buckets_total": self.operation.buckets_total,
            "compared": replay.get("compared", 0) + replay.get("checks", 0),
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
                self._plan_before = self._caller.plan()
                self._set_mode("auto")
                self._shifted_ms = time.time_ns() // 1_000_000
                self.phase = "watching"
        elif self.phase == "watching":
            self._watch()
        elif self.phase == "moving":
            self._look()
        elif self.phase == "settling" and time.monotonic() - self._ended_s > _SETTLE_S:
            self._write()
            self.phase = "measuring"
        elif self.phase == "measuring":
            self._measure()

    def end(self, replay: Mapping[str, Any]) -> None:
        """Bring it to its end once the replay has ended.

        Raises:
            ProcessError: As `step`, or it does not end in two minutes.
        """
        end_s = time.monotonic() + _PATIENCE_S
        while self.phase in ("moving", "settling"):
            if time.monotonic() > end_s:
                raise DemoError(
                    f"the reshard does not end; see the logs of the demo: {self.operation.message}"
                )
            self.step(replay)
            time.sleep(0.05)
        if self.phase in ("comparing", "watching", "measuring"):
            # So short a stream ends before the control plane has seen enough of it.
            self._fleet.unload(UNMOVED_MODEL)
        request = control_pb2.ListDecisionsRequest(page_size=500)
        answer = self._caller.call("ListDecisions", request)
        self._options.decisions.write_text(json_format.MessageToJson(answer) + "\n")
        self._caller.close()
        self.phase = "done"

    def _set_mode(self, mode: ModeName) -> None:
        settings = control_pb2.DriftSettings(mode=MODES[mode], reason="the demo")
        request = control_pb2.SetDriftSettingsRequest(settings=settings)
        self._caller.call("SetDriftSettings", request)

    def _acted(self) -> control_pb2.Decision | None:
        """Return the newest decision that moved something."""
        request = control_pb2.ListDecisionsRequest(acted_only=True, page_size=1)
        found = self._caller.call("ListDecisions", request).decisions
        return found[0] if found else None

    def _watch(self) -> None:
        decision = self._acted()
        if decision is not None:
            self._decision = decision
            self._set_mode("advise")  # answers are compared during one reshard
            self.phase = "moving"
            self._look()

    def _measure(self) -> None:
        decision = self._acted()
        if decision is not None and decision.measured_ms:
            self._decision = decision
            self._fleet.unload(UNMOVED_MODEL)
            self._write()
            self.phase = "done"

    def _look(self) -> None:
        request = control_pb2.GetOperationRequest(id=self._decision.operation_id)
        self.operation = self._caller.call("GetOperation", request).operation
        if not self.operation.ended_ms:
            return
        if self.operation.state != control_pb2.OPERATION_STATE_SUCCEEDED:
            state = enum_name(control_pb2.OperationState, self.operation.state).lower()
            raise DemoError(
                f"the reshard {state}: {self.operation.message}; see the logs of the demo"
            )
        self._ended_s = time.monotonic()
        self.phase = "settling"

    def _write(self) -> None:
        """Write down what was decided and moved."""
        plan = self._caller.plan()
        changed = changes(self._plan_before, plan)
        moved: dict[int, list[int]] = {table.id: [] for table in plan.tables}
        for bucket in changed:
            moved[bucket.table].append(bucket.bucket)
        gained = sum(
            bool({at.node for at in new.owners} - {at.node for at in old.owners})
            for old, new in changed.values()
        )
        # The features of events in their order, each with the bits and moved buckets of its table.
        newest = max(self._options.publication.glob("snapshots/*/manifest.json"))
        manifest = json.loads(newest.read_text())
        made = {name for each in manifest.get("sequences", ()) for name in each["columns"]}
        features = [
            each
            for each in manifest["features"]
            if "crossed" not in each and each["name"] not in made
        ]
        tables = {table.name: table for table in plan.tables}
        said = {
            "began_ms": self._decision.at_ms,
            "ended_ms": self.operation.ended_ms,
            "buckets": sum(1 << table.bucket_bits for table in plan.tables),
            "buckets_moved": len(changed),
            "buckets_moved_to_other_nodes": gained,
            "bytes_moved": self.operation.bytes_done,
            "features": [
                (tables[each["table"]].bucket_bits, sorted(moved[tables[each["table"]].id]))
                for each in features
            ],
        }
        said["decision"] = {
            **{name: _plain(getattr(self._decision, name)) for name in _DECISION_FIELDS},
            "seconds_after_the_shift": (self._decision.at_ms - self._shifted_ms) / 1000,
        }
        self._options.reshard.write_text(json.dumps(said) + "\n")


def _plain(value: Any) -> Any:
    """Return a field of a message as JSON has it."""
    return value if isinstance(value, str | int | float) else list(value)
