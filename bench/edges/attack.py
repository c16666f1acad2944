"""A hostile caller of one listener, in a process of its own: `python -m bench.edges.attack JSON`.

It says "attacking" once it has begun, goes on for as long as it was told, and ends. Only addresses
of this machine, a bounded number of connections.
"""

import contextlib
import dataclasses
import gzip
import json
import os
import resource
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from bench.frames import DATA, begun, call_headers, frame, header
from embertide.server.adapters.tls import TlsFolder

STREAMS = 2400
CONNECTIONS = 10_000
_CONNECTING_S = 20.0
_A_CONNECTION = 120  # streams, less than a listener allows
_DRIPPING = 256
_AT_ONCE = 8  # of those that send much
_LARGE_BYTES = 16 << 20
_BOMB_BYTES = 64 << 20
_AGAIN_S = 0.05  # so that it is no contest for the processor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Door:
    """The listener to attack, and the attacker's identity.

    Attributes:
        port: A port of this machine.
        path: The path of an RPC; empty: the listener speaks HTTP/1.1.
        tls: Folder of a certificate to show; empty: plain text.
        nameless: TLS without showing that certificate.
        token: Sent as a bearer token; empty: none.
        seconds: How long it lasts.
    """

    port: int
    path: str = ""
    tls: str = ""
    nameless: bool = False
    token: str = ""
    seconds: float = 3.0


