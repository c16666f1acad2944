"""Where servers of gRPC listen: by TLS, or in plain text where that was asked for."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from embertide._common.addresses import is_local_target
from embertide.server.adapters.tls import TlsFolder
from embertide.server.services.call_pool import CallPool

HEALTH = "grpc.health.v1.Health"
QUEUED_MAX = 8192
"""Calls that wait for a thread of a server; more are refused with RESOURCE_EXHAUSTED."""
_PROBE_THREADS = 4  # no call holds one for long
_PROBE_BYTES_MAX = 4096
_log = logging.getLogger(__name__)
LIMITS = (
    # Bounds of one connection: its silence at first, its time without a call, and its age; without
    # that, who was let in once would be for ever, whatever became of his certificate.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.max_connection_age_ms", 3_600_000),
    # Bytes that it may have sent before any is read, that is, before it is known: 64 KiB.
    ("grpc.max_concurrent_streams", 128),
    ("grpc.http2.lookahead_bytes", 512),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_metadata_size", 8192),
    ("grpc.absolute_max_metadata_size", 16384),
    # A message of a few KiB may be GiB once it is decompressed: nobody of ours compresses.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    ("grpc.max_allowed_incoming_connections", 2048),
    # Beyond these gRPC refuses calls by chance, whoever's they are: some thousands of a stranger
    # wait for a moment until they are refused.
    ("grpc.server.max_pending_requests", QUEUED_MAX // 2),
    ("grpc.server.max_pending_requests_hard_limit", QUEUED_MAX),
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
    if not is_local_target(address):
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


class Health(grpc.GenericRpcHandler):
    """The health service for probes, which check: what was watched would be kept for ever.

    It answers as soon as the headers are there, whatever service is asked for, so that no caller
    holds a thread by a message that does not come. Thread-safe.
    """

    def __init__(self) -> None:
        """Begin as what does not serve."""
        self.serving = False
        self._methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            f"/{HEALTH}/Check": grpc.stream_stream_rpc_method_handler(
                self._check,
                response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
            ),
            f"/{HEALTH}/Watch": grpc.stream_stream_rpc_method_handler(self._watch),
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return what answers a call."""
        return self._methods.get(handler_call_details.method)

    def _check(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        status = health_pb2.HealthCheckResponse
        yield status(status=status.SERVING if self.serving else status.NOT_SERVING)

    def _watch(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask with Check, again and again")
        yield b""


def health_alone(health: Health, address: str) -> grpc.Server:
    """Start a server of the health service alone, in plain text: probes have no certificate.

    Raises:
        ListenError: The address cannot be listened on.
    """
    server = grpc.server(
        CallPool(_PROBE_THREADS, "health"),
        maximum_concurrent_rpcs=QUEUED_MAX,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _PROBE_BYTES_MAX),
            *LIMITS,
        ],
    )
    server.add_generic_rpc_handlers((health,))
    listen(server, address, None)
    server.start()
    return server
