"""The serving side of the demo: a control plane, and two nodes of two CPU devices each.

embertide control ── plans ──> state Redis (its own)
^ beats                        │ read by
node-0 (0, 1) <── rows ──> node-1 (0, 1)      each a tritonserver; either answers any key
"""

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import service_pb2

from embertide._common import kserve
from embertide.server.adapters import triton
from embertide.server.adapters.process import Child, check_port, free_ports
from embertide.server.adapters.redis import own_state
from embertide.server.adapters.schema import schema_of
from embertide.server.cli.demo.console import DemoConsole
from embertide.server.cli.demo.options import CONTEXT, MODEL, DemoError, DemoOptions
from embertide.server.cli.metrics_page import MetricsPage
from embertide.server.cli.snapshot import newest_snapshot

NODES = 2
DEVICES = 2
DDR_SHARE = 0.25
"""DDR holds the index and this share of the rows' bytes; the versions' chains come out of it."""
_MIN_ROWS_BYTES = 1 << 19  # of a device: two pages, or a bucket's index while it doubles
_MIN_DEVICE_BYTES = 1 << 20  # the backend refuses less
# A node of a version chain; a row that changed in the window has one or more (docs/design/0001).
_WINDOW = 8
_CHAIN_BYTES = 64
_SSD_BYTES = 8 << 30
_LOAD_S = 60.0
_HEARTBEAT_MS, _LONGEST_DEADLINE_MS = 100, 1000
# Bytes of all rows move within so long, so that a move can be watched, and a proof has its answers.
_MOVE_S = 20


