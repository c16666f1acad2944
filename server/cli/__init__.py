"""The command `embertide`: starts trainer, nodes and Redis as processes, imports none of them."""

import os
import sys

# gRPC would write a line for each stranger whose handshake fails; what we must know of its errors
# comes as exceptions. It looks when it is imported first. Triton, which we start, takes it over.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def main() -> None:
    """Run the command; without the packages of any command, name the extras that bring them."""
    try:
        from embertide.server.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "embertide":
            raise
        sys.stderr.write(
            f"error: the command `embertide` needs {error.name}, which is not installed:\n"
            "  pip install 'embertide[train]' to train, 'embertide[serve]' to serve\n"
        )
        sys.exit(2)
    app.main()
