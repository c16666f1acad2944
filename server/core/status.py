"""How the nodes of a fleet are, for those who look: taken at once, put into messages later."""

from typing import NamedTuple

from embertide.v1 import control_pb2


class NodeStatus(NamedTuple):
    """A node as it registered and beat last.

    Attributes:
        registration: Its last one.
        beat: Its last one; None: this incarnation has not beaten yet.
        heard_ms: When it was heard last.
        state: How it takes part.
    """

    registration: control_pb2.RegisterNodeRequest
    beat: control_pb2.HeartbeatRequest | None
    heard_ms: int
    state: control_pb2.NodeState.ValueType


class FleetStatus(NamedTuple):
    """A fleet at a time. Nothing in it changes any more.

    Attributes:
        plan_epoch: Of the newest plan; 0: there is none.
        drift: Why nothing is done about drift, or what was done.
        now_ms: The time.
        nodes: All members, by name.
    """

    plan_epoch: int
    drift: control_pb2.DriftStatus
    now_ms: int
    nodes: list[NodeStatus]

    def message(self) -> control_pb2.ControlServiceGetStatusResponse:
        """Return it as callers get it: of many nodes that takes longer than to take it."""
        answer = control_pb2.ControlServiceGetStatusResponse(
            plan_epoch=self.plan_epoch, drift=self.drift
        )
        for each in self.nodes:
            beat = each.beat or control_pb2.HeartbeatRequest(versions=each.registration.versions)
            answer.nodes.add(
                node=each.registration.node,
                state=each.state,
                versions=beat.versions,
                plan_epoch=beat.plan_epoch,
                staleness_ms=beat.staleness_ms,
                failing=beat.failing,
                p99_us=beat.p99_us,
                last_beat_ms=max(0, self.now_ms - each.heard_ms),
                unheard=each.beat is None,
            )
        return answer
