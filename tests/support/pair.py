"""Two Triton nodes of two devices that share a model, a control plane and a Redis."""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Literal

from serving import metric, wait_until

from embertide.server.adapters import process, triton
from embertide.server.adapters.process import Child

COMMAND = [sys.executable, "-m", "embertide.server.cli"]


@dataclasses.dataclass
class Pair:
    """What runs."""

    nodes: list[triton.TritonServer]
    control: str  # host:port


def start_pair(
    stack: contextlib.ExitStack,
    directory: Path,
    server: triton.ServerOptions,
    url: str,
    *,
    model: str,
    publications: tuple[Path, Path],
    kind: Literal["ranking", "lookup"] = "ranking",
) -> Pair:
    """Start them, the model under the name "rank", and wait until they reach each other."""
    control_port, *ports = process.free_ports(9)
    control = f"127.0.0.1:{control_port}"
    words = ["control", "--state", url, "--model", model, "--listen", control]
    words += ["--expect-nodes", "2", "--directory", str(directory), "--longest-deadline-ms", "500"]
    stack.enter_context(Child([*COMMAND, *words], log=directory / "control.log"))
    starts = []
    for n, publication in enumerate(publications):
        http, grpc, metrics, peer = ports[4 * n : 4 * n + 4]
        repository = directory / f"models-{n}"
        options = triton.ModelOptions(
            publication=publication,
            bus=url,
            kind=kind,
            instances=2,
            devices=2,
            node=f"node-{n}",
            state=url,
            control=control,
            peer_address=f"127.0.0.1:{peer}",
            plan_file=directory / f"plan-{n}.bin",
            dead_owner="error",
        )
        triton.write_model(repository, "rank", options)
        starts.append(
            dataclasses.replace(
                server,
                repository=repository,
                log=directory / f"node-{n}.log",
                http_port=http,
                grpc_port=grpc,
                metrics_port=metrics,
                models=("rank",),
            )
        )
    # Neither is ready before the plan is made, and that waits for both.
    nodes = triton.start_together(stack, starts)
    wait_until(
        lambda: all(metric(node.metrics(), "embertide_peers_alive") == 1 for node in nodes), 20
    )
    return Pair(nodes, control)
