"""Nodes as the control plane asks them: over gRPC, each call with a deadline."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import TypeVar

import grpc

from embertide.server.adapters.tls import TlsFolder, dial
from embertide.server.core.loads import HOT_KEYS_MAX
from embertide.v1 import node_pb2, node_pb2_grpc

Answer = TypeVar("Answer")

_DEADLINE_S = 2.0
_EXPLAIN_S = 1.0
_AT_ONCE = 16
_CHANNELS_MAX = 2048
_BYTES_MAX = 16 << 20  # a node of 131,072 buckets says some 6 MB


class Nodes:
    """Channels to nodes by address, and their loads asked side by side."""

    def __init__(self, token_file: Path | None = None, tls: TlsFolder | None = None) -> None:
        """Connect to nobody yet.

        Args:
            token_file: File with the nodes' token, read for each question; None: they ask for none.
            tls: Certificates to connect with; None: plain text.
        """
        self._token_file = token_file
        self._token = ""
        self._tls = tls
        self._changes = 0  # of the certificates, which a channel keeps as they were
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self._pool = futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="nodes")

    def loads(self, addresses: Mapping[str, str]) -> dict[str, node_pb2.NodeServiceGetLoadResponse]:
        """Ask nodes, by name, for their load; one that does not answer in 2 s is left out."""
        return self._ask(self._load, addresses)

    def epochs(self, addresses: Mapping[str, str]) -> dict[str, int]:
        """Ask nodes, by name, for the plan that they act by; one that is silent is left out."""
        return self._ask(self._epoch, addresses)

    def _ask(self, ask: Callable[..., Answer], addresses: Mapping[str, str]) -> dict[str, Answer]:
        metadata = self._metadata()
        asked = {
            name: self._pool.submit(ask, self._channel(address), metadata)
            for name, address in addresses.items()
        }
        answers = {}
        for name, each in asked.items():
            with contextlib.suppress(grpc.RpcError):
                answers[name] = each.result()
        return answers

    def explain(self, address: str, request: node_pb2.ExplainRequest) -> node_pb2.ExplainResponse:
        """Ask a node where a row is.

        Raises:
            grpc.RpcError: It refused, or does not answer within a second.
        """
        stub = node_pb2_grpc.NodeServiceStub(self._channel(address))
        answer: node_pb2.ExplainResponse = stub.Explain(
            request, timeout=_EXPLAIN_S, metadata=self._metadata()
        )
        return answer

    def _channel(self, address: str) -> grpc.Channel:
        changes = 0 if self._tls is None else self._tls.changes
        with self._lock:
            if changes != self._changes:
                self._changes = changes
                self._channels.clear()  # each ends with the last call that has it
            channel = self._channels.pop(address, None) or dial(
                address, self._tls, [("grpc.max_receive_message_length", _BYTES_MAX)]
            )
            self._channels[address] = channel
            # The ones not asked for longest go; each costs a connection.
            while len(self._channels) > _CHANNELS_MAX:
                self._channels.pop(next(iter(self._channels)))
            return channel

    def _metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        # By TLS the certificate says who asks. Nodes name their own addresses.
        if self._token_file is None or self._tls is not None:
            return ()
        with contextlib.suppress(OSError, UnicodeDecodeError):  # while it is replaced: as before
            lines = self._token_file.read_text().splitlines()
            self._token = next((line.strip() for line in lines if line.strip()), self._token)
        return (("authorization", f"Bearer {self._token}"),) if self._token else ()

    @staticmethod
    def _load(
        channel: grpc.Channel, metadata: tuple[tuple[str, str | bytes], ...]
    ) -> node_pb2.NodeServiceGetLoadResponse:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        request = node_pb2.NodeServiceGetLoadRequest(hot_keys=HOT_KEYS_MAX)
        answer: node_pb2.NodeServiceGetLoadResponse = stub.GetLoad(
            request, timeout=_DEADLINE_S, metadata=metadata
        )
        return answer

    @staticmethod
    def _epoch(channel: grpc.Channel, metadata: tuple[tuple[str, str | bytes], ...]) -> int:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        request = node_pb2.NodeServiceGetStatusRequest()
        answer: node_pb2.NodeServiceGetStatusResponse = stub.GetStatus(
            request, timeout=_DEADLINE_S, metadata=metadata
        )
        return answer.plan_epoch

    def close(self) -> None:
        """End all calls."""
        self._pool.shutdown(cancel_futures=True)
        for channel in self._channels.values():
            channel.close()