def _rows_budget(stream: Mapping[str, Any], nodes: int = 1) -> int:
    """Return that of a node's share; what a device needs at least, it needs on every node."""
    chains = _WINDOW * _CHAIN_BYTES * int(stream["changed_rows"])
    least = chains + DEVICES * _MIN_ROWS_BYTES
    return max(int(DDR_SHARE * stream["row_bytes"]) // nodes, least)


def ddr_budget(stream: Mapping[str, Any]) -> int:
    """Return the DDR budget of a node that holds all, for a stream as `describe` tells of it."""
    wanted = int(stream["index_bytes"]) + _rows_budget(stream)
    return max(wanted, DEVICES * _MIN_DEVICE_BYTES)


def node_budget(stream: Mapping[str, Any]) -> int:
    """Return that of a node that holds half of the rows, and while buckets move three quarters."""
    index = int(stream["index_bytes"]) * 3 // 4
    return max(index + _rows_budget(stream, NODES), DEVICES * _MIN_DEVICE_BYTES)


class DemoFleet:
    """The processes that serve. They are ended by the stack that they are started on."""

    def __init__(
        self,
        options: DemoOptions,
        stream: Mapping[str, Any],
        bus: str,
        processes: contextlib.ExitStack,
    ) -> None:
        """Start the control plane and the nodes, and wait until they serve.

        Raises:
            ProcessError: One of them does not start; the message says why.
        """
        self.options = options
        self._stream, self._bus, self._processes = stream, bus, processes
        # Asked for at once: two calls might give the same.
        self._free = iter(free_ports(NODES + 2 * (NODES - 1)))
        self._start_control()
        self.console = DemoConsole(options, self.control, processes)
        self.nodes = self._start_nodes()

    @property
    def control(self) -> str:
        """host:port of the control plane."""
        return f"127.0.0.1:{self.options.control_port}"

    def _start_control(self) -> None:
        check_port("control plane", "127.0.0.1", self.options.control_port)
        directory = self.options.directory / "control"
        self._state = own_state(directory).url
        words: list[object] = ["control", "--model", MODEL, "--listen", self.control]
        words += ["--expect-nodes", NODES, "--bus", self._bus, "--directory", directory]
        words += ["--heartbeat-ms", _HEARTBEAT_MS, "--longest-deadline-ms", _LONGEST_DEADLINE_MS]
        # Days pass in minutes, so it looks more often than it would in life (docs/control.md).
        words += ["--clock", "event", "--mode", "advise", "--drift-interval-s", 1]
        words += ["--drift-horizon-s", 60, "--drift-cooldown-s", 5, "--drift-min-gain", 0.01]
        words += ["--drift-bytes-per-s", max(1, int(self._stream["row_bytes"]) // _MOVE_S)]
        command = [sys.executable, "-m", "embertide.server.cli", *map(str, words)]
        self._control = Child(command, log=self.options.log("control"))
        self._processes.callback(self._control.stop)

    def _model_options(self, name: str, **fields: Any) -> triton.ModelOptions:
        """Return what all models of the demo have in common; `fields` are the rest."""
        snapshot = newest_snapshot(self.options.publication)
        common = {
            "kind": "ranking",
            "instances": 2,
            "max_batch_size": 4096,  # a request ends where a group of one ts does
            "devices": DEVICES,
            "ddr_budget_bytes": ddr_budget(self._stream),
            "ssd_budget_bytes": _SSD_BYTES,
            "ssd_directory": self.options.directory / "ssd" / name,
            "schema": schema_of(snapshot),
            "context": CONTEXT.get(self.options.model, ()),
        }
        return triton.ModelOptions(**{**common, **fields})

    def _start_nodes(self) -> list[triton.TritonServer]:
        options = self.options
        first = (options.grpc_port, options.metrics_port)
        # Neither is ready before the plan is made, and that waits for both.
        others = (tuple(next(self._free) for _ in range(2)) for _ in range(NODES - 1))
        starts = [self._server(n, ports) for n, ports in enumerate((first, *others))]
        return triton.start_together(self._processes, starts)

    def _server(self, n: int, ports: tuple[int, ...]) -> triton.ServerOptions:
        options, name = self.options, f"node-{n}"
        model = self._model_options(
            name,
            publication=options.publication,
            bus=self._bus,
            node=name,
            ddr_budget_bytes=node_budget(self._stream),
            state=self._state,
            control=self.control,
            peer_address=f"127.0.0.1:{next(self._free)}",
            plan_file=options.directory / f"plan-{n}.bin",
        )
        repository = options.directory / "models" / name
        triton.write_model(repository, MODEL, model)
        return triton.ServerOptions(
            repository=repository,
            backends=options.backends,
            triton=options.triton,
            log=options.log(name),
            grpc_port=ports[0],
            metrics_port=ports[1],
            explicit=True,
            models=(MODEL,),
        )

    def check(self) -> None:
        """Prove that all run.

        Raises:
            DemoError: One has ended.
        """
        processes = {f"node-{n}": node.process for n, node in enumerate(self.nodes)}
        for name, process in {**processes, "control": self._control}.items():
            if not process.alive():
                raise DemoError(f"{name} ended with code {process.code}: see {process.log}")

    def pages(self) -> str:
        """Return the nodes' pages of metrics, one after the other."""
        return "\n".join(node.metrics() for node in self.nodes)

    def facts(self) -> dict[str, Any]:
        """Return what the nodes' metrics say of the model."""
        return MetricsPage(self.pages()).model(MODEL)

    # --- models beside the fleet's, on the first node ---------------------------------------------

    def _load(self, name: str, model: triton.ModelOptions) -> None:
        """Load a model that holds all rows by itself."""
        triton.write_model(self.nodes[0].options.repository, name, model)
        self._ask("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name=name))

    def unload(self, name: str) -> None:
        """Unload it."""
        request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
        self._ask("RepositoryModelUnload", request)

    def _ask(self, rpc: str, request: Any) -> None:
        node = self.nodes[0]
        with kserve.Line(node.grpc) as line:
            try:
                line.call(rpc, request, _LOAD_S)
            except kserve.CallError as error:
                raise DemoError(f"node-0: {error}; see {node.process.log}") from error

    def load_unmoved(self, name: str) -> None:
        """Load a copy of the model that follows the same publication and moves nothing."""
        self._load(
            name, self._model_options(name, publication=self.options.publication, bus=self._bus)
        )

    def load_frozen(self, name: str) -> None:
        """Load the copy that was kept early on."""
        self._load(name, self._model_options(name, snapshot=self.options.kept))
