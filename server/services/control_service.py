"""ControlService: each RPC translated to a question to the core; the gate maps refusals."""

import collections
import threading
import time
from collections.abc import Iterator
from typing import Protocol

import grpc

from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.idempotency import check_id
from embertide.server.core.plan.keys import owners_of_key
from embertide.server.services.driver import Driver
from embertide.server.services.figures import Figures, snapshot
from embertide.server.services.identity import CALLER, Identity
from embertide.server.services.outside import task_health
from embertide.server.services.registrations import RefusedRegistrations
from embertide.server.services.rollbacks import RollbackBus, start_rollback
from embertide.v1 import control_pb2, control_pb2_grpc, node_pb2

WATCHERS_MAX = 100
_OF_ONE_READER_MAX = WATCHERS_MAX // 2
_ANSWER_EVERY_S = 5.0
_LOOK_S = 0.5


class RowSource(Protocol):
    """Asks a node where a row is."""

    def explain(self, address: str, request: node_pb2.ExplainRequest) -> node_pb2.ExplainResponse:
        """Return what the node says; a grpc.RpcError: it refused, or does not answer."""


def _author() -> str:
    """Name the caller. Empty: callers are not asked who they are."""
    caller = CALLER.get()
    return "" if caller.role == "open" else str(caller)


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Serves a driver."""

    def __init__(
        self,
        driver: Driver,
        rows: RowSource,
        commits: RollbackBus | None,
        registrations: RefusedRegistrations,
    ) -> None:
        """Take the driver, who asks nodes, who knows what is committed, and who was refused."""
        self._registrations = registrations
        self._driver = driver
        self._rows = rows
        self._commits = commits
        self._watchers = threading.BoundedSemaphore(WATCHERS_MAX)
        self._watching: collections.Counter[Identity] = collections.Counter()
        self._lock = threading.Lock()
        self._figures = Figures(lambda: driver.call(snapshot))

    def RegisterNode(
        self, request: control_pb2.RegisterNodeRequest, context: grpc.ServicerContext
    ) -> control_pb2.RegisterNodeResponse:
        """Make a node known."""
        return self._driver.call(lambda core, now_ms: core.register(request, now_ms))

    def Heartbeat(
        self, request: control_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> control_pb2.HeartbeatResponse:
        """Take a beat."""
        return self._driver.beat(request)

    def StreamBeats(
        self, requests: Iterator[control_pb2.StreamBeatsRequest], context: grpc.ServicerContext
    ) -> Iterator[control_pb2.StreamBeatsResponse]:
        """Take the beats of a node; answer when there is something new, and now and then."""
        told, told_s = control_pb2.HeartbeatResponse(), 0.0
        for request in requests:
            now, now_s = self._driver.beat(request.beat), time.monotonic()
            if now != told or now_s - told_s >= _ANSWER_EVERY_S:
                told, told_s = now, now_s
                yield control_pb2.StreamBeatsResponse(response=now)

    def GetPlan(
        self, request: control_pb2.GetPlanRequest, context: grpc.ServicerContext
    ) -> control_pb2.GetPlanResponse:
        """Return a plan."""
        return control_pb2.GetPlanResponse(plan=self._driver.plan(request.epoch))

    def GetStatus(
        self, request: control_pb2.ControlServiceGetStatusRequest, context: grpc.ServicerContext
    ) -> control_pb2.ControlServiceGetStatusResponse:
        """Say how the fleet is."""
        answer = self._driver.call(lambda core, now_ms: core.status(now_ms)).message()
        newest = self._commits.newest() if self._commits else None
        if newest is not None:
            answer.newest_committed.CopyFrom(newest)
        answer.tasks.extend(map(task_health, self._driver.healths()))
        answer.refused.extend(self._registrations.newest())
        trainer = self._commits.trainer() if self._commits else None
        if trainer is not None:
            answer.trainer.CopyFrom(trainer)
        return answer

    def GetFleetLoad(
        self, request: control_pb2.GetFleetLoadRequest, context: grpc.ServicerContext
    ) -> control_pb2.GetFleetLoadResponse:
        """Say what was read in the last window."""
        return self._driver.call(lambda core, now_ms: core.fleet_load(request))

    def GetFleetFigures(
        self, request: control_pb2.GetFleetFiguresRequest, context: grpc.ServicerContext
    ) -> control_pb2.GetFleetFiguresResponse:
        """Say the same in sums."""
        return self._figures.answer(request)

    def GetRow(
        self, request: control_pb2.GetRowRequest, context: grpc.ServicerContext
    ) -> control_pb2.GetRowResponse:
        """Ask the owners of a key where its row is."""
        plan = self._driver.plan(0)
        wrong = []
        for owner in owners_of_key(plan, request.row.table, request.row.key):
            node = plan.topology.nodes[owner.node]
            try:
                said = self._rows.explain(node.address, request.row)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                    raise RefusedError(Code.OUT_OF_RANGE, error.details() or "") from error
                wrong.append(f"{node.name}: {error.code().name}: {error.details()}")
                continue
            if said.held:
                return control_pb2.GetRowResponse(node=node.name, address=node.address, row=said)
            wrong.append(f"{node.name} does not hold bucket {said.bucket} now")
        raise RefusedError(Code.UNAVAILABLE, "no owner says where the row is: " + "; ".join(wrong))

    def RemoveNode(
        self, request: control_pb2.RemoveNodeRequest, context: grpc.ServicerContext
    ) -> control_pb2.RemoveNodeResponse:
        """Forget a node."""
        return self._driver.call(
            lambda core, now_ms: core.remove(request, now_ms), author=_author()
        )

    def AdoptPlan(
        self, request: control_pb2.AdoptPlanRequest, context: grpc.ServicerContext
    ) -> control_pb2.AdoptPlanResponse:
        """Make a plan of what nodes hold."""
        return self._driver.adopt_plan(request, _author())

    def StartReshard(
        self, request: control_pb2.StartReshardRequest, context: grpc.ServicerContext
    ) -> control_pb2.StartReshardResponse:
        """Accept an operation, from loads that are asked for now."""
        return self._driver.start_reshard(request, _author())

    def GetOperation(
        self, request: control_pb2.GetOperationRequest, context: grpc.ServicerContext
    ) -> control_pb2.GetOperationResponse:
        """Return an operation."""
        return control_pb2.GetOperationResponse(operation=self._operation(request.id))

    def WatchOperation(
        self, request: control_pb2.WatchOperationRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.WatchOperationResponse]:
        """Send an operation whenever it changes, until it has ended or the caller has gone."""
        operation = self._operation(request.id)
        caller = CALLER.get()
        if not self._watchers.acquire(blocking=False):
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED, f"{WATCHERS_MAX} callers watch; ask with GetOperation"
            )
        try:
            with self._lock:
                self._watching[caller] += 1
                if caller.role == "reader" and self._watching[caller] > _OF_ONE_READER_MAX:
                    raise RefusedError(
                        Code.RESOURCE_EXHAUSTED,
                        f"{caller} watches {_OF_ONE_READER_MAX} times; ask with GetOperation",
                    )
            yield control_pb2.WatchOperationResponse(operation=operation)
            while not operation.ended_ms and context.is_active():
                with self._driver.changed:
                    self._driver.changed.wait(_LOOK_S)
                now = self._operation(request.id)
                if now != operation:
                    operation = now
                    yield control_pb2.WatchOperationResponse(operation=operation)
        finally:
            with self._lock:
                self._watching[caller] -= 1
                if not self._watching[caller]:
                    del self._watching[caller]
            self._watchers.release()

    def SteerOperation(
        self, request: control_pb2.SteerOperationRequest, context: grpc.ServicerContext
    ) -> control_pb2.SteerOperationResponse:
        """Halt, resume or end an operation."""
        return self._driver.call(
            lambda core, now_ms: control_pb2.SteerOperationResponse(
                operation=core.steer(request, now_ms)
            ),
            decides=True,
            author=_author(),
        )

    def ListOperations(
        self, request: control_pb2.ListOperationsRequest, context: grpc.ServicerContext
    ) -> control_pb2.ListOperationsResponse:
        """Return a page of operations."""
        return self._driver.call(lambda core, now_ms: core.operations.page(request))

    def ListDecisions(
        self, request: control_pb2.ListDecisionsRequest, context: grpc.ServicerContext
    ) -> control_pb2.ListDecisionsResponse:
        """Return a page of what was decided about drift."""
        return self._driver.call(lambda core, now_ms: core.decisions(request, now_ms))

    def SetDriftSettings(
        self, request: control_pb2.SetDriftSettingsRequest, context: grpc.ServicerContext
    ) -> control_pb2.SetDriftSettingsResponse:
        """Change how drift is treated."""
        return self._driver.call(
            lambda core, now_ms: control_pb2.SetDriftSettingsResponse(
                settings=core.set_drift(request.settings)
            ),
            author=_author(),
        )

    def ListEvents(
        self, request: control_pb2.ListEventsRequest, context: grpc.ServicerContext
    ) -> control_pb2.ListEventsResponse:
        """Return a page of what happened."""
        return self._driver.call(lambda core, now_ms: self._driver.timeline.events.page(request))

    def ListVersions(
        self, request: control_pb2.ListVersionsRequest, context: grpc.ServicerContext
    ) -> control_pb2.ListVersionsResponse:
        """Return the newest versions, and how full the bus is."""
        return self._driver.call(lambda core, now_ms: self._driver.versions.answer())

    def StartRollback(
        self, request: control_pb2.StartRollbackRequest, context: grpc.ServicerContext
    ) -> control_pb2.StartRollbackResponse:
        """Order the trainer to restore the state of an older version."""
        known, now_ms = self._driver.call(
            lambda core, now_ms: (self._driver.versions.answer(), now_ms), decides=True
        )
        return start_rollback(request, self._commits, known, _author(), now_ms)

    def _operation(self, id: str) -> control_pb2.Operation:
        check_id("id", id)
        copy = control_pb2.Operation()
        self._driver.call(lambda core, now_ms: copy.CopyFrom(core.operations.find(id).operation))
        return copy
