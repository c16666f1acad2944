"""The fleets of several models behind one service: each call goes to the fleet of its model.

Callers name the model in metadata (gate.py); where there is one fleet they need not. Nodes say it
when they register, and are known by their incarnation afterwards.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import grpc

from embertide.server.core.errors import Code, RefusedError, invalid
from embertide.server.core.plan.validity import NODES_MAX
from embertide.server.services.control_service import ControlService
from embertide.server.services.driver import Driver
from embertide.server.services.gate import named_model
from embertide.server.services.identity import CALLER
from embertide.server.services.tokens import check_model, check_node
from embertide.v1 import control_pb2

_FIRST_BEAT_S = 10.0


class FleetOfModel(NamedTuple):
    """The service and the driver of a model's fleet."""

    service: ControlService
    driver: Driver


class Fleets:
    """Hands each call to the service of its model. It has every RPC of ControlService (below)."""

    def __init__(self, fleets: Mapping[str, FleetOfModel]) -> None:
        """Take the fleets by model. Requires: one at least."""
        self._fleets = dict(fleets)
        self._first = next(iter(self._fleets.values()))
        self._streams = threading.BoundedSemaphore(NODES_MAX)

    def of_call(self, context: grpc.ServicerContext) -> ControlService:
        """Return the service of the model that a call names.

        Raises:
            RefusedError: It names none, and there are several, or there is no such model, or the
                caller is of another one.
        """
        model = named_model(context)
        names = sorted(self._fleets)
        if model is None:
            if len(names) == 1:
                check_model(CALLER.get(), names[0])
                return self._first.service
            raise invalid(f"no model is named, and this control plane has {names}; give --model")
        if model not in self._fleets:
            raise RefusedError(
                Code.NOT_FOUND,
                f"no such model: {model[:80]!r}; this control plane has {names}, give --model",
            )
        check_model(CALLER.get(), model)
        return self._fleets[model].service

    def of_registration(self, request: control_pb2.RegisterNodeRequest) -> ControlService:
        """Return the service of a node's model.

        Raises:
            RefusedError: There are several, and none is of this model; or the caller may not
                speak for this node.
        """
        check_node(CALLER.get(), request.node.name)
        check_model(CALLER.get(), request.model)
        if request.model in self._fleets:
            return self._fleets[request.model].service
        if len(self._fleets) == 1:
            return self._first.service  # which refuses it
        raise RefusedError(
            Code.FAILED_PRECONDITION,
            f"node {request.node.name[:80]!r} serves model {request.model[:80]!r}; this control "
            f"plane has {sorted(self._fleets)}",
        )

    def of_beat(self, beat: control_pb2.HeartbeatRequest) -> ControlService:
        """Return the service of a node that beats; whoever knows only its name refuses it.

        Raises:
            RefusedError: The caller may not speak for it.
        """
        check_node(CALLER.get(), beat.node)
        if len(self._fleets) == 1:
            check_model(CALLER.get(), next(iter(self._fleets)))
            return self._first.service
        known = {model: each.driver.incarnation(beat.node) for model, each in self._fleets.items()}
        same = [model for model, incarnation in known.items() if incarnation == beat.incarnation]
        named = [model for model, incarnation in known.items() if incarnation is not None]
        model = (*same, *named, *self._fleets)[0]
        check_model(CALLER.get(), model)
        return self._fleets[model].service

    def RegisterNode(
        self, request: control_pb2.RegisterNodeRequest, context: grpc.ServicerContext
    ) -> control_pb2.RegisterNodeResponse:
        """Make a node of one of the models known."""
        return self.of_registration(request).RegisterNode(request, context)

    def Heartbeat(
        self, request: control_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> control_pb2.HeartbeatResponse:
        """Take a beat."""
        return self.of_beat(request).Heartbeat(request, context)

    def StreamBeats(
        self, requests: Iterator[control_pb2.StreamBeatsRequest], context: grpc.ServicerContext
    ) -> Iterator[control_pb2.StreamBeatsResponse]:
        """Take the beats of a node, whose first one says which it is, and comes soon."""
        if not self._streams.acquire(blocking=False):
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED, f"{NODES_MAX} nodes beat by stream; call Heartbeat"
            )
        # A stream that says nothing would hold its thread until its deadline.
        silent = threading.Timer(_FIRST_BEAT_S, context.cancel)
        silent.daemon = True
        silent.start()
        try:
            for first in requests:
                silent.cancel()
                service = self.of_beat(first.beat)
                others = _of_one_node(first.beat.node, requests)
                yield from service.StreamBeats(itertools.chain((first,), others), context)
        finally:
            silent.cancel()
            self._streams.release()


def _of_one_node(
    node: str, requests: Iterator[control_pb2.StreamBeatsRequest]
) -> Iterator[control_pb2.StreamBeatsRequest]:
    """Yield the beats of a stream, which are all of the node that its first one was of."""
    for request in requests:
        if request.beat.node != node:
            raise invalid(f"a beat of {request.beat.node[:80]!r} in a stream of {node[:80]!r}")
        yield request


def _routed(rpc: str) -> Callable[[Fleets, Any, grpc.ServicerContext], Any]:
    """Return an RPC that goes to the service of the model that the call names."""

    def call(self: Fleets, request: Any, context: grpc.ServicerContext) -> Any:
        return getattr(self.of_call(context), rpc)(request, context)

    return call


for _method in control_pb2.DESCRIPTOR.services_by_name["ControlService"].methods:
    if _method.name not in vars(Fleets):
        setattr(Fleets, _method.name, _routed(_method.name))
