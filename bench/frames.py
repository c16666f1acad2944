"""HTTP/2 by hand, for callers that no library would let be."""

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """Return a header as HPACK has one that is not to be remembered."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_headers(stream: int, path: bytes, *more: bytes) -> bytes:
    """Return the headers of a call, which leave its stream open."""
    names = (b":method", b":scheme", b":path", b":authority", b"content-type", b"te")
    values = (b"POST", b"http", path, b"x", b"application/grpc", b"trailers")
    headers = b"".join(map(header, names, values)) + b"".join(more)
    return frame(HEADERS, END_HEADERS, stream, headers)


def begun() -> bytes:
    """Return what a client says first."""
    return PREFACE + frame(SETTINGS, 0, 0, b"")
