"""Two Triton nodes of two devices that share a model, a control plane and a Redis."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal

from commands import embertide
from serving import metric
from waiting import wait_until

from embertide.server.adapters import process, triton
from embertide.server.adapters.process import Child

COMMAND = [sys.executable, "-m", "embertide.server.cli"]


@dataclasses.dataclass
class Pair:
    """The running processes."""

    nodes: list[triton.TritonServer]
    control: str  # host:port

    def command(self, *words: str) -> str:
        """Run an operator's command and return what it prints."""
        done = embertide(*words, "--control", self.control)
        assert done.exit_code == 0, done.output
        return done.stdout

    def ask(self, *words: str) -> Any:
        """Run an operator's command and return what it says in JSON."""
        return json.loads(self.command(*words, "--json"))

    def owners(self) -> dict[tuple[str, int], list[str]]:
        """Owners by (table, bucket), as node/device."""
        plan = self.ask("plan", "show")
        names = {table["id"]: table["name"] for table in plan["tables"]}
        nodes = [node["name"] for node in plan["topology"]["nodes"]]
        owners = {}
        for each in plan["assignments"]:
            for b in range(each["bucket_begin"], each["bucket_begin"] + each["bucket_count"]):
                at = [f"{nodes[o['node']]}/{o['device']}" for o in each["owners"]]
                owners[names[each["table_id"]], b] = at
        return owners


def start_pair(
    stack: contextlib.ExitStack,
    directory: Path,
    server: triton.ServerOptions,
    url: str,
    *,
    model: str,
    publications: tuple[Path, Path],
    kind: Literal["ranking", "lookup"] = "ranking",
    hot_rows_bytes: int | None = None,
    max_degraded_share: float = 0,
    context: tuple[str, ...] = (),
    schema: str | None = None,
) -> Pair:
    """Start them, the model under the name "rank", and wait until they reach each other."""
    control_port, *ports = process.free_ports(7)
    control = f"127.0.0.1:{control_port}"
    words = ["control", "--state", url, "--model", model, "--listen", control]
    words += [
        "--bus",
        url,
        "--expect-nodes",
        "2",
        "--directory",
        str(directory),
        "--longest-deadline-ms",
        "500",
    ]
    stack.enter_context(Child([*COMMAND, *words], log=directory / "control.log"))
    starts = []
    for n, publication in enumerate(publications):
        grpc, metrics, peer = ports[3 * n : 3 * n + 3]
        repository = directory / f"models-{n}"
        options = triton.ModelOptions(
            publication=publication,
            hot_rows_bytes=hot_rows_bytes,
            bus=url,
            kind=kind,
            instances=2,
            devices=2,
            node=f"node-{n}",
            state=url,
            control=control,
            peer_address=f"127.0.0.1:{peer}",
            plan_file=directory / f"plan-{n}.bin",
            max_degraded_share=max_degraded_share,
            context=context,
            schema=schema,
            # A busy machine holds a peer up for longer than the tenth of a second that it has.
            peer_timeout_ms=450,
        )
        triton.write_model(repository, "rank", options)
        starts.append(
            dataclasses.replace(
                server,
                repository=repository,
                log=directory / f"node-{n}.log",
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
