"""Faults of one rank of many: lost in a stage, a full drive, a wrong clock, a full store.

The error names the rank, no version is there in part, and the run goes on.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rankfaults import (
    CROWDED,
    crowd_store,
    fill_drive,
    go_on_half_blind,
    lose_rank,
    overfill_store,
    shift_clock,
)
from rankjobs import train
from rankpool import RankFailedError, RankPool, rank_pool
from snapshots import newest_files

from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.snapshot import read_manifest
from embertide.trainer.run.checkpoint.checkpoint import is_complete
from embertide.trainer.sync import plan

HOUR_S = 3600


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool() as made:
        yield made


@pytest.fixture(scope="module")
def whole(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Publication:
    """A run of two ranks without a fault."""
    folder = tmp_path_factory.mktemp("whole") / "pub"
    pool.run(2, train, "news", str(folder))
    return Publication(folder)


@pytest.fixture
def publication(whole: Publication, tmp_path: Path) -> Publication:
    """An empty one; the compiled net, which takes seconds, is there."""
    path = tmp_path / "pub"
    path.mkdir()
    (path / "program.pt2").hardlink_to(whole.program)
    return Publication(path)


def check_nothing_is_there_in_part(publication: Publication) -> None:
    """Every version that can be seen can be read to its end."""
    for version in publication.deltas():
        assert list(publication.read_batches(version))
    for version in publication.snapshots():
        snapshot = publication.snapshot_path(version)
        manifest = read_manifest(snapshot)
        assert all((snapshot / each["path"]).exists() for each in manifest["buckets"])
        assert is_complete(publication, version)


@pytest.mark.parametrize(
    ("stage", "lost"),
    [
        ("gradients", 1),
        ("commit", 0),
        *(
            pytest.param(*fault, marks=pytest.mark.long)
            for fault in (
                *(("events", 0), ("keys", 1), ("rows", 0), ("dense", 0)),
                *(("delta", 1), ("snapshot", 1), ("checkpoint", 0), ("checkpoint", 1)),
            )
        ),
    ],
)
def test_a_rank_that_is_killed_in_any_stage_is_named_and_leaves_nothing_in_part(
    pool: RankPool, whole: Publication, publication: Publication, stage: str, lost: int
) -> None:
    found = pool.results(2, lose_rank, stage, lost, str(publication.path), timeout_s=20)
    assert found[lost] is None
    other = found[1 - lost]
    assert isinstance(other, RankFailedError)
    assert f"rank {lost} is gone without a word" in other.text
    check_nothing_is_there_in_part(publication)
    if stage != "events":  # they are read long before they are learned
        assert publication.snapshots()[-1].number > 1
    pool.run(2, train, "news", str(publication.path))
    check_nothing_is_there_in_part(publication)
    assert newest_files(publication) == newest_files(whole)


@pytest.mark.parametrize("stage", ["snapshot", "state"])
def test_a_drive_that_is_full_for_one_rank_costs_all_the_checkpoint_and_no_more(
    pool: RankPool, whole: Publication, publication: Publication, stage: str
) -> None:
    found = pool.run(2, fill_drive, stage, str(publication.path))
    assert [each["checkpoints_without_room"] for each in found] == [1, 1]
    check_nothing_is_there_in_part(publication)
    assert newest_files(publication) == newest_files(whole)


@pytest.mark.parametrize(("wrong", "by_s"), [(0, -HOUR_S), (1, HOUR_S)])
def test_times_are_by_the_first_ranks_clock_and_nothing_else_depends_on_any(
    pool: RankPool, whole: Publication, publication: Publication, wrong: int, by_s: int
) -> None:
    began_ms = min(pool.run(2, shift_clock, wrong, by_s, str(publication.path)))
    lines = [json.loads(line) for line in publication.log.read_text().splitlines()]
    by_clock_ms = began_ms + (by_s * 1000 if wrong == 0 else 0)
    for line in lines:
        assert 0 <= line["committed_ms"] - by_clock_ms < 120_000
    for version in publication.deltas():
        committed_ms = publication.read_commit(version).commit.committed_ms
        assert 0 <= committed_ms - by_clock_ms < 120_000
    assert [line["number"] for line in lines] == list(range(1, len(lines) + 1))
    assert newest_files(publication) == newest_files(whole)


@pytest.mark.parametrize("blind", [0, 1])
def test_all_ranks_go_on_from_one_checkpoint_whatever_each_sees_of_the_folder(
    pool: RankPool, whole: Publication, tmp_path: Path, blind: int
) -> None:
    publication = Publication(shutil.copytree(whole.path, tmp_path / "pub"))
    before, newest = publication.snapshots()[-2:]
    found = pool.results(2, go_on_half_blind, blind, str(publication.path))
    if blind == 0:  # which names the one before
        assert found == [before.number, before.number]
        return
    for each in found:
        assert isinstance(each, RankFailedError)
        assert f"checkpoint of version {newest.number}, which is not in" in str(each)
        assert "rank 1" in str(each)
    assert publication.snapshots()[-1] == newest
    assert is_complete(publication, newest), "a checkpoint was put aside that is whole"


@pytest.fixture
def all_at_one(tmp_path: Path) -> str:
    """A plan that gives rank 1 every row."""
    owners = {table.name: 1 for table in CROWDED["plain"].model.tables}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": plan.FORMAT, "ranks": 2, "tables": owners}))
    return str(path)


def test_a_store_that_is_full_on_one_rank_ends_all_with_its_words(
    pool: RankPool, publication: Publication, all_at_one: str
) -> None:
    job = overfill_store, all_at_one, str(publication.path)
    first, _ = pool.results(2, *job, timeout_s=20)
    assert first.kind == "RankLostError"
    assert first.text.startswith("rank 1 failed: StoreError: key ")
    assert first.text.count("does not fit the budget of 1048576 bytes") == 1
    check_nothing_is_there_in_part(publication)


def test_keys_that_pruned_rows_leave_no_room_for_are_counted_and_shown(
    pool: RankPool, publication: Publication, all_at_one: str
) -> None:
    first, second = pool.run(2, crowd_store, "pruned", all_at_one, str(publication.path))
    assert set(first["here"].values()) == {0}
    assert second["here"]["unworthy_keys"] + second["here"]["worthy_keys_without_room"] > 0
    assert first["total"] == second["total"] == second["here"]
    last = first["shown"][-1]
    assert {name: last[name] for name in second["here"]} == second["here"]
    assert not second["shown"]  # progress is the first rank's
    check_nothing_is_there_in_part(publication)
