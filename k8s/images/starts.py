"""Proves that a node's image can serve: starts tritonserver, and ours with the same core.

Run when the image is built. Neither has a model. Prints which server it is, and its version.
"""

import sys
import tempfile
from pathlib import Path

from embertide.server.adapters.process import ProcessError, free_ports
from embertide.server.adapters.triton import ServerOptions, TritonServer, find_backends


def main() -> None:
    """Start both; end with the reason if one does not start."""
    grpc_port, metrics_port = free_ports(2)
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        models.mkdir()
        options = ServerOptions(
            repository=models,
            backends=find_backends(),
            log=Path(folder) / "log",
            grpc_port=grpc_port,
            metrics_port=metrics_port,
        )
        try:
            with TritonServer(options) as server:
                print(server.name, "with", server.installation.library)
            print(server.installation.binary, server.installation.version())
        except ProcessError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
