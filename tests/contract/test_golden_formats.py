"""Files of earlier builds, kept in tests/golden: today's build reads each, and goes on from it.

A folder is made by the build of its format (support/golden_run.py, support/golden_state.py) and
never again. Whoever raises a format's number adds the folder of the new one.
docs/design/0010-compatibility.md has the promise.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import golden_run
import golden_state
import pytest
from golden_run import NEWS, RUN
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from simulation import SimulatedNode, Simulation

from embertide import _store
from embertide.server.adapters.state import MemoryState
from embertide.server.core.errors import Code, RefusedError
from embertide.server.core.plan.layout import Bucket, LaidPlan, layout_of
from embertide.server.core.state import Writes
from embertide.trainer.embedding.store import store_table
from embertide.trainer.model.learner import Learner
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.publish.snapshot import read_manifest
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint.checkpoint import SavedCheckpoint
from embertide.v1 import control_pb2, plan_pb2

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden"
CHECKPOINTS = sorted(GOLDEN.glob("checkpoint-*"))


@pytest.fixture(params=CHECKPOINTS, ids=[path.name for path in CHECKPOINTS])
def golden(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def expected(golden: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((golden / "expected.json").read_text())
    return read


def test_every_format_that_is_read_has_its_files() -> None:
    formats = []
    for path in CHECKPOINTS:
        file = sorted(path.glob("publication/checkpoints/*/checkpoint.json"))[-1]
        formats.append(json.loads(file.read_text())["checkpoint"]["format"])
    assert formats == list(range(checkpoints.OLDEST, checkpoints.FORMAT + 1))


def test_a_run_goes_on_from_an_older_checkpoint_and_ends_with_the_bytes_of_that_build(
    golden: Path, tmp_path: Path
) -> None:
    publication = Publication(tmp_path / "publication")
    shutil.copytree(golden / "publication", publication.path)
    begun = publication.snapshots()[-1].number
    command = [sys.executable, golden_run.__file__, "go-on", str(publication.path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["number"], said["changes"]) == (begun, 0)
    assert 0 < said["done"] < NEWS.total_events()
    assert said["passes"] > 3
    assert said["end"] == expected(golden)
    saved = checkpoints.load_newest(publication)
    assert saved is not None
    assert saved.checkpoint.done == NEWS.total_events()


def test_the_state_that_a_checkpoint_holds_is_all_read(golden: Path) -> None:
    publication = Publication(golden / "publication")
    version = publication.snapshots()[-1]
    saved = SavedCheckpoint(publication, version)
    checkpoint = saved.checkpoint
    assert checkpoint.version == version == VersionId(4, 1)
    assert (checkpoint.offset, checkpoint.done, checkpoint.events) == (96, 96, 96)
    assert len(checkpoint.histories[0].user_U) == 10
    assert {"state", "param_groups"} == set(checkpoint.optimizer)
    learner = Learner(RUN)
    saved.restore_rows(learner.rows)
    learner.rows.store.check_integrity()
    assert learner.rows.steps == checkpoint.rows[0] == 5
    assert learner.rows.store.seen_bytes(0) > 0
    manifest = read_manifest(publication.snapshot_path(version))
    assert learner.rows.stats()["rows"] == sum(each["rows"] for each in manifest["buckets"]) > 0


def restored(golden: Path) -> Learner:
    """Rows, and what learning knows of them, from the newest checkpoint of a folder."""
    publication = Publication(golden / "publication")
    learner = Learner(RUN)
    SavedCheckpoint(publication, publication.snapshots()[-1]).restore_rows(learner.rows)
    return learner


def test_all_formats_of_one_run_hold_the_same_state() -> None:
    """The folders are of the same run at the same version, each by the build of its format.

    But for that of two ranks, whose sums differ in the last bits: its end is compared instead.
    """
    *older_builds, newest_build = [path for path in CHECKPOINTS if path.name != "checkpoint-7"]
    newest = restored(newest_build).rows
    for path in older_builds:
        older = restored(path).rows
        assert older.progress() == newest.progress()
        assert older.store.seen_bytes(0) == newest.store.seen_bytes(0) > 0
        for t, _, bucket in newest.places():
            assert older.store.export_bucket(t, bucket) == newest.store.export_bucket(t, bucket)
            for one, other in zip(
                older.store.bucket_state(t, bucket),
                newest.store.bucket_state(t, bucket),
                strict=True,
            ):
                assert one.tobytes() == other.tobytes()


def test_a_prune_state_of_another_size_is_refused() -> None:
    store = restored(CHECKPOINTS[0]).rows.store
    for state in (b"", b"short", bytes(24 + 3 * 2048 - 1)):
        with pytest.raises(_store.StoreError, match=f"{len(state)} bytes is not of prune group 0"):
            store.prune_state_of_format_5(0, state)


def test_bucket_files_deltas_and_commits_lead_to_the_rows_of_the_next_snapshot(
    golden: Path,
) -> None:
    """The rows of the first snapshot and the deltas after it are those of the second."""
    publication = Publication(golden / "publication")
    first, second = publication.snapshots()
    manifests = [read_manifest(publication.snapshot_path(each)) for each in (first, second)]
    tables = [store_table(table, i, RUN.seed) for i, table in enumerate(RUN.model.tables)]
    store = _store.ServingStore(tables=tables, ddr_budget_bytes=16 << 20)
    index = {table.name: t for t, table in enumerate(tables)}

    def stage(number: int, manifest: dict[str, Any], version: VersionId) -> None:
        for each in manifest["buckets"]:
            info = _store.BucketFileInfo(**each)
            t = index[info.table]
            path = str(publication.snapshot_path(version))
            store.stage_records(
                number, t, info.bucket, _store.read_bucket_file(path, tables[t], info)
            )

    stage(first.number, manifests[0], first)
    store.commit(first.number)
    changed = 0
    for version in publication.deltas():
        if not first < version <= second:
            continue
        commit = publication.read_commit(version).commit
        assert VersionId.of(commit.version) == version
        assert commit.schema_id == manifests[0]["schema_id"]
        for batch in publication.read_batches(version):
            store.stage_records(version.number, batch.table_id, batch.bucket, batch.records)
            changed += len(batch.records)
        store.commit(version.number)
    assert changed > 1000
    assert commit.watermark_ms == manifests[1]["watermark_ms"]
    for each in manifests[1]["buckets"]:
        info = _store.BucketFileInfo(**each)
        t = index[info.table]
        kept = _store.read_bucket_file(str(publication.snapshot_path(second)), tables[t], info)
        assert store.export_bucket(t, info.bucket) == kept
    store.check_integrity()


# --- the state store ------------------------------------------------------------------------------

KINDS: dict[str, type[Message]] = {
    "plan.pb": plan_pb2.Plan,
    "nodes": control_pb2.RegisterNodeRequest,
    "operations": control_pb2.OperationRecord,
}


def read_state() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted((GOLDEN / "state-1").rglob("*.pb")):
        name = str(path.relative_to(GOLDEN / "state-1"))
        message = KINDS[name.split("/")[0]]()
        message.ParseFromString(path.read_bytes())
        found[name] = message
    return found


def test_plans_nodes_and_operations_read_as_they_were_written() -> None:
    wanted = json.loads((GOLDEN / "state-1" / "state.json").read_text())
    found = read_state()
    assert len(found) == 5
    as_json = {n: MessageToDict(m, preserving_proto_field_name=True) for n, m in found.items()}
    assert as_json == wanted


def older_fleet(*, begun_from: plan_pb2.Plan | None = None) -> Simulation:
    """Return an older build's fleet under a control plane of this one; its operation has ended.

    Args:
        begun_from: The plan before, as the store kept it. None: it has none that names nodes.
    """
    found = read_state()
    plan, store = found["plan.pb"], MemoryState()
    term = store.take_term()
    for epoch in range(1, plan.epoch):  # the store counts epochs by one
        before = plan_pb2.Plan() if begun_from is None else begun_from
        before.epoch = epoch
        store.commit(term, Writes(plan=LaidPlan.of(before)))
    writes = Writes(plan=LaidPlan.of(plan))
    for name, message in found.items():
        folder, _, file = name.rpartition("/")
        if folder:
            getattr(writes, folder)[file.removesuffix(".pb")] = message
    store.commit(term, writes)

    fleet = Simulation(list(plan.tables), expect=3, deadline_ms=100)
    fleet.store = store
    fleet.restart()
    for node in plan.topology.nodes:
        request = found[f"nodes/{node.name}.pb"].request_id
        fleet.nodes[node.name] = SimulatedNode(node, request)
        fleet.nodes[node.name].act(plan)
    until_ended(fleet, golden_state.OPERATION)
    return fleet


def until_ended(fleet: Simulation, operation: str) -> control_pb2.Operation:
    for _ in range(1000):
        fleet.step()
        if fleet.operation(operation).ended_ms:
            break
    return fleet.operation(operation)


def owners(plan: plan_pb2.Plan) -> dict[Bucket, list[int]]:
    layout = layout_of(plan.assignments)
    return {at: [place.node for place in held.owners] for at, held in layout.items()}


def test_a_control_plane_ends_the_reshard_that_an_older_one_began() -> None:
    fleet = older_fleet()
    ended = fleet.operation(golden_state.OPERATION)
    assert ended.state == control_pb2.OPERATION_STATE_SUCCEEDED
    for (table, bucket), node in golden_state.TARGET.items():
        assert owners(fleet.plan())[Bucket(table, bucket)] == [node]


UNDO = control_pb2.StartReshardRequest(operation_id="back", undo_operation=golden_state.OPERATION)


def test_an_operation_of_before_nodes_were_named_is_undone_by_the_plan_that_it_began_from() -> None:
    began = plan_pb2.Plan.FromString((GOLDEN / "state-1" / "plan.pb").read_bytes())
    for each in began.assignments:
        del each.joining[:]
    fleet = older_fleet(begun_from=began)
    assert owners(fleet.plan()) != owners(began)
    fleet.core.start(UNDO, fleet.now_ms)
    fleet.settle()
    assert until_ended(fleet, "back").state == control_pb2.OPERATION_STATE_SUCCEEDED
    assert owners(fleet.plan()) == owners(began)


def test_one_that_was_at_work_then_is_undone_as_any_other() -> None:
    began = plan_pb2.Plan.FromString((GOLDEN / "state-1" / "plan.pb").read_bytes())
    fleet = older_fleet()
    fleet.core.start(UNDO, fleet.now_ms)
    fleet.settle()
    assert until_ended(fleet, "back").state == control_pb2.OPERATION_STATE_SUCCEEDED
    assert owners(fleet.plan()) == owners(began)


def test_one_that_ended_before_nodes_were_named_is_not_undone_without_that_plan() -> None:
    fleet = older_fleet()
    del fleet.core.operations.find(golden_state.OPERATION).nodes[:]
    before = fleet.plan()
    with pytest.raises(RefusedError) as refused:
        fleet.core.start(UNDO, fleet.now_ms)
    assert refused.value.code is Code.FAILED_PRECONDITION
    assert refused.value.message == (
        "operation 'golden' is of a build whose records do not name nodes, and the plan that it "
        "began from is not kept: move its buckets by a target"
    )
    fleet.settle()
    assert fleet.plan() == before


def test_what_a_newer_build_adds_to_a_record_is_passed_over() -> None:
    """Field 4000, varint 1: a field that no build has yet."""
    for name, message in read_state().items():
        newer = type(message).FromString(message.SerializeToString() + b"\x80\xfa\x01\x01")
        assert MessageToDict(newer) == MessageToDict(message), name
