"""`serve`: a node on this machine, as a context manager."""

import contextlib
import logging
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from embertide._common.private import own_folder
from embertide.client import AsyncClient, Client
from embertide.server.adapters.kept_server import KeptInBackground
from embertide.server.adapters.process import ProcessError, free_ports
from embertide.server.adapters.schema import model_of, schema_of
from embertide.server.adapters.silence import DEFAULT_S, SilenceWatch, check_bound
from embertide.server.adapters.triton import (
    ModelOptions,
    ServerOptions,
    TritonServer,
    find_backends,
    write_model,
)
from embertide.server.cli.snapshot import newest_snapshot

__all__ = ["ProcessError", "Served", "serve"]
_log = logging.getLogger(__name__)


class Served:
    """A node that runs. A context manager: leaving it stops the node.

    Attributes:
        model: Its model's name.
        grpc: host:port of KServe v2 over gRPC.
        http: The same over HTTP; None: it is closed.
        metrics: URL of Prometheus' page.
        log: The log of tritonserver.
    """

    def __init__(
        self,
        model: str,
        server: TritonServer,
        kept: KeptInBackground,
        started: contextlib.ExitStack,
    ) -> None:
        """Take what runs, and what watches it; closing `started` ends both."""
        self.model, self._server, self._kept, self._started = model, server, kept, started
        self.grpc = server.grpc
        self.http = server.http if server.options.http_port is not None else None
        self.metrics = f"http://{server.options.host}:{server.options.metrics_port}/metrics"
        self.log = server.options.log

    def __enter__(self) -> Self:
        """Return it, ready."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it."""
        self.stop()

    def stop(self) -> None:
        """Stop it; does nothing if it ended already."""
        self._started.close()

    def alive(self) -> bool:
        """Return whether the process runs: one that ended is started again within two seconds."""
        self._kept.unwatched()  # where there was no thread for that, there may be one now
        return self._server.alive()

    @property
    def unwatched(self) -> str:
        """Why one that ends is not started again now, as a thread is lacking; empty: it is."""
        return self._kept.unwatched()

    @property
    def restarts(self) -> int:
        """Times that it ended and was started again; each is logged as a warning."""
        return self._server.restarts

    @property
    def silences(self) -> int:
        """Times that it was ended as it stood still: it ran, and answered nobody."""
        return self._server.silences

    def client(self, **settings: Any) -> Client:
        """Return a client of it; the caller closes it."""
        return Client(self.grpc, **settings)

    def async_client(self, **settings: Any) -> AsyncClient:
        """Return a client of it for asyncio; the caller closes it."""
        return AsyncClient(self.grpc, **settings)


def serve(
    path: Path | str,
    *,
    model: str | None = None,
    kind: Literal["ranking", "lookup"] = "ranking",
    bus: str | None = None,
    host: str = "127.0.0.1",
    grpc_port: int | None = None,
    http_port: int | None = None,
    metrics_port: int | None = None,
    instances: int = 2,
    threads: int = 1,
    ddr_budget_bytes: int = 1 << 30,
    ssd_budget_bytes: int = 0,
    folder: Path | str | None = None,
    triton: Path | str | None = None,
    front: Literal["own", "triton"] = "own",
    front_tls: Path | str | None = None,
    front_tokens: Path | str | None = None,
    known_callers: bool = False,
    spans_to: str | None = None,
    spans_every: int = 1,
    start_timeout_s: float = 3600.0,
    silent_s: float = DEFAULT_S,
) -> Served:
    """Serve a snapshot, or a publication as it grows, until `stop` or the end of the context.

    A tritonserver was started and is ready when this returns; one that ends is started again.
    `embertide serve` has more options, and nodes that share a model.

    Args:
        path: The folder that `train`, `embertide train` or `embertide import` wrote.
        model: Its name in Triton; None: the name that it has.
        kind: "ranking" gives scores, "lookup" embeddings.
        bus: URL of the trainer's Redis; None: a publication's files are followed.
        host: Address to listen on.
        grpc_port: None, as for `metrics_port`: one that is free.
        http_port: Port of KServe v2 over HTTP as JSON, in plain text; None: closed. With front
            "triton" one request of a stranger can end it.
        metrics_port: Port of the Prometheus page.
        instances: Requests that are answered at a time.
        threads: Threads of an instance, which share a request's samples.
        ddr_budget_bytes: For rows, index and versions in memory.
        ssd_budget_bytes: For rows that memory does not hold; 0: none.
        folder: Folder of the log, the model repository and the SSD tier; None: a temporary one.
        triton: The tritonserver to start, or the folder that it is installed in; None: what
            EMBERTIDE_TRITON names, or else that of the wheel.
        front: Who answers callers: "own" is embertide_server over Triton's core, "triton" is
            tritonserver's own front end.
        front_tls: Folder of tls.crt, tls.key and ca.crt, read again when they change: callers are
            spoken to by TLS, and show a certificate of ca.crt's authorities. As `front_tokens` and
            `known_callers` with front "own" alone; give `client` what it needs, as tls= or token=.
        front_tokens: File of lines ROLE[@MODEL][/NAME]:TOKEN, read again when it changes: callers
            may show a token.
        known_callers: Answer readers and operators alone, by certificate or token.
        spans_to: URL of a collector that takes spans of OpenTelemetry, as http://HOST:4317; with
            front "triton", as http://HOST:4318/v1/traces. None: no spans.
        spans_every: Of requests without a traceparent, one in so many has a span.
        start_timeout_s: That loading may take.
        silent_s: A server that is ready, and then answers nobody for so long, is ended and started
            again; 0: never. One that is loading or busy is left alone.

    Raises:
        ProcessError: There is nothing to serve, Triton or the backend is missing, a port is in use,
            the model does not load; the message says what to do. No process is left behind.
    """
    check_bound(silent_s)
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="embertide-"))
        directory, source = own_folder(Path(folder)), Path(path)
        snapshot = newest_snapshot(source)
        options = ModelOptions(
            snapshot=source if snapshot == source else None,
            publication=None if snapshot == source else source,
            bus=bus,
            kind=kind,
            instances=instances,
            threads=threads,
            ddr_budget_bytes=ddr_budget_bytes,
            ssd_budget_bytes=ssd_budget_bytes,
            ssd_directory=directory / "ssd" if ssd_budget_bytes else None,
            schema=schema_of(snapshot),
        )
        model = model_of(snapshot) if model is None else model
        repository = directory / "models"
        write_model(repository, model, options)
        free = iter(free_ports(2))
        ports = [next(free) if p is None else p for p in (grpc_port, metrics_port)]
        server = stack.enter_context(
            TritonServer(
                ServerOptions(
                    repository=repository,
                    backends=find_backends(),
                    log=directory / "node.log",
                    triton=None if triton is None else Path(triton),
                    front=front,
                    tls=None if front_tls is None else Path(front_tls),
                    tokens=None if front_tokens is None else Path(front_tokens),
                    known_callers=known_callers,
                    spans_to=spans_to,
                    spans_every=spans_every,
                    host=host,
                    grpc_port=ports[0],
                    http_port=http_port,
                    metrics_port=ports[1],
                    start_timeout_s=start_timeout_s,
                )
            )
        )
        version = server.version()
        if repaired := server.advice(version):
            _log.warning("tritonserver %s: %s", version, repaired)
        watch = SilenceWatch(server, model, silent_s)
        kept = stack.enter_context(KeptInBackground(server, _log.warning, watch))
        return Served(model, server, kept, stack.pop_all())
