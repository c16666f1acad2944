"""A real S3 server, and buckets in it that nobody else has."""

import contextlib
import itertools
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from waiting import wait_until

from embertide.server.adapters.process import Child, free_ports

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "moto" / "bin" / "python"
_SIGNED = (
    "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
)


class S3:
    """The server; `environment` is what a process needs to speak to it."""

    def __init__(self, folder: Path) -> None:
        assert PYTHON.exists(), "the S3 server of the tests is not installed: run make build/.moto"
        (port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_REGION": "us-east-1",
        }
        self._numbers = itertools.count()
        script = Path(__file__).with_name("s3_server.py")
        self.child = Child([str(PYTHON), str(script), str(port)], log=folder / "s3.log")
        wait_until(lambda: "listening" in self.child.log_text(), timeout_s=60)

    def _ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(
            f"{self.endpoint}/{path}", method=method, data=data, headers={"Authorization": _SIGNED}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: bytes = answer.read()
            return found

    def bucket(self) -> str:
        """The URL of a new bucket with a prefix."""
        name = f"bucket-{next(self._numbers)}"
        self._ask("PUT", name)
        return f"s3://{name}/some/prefix"

    def harm(self, times: int, *, key: str = ".", methods: str = "PUT", **how: object) -> None:
        """Harm the next requests of such methods for such keys."""
        said = {"times": times, "key": key, "methods": methods.split(), **how}
        self._ask("POST", "harm", json.dumps(said).encode())

    def left(self) -> int:
        """The number of requests that are still to be harmed."""
        return int(self._ask("POST", "harm"))


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """A server whose environment is this process's, too."""
    server = S3(folder)
    before = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    try:
        yield server
    finally:
        server.child.kill()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