class Attacker:
    """Attacks a door."""

    def __init__(self, door: Door) -> None:
        """Take the door; nothing is sent yet."""
        self._door = door
        self._until = time.monotonic() + door.seconds
        self._count = 0
        self._lock = threading.Lock()
        token = f"Bearer {door.token}".encode()
        self._more = (header(b"authorization", token),) if door.token else ()
        self._path = door.path.encode()

    def run(self, name: str) -> None:
        """Attack by a name of `ATTACKS`."""
        print("attacking", flush=True)
        with contextlib.suppress(OSError):
            ATTACKS[name](self)
        time.sleep(max(0.0, self._until - time.monotonic()))

    def _going(self) -> bool:
        return time.monotonic() < self._until

    def _connect(self) -> socket.socket:
        """Connect from one of many addresses of this machine."""
        with self._lock:
            self._count += 1
            near = socket.inet_ntoa(struct.pack(">I", 0x7F010001 + self._count % (1 << 14)))
        talk = socket.socket()
        talk.settimeout(2)
        talk.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        talk.bind((near, 0))
        talk.connect(("127.0.0.1", self._door.port))
        if not self._door.tls:
            return talk
        context = ssl.create_default_context(cafile=f"{self._door.tls}/ca.crt")
        context.set_alpn_protocols(["h2"])
        if not self._door.nameless:
            context.load_cert_chain(f"{self._door.tls}/tls.crt", f"{self._door.tls}/tls.key")
        return context.wrap_socket(talk, server_hostname="localhost")

    def _over_and_over(self, data: bytes, pieces: Callable[[bytes], list[bytes]]) -> None:
        """Send the same over fresh connections, the last few of which stay open."""
        kept: list[socket.socket] = []
        while self._going():
            with contextlib.suppress(OSError):
                talk = self._connect()
                kept.append(talk)
                for piece in pieces(data):
                    talk.sendall(piece)
            if len(kept) > _DRIPPING // 4:
                kept.pop(0).close()
            time.sleep(_AGAIN_S)

    def _begun(self, stream: int = 1) -> bytes:
        return begun() + call_headers(stream, self._path, *self._more)

    def _post(self, *headers: str) -> bytes:
        lines = ("POST /metrics HTTP/1.1", "Host: x", *headers, "", "")
        return "\r\n".join(lines).encode()

    def _calls(self, message: bytes, compression: grpc.Compression | None = None) -> None:
        """Call with a message by gRPC's own client, several at once."""
        door = self._door
        options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
        metadata = (("authorization", f"Bearer {door.token}"),) if door.token else ()

        def call() -> None:
            address = f"localhost:{door.port}"
            if not door.tls:
                channel = grpc.insecure_channel(address, options=options)
            elif door.nameless:
                trust = (Path(door.tls) / "ca.crt").read_bytes()
                channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(trust), options)
            else:
                channel = grpc.secure_channel(address, TlsFolder(Path(door.tls)).channel(), options)
            with channel:
                ask: Any = channel.unary_unary(door.path)
                while self._going():
                    with contextlib.suppress(grpc.RpcError):
                        ask(message, timeout=5, metadata=metadata, compression=compression)
                    time.sleep(_AGAIN_S)

        threads = [threading.Thread(target=call) for _ in range(_AT_ONCE)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    # --- what it does -----------------------------------------------------------------------------

    def huge_shape(self) -> None:
        """A message that says it is of 4 GiB, or a body of 8 EiB."""
        if self._path:
            claim = frame(DATA, 0, 1, b"\0\xff\xff\xff\xff" + bytes(400))
            self._over_and_over(self._begun() + claim, lambda data: [data])
        else:
            said = self._post(f"Content-Length: {2**63 - 1}") + b"x" * 65536
            self._over_and_over(said, lambda data: [data])

    def deep(self) -> None:
        """A message, or JSON, nested without end."""
        if self._path:
            self._calls(b"\x0b" * 60_000)
        else:
            body = b"[" * 200_000
            said = self._post(f"Content-Length: {len(body)}") + body
            self._over_and_over(said, lambda data: [data])

    def one_byte_chunks(self) -> None:
        """A body in pieces of a byte each."""
        if self._path:
            first = frame(DATA, 0, 1, b"\0\0\0\xea\x60") + frame(DATA, 0, 1, b"x") * 400
            self._over_and_over(self._begun() + first, lambda data: [data])
        else:
            said = self._post("Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 50_000
            self._over_and_over(said, lambda data: [data])

    def gzip_bomb(self) -> None:
        """64 KiB that become 64 MiB."""
        if self._path:
            self._calls(bytes(_BOMB_BYTES // 4), grpc.Compression.Gzip)
        else:
            body = gzip.compress(bytes(_BOMB_BYTES))
            said = self._post("Content-Encoding: gzip", f"Content-Length: {len(body)}") + body
            self._over_and_over(said, lambda data: [data])

    def headers_only(self) -> None:
        """Thousands of calls whose message never comes."""
        talks = []
        for _ in range(STREAMS // _A_CONNECTION):
            if self._path:
                said = begun() + b"".join(
                    call_headers(2 * n + 1, self._path, *self._more) for n in range(_A_CONNECTION)
                )
            else:
                said = self._post("Content-Length: 10")
            with contextlib.suppress(OSError):
                talk = self._connect()
                talk.sendall(said)
                talks.append(talk)
        time.sleep(max(0.0, self._until - time.monotonic()))

    def drip(self) -> None:
        """Hundreds of connections that each send a byte now and then."""
        said = self._begun() if self._path else self._post("Content-Length: 10")
        talks = []
        for _ in range(_DRIPPING):
            with contextlib.suppress(OSError):
                talks.append(self._connect())
        at = 0
        while self._going():
            for talk in talks:
                with contextlib.suppress(OSError):
                    talk.send(said[at % len(said) :][:1])
            at += 1
            time.sleep(_AGAIN_S)

    def large(self) -> None:
        """Messages of 16 MiB."""
        if self._path:
            self._calls(bytes(_LARGE_BYTES))
        else:
            said = self._post(f"Content-Length: {_LARGE_BYTES}") + bytes(_LARGE_BYTES)
            self._over_and_over(said, lambda data: [data])

    def connections(self) -> None:
        """Ten thousand connections, if so many are taken, that say their first word and no more."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        door = dataclasses.replace(self._door, tls="")  # a handshake each would be a contest
        plain, talks = Attacker(door), []
        enough = time.monotonic() + _CONNECTING_S
        for _ in range(min(CONNECTIONS, hard - 100)):
            if time.monotonic() > enough:
                break  # the listener takes no more
            with contextlib.suppress(OSError):
                talk = plain._connect()
                talks.append(talk)
                talk.sendall(begun() if self._path and not self._door.tls else b"\x16\x03\x01")
        time.sleep(max(0.0, self._until - time.monotonic()))


ATTACKS: dict[str, Callable[[Attacker], None]] = {
    "a huge shape": Attacker.huge_shape,
    "deep nesting": Attacker.deep,
    "one-byte chunks": Attacker.one_byte_chunks,
    "a gzip bomb": Attacker.gzip_bomb,
    "headers alone": Attacker.headers_only,
    "a slow drip": Attacker.drip,
    "16 MiB": Attacker.large,
    "10,000 connections": Attacker.connections,
}


def main() -> int:
    """Attack as the arguments say: the attack's name, and the door as JSON."""
    os.nice(10)  # what is tried is the listener, not who gets the processor
    Attacker(Door(**json.loads(sys.argv[2]))).run(sys.argv[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
