"""The fleet that chaos harms, all of it real processes, and who starts them again.

    trainer ──> bus Redis ──> node-0, node-1 (tritonserver; they share the model) <── clients
       ^                            ^ beats        │ rows of each other
    events, in the state Redis   control plane ── plans ──> state Redis

Every line above but the clients' is a link that can be harmed. What ended is started again, as a
supervisor would; what ended by itself, unharmed, is told of.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from embertide.server.adapters import triton
from embertide.server.adapters.process import Child, ProcessError, check_interrupt, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.server.cli.chaos.faults import NODES
from embertide.server.cli.chaos.feed import STREAM, Feed
from embertide.server.cli.chaos.links import Links, Route
from embertide.server.cli.chaos.options import ChaosError, ChaosOptions
from embertide.server.cli.chaos.traffic import MODEL
from embertide.server.cli.metrics_page import MetricsPage
from embertide.server.cli.processes import TRAINER

_LOCAL = "127.0.0.1"
_FLEET = "news"  # the model's name in the state store
_START_S = 600.0  # the dense net is compiled once, on whatever machine this is
_AGAIN_S = 1.0  # until what ended by itself is started again
_POLL_S = 0.02
_DEVICES = 2
_BATCH_EVENTS = 64
_STARTS_TRIED = 3
_DDR_BYTES, _SSD_BYTES = 24 << 20, 1 << 30
# There are up to four versions a second, and two faults of the bus after each other last six: a
# node that is behind for so long still has versions that the other one holds.
_WINDOW_VERSIONS = 48
_SEAL_MS = 10_000
_DEADLINE_MS = 500
_END_S = 10.0
_LOG_TAIL = 2000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """A process that ended though nobody killed it."""

    name: str
    at_s: float  # of the monotonic clock
    code: int
    log: str  # its end


@dataclasses.dataclass(slots=True)
class _Service:
    """A process that is started again whenever it ended."""

    start: Callable[[Path], Child]
    child: Child | None = None
    starts: int = 0
    killed: bool = False
    due_s: float = 0.0  # when it is to be started


class Fleet:
    """Processes that run. For one thread: the kernel ends a child with its starting thread."""

    def __init__(self, options: ChaosOptions) -> None:
        """Start everything and wait until both nodes are ready.

        Raises:
            ProcessError: A process does not start; the message says why.
        """
        self.options = options
        self.endings: list[Ending] = []
        self._stack = contextlib.ExitStack()
        self._services: dict[str, _Service] = {}
        self._servers: dict[str, triton.TritonServer] = {}
        self._beside: list[Child] = []
        self._control_port, *rest = free_ports(3 + 3 * len(NODES))
        self._page_ports = {"control": rest.pop(), "trainer": rest.pop()}
        self._node_ports = {name: rest[3 * n : 3 * n + 3] for n, name in enumerate(NODES)}
        sockets = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="embertide-")))
        self._redis_options = {
            name: RedisOptions(
                log=options.log(name),
                socket=sockets / f"{name}.sock",
                append_only=None if name == "bus" else options.directory / "state",
                adjustable=name == "bus",  # one of the faults is a bus that is full
            )
            for name in ("bus", "state")
        }
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._stack.callback(self._end_services)
        self.links = self._stack.enter_context(Links(self._routes()))
        for name, redis in self._redis_options.items():
            self._add(name, self._redis(redis))
        self.feed = self._stack.enter_context(
            Feed(
                self.state_url,
                self.options.data,
                self.options.events_per_s,
                self.options.log("send-events"),
            )
        )
        self.feed.flow(True)
        self._write_run_file()
        self._add("trainer", self._trainer)
        self.await_true(self._publishes, "the trainer publishes no snapshot")
        self._add("control", self._control)
        for name in NODES:
            self._write_model(name)
            self._add(name, self._node(name))
        self.await_true(lambda: all(map(self.ready, NODES)), "the nodes are not ready")

    # --- what runs --------------------------------------------------------------------------------

    def _routes(self) -> dict[str, Route]:
        """Return every link; its ports are taken from now on."""
        to: dict[str, tuple[str, int] | Path] = {"control": (_LOCAL, self._control_port)}
        to |= {name: redis.socket for name, redis in self._redis_options.items()}
        names = ["trainer>bus", "trainer>state", "control>state", "nodes>control"]
        names += [f"{node}>{redis}" for node in NODES for redis in ("bus", "state")]
        names += [f"peers>{node}" for node in NODES]
        to |= {node: (_LOCAL, ports[2]) for node, ports in self._node_ports.items()}
        self._link_ports = dict(zip(names, free_ports(len(names)), strict=True))
        return {
            name: Route(listen=(_LOCAL, port), to=to[name.partition(">")[2]])
            for name, port in self._link_ports.items()
        }

    def _url(self, link: str) -> str:
        return f"redis://{_LOCAL}:{self._link_ports[link]}/0"

    @property
    def bus_url(self) -> str:
        """The bus, past its links."""
        return self._redis_options["bus"].url

    @property
    def state_url(self) -> str:
        """The state store, past its links."""
        return self._redis_options["state"].url

    @property
    def grpc(self) -> list[str]:
        """host:port of each node's Triton."""
        return [f"{_LOCAL}:{self._node_ports[node][0]}" for node in NODES]

    @property
    def control(self) -> str:
        """host:port of the control plane, past its links."""
        return f"{_LOCAL}:{self._control_port}"

    @property
    def pages(self) -> dict[str, str]:
        """host:port of /metrics of each process that has it, by its name."""
        ports = self._page_ports | {node: self._node_ports[node][1] for node in NODES}
        return {name: f"{_LOCAL}:{port}" for name, port in ports.items()}

    def _redis(self, options: RedisOptions) -> Callable[[Path], Child]:
        def start(log: Path) -> Child:
            return RedisServer(dataclasses.replace(options, log=log)).process

        return start

    @property
    def _run_file(self) -> Path:
        return self.options.directory / "run.py"

    def _write_run_file(self) -> None:
        """Write the trainer's settings: those of the user, or of the news model, but for the pace.

        Raises:
            ChaosError: The news model's cannot be had.
        """
        options = self.options
        command = [*TRAINER, "train", "--print-config", "news"]
        if options.config is not None:
            text = options.config.read_text()
        else:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ChaosError(f"the trainer does not run: {done.stderr.strip()}")
            text = done.stdout
        pace = {
            "publish_every_s": options.version_s,
            "batch_size": _BATCH_EVENTS,
            "snapshot_every": options.versions_per_snapshot,
            # A node that is slow to start reads a snapshot that is not the newest any more.
            "keep_snapshots_s": options.heal_s,
        }
        changes = ", ".join(f"{name}={value}" for name, value in pace.items())
        text += f"\nimport dataclasses\n\nrun = dataclasses.replace(run, {changes})\n"
        self._run_file.write_text(text)

    def _trainer(self, log: Path) -> Child:
        options = self.options
        words = [str(options.publication), "--bus", self._url("trainer>bus")]
        words += ["--config", str(self._run_file), "--cache", str(options.cache), "--json"]
        words += ["--data", f"{self._url('trainer>state')}#{STREAM}"]
        words += ["--metrics-port", str(self._page_ports["trainer"])]
        return Child([*TRAINER, "train", *words], log=log, environment=self._clock("trainer"))

    def _control(self, log: Path) -> Child:
        words = ["control", "--model", _FLEET, "--state", self._url("control>state")]
        words += ["--listen", f"{_LOCAL}:{self._control_port}", "--bus", self.bus_url]
        words += ["--expect-nodes", str(len(NODES)), "--longest-deadline-ms", str(_DEADLINE_MS)]
        words += ["--directory", str(self.options.directory / "control")]
        words += ["--metrics-port", str(self._page_ports["control"])]
        command = [sys.executable, "-m", "embertide.server.cli", *words]
        return Child(command, log=log, environment=self._clock("control"))

    def _write_model(self, name: str) -> None:
        directory = self.options.directory
        model = triton.ModelOptions(
            kind="lookup",
            publication=self.options.publication,
            bus=self._url(f"{name}>bus"),
            instances=2,
            max_batch_size=1024,
            devices=_DEVICES,
            ddr_budget_bytes=_DDR_BYTES,
            ssd_budget_bytes=_SSD_BYTES,
            ssd_directory=directory / "ssd" / name,
            ssd_seal_interval_ms=_SEAL_MS,
            window_versions=_WINDOW_VERSIONS,
            node=name,
            state=self._url(f"{name}>state"),
            control=f"{_LOCAL}:{self._link_ports['nodes>control']}",
            peer_address=f"{_LOCAL}:{self._link_ports[f'peers>{name}']}",
            peer_listen=f"{_LOCAL}:{self._node_ports[name][2]}",
            plan_file=self.plan_file(name),
        )
        triton.write_model(directory / "models" / name, MODEL, model)

    def plan_file(self, node: str) -> Path:
        """Return where a node keeps its plan."""
        return self.options.directory / f"{node}.plan"

    def _node(self, name: str) -> Callable[[Path], Child]:
        grpc, metrics, _ = self._node_ports[name]

        def start(log: Path) -> Child:
            options = triton.ServerOptions(
                repository=self.options.directory / "models" / name,
                backends=self.options.backends,
                triton=self.options.triton,
                log=log,
                grpc_port=grpc,
                metrics_port=metrics,
                environment=self._clock(name),
            )
            self._servers[name] = triton.TritonServer(options, wait=False)
            return self._servers[name].process

        return start

    def clock_file(self, name: str) -> Path:
        """Return the file that says how far a process's clock is off."""
        return self.options.directory / "clocks" / name

    def _clock(self, name: str) -> Mapping[str, str]:
        if self.options.clock_library is None:
            return {}
        self.clock_file(name).parent.mkdir(exist_ok=True)
        self.clock_file(name).write_text("+0\n")
        return {
            "LD_PRELOAD": str(self.options.clock_library),
            "FAKETIME_TIMESTAMP_FILE": str(self.clock_file(name)),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    # --- who starts it again ----------------------------------------------------------------------

    def _add(self, name: str, start: Callable[[Path], Child]) -> None:
        service = self._services[name] = _Service(start)
        self._begin(name, service)

    def _begin(self, name: str, service: _Service) -> None:
        service.starts += 1
        service.killed = False
        service.child = service.start(self.options.log(f"{name}-{service.starts:03}"))

    def step(self) -> None:
        """Start again what ended and whose time has come; called often."""
        check_interrupt()
        self.feed.step()
        now = time.monotonic()
        for name, service in self._services.items():
            child = service.child
            if child is not None and not child.alive():
                service.child = None
                if not service.killed:
                    service.due_s = now + _AGAIN_S
                    text = child.log_text()[-_LOG_TAIL:]
                    self.endings.append(Ending(name=name, at_s=now, code=child.code or 0, log=text))
            if service.child is None and now >= service.due_s:
                try:
                    self._begin(name, service)
                except ProcessError as error:
                    # A port may be in use for a moment; a supervisor tries again.
                    self.endings.append(Ending(name=name, at_s=now, code=-1, log=str(error)))
                    service.due_s = now + _AGAIN_S

    def child(self, name: str) -> Child | None:
        """Return a process; None while nobody has started it again."""
        child = self._services[name].child
        return child if child is not None and child.alive() else None

    @property
    def names(self) -> list[str]:
        """The processes' names."""
        return list(self._services)

    def starts(self, name: str) -> int:
        """Return how often a process was started."""
        return self._services[name].starts

    def kill(self, name: str, for_s: float) -> None:
        """End a process as a crash would; it is started again after a time."""
        service, child = self._services[name], self.child(name)
        if child is not None:
            service.killed = True
            service.due_s = time.monotonic() + for_s
            child.kill()

    def stop(self, name: str, for_s: float) -> None:
        """Put a process to sleep for a time."""
        child = self.child(name)
        if child is not None:
            # Not ours to wake: were we killed meanwhile, it would sleep on.
            pid = child.pid
            script = f"trap '' TERM; kill -STOP {pid}; sleep {for_s}; kill -CONT {pid}"
            self.run_beside(["sh", "-c", script])

    def run_beside(self, command: list[str]) -> Child:
        """Start a process that ends by itself, and at the latest with the fleet."""
        child = Child(command, log=self.options.log("beside"))
        self._beside = [each for each in self._beside if each.alive()] + [child]
        return child

    # --- how it is --------------------------------------------------------------------------------

    def _publishes(self) -> bool:
        return any(self.options.publication.glob("snapshots/*/manifest.json"))

    def ready(self, node: str) -> bool:
        """Return whether a node's Triton says that it is ready."""
        return self.child(node) is not None and self._servers[node].ready()

    def page(self, node: str) -> MetricsPage | None:
        """Return a node's metrics; None if it does not answer."""
        try:
            return MetricsPage(self._servers[node].metrics())
        except triton.TritonError:
            return None

    def await_true(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait for what comes at a start.

        Raises:
            ChaosError: It does not come, or a process ended meanwhile.
        """
        deadline = time.monotonic() + _START_S
        while not condition():
            self.step()
            if len(self.endings) >= _STARTS_TRIED:
                ending = self.endings[-1]
                raise ChaosError(f"{ending.name} ended with {ending.code}:\n{ending.log}")
            if time.monotonic() > deadline:
                raise ChaosError(f"{otherwise}: see {self.options.directory / 'logs'}")
            time.sleep(_POLL_S)

    # --- its end ----------------------------------------------------------------------------------

    def _end_services(self) -> None:
        children = [each.child for each in self._services.values() if each.child is not None]
        children = [*self._beside, *children]
        for number in (signal.SIGCONT, signal.SIGTERM):
            for each in children:
                if each.alive():
                    os.kill(each.pid, number)
        deadline = time.monotonic() + _END_S
        while any(each.alive() for each in children) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for each in children:
            if each.alive():
                each.kill()

    def close(self) -> None:
        """End everything."""
        self._stack.close()

    def __enter__(self) -> Self:
        """Return it, running."""
        return self

    def __exit__(self, *error: object) -> None:
        """End everything."""
        self.close()
