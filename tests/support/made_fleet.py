"""Made-up answers of a control plane, for pages of the console: any size, any names."""

import dataclasses
import time
from typing import Any

import grpc

from embertide.server.cli.control_client import CallError
from embertide.server.core.figures import FleetFigures, FleetSnapshot
from embertide.server.core.plan.bucket_columns import bucket_columns
from embertide.server.core.plan.layout import layout_of
from embertide.v1 import control_pb2, node_pb2, plan_pb2, update_pb2

NOW_MS = 1_790_000_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """Names that others have given, and what they gave as reasons."""

    node: str = "node"
    table: str = "user"
    reason: str = "a release"
    author: str = "operator/anna"
    host: str = "trainer-0"
    message: str = "the name is alive elsewhere"


def answers(
    nodes: int = 2, *, bits: int = 4, names: Names = Names(), dead: int = 0
) -> dict[str, Any]:
    """The answers of a fleet by RPC; the first `dead` nodes are dead."""
    now_ms = round(time.time() * 1000)
    tiers = [
        plan_pb2.TierBudget(tier=plan_pb2.TIER_DDR, budget_bytes=1 << 30),
        plan_pb2.TierBudget(tier=plan_pb2.TIER_SSD, budget_bytes=4 << 30),
    ]
    known = [
        plan_pb2.Node(
            name=f"{names.node}-{at}",
            address=f"10.0.0.{at % 250}:7200",
            devices=[plan_pb2.Device(index=0, kind=plan_pb2.DEVICE_KIND_CPU, budgets=tiers)],
        )
        for at in range(nodes)
    ]
    status = control_pb2.ControlServiceGetStatusResponse(
        plan_epoch=7 if nodes else 0,
        newest_committed=update_pb2.Version(lineage=1, number=40),
        tasks=[node_pb2.TaskHealth(name="ticks", state="failing", error=names.message, since_ms=1)],
        refused=[
            control_pb2.RefusedRegistration(
                node=names.node, address=names.host, message=names.message, count=3, last_ms=now_ms
            )
        ],
        trainer=control_pb2.TrainerStatus(
            sign=update_pb2.TrainerSign(
                host=names.host, folder=names.host, version=40, started_ms=now_ms - 10_000, events=9
            ),
            age_ms=900,
        ),
    )
    for at, node in enumerate(known):
        status.nodes.add(
            node=node,
            state=control_pb2.NODE_STATE_DEAD if at < dead else control_pb2.NODE_STATE_READY,
            versions=update_pb2.VersionRange(
                oldest=update_pb2.Version(lineage=1, number=36),
                newest=update_pb2.Version(lineage=1, number=40 - at % 3),
            ),
            plan_epoch=7,
            staleness_ms=100 + 7 * at,
            last_beat_ms=61_000 if at < dead else 12,
            p99_us=1500 + 400 * at,
            failing=[node_pb2.TaskHealth(name="bus", state="failing", error=names.message)],
        )
    buckets = 1 << bits
    plan = plan_pb2.Plan(
        epoch=7,
        tables=[plan_pb2.PlannedTable(id=0, name=names.table, bucket_bits=bits, chunks=1)],
        topology=plan_pb2.Topology(nodes=known),
        assignments=[
            plan_pb2.Assignment(
                bucket_begin=bucket,
                bucket_count=1,
                owners=[plan_pb2.Owner(node=bucket % nodes)],
            )
            for bucket in range(buckets if nodes else 0)
        ],
        created_ms=now_ms - 5000,
        planner="first",
    )
    load = control_pb2.GetFleetLoadResponse()
    for at, node in enumerate(known):
        told = load.nodes.add(node=node.name).load
        told.window_ms, told.requests, told.request_us, told.cpu_us = 5000, 900, 720_000, 2_100_000
        if at == 0:
            told.hot_keys.add(key=7, reads=40, error=1)
            told.slow.add(
                ended_ms=now_ms,
                whole_us=9000,
                peers_us=6000,
                lookup_us=500,
                net_us=2000,
                version=40,
                keys=96,
                samples=8,
                requests=2,
                trace="4bf92f3577b34da6a3ce929d0e0e4736",
            )
            told.slow.add(
                ended_ms=now_ms, whole_us=90, requests=1, refusal=names.message, trace=names.message
            )
        if at == 1:
            told.slow_lookups.add(
                ended_ms=now_ms,
                whole_us=5200,
                keys=48,
                asker=known[0].name,
                trace="4bf92f3577b34da6a3ce929d0e0e4736",
            )
            told.slow_lookups.add(
                ended_ms=now_ms, whole_us=80, keys=3, asker=names.message, trace=names.message
            )
        for bucket in range(at, buckets, nodes):
            told.buckets.add(
                bucket=bucket,
                reads=10 + bucket,
                resident_bytes=1000,
                held=True,
                reads_by_source=[0, 9, 1],
            )
    operation = control_pb2.Operation(
        id="move-1",
        kind="drain",
        state=control_pb2.OPERATION_STATE_RUNNING,
        created_ms=now_ms - 3000,
        buckets_done=1,
        buckets_total=4,
        author=names.author,
        reason=names.reason,
        message=names.message,
    )
    ended = control_pb2.Operation()
    ended.CopyFrom(operation)
    ended.id, ended.ended_ms = "move-0", now_ms - 1000
    ended.state = control_pb2.OPERATION_STATE_SUCCEEDED
    kinds = control_pb2.EventKind
    happened = [
        (
            kinds.EVENT_KIND_LEADER,
            60_000,
            "the control plane at here:7070 leads",
            "",
            names.message,
        ),
        (kinds.EVENT_KIND_VERSION, 50_000, "versions 1 to 40 were published", "", "lineage 1"),
        (kinds.EVENT_KIND_NODE, 40_000, f"node {names.node}-0 is dead", "", names.message),
        (
            *(kinds.EVENT_KIND_OPERATION, 3000, "drain move-1 was accepted: 4 buckets, 0 bytes"),
            *(names.author, names.reason),
        ),
        (kinds.EVENT_KIND_DRIFT, 2000, "look-1: no gain", "drift", names.message),
    ]
    events = [
        control_pb2.FleetEvent(
            number=at + 1,
            at_ms=now_ms - ago_ms,
            kind=kind,
            name="made_up",
            text=text,
            author=author,
            why=why,
            times=40 if kind == kinds.EVENT_KIND_VERSION else 1,
            first_ms=now_ms - 90_000 if kind == kinds.EVENT_KIND_VERSION else 0,
        )
        for at, (kind, ago_ms, text, author, why) in enumerate(happened)
    ]
    kept = control_pb2.ListVersionsResponse(
        promoted=38, bus=control_pb2.BusStatus(used_bytes=90 << 20, max_bytes=1 << 30, versions=40)
    )
    for number in range(40, 30, -1):
        verdicts = control_pb2.VersionVerdict
        withdrawn = number == 36
        kept.versions.add(
            version=update_pb2.Version(lineage=1, number=number),
            committed_ms=now_ms - 60_000 * (40 - number),
            schema_id=7,
            dense_bytes=20_000,
            partitions=64,
            quality=update_pb2.LiveQuality(
                events=100 * number, auc=0.7 + number / 1000, log_loss=0.4, calibration=1.01
            ),
            verdict=verdicts.VERSION_VERDICT_WITHDRAWN
            if withdrawn
            else verdicts.VERSION_VERDICT_CANDIDATE
            if number > 38
            else verdicts.VERSION_VERDICT_PROMOTED,
            why=names.message if withdrawn else "",
            author=names.author if withdrawn else "",
        )
    decision = control_pb2.Decision(
        id="look-1",
        at_ms=now_ms - 2000,
        outcome=control_pb2.DECISION_OUTCOME_NO_GAIN,
        why=names.message,
        looks=3,
        triggers=["skew"],
        before=control_pb2.PlanCost(busiest_us=200, mean_us=100),
        after=control_pb2.PlanCost(busiest_us=190, mean_us=100),
        predicted_gain=0.04,
        expected_gain=0.061,
        correction=control_pb2.GainCorrection(kind="balance", factor=1.5, operations=7, spread=1.2),
    )
    return {
        "GetStatus": status,
        "StartReshard": control_pb2.StartReshardResponse(
            operation=operation, explanation=names.message
        ),
        "GetOperation": control_pb2.GetOperationResponse(operation=operation),
        "SteerOperation": control_pb2.SteerOperationResponse(operation=operation),
        "SetDriftSettings": control_pb2.SetDriftSettingsResponse(),
        "GetPlan": control_pb2.GetPlanResponse(plan=plan) if nodes else None,
        "GetFleetFigures": FleetSnapshot(
            plan=plan if nodes else None,
            layout=layout_of(plan.assignments),
            no_plan="" if nodes else "no plan has been made",
            living=frozenset(node.name for node in known[dead:]),
            loads_version=1,
            loads={node.node: node.load for node in load.nodes},
            columns={node.node: bucket_columns(node.load) for node in load.nodes},
        ),
        "ListOperations": control_pb2.ListOperationsResponse(
            operations=[operation, ended] if nodes else []
        ),
        "ListEvents": control_pb2.ListEventsResponse(events=reversed(events) if nodes else []),
        "ListVersions": kept if nodes else control_pb2.ListVersionsResponse(),
        "ListDecisions": control_pb2.ListDecisionsResponse(
            decisions=[decision] if nodes else [],
            status=control_pb2.DriftStatus(
                settings=control_pb2.DriftSettings(
                    mode=control_pb2.DRIFT_MODE_AUTO, reason=names.reason
                ),
                outcome=control_pb2.DECISION_OUTCOME_NO_GAIN,
                why=names.message,
            ),
            corrections=[
                control_pb2.GainCorrection(factor=1.4, operations=9, spread=1.25, left_out=1),
                decision.correction,
            ],
        ),
    }


