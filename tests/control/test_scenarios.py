"""Scripts of the control plane: a command, the output that it must have, prose between.

EMBERTIDE_REWRITE=1 writes the outputs anew; the difference is then reviewed.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from simulation import Simulation, make_node, make_registration, make_tables

from embertide.server.core.errors import RefusedError
from embertide.server.core.operation import ENDED
from embertide.server.core.plan.hot import NO_LIMIT
from embertide.server.core.plan.layout import Bucket, Place, owner, place
from embertide.server.core.plan.moves import Step
from embertide.v1 import control_pb2, plan_pb2

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
REWRITE = os.environ.get("EMBERTIDE_REWRITE") == "1"
STEERINGS = {
    "pause": control_pb2.STEERING_PAUSE,
    "resume": control_pb2.STEERING_RESUME,
    "abort": control_pb2.STEERING_ABORT,
}


class Script:
    """Runs the commands of one script."""

    def __init__(self) -> None:
        self.fleet: Simulation
        self.added: list[str] = []  # nodes that the last operation adds to the topology

    def run(self, line: str) -> list[str]:
        name, *words = line.split()
        command: Callable[..., list[str]] = getattr(self, f"do_{name}")
        options = dict(word.split("=", 1) for word in words if "=" in word)
        try:
            return command(*[word for word in words if "=" not in word], **options)
        except RefusedError as error:
            assert not self.fleet.core.take(), "a refusal has changed something"
            return [f"{error.code.value}: {error.message}"]

    def do_fleet(
        self, expect: str = "2", deadline_ms: str = "2000", beat_ms: str = "200", **bits: str
    ) -> list[str]:
        tables = make_tables(**{name: int(each) for name, each in bits.items()})
        self.fleet = Simulation(
            tables, expect=int(expect), deadline_ms=int(deadline_ms), beat_ms=int(beat_ms)
        )
        return []

    def do_start(
        self, name: str, group: str = "0", devices: str = "1", budget: str = "1000000"
    ) -> list[str]:
        node = make_node(name, group=int(group), devices=int(devices), budget=int(budget))
        answer = self.fleet.add(node)
        return [f"epoch {answer.plan_epoch}, beats every {answer.heartbeat_interval_ms} ms"]

    def do_register(self, name: str, id: str, address: str = "", model: str = "news") -> list[str]:
        request = make_registration(
            make_node(name, address=address), self.fleet.tables, id=id, model=model
        )
        answer = self.fleet.core.register(request, self.fleet.now_ms)
        self.fleet.settle()
        return [f"epoch {answer.plan_epoch}, incarnation {answer.incarnation}"]

    def do_kill(self, name: str) -> list[str]:
        self.fleet.nodes[name].alive = False
        return []

    def do_stick(self, name: str) -> list[str]:
        self.fleet.nodes[name].stuck = True
        return []

    def do_unstick(self, name: str) -> list[str]:
        self.fleet.nodes[name].stuck = False
        return []

    def do_fill(self, name: str) -> list[str]:
        self.fleet.nodes[name].full = True
        return []

    def do_empty(self, name: str) -> list[str]:
        self.fleet.nodes[name].full = False
        return []

    def do_deafen(self, name: str) -> list[str]:
        self.fleet.nodes[name].deaf = True
        return []

    def do_hear(self, name: str) -> list[str]:
        self.fleet.nodes[name].deaf = False
        return []

    def do_answers(self, name: str, version: str = "5", p99_us: str = "0") -> list[str]:
        node = self.fleet.nodes[name]
        node.version, node.p99_us = int(version), int(p99_us)
        return []

    def do_restart(self, *, found_after_ms: str = "0") -> list[str]:
        self.fleet.restart(int(found_after_ms))
        return []

    def do_lose(self) -> list[str]:
        """Lose all that is in the store."""
        self.fleet.store.lose()
        return []

    def do_find(self) -> list[str]:
        """Let nodes register again with a control plane that does not know them."""
        for node in self.fleet.nodes.values():
            request = make_registration(node.node, self.fleet.tables, id=node.incarnation)
            self.fleet.core.register(request, self.fleet.now_ms)
        self.fleet.settle()
        return []

    def do_adopt(self, id: str = "adopt", dry: str = "") -> list[str]:
        loads = {name: node.load() for name, node in self.fleet.nodes.items() if node.alive}
        request = control_pb2.AdoptPlanRequest(request_id=id, dry_run=dry == "yes")
        answer = self.fleet.core.adopt(request, loads, self.fleet.now_ms)
        self.fleet.settle()
        said = [f"plan {answer.plan_epoch}, {answer.buckets_unheld} buckets unheld"]
        return said + [
            f"  {each.node} acted by plan {each.plan_epoch}, holds {each.buckets}"
            for each in answer.nodes
        ]

    def do_remove(self, name: str, id: str = "remove") -> list[str]:
        request = control_pb2.RemoveNodeRequest(request_id=id, node=name)
        self.fleet.core.remove(request, self.fleet.now_ms)
        self.fleet.settle()
        self.fleet.nodes.pop(name, None)  # one that did but register has none
        return []

    def do_load(self, name: str, *, each: str = "", **buckets: str) -> list[str]:
        """Give reads:bytes of buckets, as user.3=100:50; `each` is what all others have."""
        fleet = self.fleet
        ids = {table.name: table.id for table in fleet.tables}
        reads, size = map(int, (each or "0:0").split(":"))
        topology = [node.name for node in fleet.plan().topology.nodes]
        loads = {
            at: (reads, size)
            for at, held in fleet.core.layout.items()
            if any(topology[p.node] == name for p in held.owners)
        }
        for bucket, value in buckets.items():
            table, _, number = bucket.partition(".")
            first, second = value.split(":")
            loads[Bucket(ids[table], int(number))] = int(first), int(second)
        fleet.load(name, loads)
        return []

    def do_reshard(self, id: str, *targets: str, **options: str) -> list[str]:
        """Start: planner=, drain=, undo=, add_group=, remove_group=, or targets as
        user.0-3:node-1/0,node-2/0, hot.user=9."""
        request = control_pb2.StartReshardRequest(
            operation_id=id, dry_run=options.get("dry") == "yes", reason=options.get("reason", "")
        )
        if "planner" in options:
            request.planner = options["planner"]
        if "drain" in options:
            request.drain_node = options["drain"]
        if "undo" in options:
            request.undo_operation = options["undo"]
        if "add_group" in options:
            request.add_group = int(options["add_group"])
        if "remove_group" in options:
            request.remove_group = int(options["remove_group"])
        for target in targets:
            request.target.assignments.append(self._assignment(target))
            request.target.base_epoch = int(options.get("base", self.fleet.core.epoch))
        for name, rows in options.items():
            if not name.startswith("hot."):
                continue
            ids = {each.name: each.id for each in self.fleet.tables}
            limit = NO_LIMIT if rows == "all" else int(rows)
            request.target.hot_rows.add(table_id=ids.get(name[4:], 99), rows=limit)
            request.target.base_epoch = int(options.get("base", self.fleet.core.epoch))
        request.budget.buckets_at_once = int(options.get("at_once", 0))
        request.budget.bytes_per_s = int(options.get("rate", 0))
        request.budget.p99_us = int(options.get("p99_us", 0))
        answer = self.fleet.core.start(request, self.fleet.now_ms)
        self.fleet.settle()
        self.added = [node.name for node in answer.added_nodes]
        said = [self._operation(answer.operation), answer.explanation]
        for move in answer.moves:
            ends = [
                self._place(place(getattr(move, end))) if move.HasField(end) else "-"
                for end in ("source", "target")
            ]
            said.append(
                f"  {self._bucket(Bucket(move.table_id, move.bucket))} {ends[0]} -> {ends[1]}"
                f" ({move.reads} reads, {move.bytes} bytes)"
            )
        said += [f"  hot rows: {self._hot(answer.hot_rows)}"] if answer.hot_rows else []
        if any(each.reads_before for each in answer.devices):
            said += [
                f"  {self._place(place(each.device))} reads {each.reads_before} -> "
                f"{each.reads_after}, bytes {each.bytes_before} -> {each.bytes_after}"
                for each in answer.devices
            ]
        return said

    def _assignment(self, text: str) -> plan_pb2.Assignment:
        where, _, who = text.partition(":")
        table, _, run = where.partition(".")
        first, _, last = run.partition("-")
        names = [node.name for node in self.fleet.plan().topology.nodes]
        ids = {each.name: each.id for each in self.fleet.tables}
        owners = []
        for each in who.split(","):
            node, _, device = each.partition("/")
            at = names.index(node) if node in names else 99
            owners.append(owner(Place(at, int(device))))
        return plan_pb2.Assignment(
            table_id=ids.get(table, 99),
            bucket_begin=int(first),
            bucket_count=int(last or first) - int(first) + 1,
            owners=owners,
        )

    def do_steer(self, id: str, how: str) -> list[str]:
        request = control_pb2.SteerOperationRequest(id=id, steering=STEERINGS[how])
        operation = self.fleet.core.steer(request, self.fleet.now_ms)
        said = self._operation(operation)
        self.fleet.settle()
        return [said]

    def do_run(self, ms: str = "0", until: str = "") -> list[str]:
        """Let time pass, so long or until an operation has ended; trace what is written."""
        said = []
        last = ""
        end_ms = self.fleet.now_ms + int(ms or 0) + (60_000 if until else 0)
        while self.fleet.now_ms < end_ms:
            plan = self.fleet.step()
            if plan is not None:
                said.append(f"epoch {plan.epoch}: {self._moving(plan)}")
            running = self.fleet.core.operations.records.values()
            now = "\n".join(self._operation(each.operation) for each in running)
            if now != last and plan is None and last:
                said += [line for line in now.split("\n") if line not in last]
            last = now
            if until and self.fleet.operation(until).ended_ms:
                if said and said[-1] != self._operation(self.fleet.operation(until)):
                    said.append(self._operation(self.fleet.operation(until)))
                return said
        return [*said, f"{until} has not ended"] if until else said

    def _moving(self, plan: plan_pb2.Plan) -> str:
        moving = []
        for each in plan.assignments:
            if each.joining or each.leaving:
                run = f"{self._bucket(Bucket(each.table_id, each.bucket_begin))}"
                if each.bucket_count > 1:
                    run += f"-{each.bucket_begin + each.bucket_count - 1}"
                parts = [
                    f"{what} {' '.join(self._place(place(at)) for at in places)}"
                    for what, places in (
                        ("own", each.owners),
                        ("join", each.joining),
                        ("leave", each.leaving),
                    )
                    if places
                ]
                moving.append(f"{run} {', '.join(parts)}")
        step = ""
        if self.fleet.core.operations.running:
            record = self.fleet.core.operations.running.record
            steps = [each.step for each in record.batches if each.step_epoch == plan.epoch]
            if record.step_epoch == plan.epoch:
                names = "+".join(Step(each).name for each in steps or [record.step])
                step = f"{names} of {record.operation.id}"
        if step.startswith("HOT_ROWS"):
            moving.append(self._hot(plan.hot_rows) or "no limits")
        partial = plan.topology.partial_groups
        said = " | ".join([step, *moving] if step else moving) or "nothing moves"
        return said + (f" | partial groups {' '.join(map(str, partial))}" if partial else "")

    def _hot(self, limits: Iterable[plan_pb2.HotRows]) -> str:
        names = {table.id: table.name for table in self.fleet.tables}
        return ", ".join(
            f"{names[each.table_id]} {'all' if each.rows == NO_LIMIT else each.rows}"
            for each in limits
        )

    def do_plan(self) -> list[str]:
        said = []
        for each in self.fleet.plan().assignments:
            last = each.bucket_begin + each.bucket_count - 1
            run = f"{self._bucket(Bucket(each.table_id, each.bucket_begin))}-{last}"
            said.append(f"{run} {' '.join(self._place(place(at)) for at in each.owners)}")
        return said

    def do_status(self) -> list[str]:
        return [
            f"{each.node.name} {control_pb2.NodeState.Name(each.state).removeprefix('NODE_STATE_')}"
            f" plan {each.plan_epoch}"
            for each in self.fleet.core.status(self.fleet.now_ms).message().nodes
        ]

    def _bucket(self, at: Bucket) -> str:
        names = {table.id: table.name for table in self.fleet.tables}
        return f"{names[at.table]}.{at.bucket}"

    def _place(self, at: Place) -> str:
        names = [node.name for node in self.fleet.plan().topology.nodes]
        return f"{[*names, *self.added][at.node]}/{at.device}"

    def _operation(self, operation: control_pb2.Operation) -> str:
        state = control_pb2.OperationState.Name(operation.state).removeprefix("OPERATION_STATE_")
        ending = operation.state in ENDED and not operation.ended_ms
        return (
            f"{operation.id} {state}{' (ending)' if ending else ''} "
            f"{operation.buckets_done}/{operation.buckets_total}"
            + (f": {operation.message}" if operation.message else "")
        )


def play(text: str) -> str:
    """Run a script and return it with the outputs that it had."""
    script = Script()
    out: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        out.append(line)
        if line.startswith("> "):
            out += [f"  {said}" for said in script.run(line[2:])]
    return "\n".join(out) + "\n"


def commands(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("  "))


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_scenario(path: Path) -> None:
    text = path.read_text()
    played = play(commands(text))
    if REWRITE:
        path.write_text(played)
    assert played == text
