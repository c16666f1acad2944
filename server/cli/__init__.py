"""The command `embertide`: starts trainer, nodes and Redis as processes, imports none of them."""

import os

# gRPC would write a line for each stranger whose handshake fails; what we must know of its errors
# comes as exceptions. It looks when it is imported first. Triton, which we start, takes it over.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
