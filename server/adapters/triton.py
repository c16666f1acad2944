"""A tritonserver on this machine: its model repository, its process.

``write_model`` writes a model directory for a snapshot; ``TritonServer`` starts a process over a
repository, waits until it is ready, and stops it. Which program that is, `installation` says.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from embertide._common.addresses import join_address
from embertide._common.direct_http import open_url
from embertide._common.private import temporary_folder
from embertide._common.quoting import protobuf_text
from embertide.server.adapters import known_holes, server_command
from embertide.server.adapters.installation import find_installation
from embertide.server.adapters.node_options import ModelOptions as ModelOptions
from embertide.server.adapters.process import Child, Stopped, check_port
from embertide.server.adapters.server_command import ADMIN_HEADER as ADMIN_HEADER
from embertide.server.adapters.server_command import GRPC_ADMIN_HEADER as GRPC_ADMIN_HEADER
from embertide.server.adapters.server_command import PACKAGE
from embertide.server.adapters.server_command import Front as Front
from embertide.server.adapters.server_command import ServerOptions as ServerOptions
from embertide.server.adapters.server_command import TritonError as TritonError

if TYPE_CHECKING:
    from embertide._common.kserve import Line
    from embertide.server.adapters.tiny_inference import TinyInference

BACKEND = "embertide"
_LIBRARY = f"libtriton_{BACKEND}.so"
# Enough of a failing server's log to hold its reason.
_LOG_TAIL_LINES = 40
# Our own messages in Triton's log.
_OURS = re.compile("embertide(_server)?: ")
# Inferences that Triton has answered, well or not.
_ANSWERED = re.compile(r"^nv_inference_request_(?:success|failure)\{.*\} (\S+)$", re.MULTILINE)
_POLL_S = 0.05
_ASK_S = 5.0
_METRICS_S = 10.0
_SILENT_METRICS_S = 2.0  # of a server that seems to stand still


def find_programs() -> Path:
    """Return the cache of compiled dense nets: the user's, or that of a checkout."""
    if not (PACKAGE / "backends").is_dir():
        return PACKAGE / "build" / "cache" / "dense"
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "embertide" / "dense"


def shipped_programs() -> Path:
    """Return where a wheel has the presets' dense nets, compiled; a checkout has none."""
    return PACKAGE / "programs"


def find_backends() -> Path:
    """Return where our backend is to be.

    EMBERTIDE_BACKENDS names it, else it is in the installed package, else in a checkout's build.
    """
    named, installed = os.environ.get("EMBERTIDE_BACKENDS"), PACKAGE / "backends"
    if named:
        return Path(named)
    return installed if installed.is_dir() else PACKAGE / "build" / "cpp" / "backends"


# --- model repository -----------------------------------------------------------------------------

_OF_CONTEXTS = (
    ("CONTEXT_KEYS", "TYPE_INT64"),
    ("CONTEXT_LENGTHS", "TYPE_INT32"),
    ("CONTEXT_WEIGHTS", "TYPE_FP32"),
    ("CONTEXT_DENSE", "TYPE_FP32"),
    ("CANDIDATES", "TYPE_INT32"),
)
"""Inputs of requests with contexts (docs/serving.md), and their types."""


def _tensor(kind: str, name: str, dtype: str, dim: int, *flags: str) -> str:
    lines = [f"name: {protobuf_text(name)}", f"data_type: {dtype}", f"dims: [ {dim} ]", *flags]
    return f"{kind} [ {{ " + " ".join(lines) + " } ]"


def _queue_policy(options: ModelOptions) -> str:
    policy = []
    if options.max_wait_ms is not None:
        policy += [
            "timeout_action: REJECT",
            f"default_timeout_microseconds: {1000 * options.max_wait_ms}",
            "allow_timeout_override: true",
        ]
    if options.max_queue_size is not None:
        policy.append(f"max_queue_size: {options.max_queue_size}")
    return f" default_queue_policy {{ {' '.join(policy)} }}" if policy else ""


