"""A proxy that the environment names, and that nobody of ours may ask."""

import contextlib
import socket
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def unused_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the environment name a proxy; prove that nobody has connected to it."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield
        with pytest.raises(BlockingIOError):
            proxy.accept()
