"""A control plane that stands by: it listens, says who leads, and waits until nobody does.

The leader's lease is in `state` and expires by the clock of Redis. A leader that was killed or is
paused cannot renew it; whoever stands by then takes it, and the next term with it.
"""

import logging
import threading
from collections.abc import Iterator
from typing import Any, Self

import grpc

from embertide.server.adapters.tls import TlsFolder
from embertide.server.core.errors import StateUnavailableError
from embertide.server.core.state import StateStore
from embertide.server.services.call_pool import CallPool
from embertide.server.services.gate import SERVICE
from embertide.server.services.listening import LIMITS, QUEUED_MAX, Health, health_alone, listen

_TRY_S = 0.25
_THREADS = 8
_log = logging.getLogger(__name__)


class _Redirect(grpc.GenericRpcHandler):
    """Refuses every call of the service, and names the leader."""

    def __init__(self) -> None:
        self.leader = ""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        if handler_call_details.method.lstrip("/").partition("/")[0] != SERVICE:
            return None
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    def _refuse(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        where = f"ask {self.leader}, which leads" if self.leader else "try again"
        # By this a caller tells it from a connection that failed, whose code is the same.
        context.set_trailing_metadata((("embertide-leader", self.leader or "none"),))
        context.abort(
            grpc.StatusCode.UNAVAILABLE,
            f"this control plane stands by and decides nothing; {where}",
        )


class Standby:
    """Listens from its making to `stop`. A context manager.

    Attributes:
        address: HOST:PORT that it listens on.
    """

    def __init__(
        self,
        address: str,
        store: StateStore,
        advertise: str = "",
        tls: TlsFolder | None = None,
        health_listen: str | None = None,
    ) -> None:
        """Listen at an address; `advertise` is where others reach it, if that is another.

        Raises:
            ListenError: The address cannot be listened on.
        """
        self._store = store
        self._redirect = _Redirect()
        self._server = grpc.server(
            CallPool(_THREADS, "standby"),
            maximum_concurrent_rpcs=QUEUED_MAX,
            options=[("grpc.so_reuseport", 0), *LIMITS],
        )
        self.address = listen(self._server, address, tls)
        self._holder = advertise or self.address
        health = Health()
        self._server.add_generic_rpc_handlers((health, self._redirect))
        self._server.start()
        self._probes = health_alone(health, health_listen) if health_listen else None

    def wait(self, stopping: threading.Event | None = None) -> bool:
        """Wait until nobody leads, and take the lease; False: `stopping` was set before."""
        stopping = stopping or threading.Event()
        said = None
        while not stopping.is_set():
            try:
                term, leader = self._store.try_term(self._holder)
            except StateUnavailableError as error:
                _log.warning("standing by: %s", error.message)
            else:
                if term:
                    _log.warning("nobody leads: this control plane takes over with term %d", term)
                    return True
                self._redirect.leader = leader
                if leader != said:
                    said = leader
                    _log.info("standing by: %s leads", leader)
            stopping.wait(_TRY_S)
        return False

    def stop(self) -> None:
        """Free the address."""
        self._server.stop(None).wait()
        if self._probes is not None:
            self._probes.stop(None).wait()

    def __enter__(self) -> Self:
        """Return it, listening."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop it."""
        self.stop()
