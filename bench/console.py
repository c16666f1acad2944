"""The cost of the console to a visitor: first page, updates, weight; 1,000 nodes, 10^6 buckets.

The fleet is made up: its plan and loads are in memory, as a control plane has them once its nodes
have reported. What the control plane computes of them for an answer is computed for each reading,
as where every look meets new loads, and goes over the wire's bytes. So the figures are those of a
visitor, from a request over HTTP to the whole answer, but for beats and ticks at work beside it.
"""

import argparse
import contextlib
import http.client
import re
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bench import parts
from bench.report import CONSOLE, Row, measure
from embertide.server.console.app import Console, ConsoleOptions
from embertide.server.console.server import ConsoleServer
from embertide.server.console.views import VIEWS
from embertide.server.core.figures import FleetFigures, FleetSnapshot
from embertide.server.core.plan.bucket_columns import bucket_columns
from embertide.server.core.plan.layout import layout_of
from embertide.server.services.gate import LARGE_BYTES_MAX
from embertide.v1 import control_pb2, node_pb2, plan_pb2, update_pb2

_TABLES = 4
_RUN = 256  # buckets in a row that one node owns, before some of them moved
_MOVED = 0.02
_STATIC = (
    "page.css",
    "page.js",
    "console.js",
    "theme.js",
    "htmx.min.js",
    "uplot.min.js",
    "uplot.min.css",
)


def _nodes(count: int) -> list[plan_pb2.Node]:
    budget = plan_pb2.TierBudget(tier=plan_pb2.TIER_DDR, budget_bytes=64 << 30)
    device = plan_pb2.Device(index=0, kind=plan_pb2.DEVICE_KIND_CPU, budgets=[budget])
    return [
        plan_pb2.Node(
            name=f"node-{at}", address=f"10.0.{at // 250}.{at % 250}:7200", devices=[device]
        )
        for at in range(count)
    ]


