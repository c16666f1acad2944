"""Nodes as the control plane asks them: over gRPC, each call with a deadline."""

import contextlib
import threading
from collections.abc import Mapping
from concurrent import futures

import grpc

from embertide.server.core.loads import HOT_KEYS_MAX
from embertide.v1 import node_pb2, node_pb2_grpc

_DEADLINE_S = 2.0
_AT_ONCE = 16
_CHANNELS_MAX = 2048
_BYTES_MAX = 16 << 20  # a node of 131,072 buckets says some 6 MB


class Nodes:
    """Channels to nodes by address, and their loads asked side by side."""

    def __init__(self, token: str | None = None) -> None:
        """Connect to nobody yet; `token` is what the nodes were started with."""
        self._metadata: tuple[tuple[str, str | bytes], ...] = (
            (("authorization", f"Bearer {token}"),) if token else ()
        )
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self._pool = futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="nodes")

    def loads(self, addresses: Mapping[str, str]) -> dict[str, node_pb2.NodeServiceGetLoadResponse]:
        """Ask nodes, by name, for their load; one that does not answer in 2 s is left out."""
        with self._lock:
            # The ones not asked for longest go; each costs a connection.
            while len(self._channels) > _CHANNELS_MAX:
                self._channels.pop(next(iter(self._channels))).close()
            asked = {}
            for name, address in addresses.items():
                channel = self._channels.pop(address, None) or grpc.insecure_channel(
                    address, options=[("grpc.max_receive_message_length", _BYTES_MAX)]
                )
                self._channels[address] = channel
                asked[name] = self._pool.submit(self._load, self._channels[address])
            answers = {}
            for name, each in asked.items():
                with contextlib.suppress(grpc.RpcError):
                    answers[name] = each.result()
            return answers

    def _load(self, channel: grpc.Channel) -> node_pb2.NodeServiceGetLoadResponse:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        request = node_pb2.NodeServiceGetLoadRequest(hot_keys=HOT_KEYS_MAX)
        answer: node_pb2.NodeServiceGetLoadResponse = stub.GetLoad(
            request, timeout=_DEADLINE_S, metadata=self._metadata
        )
        return answer

    def close(self) -> None:
        """End all calls."""
        self._pool.shutdown(cancel_futures=True)
        for channel in self._channels.values():
            channel.close()
