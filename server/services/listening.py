"""Where servers of gRPC listen: by TLS, or in plain text where that was asked for."""

import logging
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from embertide.server.adapters.tls import TlsFolder, of_this_machine

_PROBES_MAX = 16
_PROBE_BYTES_MAX = 4096
_log = logging.getLogger(__name__)
# Of one connection: how long it may say nothing at first, how many calls it has at once, and its
# age; without that, who was let in once would be for ever, whatever became of his certificate.
LIMITS = (
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", 512),
    ("grpc.max_connection_age_ms", 3_600_000),
)


class ListenError(RuntimeError):
    """The address cannot be listened on."""


def listening_tls(address: str, folder: Path | None, *, plaintext: bool) -> TlsFolder | None:
    """Return what to listen with; None: in plain text.

    Raises:
        ListenError: That would be where others can listen in, and nobody said that it may.
        TlsError: The certificates are wrong.
    """
    if folder is not None:
        return TlsFolder(folder)
    if not of_this_machine(address):
        if not plaintext:
            raise ListenError(
                f"{address} would be plain text that others can reach: give --tls with a folder of "
                "certificates, or --plaintext on a network that nobody else listens to"
            )
        _log.warning("PLAINTEXT at %s: who listens on the network reads tokens", address)
    return None


def listen(server: grpc.Server, address: str, tls: TlsFolder | None) -> str:
    """Have a server listen; return where, which port 0 leaves open.

    Raises:
        ListenError: The address cannot be listened on.
    """
    try:
        port = (
            server.add_insecure_port(address)
            if tls is None
            else server.add_secure_port(address, tls.server())
        )
    except RuntimeError as error:
        raise ListenError(
            f"cannot listen on {address}: stop what listens there, or choose another address"
        ) from error
    return f"{address.rpartition(':')[0]}:{port}"


class Health(health.HealthServicer):  # type: ignore[misc]
    """The health service for probes, which check: what was watched would be kept for ever."""

    def __init__(self) -> None:
        """Begin with nothing that serves."""
        super().__init__(experimental_non_blocking=False)

    def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        """Refuse."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask with Check, again and again")
        yield health_pb2.HealthCheckResponse()


def health_alone(servicer: health.HealthServicer, address: str) -> grpc.Server:
    """Start a server of the health service alone, in plain text: probes have no certificate.

    Raises:
        ListenError: The address cannot be listened on.
    """
    server = grpc.server(
        futures.ThreadPoolExecutor(_PROBES_MAX, thread_name_prefix="health"),
        maximum_concurrent_rpcs=_PROBES_MAX,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _PROBE_BYTES_MAX),
            *LIMITS,
        ],
    )
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    listen(server, address, None)
    server.start()
    return server