def _owners(nodes: int, bits: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the owner of each bucket, table by table: runs, of which some buckets moved."""
    random = np.random.default_rng(1)
    buckets = _TABLES << bits
    owners = np.arange(buckets) // _RUN % nodes
    moved = random.choice(buckets, int(buckets * _MOVED), replace=False)
    owners[moved] = random.integers(0, nodes, len(moved))
    return owners


def made_answers(nodes: int, bits: int) -> dict[str, Any]:
    """Return the answers of a control plane by RPC; each table has 2^bits buckets."""
    now_ms, known, owners = round(time.time() * 1000), _nodes(nodes), _owners(nodes, bits)
    status = control_pb2.ControlServiceGetStatusResponse(
        plan_epoch=7, newest_committed=update_pb2.Version(lineage=1, number=40)
    )
    newest = update_pb2.Version(lineage=1, number=40)
    for node in known:
        status.nodes.add(
            node=node,
            state=control_pb2.NODE_STATE_READY,
            versions=update_pb2.VersionRange(oldest=newest, newest=newest),
            plan_epoch=7,
            staleness_ms=90,
            p99_us=1500,
        )
    plan = plan_pb2.Plan(
        epoch=7,
        created_ms=now_ms,
        topology=plan_pb2.Topology(nodes=known),
        tables=[
            plan_pb2.PlannedTable(id=at, name=f"table-{at}", bucket_bits=bits, chunks=1)
            for at in range(_TABLES)
        ],
    )
    load = control_pb2.GetFleetLoadResponse()
    loads = [load.nodes.add(node=node.name).load for node in known]
    for told in loads:
        told.window_ms, told.requests, told.request_us = 5000, 5000, 4_000_000
    for table in range(_TABLES):
        of_table = owners[table << bits : (table + 1) << bits]
        ends = np.flatnonzero(np.diff(of_table)).tolist()
        for begin, end in zip(
            [0, *(at + 1 for at in ends)], [*ends, len(of_table) - 1], strict=True
        ):
            plan.assignments.add(
                table_id=table,
                bucket_begin=begin,
                bucket_count=end - begin + 1,
                owners=[plan_pb2.Owner(node=int(of_table[begin]))],
            )
        for bucket, owner in enumerate(of_table.tolist()):
            loads[owner].buckets.append(
                node_pb2.BucketLoad(
                    table_id=table,
                    bucket=bucket,
                    reads=100 + bucket % 977,
                    unique_keys=90,
                    bytes_read=6400,
                    reads_by_source=[0, 100],
                    rows=100_000,
                    resident_bytes=8_000_000,
                    held=True,
                )
            )
    events = [
        control_pb2.FleetEvent(
            number=1000 - at,
            at_ms=now_ms - 1000 * at,
            kind=control_pb2.EVENT_KIND_NODE,
            name="node_returned",
            text=f"node node-{at} is back after {at:,}.0 s",
            why="it was started again, at 10.0.0.1:7200",
            subject=f"node-{at}",
            times=1,
        )
        for at in range(1000)
    ]
    return {
        "GetStatus": status,
        "GetPlan": control_pb2.GetPlanResponse(plan=plan),
        "GetFleetFigures": FleetSnapshot(
            plan=plan,
            layout=layout_of(plan.assignments),
            no_plan="",
            living=frozenset(node.name for node in known),
            loads_version=1,
            loads={each.node: each.load for each in load.nodes},
            columns={each.node: bucket_columns(each.load) for each in load.nodes},
        ),
        "ListOperations": control_pb2.ListOperationsResponse(),
        "ListDecisions": control_pb2.ListDecisionsResponse(),
        "ListEvents": control_pb2.ListEventsResponse(events=events),
        "ListVersions": control_pb2.ListVersionsResponse(),
    }


class _MadeCaller:
    """Answers as a control plane would, at once."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.open, self.role = True, "operator"
        self._told = told

    def call(self, rpc: str, request: Any, deadline_s: float = 5.0) -> Any:
        answer = self._told[rpc]
        if isinstance(answer, FleetSnapshot):
            answer = FleetFigures(answer).answer(request)
        sent = answer.SerializeToString()
        self._told["bytes"] = max(self._told.get("bytes", 0), len(sent))
        return type(answer).FromString(sent)

    def plan(self, epoch: int = 0) -> plan_pb2.Plan:
        plan: plan_pb2.Plan = self._told["GetPlan"].plan
        return plan

    def close(self) -> None:
        """Nothing is open."""


class Visitor:
    """A browser's requests, one after the other on one connection."""

    def __init__(self, address: str) -> None:
        """Know a console; `log_in` comes first."""
        self._connection = http.client.HTTPConnection(address, timeout=120)
        self._cookies: dict[str, str] = {}
        self._origin = f"http://{address}"

    def ask(
        self,
        path: str,
        form: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the body of an answer that is no refusal."""
        headers = dict(headers or {})
        headers["cookie"] = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        if form is not None:
            headers |= {"content-type": "application/x-www-form-urlencoded", "origin": self._origin}
        body = urllib.parse.urlencode(form) if form is not None else None
        method = "POST" if form is not None else "GET"
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError):  # idle for too long
            self._connection.close()
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
        text = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"{path} answers {answer.status}: {text[:200]!r}")
        for cookie in answer.headers.get_all("set-cookie") or ():
            name, _, value = cookie.partition(";")[0].partition("=")
            self._cookies[name] = value
        return text

    def log_in(self) -> None:
        """Log in without a token."""
        found = re.search(rb'name="csrf" value="([^"]+)"', self.ask("/login"))
        if found is None:
            raise RuntimeError("the page of /login has no form")
        self.ask("/login", {"csrf": found[1].decode(), "token": ""})


@contextlib.contextmanager
def _visited(told: dict[str, Any]) -> Iterator[Visitor]:
    """A console that has just started, and a visitor who is logged in."""
    dial: Any = lambda _: _MadeCaller(told)  # noqa: E731 - a caller that calls nobody
    console = Console(ConsoleOptions(control="127.0.0.1:7070", dial=dial))
    try:
        with ConsoleServer(console.app, "127.0.0.1:0", None) as server:
            visitor = Visitor(server.address)
            visitor.log_in()
            yield visitor
    finally:
        console.close()


def measured(given: argparse.Namespace) -> list[Row]:
    """Return the rows of one size of fleet."""
    nodes, bits = given.nodes, given.bits
    case = f"console, {nodes:,} nodes, {_TABLES << bits:,} buckets"
    CONSOLE.print(f"making the answers of {case}")
    told = made_answers(nodes, bits)
    first_s, first_cpu_s, update_ms, weight_kb = [], [], [], []
    for _ in range(given.repetitions):
        with _visited(told) as visitor:
            began, cpu = time.perf_counter(), time.process_time()
            visitor.ask("/")
            first_s.append(time.perf_counter() - began)
            first_cpu_s.append(time.process_time() - cpu)
            static = sum(len(visitor.ask(f"/static/{name}")) for name in _STATIC)
            slowest = 0.0
            for path, _, _ in VIEWS.values():
                began = time.perf_counter()
                page = visitor.ask(path, headers={"hx-request": "true"})
                slowest = max(slowest, time.perf_counter() - began)
                weight_kb.append((len(page) + static) / 1000)
            update_ms.append(1000 * slowest)
            CONSOLE.print(f"first page {first_s[-1]:.2f} s, slowest update {update_ms[-1]:.0f} ms")
    wire_mb = told["bytes"] / 2**20
    claim = "G.3"
    return [
        measure((case, "first page", "s"), first_s, better="lower", target=1.0, claim=claim),
        measure((case, "CPU time of the first page", "s"), first_cpu_s, better="lower", target=0),
        measure(
            (case, "slowest update of a page", "ms"),
            update_ms,
            better="lower",
            target=200.0,
            claim=claim,
        ),
        measure(
            (case, "heaviest page with its files", "KB"),
            [max(weight_kb)],
            better="lower",
            target=500.0,
            claim=claim,
        ),
        measure(
            (case, "largest answer on the wire", "MiB"),
            [wire_mb],
            better="lower",
            target=LARGE_BYTES_MAX / 2**20,
            claim=claim,
        ),
    ]


if __name__ == "__main__":
    parser = parts.options("console", __doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--bits", type=int, default=18, help="each of 4 tables has 2^bits buckets")
    parts.command("What the console costs a visitor", measured, parser)