def model_config(name: str, options: ModelOptions) -> str:
    """Return the text of ``config.pbtxt``."""
    ranking = options.kind == "ranking"
    lengths = "NUMKEYS" if options.hps_names else "LENGTHS"
    answer = "SCORE" if ranking else "OUTPUT0" if options.hps_names else "EMBEDDING"
    ragged = "allow_ragged_batch: true"
    lines = [
        f"name: {protobuf_text(name)}",
        f'backend: "{BACKEND}"',
        f"max_batch_size: {options.max_batch_size}",
        _tensor("input", "KEYS", "TYPE_INT64", -1, ragged),
        _tensor("input", lengths, "TYPE_INT32", -1, ragged, "optional: true"),
        _tensor("input", "WEIGHTS", "TYPE_FP32", -1, ragged, "optional: true"),
        *([_tensor("input", "DENSE", "TYPE_FP32", -1, ragged, "optional: true")] * ranking),
        *(
            _tensor("input", name, dtype, -1, ragged, "optional: true")
            for name, dtype in (_OF_CONTEXTS if options.context else ())
        ),
        _tensor("output", answer, "TYPE_FP32", -1),
        *(_tensor("output", f"SCORE_{head}", "TYPE_FP32", -1) for head in options.more_heads),
        _tensor("output", "SOURCE", "TYPE_UINT8", -1),
        _tensor("output", "VERSION", "TYPE_INT64", 1),
        f"instance_group [ {{ count: {options.instances} kind: KIND_CPU }} ]",
    ]
    if options.max_queue_delay_us is not None:
        delay = f"max_queue_delay_microseconds: {options.max_queue_delay_us}"
        lines.append(f"dynamic_batching {{ {delay}{_queue_policy(options)} }}")
    lines += [
        f"parameters {{ key: {protobuf_text(key)} "
        f"value: {{ string_value: {protobuf_text(value)} }} }}"
        for key, value in options.parameters().items()
    ]
    return "\n".join(lines) + "\n"


def write_model(repository: Path, name: str, options: ModelOptions) -> Path:
    """Write the directory of one model into a repository and return it.

    Writing again replaces the configuration. Other models of the repository are left alone.
    """
    directory = repository / name
    (directory / "1").mkdir(parents=True, exist_ok=True)  # Triton wants a version, always 1
    temporary = directory / ".config.pbtxt.tmp"
    temporary.write_text(model_config(name, options), encoding="utf-8")
    temporary.replace(directory / "config.pbtxt")
    return directory


# --- process --------------------------------------------------------------------------------------


def _check_ports(options: ServerOptions) -> None:
    seen: dict[int, str] = {}
    for name, port in options.ports().items():
        if port in seen:
            raise TritonError(
                f"{seen[port]} and {name} cannot both use port {port}: give one of them another"
            )
        seen[port] = name
        check_port(name, options.host, port)


