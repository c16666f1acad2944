"""Lookups with half of the keys on another node, against all of them local: `make bench-remote`.

One tritonserver with five models over the same rows: two hold all, and one of them counts what it
reads; three hold half of the buckets, with an embertide_node each beside it for the rest: one keeps
copies of rows that are read often, and one asks its peer by TLS. Requests as in `bench.serve`,
batch 64, two clients.
"""

import argparse
import contextlib
import json
from pathlib import Path

from bench import keys, models, parts, perf, report
from bench.authority import Authority
from bench.nodes import NodeProcess, make_plan, publication_of, publish_plan
from bench.report import CONSOLE
from bench.servers import BUILD, await_peer
from bench.shapes import Shape
from embertide.server.adapters import triton
from embertide.server.adapters.process import free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer

_BATCH = 64
_WINDOW_MS = 500
_FOLDER = BUILD / "bench" / "remote"
_MIN_RATE, _MAX_P99 = 0.6, 1.8  # half remote / all local
_MIN_BY_TLS, _MAX_P99_BY_TLS = 0.9, 1.15  # TLS / plain text
_MIN_COUNTED = 0.99  # a node that shares a model counts its reads; one alone does not
_CLAIMS = {("copies", "local"): "23.5", ("none", "local"): "23.5", ("tls", "none"): "21.2"}
_SHAPE = Shape(name="criteo", rows=200_000)
_SAID = {
    "local": "all keys local",
    "counted": "all keys local, reads counted",
    "none": "half remote, no copies",
    "copies": "half remote, copies of hot rows",
    "tls": "half remote, no copies, by TLS",
}


def _share(
    stack: contextlib.ExitStack,
    files: models.Files,
    name: str,
    local: triton.ModelOptions,
    *,
    nodes: int,
    hot_rows_bytes: int | None = None,
    tls: Path | None = None,
) -> tuple[triton.ModelOptions, list[str]]:
    """Return the model of the first of so many nodes that share it, and the others' addresses."""
    folder = _FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    ports = free_ports(nodes)
    state = stack.enter_context(RedisServer(RedisOptions(log=folder / "redis.log")))
    addresses = [f"127.0.0.1:{each}" for each in ports]
    publish_plan(state.url, _SHAPE.name, make_plan(files.snapshot, addresses))
    publication = publication_of(files.snapshot, folder / "publication")
    words = ["--ddr-bytes", local.ddr_budget_bytes, *(["--tls", tls] if tls else [])]
    for n, address in enumerate(addresses[1:], 1):
        log = folder / "peer.log"
        process = NodeProcess(f"node-{n}", address, publication, state.url, log, *words)
        stack.enter_context(process)
    options = local.replace(
        snapshot=None,
        publication=publication,
        state=state.url,
        peer_address=addresses[0],
        node="node-0",
        max_degraded_share=0,
        hot_rows_bytes=hot_rows_bytes,
        tls_folder=tls,
    )
    return options, addresses[1:]


def _measure(stack: contextlib.ExitStack, repetitions: int) -> list[report.Row]:
    files = models.make(_SHAPE, BUILD)
    grpc_port, metrics = free_ports(2)
    budget = 2 * _SHAPE.row_bytes + (1 << 30)
    local = triton.ModelOptions(
        snapshot=files.snapshot,
        instances=2,
        max_queue_delay_us=None,
        ddr_budget_bytes=budget,
        devices=1,
    )
    repository = _FOLDER / "models"
    served, peers = {"local": local}, list[tuple[str, Path | None]]()
    tls = Authority().issue(_FOLDER / "certificates", "node")
    for name, nodes, hot_rows_bytes, by in (
        ("counted", 1, 0, None),
        ("none", 2, 0, None),
        ("copies", 2, None, None),
        ("tls", 2, 0, tls),
    ):
        served[name], found = _share(
            stack, files, name, local, nodes=nodes, hot_rows_bytes=hot_rows_bytes, tls=by
        )
        peers += [(each, by) for each in found]
    for name, options in served.items():
        triton.write_model(repository, name, options)
    server = stack.enter_context(
        triton.TritonServer(
            triton.ServerOptions(
                repository=repository,
                backends=BUILD / "cpp" / "backends",
                log=_FOLDER / "triton.log",
                grpc_port=grpc_port,
                metrics_port=metrics,
                explicit=True,
                models=tuple(served),
            )
        )
    )
    for address, by in peers:
        await_peer(address, by)
    data = _FOLDER / "requests.json"
    data.write_text(json.dumps(keys.requests(_SHAPE, batch=_BATCH, count=64, dense=False)))
    measured: dict[str, list[perf.Measured]] = {name: [] for name in served}
    for _ in range(repetitions):
        for name in served:
            load = perf.Load(
                model=name, url=server.grpc, data=data, batch=_BATCH, window_ms=_WINDOW_MS
            )
            measured[name].append(perf.run(load))
            last = measured[name][-1]
            CONSOLE.print(
                f"[dim]{name}: {last.requests_per_s:,.0f}/s, p99 {last.latency_us_p99:,.0f} us"
            )
    rows = []
    case = f"lookup {_SHAPE.tables}x{_SHAPE.rows}x{_SHAPE.dim}, batch {_BATCH}"
    for ours, peer, least, most in (
        ("counted", "local", _MIN_COUNTED, 0.0),
        ("copies", "local", _MIN_RATE, _MAX_P99),
        ("none", "local", _MIN_RATE, _MAX_P99),
        ("copies", "none", 0.0, 0.0),
        ("tls", "none", _MIN_BY_TLS, _MAX_P99_BY_TLS),
    ):
        claim = _CLAIMS.get((ours, peer), "")
        said = (f"{case}, {_SAID[ours]}", measured[ours], measured[peer])
        rows.append(
            perf.compare_throughput(*said, peer_name=_SAID[peer], target=least, claim=claim)
        )
        rows.append(perf.compare_p99(*said, peer_name=_SAID[peer], target=most, claim=claim))
    return rows


def _run(given: argparse.Namespace) -> list[report.Row]:
    with contextlib.ExitStack() as stack:
        return _measure(stack, given.repetitions)


if __name__ == "__main__":
    parts.command("Remote lookups", _run, parts.options("remote", __doc__))
