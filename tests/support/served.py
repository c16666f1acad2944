"""A node that `embertide serve` runs, as its users start it."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from serving import MODULES
from waiting import wait_until

from embertide.server.adapters import process

Addresses = dict[str, str]  # by protocol


@contextlib.contextmanager
def serving(
    snapshot: Path, directory: Path, backends: Path, *more: str, http: bool = False
) -> Iterator[Addresses]:
    """Run `embertide serve` until the block ends; gives its addresses.

    HTTP is answered behind tritonserver's own front end, gRPC alone behind ours.
    """
    http_port, grpc, metrics = process.free_ports(3)
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "embertide.server.cli", "serve", str(snapshot)]
    command += ["--kind", "lookup", "--name", "lookup", "--directory", str(directory)]
    command += ["--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command += ["--front", "triton", "--http-port", str(http_port)] if http else []
    command += ["--backends", str(backends), *more]
    ports = {"grpc": grpc, "metrics": metrics} | ({"http": http_port} if http else {})
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    with process.Child(command, log=directory / "serve.log") as child:
        wait_until(lambda: "is ready" in child.log_text() or not child.alive(), 60)
        assert child.alive(), child.log_text()
        yield addresses


def answer(raw: Any, protocol: str) -> float:
    module = MODULES[protocol]
    tensor = module.InferInput("KEYS", [1, 4], "INT64")
    tensor.set_data_from_numpy(np.array([[0, 1, 7, 100]], np.int64))
    return float(raw.infer("lookup", [tensor]).as_numpy("VERSION")[0, 0])
