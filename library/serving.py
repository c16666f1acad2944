"""`serve`: a node on this machine, as a context manager."""

import contextlib
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from embertide.client import AsyncClient, Client
from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports
from embertide.server.adapters.schema import schema_of
from embertide.server.cli.snapshot import newest_snapshot

__all__ = ["Served", "serve"]


class Served:
    """A node that runs. A context manager: leaving it stops the node.

    Attributes:
        model: Its model's name.
        grpc: host:port of KServe v2 over gRPC; `http`: over HTTP.
        metrics: URL of Prometheus' page.
        log: What tritonserver says.
    """

    def __init__(
        self, model: str, server: triton.TritonServer, started: contextlib.ExitStack
    ) -> None:
        """Take what runs; closing `started` ends it."""
        self.model, self._server, self._started = model, server, started
        self.grpc, self.http = server.grpc, server.http
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
        """Return whether the process runs."""
        return self._server.alive()

    def client(self, **settings: Any) -> Client:
        """Return a client of it; the caller closes it."""
        return Client(self.grpc, **settings)

    def async_client(self, **settings: Any) -> AsyncClient:
        """Return a client of it for asyncio; the caller closes it."""
        return AsyncClient(self.grpc, **settings)


def serve(
    path: Path | str,
    *,
    model: str = "news",
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
    start_timeout_s: float = 3600.0,
) -> Served:
    """Serve a snapshot, or a publication as it grows, until `stop` or the end of the context.

    A tritonserver was started and is ready when this returns. `embertide serve` has more options,
    and nodes that share a model.

    Args:
        path: The folder that `train`, `embertide train` or `embertide import` wrote.
        model: Its name in Triton.
        kind: "ranking" gives scores, "lookup" embeddings.
        bus: URL of the trainer's Redis; None: a publication's files are followed.
        host: Address to listen on.
        grpc_port: None, as for the others: one that is free.
        http_port: Of KServe v2 over HTTP.
        metrics_port: Of Prometheus' page.
        instances: Requests that are answered at a time.
        threads: Of an instance, which share a request's samples.
        ddr_budget_bytes: For rows, index and versions in memory.
        ssd_budget_bytes: For rows that memory does not hold; 0: none.
        folder: Of the log, the model repository and the SSD tier; None: one that goes with it.
        start_timeout_s: That loading may take.

    Raises:
        ProcessError: There is nothing to serve, Triton or the backend is missing, a port is in use,
            the model does not load; the message says what to do. No process is left behind.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="embertide-"))
        directory, source = Path(folder), Path(path)
        snapshot = newest_snapshot(source)
        options = triton.ModelOptions(
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
        repository = directory / "models"
        triton.write_model(repository, model, options)
        free = iter(free_ports(3))
        ports = [next(free) if p is None else p for p in (grpc_port, http_port, metrics_port)]
        server = stack.enter_context(
            triton.TritonServer(
                triton.ServerOptions(
                    repository=repository,
                    backends=triton.find_backends(),
                    log=directory / "node.log",
                    host=host,
                    grpc_port=ports[0],
                    http_port=ports[1],
                    metrics_port=ports[2],
                    start_timeout_s=start_timeout_s,
                )
            )
        )
        return Served(model, server, stack.pop_all())
