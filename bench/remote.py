"""Lookups with half of the keys on another node, against all of them local: `make bench-remote`.

One tritonserver with two models over the same rows: one holds all, the other half of the buckets;
an embertide_node beside it holds the rest. Requests as in `bench.serve`, batch 64, two clients.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import redis
from rich.console import Console

from bench import keys, models, perf, report
from bench.servers import BUILD, ROOT, BenchError, await_peer
from bench.shapes import Shape
from embertide.server.adapters import triton
from embertide.server.adapters.process import Child, ProcessError, free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.v1 import plan_pb2

_CONSOLE = Console(stderr=True, highlight=False)
_BATCH = 64
_WINDOW_MS = 500
_FOLDER = BUILD / "bench" / "remote"
_LEAST_RATE, _MOST_P99 = 0.5, 2.0  # half remote / all local


def _publication(snapshot: Path) -> Path:
    """Return a publication whose one snapshot is this."""
    folder = _FOLDER / "publication"
    link = folder / "snapshots" / "000000000001-000001"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(snapshot.resolve())
    return folder


def _plan(snapshot: Path, addresses: Sequence[str]) -> plan_pb2.Plan:
    """Return the plan that gives each node every other bucket."""
    manifest = json.loads((snapshot / "manifest.json").read_text())
    plan = plan_pb2.Plan(epoch=1)
    for n, address in enumerate(addresses):
        node = plan.topology.nodes.add(name=f"node-{n}", address=address)
        device = node.devices.add(kind=plan_pb2.DEVICE_KIND_CPU)
        device.budgets.add(tier=plan_pb2.TIER_DDR, budget_bytes=1 << 32)
    for table in manifest["tables"]:
        plan.tables.add(
            id=table["id"],
            name=table["name"],
            bucket_bits=table["bucket_bits"],
            chunks=table["chunks"],
        )
        for bucket in range(1 << table["bucket_bits"]):
            owner = plan_pb2.Owner(node=(bucket + table["id"]) % len(addresses))
            plan.assignments.add(
                table_id=table["id"], bucket_begin=bucket, bucket_count=1, owners=[owner]
            )
    return plan


def _measure(stack: contextlib.ExitStack, repetitions: int) -> list[report.Row]:
    shape = Shape(name="criteo", rows=200_000)
    files = models.make(shape, BUILD)
    port, http, grpc_port, metrics, *peers = free_ports(6)
    state = stack.enter_context(RedisServer(RedisOptions(log=_FOLDER / "redis.log", port=port)))
    addresses = [f"127.0.0.1:{each}" for each in peers]
    with redis.Redis.from_url(state.url) as client:
        plan = _plan(files.snapshot, addresses)
        client.set(f"c:{{{shape.name}}}:plan:1", plan.SerializeToString())
        client.set(f"c:{{{shape.name}}}:epoch", 1)
    budget = 2 * shape.row_bytes + (1 << 30)
    publication = _publication(files.snapshot)
    binary = BUILD / "cpp" / "embertide_node"
    words = ["--publication", publication, "--state", state.url, "--node", "node-1"]
    words += ["--peer-address", addresses[1], "--ddr-bytes", budget]
    stack.enter_context(Child([str(binary), *map(str, words)], log=_FOLDER / "peer.log"))
    repository = _FOLDER / "models"
    local = triton.ModelOptions(
        snapshot=files.snapshot,
        instances=2,
        max_queue_delay_us=None,
        ddr_budget_bytes=budget,
        devices=1,
    )
    half = dataclasses.replace(
        local,
        snapshot=None,
        publication=publication,
        state=state.url,
        peer_address=addresses[0],
        node="node-0",
        max_degraded_share=0,
    )
    names = ("local", "half")
    for name, options in zip(names, (local, half), strict=True):
        triton.write_model(repository, name, options)
    server = stack.enter_context(
        triton.TritonServer(
            triton.ServerOptions(
                repository=repository,
                backends=BUILD / "cpp" / "backends",
                log=_FOLDER / "triton.log",
                http_port=http,
                grpc_port=grpc_port,
                metrics_port=metrics,
                explicit=True,
                models=names,
            )
        )
    )
    await_peer(addresses[1])
    data = _FOLDER / "requests.json"
    data.write_text(json.dumps(keys.requests(shape, batch=_BATCH, count=64, dense=False)))
    measured: dict[str, list[perf.Measured]] = {name: [] for name in names}
    for _ in range(repetitions):
        for name in names:
            load = perf.Load(
                model=name, url=server.grpc, data=data, batch=_BATCH, window_ms=_WINDOW_MS
            )
            measured[name].append(perf.run(load))
            last = measured[name][-1]
            _CONSOLE.print(
                f"[dim]{name}: {last.requests_per_s:,.0f}/s, p99 {last.latency_us_p99:,.0f} us"
            )
    case = f"lookup 26x200000x16, batch {_BATCH}, half of the keys remote"
    ours, peer, name = measured["half"], measured["local"], "all keys local"
    return [
        perf.compare_throughput(case, ours, peer, peer_name=name, target=_LEAST_RATE),
        perf.compare_p99(case, ours, peer, peer_name=name, target=_MOST_P99),
    ]


def main() -> int:
    """Run the benchmark; the exit code says whether it ran, not whether targets were reached."""
    parser = argparse.ArgumentParser(prog="bench.remote", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=report.LEAST_REPETITIONS)
    parser.add_argument("--out", type=Path, default=BUILD / "bench" / "remote.json")
    arguments = parser.parse_args()
    try:
        with contextlib.ExitStack() as stack:
            rows = _measure(stack, arguments.repetitions)
        report.write(arguments.out, ROOT, rows)
    except (BenchError, ProcessError) as error:
        _CONSOLE.print(f"[red]bench-remote: {error}")
        return 1
    report.show("Remote lookups", rows)
    _CONSOLE.print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