class MadeFleet:
    """Stands in for a control plane.

    Attributes:
        told: Its answers by RPC.
        refusal: The error that it answers instead; None: its answers.
        role: The role of every caller.
        open: Whether it asks nobody for a token.
        tokens: Those that it takes.
        calls: RPCs that were called.
    """

    def __init__(self, told: dict[str, Any], *, role: str = "operator", open: bool = True) -> None:
        self.told = told
        self.refusal: CallError | None = None
        self.role = role
        self.open = open
        self.tokens = {"good", "also good"}
        self.calls: list[str] = []

    def dial(self, token: str | None) -> Any:
        return MadeCaller(self, token)

    def die(self) -> None:
        self.refusal = CallError(grpc.StatusCode.UNAVAILABLE, "no control plane answers")


class MadeCaller:
    """Calls of a made-up control plane."""

    def __init__(self, fleet: MadeFleet, token: str | None) -> None:
        self._fleet, self._token = fleet, token
        self.open, self.role = fleet.open, fleet.role

    def call(self, rpc: str, request: Any, deadline_s: float = 5.0) -> Any:
        self._fleet.calls.append(rpc)
        if self._fleet.refusal is not None:
            raise self._fleet.refusal
        if not self._fleet.open and self._token not in self._fleet.tokens:
            raise CallError(grpc.StatusCode.UNAUTHENTICATED, "the token is not known here")
        answer = self._fleet.told[rpc]
        if isinstance(answer, FleetSnapshot):
            return FleetFigures(answer).answer(request)
        if answer is None:
            raise CallError(grpc.StatusCode.NOT_FOUND, "no plan has been made")
        return answer

    def plan(self, epoch: int = 0) -> plan_pb2.Plan:
        plan: plan_pb2.Plan = self.call("GetPlan", control_pb2.GetPlanRequest()).plan
        return plan

    def close(self) -> None:
        pass
