"""The control plane as a server: the service, health and reflection on one port, and its driver."""

import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self, cast

import grpc
from grpc_reflection.v1alpha import reflection

from embertide._common.background import BackgroundTask, tend
from embertide._common.page_server import serving
from embertide._common.quoting import shown
from embertide.server.adapters.bus import Bus
from embertide.server.adapters.nodes import Nodes
from embertide.server.adapters.tls import TlsFolder
from embertide.server.core.control import ControlOptions
from embertide.server.core.plan.validity import NODES_MAX
from embertide.server.core.state import StateStore
from embertide.server.services.audit import Audit
from embertide.server.services.call_pool import CallPool, NoThreadError
from embertide.server.services.clock import Clock
from embertide.server.services.control_service import WATCHERS_MAX, ControlService
from embertide.server.services.driver import Driver
from embertide.server.services.fleets import FleetOfModel, Fleets
from embertide.server.services.gate import LARGE_BYTES_MAX, SERVICE, Gate
from embertide.server.services.listening import (
    HEALTH,
    LIMITS,
    QUEUED_MAX,
    Health,
    ListenError,
    health_alone,
    listen,
)
from embertide.server.services.metrics import ControlPage, metrics_app
from embertide.server.services.outside import Outside
from embertide.server.services.planning import LIMIT_S, Planning
from embertide.server.services.spans import Spans
from embertide.server.services.tokens import Guard, Tokens
from embertide.v1 import control_pb2_grpc

_WORKERS = 32  # beside the watchers and the streams of beats, each of which holds a thread
# A stream's thread costs 30 KB and, at a beat a second, 0.03 ms of CPU more than a coroutine of
# grpc.aio would; a call costs 0.1 ms less than there (docs/scale.md).
_THREADS = _WORKERS + WATCHERS_MAX + NODES_MAX
_POLL_S = 0.5
# Room for the framing of a message that is just at its limit.
_FRAME_BYTES = 64 << 10
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Options of the server.

    Attributes:
        listen: HOST:PORT; port 0 takes a free one.
        tokens: Tokens of callers; None: nobody is asked for one.
        tls: Certificates: gRPC is TLS, and callers show one; None: plain text.
        health_listen: HOST:PORT of the health service alone, in plain text; None: none.
        audit: File of the audit lines; None: none are kept.
        node_token_file: File of the token that nodes ask of who calls them.
        bus: Redis URL that versions come by; None: nobody knows what is committed.
        planner_limit_s: Time that a planner may take; a call of StartReshard waits for 30 s.
        advertise: HOST:PORT that others are told; empty: where it listens.
        metrics: Host and port of /metrics, over HTTP to everybody who reaches it; None: none.
        spans: Whether calls are spans of OpenTelemetry.
    """

    control: ControlOptions
    listen: str = "127.0.0.1:7070"
    tokens: Tokens | None = None
    tls: TlsFolder | None = None
    health_listen: str | None = None
    audit: Path | None = None
    node_token_file: Path | None = None
    bus: str | None = None
    planner_limit_s: float = LIMIT_S
    advertise: str = ""
    metrics: tuple[str, int] | None = None
    spans: bool = False


@contextlib.contextmanager
def _serving_metrics(address: tuple[str, int], page: ControlPage) -> Iterator[None]:
    """Serve /metrics while the context lives.

    Raises:
        ListenError: The address cannot be listened on.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(serving(*address, metrics_app(page)))
        except (OSError, OverflowError, UnicodeError) as error:
            raise ListenError(
                f"--metrics-port {address[1]} on {shown(address[0])} cannot be used: {error}; give "
                "another, or another --metrics-host"
            ) from error
        yield