class TritonServer(Stopped):
    """A tritonserver process. A context manager: leaving it stops the process.

    Attributes:
        options: It was started with.
        installation: That it is of.
        restarts: Times that it was started again.
        silences: Times that it was ended as it stood still.
        process: That runs, or ran last.
    """

    def __init__(self, options: ServerOptions, *, wait: bool = True) -> None:
        """Start the process and wait, unless told not to, until all its models are ready.

        Raises:
            InstallationError: There is no tritonserver that can be started.
            TritonError: A port is in use, the backend is not built, a model does not load. No
                process is left behind.
        """
        self.options = options
        self.restarts = self.silences = 0
        self._channel: grpc.Channel | None = None
        self._line: Line | None = None
        self._own_socket: Path | None = None  # in a folder of our own, which nobody else can reach
        library = options.backends / BACKEND / _LIBRARY
        if not library.is_file():
            raise TritonError(
                f"{library} is missing: build it with `make cpp`, or pip install a wheel of "
                "embertide that carries it"
            )
        self.installation = find_installation(options.triton)
        server_command.check(options, self.installation)
        _check_ports(options)
        if options.asks_callers():
            self._own_socket = temporary_folder() / "server.sock"
        try:
            self.process = self._start()
        except BaseException:
            self._remove_socket()
            raise
        if not wait:
            return
        try:
            _wait_ready([self])
        except BaseException:
            self.stop()
            raise

    def _start(self) -> Child:
        options = self.options
        self._leaving.unlink(missing_ok=True)
        command, needed = server_command.command(options, self.installation, self._own_socket)
        counts = {"RESTARTS": self.restarts, "SILENCES": self.silences}
        environment = {f"EMBERTIDE_{name}": str(count) for name, count in counts.items()}
        environment |= {**needed, **options.environment}
        if options.http_port is not None and options.front == "triton":
            environment["EMBERTIDE_LEAVING"] = f"{options.http_port}@{self._leaving.absolute()}"
        return Child(command, log=options.log, environment=environment)

    @property
    def former_log(self) -> Path:
        """Return where the log of the process before the last restart is kept."""
        return self.options.log.with_name(f"{self.options.log.name}.1")

    def restart(self) -> None:
        """Start a process that has ended again, as it was started first; does not wait for it.

        Raises:
            InstallationError: It is not there any more.
            TritonError: It cannot be started now.
        """
        self.installation = find_installation(self.options.triton)
        _check_ports(self.options)
        with contextlib.suppress(FileNotFoundError):  # the start before this one failed
            self.options.log.replace(self.former_log)
        self.restarts += 1
        self.process = self._start()

    @property
    def _leaving(self) -> Path:
        return self.options.log.with_name("leaving")

    def leave(self, seconds: float) -> None:
        """Answer on for so long, and let callers go meanwhile.

        Connections of HTTP that nobody uses are ended in the last two thirds of the time. Before,
        load balancers may not know yet, and a new connection would come here again.
        """
        if seconds <= 0:
            return
        end = time.monotonic() + seconds
        time.sleep(seconds / 3)
        self._leaving.touch()
        while self.alive() and time.monotonic() < end:
            time.sleep(_POLL_S)

    def load(self, model: str) -> "grpc.Future[Any]":
        """Have a model of the repository loaded, again if it is, by a server in mode explicit.

        Triton makes it beside the one that serves, which stays if it cannot be loaded. By gRPC:
        over HTTP, other connections would wait for its end.
        """
        from tritonclient.grpc import service_pb2

        key = self.options.admin_key
        return self._stub().RepositoryModelLoad.future(  # type: ignore[no-any-return]
            service_pb2.RepositoryModelLoadRequest(model_name=model),
            metadata=[(GRPC_ADMIN_HEADER, key)] if key else [],
        )

    def _stub(self) -> Any:
        # Where trainers run there is no Triton, and this module says where things are.
        from tritonclient.grpc import service_pb2_grpc

        if self._channel is None:
            self._channel = grpc.insecure_channel(
                self._target(),
                options=[
                    ("grpc.enable_http_proxy", 0),
                    # It is asked while it starts: gRPC would wait for longer each time.
                    ("grpc.initial_reconnect_backoff_ms", 100),
                    ("grpc.min_reconnect_backoff_ms", 100),
                    ("grpc.max_reconnect_backoff_ms", 200),
                ],
            )
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def reason(self) -> str:
        """Return what the log says of a failed start: our lines if there are any, else its end."""
        lines = self.log_text().splitlines()
        ours = [line for line in lines if _OURS.search(line)]
        return "\n".join((ours or lines)[-_LOG_TAIL_LINES:]) + f"\n(log: {self.options.log})"

    @property
    def http(self) -> str:
        """Return host:port of HTTP.

        Raises:
            TritonError: It is closed.
        """
        if self.options.http_port is None:
            raise TritonError("HTTP is closed: give an http_port to open it")
        return join_address(self.options.host, self.options.http_port)

    @property
    def grpc(self) -> str:
        """Return host:port of gRPC."""
        return join_address(self.options.host, self.options.grpc_port)

    @property
    def name(self) -> str:
        """Return what the process is called."""
        return "embertide_server" if self.options.front == "own" else "tritonserver"

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self.process.pid

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.process.alive()

    def ready(self) -> bool:
        """Return whether the server answers and all models of its start are loaded."""
        from tritonclient.grpc import service_pb2

        from embertide._common import kserve

        try:
            asked = service_pb2.ServerReadyRequest()
            return bool(self._asked().call("ServerReady", asked, _ASK_S).ready)
        except kserve.CallError:
            return False

    def advice(self, version: str) -> str:
        """Return what another tritonserver would repair of this one's front end; empty: nothing.

        Args:
            version: As `version` returns it.
        """
        if self.options.front == "own":
            return ""
        return known_holes.advice(version, http=self.options.http_port is not None)

    def version(self) -> str:
        """Return the version that it says it has; empty: it does not answer."""
        from tritonclient.grpc import service_pb2

        from embertide._common import kserve

        try:
            asked = service_pb2.ServerMetadataRequest()
            return str(self._asked().call("ServerMetadata", asked, _ASK_S).version)
        except kserve.CallError:
            return ""

    def _asked(self) -> "Line":
        from embertide._common import kserve

        if self._line is None:
            self._line = kserve.Line(self._target())
        return self._line

    def _target(self) -> str:
        """Return where this process asks the server: no certificate or token of ours may be old."""
        if self._own_socket is not None:
            return f"unix:{self._own_socket}"
        return self.options.reached(self.options.grpc_port)

    def _remove_socket(self) -> None:
        if self._own_socket is not None:
            shutil.rmtree(self._own_socket.parent, ignore_errors=True)

    def metrics(self, timeout_s: float = _METRICS_S) -> str:
        """Return the page of metrics.

        Raises:
            TritonError: It cannot be read: the server ended.
        """
        url = f"http://{self.options.reached(self.options.metrics_port)}/metrics"
        try:
            with open_url(url, timeout_s) as reply:
                return str(reply.read().decode())
        except OSError as error:
            raise TritonError(f"{url} cannot be read: {error}; see {self.options.log}") from error

    def answers(self) -> bool:
        """Return whether it is ready and its metrics can be read: they come up last."""
        try:
            return self.ready() and bool(self.metrics())
        except TritonError:
            return False

    def ask(self, model: str) -> "TinyInference":
        """Ask for an inference of a model of ours, to see whether there is an answer."""
        from embertide.server.adapters.tiny_inference import TinyInference

        return TinyInference(self._asked(), model)

    def answered(self) -> int | None:
        """Return how many inferences it has answered or refused since it began; None: unknown."""
        try:
            page = self.metrics(_SILENT_METRICS_S)
            return sum(int(float(count)) for count in _ANSWERED.findall(page))
        except (TritonError, ValueError):
            return None

    def traced_by(self) -> int:
        """Return the process that debugs it; 0: none does."""
        return self.process.traced_by()

    def log_text(self) -> str:
        """Return the log so far."""
        return self.process.log_text()

    def stop(self) -> int:
        """Stop the process and return its exit code; does nothing if it ended already."""
        if self._channel is not None:
            self._channel.close()
        try:
            code = self.process.stop()
        finally:
            self._remove_socket()
        if self._line is not None:  # a cancel could have ended the server
            self._line.drop()
        return code


def start_together(
    stack: contextlib.ExitStack, starts: Sequence[ServerOptions]
) -> list[TritonServer]:
    """Start servers that are ready only once all of them run, as nodes that wait for a first plan.

    They stop as the stack ends.

    Raises:
        TritonError: One does not start; the others stop with the stack.
    """
    servers = [stack.enter_context(TritonServer(each, wait=False)) for each in starts]
    _wait_ready(servers)
    return servers


def _wait_ready(servers: Sequence[TritonServer]) -> None:
    timeout_s = max(each.options.start_timeout_s for each in servers)
    deadline = time.monotonic() + timeout_s
    waiting = list(servers)
    while waiting := [each for each in waiting if not each.answers()]:
        for each in waiting:
            if not each.alive():
                raise TritonError(
                    f"{each.name} ended with code {each.process.code}; correct what its log "
                    "names:\n"
                    f"{each.reason()}"
                )
        if time.monotonic() > deadline:
            raise TritonError(
                f"{waiting[0].name} is not ready after {timeout_s:.0f} s; see its log, or give it "
                "longer:\n"
                f"{waiting[0].reason()}"
            )
        time.sleep(_POLL_S)