class ControlServer:
    """Runs from its making to `stop`. A context manager.

    Attributes:
        address: HOST:PORT that it listens on.
        drivers: A driver for each model, the first one's first.
        driver: The first model's.
    """

    def __init__(
        self,
        options: ServerOptions,
        store: StateStore,
        further: Mapping[str, StateStore] | None = None,
    ) -> None:
        """Take over from whoever ran before, and serve.

        Args:
            options: Options of the server; `options.control` is of the first model.
            store: Keeps the state of the first model.
            further: Stores of further models by name, whose fleets are treated alike.

        Raises:
            StateUnavailableError: The store cannot be reached.
            ListenError: The address cannot be listened on.
            ImportError: `options.spans`, and opentelemetry-api is missing.
        """
        self._options = options
        guard = Guard(options.tokens, certificates=options.tls is not None)
        if guard.open:
            _log.warning("no tokens file: everybody who reaches %s may do all", options.listen)
        self._audit = Audit(options.audit)
        self.gate = Gate(guard, self._audit)
        self._health = Health()
        self._calls = CallPool(_THREADS, "control")
        self._answers = BackgroundTask("answers", self._tend, expected=(NoThreadError,))
        self._server = grpc.server(
            self._calls,
            interceptors=[self.gate, *([Spans()] if options.spans else [])],
            maximum_concurrent_rpcs=_THREADS + QUEUED_MAX,
            options=[
                ("grpc.max_receive_message_length", LARGE_BYTES_MAX + _FRAME_BYTES),
                ("grpc.max_send_message_length", LARGE_BYTES_MAX + _FRAME_BYTES),
                ("grpc.so_reuseport", 0),
                *LIMITS,
            ],
        )
        self.address = listen(self._server, options.listen, options.tls)
        self._nodes = Nodes(options.node_token_file, options.tls)
        self._buses: dict[str, Bus] = {}
        planning = Planning(options.planner_limit_s)
        holder = options.advertise or self.address
        fleets: dict[str, FleetOfModel] = {}
        for model, its_store in {options.control.model: store, **(further or {})}.items():
            bus = Bus(options.bus, model) if options.bus else None
            if bus is not None:
                self._buses[model] = bus
            its_options = dataclasses.replace(options.control, model=model)
            outside = Outside(bus, self.gate.registrations)
            driver = Driver(its_options, its_store, self._nodes, Clock(), planning, holder, outside)
            service = ControlService(driver, self._nodes, bus, self.gate.registrations)
            fleets[model] = FleetOfModel(service, driver)
        self.drivers = [fleet.driver for fleet in fleets.values()]
        self.driver = self.drivers[0]
        every = cast(control_pb2_grpc.ControlServiceServicer, Fleets(fleets))
        control_pb2_grpc.add_ControlServiceServicer_to_server(every, self._server)
        self._server.add_generic_rpc_handlers((self._health,))
        self._probes = (
            health_alone(self._health, options.health_listen) if options.health_listen else None
        )
        reflection.enable_server_reflection(
            (SERVICE, HEALTH, reflection.SERVICE_NAME), self._server
        )
        self._page = contextlib.ExitStack()
        if options.metrics is not None:
            drivers = {model: fleet.driver for model, fleet in fleets.items()}
            self._page.enter_context(
                _serving_metrics(options.metrics, ControlPage(drivers, self.gate, self._buses))
            )
        self._health.serving = True
        for driver in self.drivers:
            driver.start()
        self._answers.start()
        self._server.start()

    def _tend(self, stop: threading.Event) -> float:
        for pool in (self._calls, self.gate.strangers):
            pool.tend()
        return _POLL_S

    def wait(self) -> None:
        """Serve until others have taken all models over; health follows what the store does."""
        while left := [each for each in self.drivers if not each.superseded.is_set()]:
            self._health.serving = all(each.reachable for each in left)
            tend()  # of the threads that the system did not start
            left[0].superseded.wait(_POLL_S)
        self._health.serving = False

    def stop(self) -> None:
        """End at once, as a crash would: whoever starts next goes on from the store."""
        for driver in self.drivers:
            driver.stop()
            driver.release()
        self._answers.stop()
        self._server.stop(None).wait()
        if self._probes is not None:
            self._probes.stop(None).wait()
        self.gate.close()
        self._page.close()
        self._nodes.close()
        self._audit.close()
        counts = self.gate.refused + sum((d.counts for d in self.drivers), collections.Counter())
        for bus in self._buses.values():
            bus.close()
            counts["bus_not_answered"] += bus.missed
        for what, files in (("tokens", self._options.tokens), ("certificates", self._options.tls)):
            counts[f"changed_{what}_refused"] += files.refused if files is not None else 0
        for what, count in sorted(counts.items()):
            _log.info("counted %s: %d", what, count)

    def __enter__(self) -> Self:
        """Return it, serving."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop it."""
        self.stop()
