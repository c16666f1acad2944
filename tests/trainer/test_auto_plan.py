"""A run that looks for a plan of its ranks: it ends as one that does not, killed at any stage."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from planjobs import RUN, look, supervised, train
from rankpool import RankFailedError, RankPool, rank_pool
from snapshots import newest_files

from embertide.trainer.config import PruneConfig, RunConfig
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run import plan_record
from embertide.trainer.run.auto_plan import AutoPlan, AutoPlanner
from embertide.trainer.run.plan_record import PlanRecord
from embertide.trainer.sync.channel import ALONE, Channel
from embertide.trainer.sync.plan import balanced, text
from embertide.trainer.sync.ranks import Ranks

_MACHINE = "a machine"
_TRIAL = PlanRecord(
    stage="trial", ranks=2, machine=_MACHINE, plan=text(RUN.model, balanced(RUN.model, 2))
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool() as made:
        yield made


@pytest.fixture(scope="module")
def whole(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Publication, int]:
    """A run of two ranks without a plan, and how many events it learned."""
    folder = tmp_path_factory.mktemp("whole") / "pub"
    return Publication(folder), pool.run(2, train, str(folder))[0]


@pytest.fixture
def publication(whole: tuple[Publication, int], tmp_path: Path) -> Publication:
    """An empty one; the compiled net, which takes seconds, is there."""
    path = tmp_path / "pub"
    path.mkdir()
    (path / "program.pt2").hardlink_to(whole[0].program)
    return Publication(path)


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["kept", "refused"])
def test_a_plan_is_tried_and_the_run_ends_as_one_without(
    pool: RankPool, whole: tuple[Publication, int], publication: Publication, outcome: str
) -> None:
    starts = supervised(lambda: pool.run(2, look, str(publication.path), outcome))
    first, second = starts[:2]
    assert (first["is_planned"], first["stage"]) == (False, "trial")
    assert first["default_s"] > 0
    assert first["predicted_s"] > 0
    assert second["searched"] == first["searched"] > 0
    assert second["is_planned"]
    assert {owner for of in second["owns"] for owner in of} == {1}
    assert second["stage"] == outcome
    assert (second["measured_s"] > second["default_s"]) == (outcome == "refused")
    if outcome == "refused":  # once more, without
        assert [each["is_planned"] for each in starts] == [False, True, False]
        assert starts[2]["owns"] != second["owns"]
    else:
        assert len(starts) == 2
    assert starts[-1]["events"] == whole[1]
    assert newest_files(publication) == newest_files(whole[0])
    # A decision stays.
    (again,) = supervised(lambda: pool.run(2, look, str(publication.path), outcome))
    assert again["stage"] == outcome


@pytest.mark.parametrize(
    ("stage", "lost"),
    [
        ("search", 1),
        ("restarted", 0),
        ("trial", 1),
        *(
            pytest.param(*fault, marks=pytest.mark.long)
            for fault in (("profile", 1), ("restart", 0), ("search", 0), ("trial", 0))
        ),
    ],
)
def test_a_run_that_is_killed_at_any_stage_ends_as_one_that_is_not(
    pool: RankPool, whole: tuple[Publication, int], publication: Publication, stage: str, lost: int
) -> None:
    path, killed = str(publication.path), 0
    for _ in range(3):
        found = pool.results(2, look, path, "kept", lost, stage, timeout_s=60)
        if found[lost] is None:
            killed += 1
            assert isinstance(found[1 - lost], RankFailedError)
            break
    assert killed == 1
    starts = supervised(lambda: pool.run(2, look, path, "kept"))
    assert starts[-1]["stage"] == "kept"
    assert starts[-1]["is_planned"]
    assert starts[-1]["events"] == whole[1]
    assert newest_files(publication) == newest_files(whole[0])


# --- no plan --------------------------------------------------------------------------------------


class _Two(Channel):
    size = 2


@pytest.mark.parametrize(
    ("change", "ranks", "is_supervised", "why"),
    [
        ({}, 1, True, "one rank owns all rows"),
        ({}, 2, False, "nothing starts the ranks again"),
        ({"prune": PruneConfig(ratio=2)}, 2, True, "the run prunes"),
        ({"ssd_budget_bytes": 1 << 20, "ssd_directory": "ssd"}, 2, True, "on an SSD"),
    ],
    ids=["one rank", "no supervisor", "pruned", "SSD"],
)
def test_a_run_that_can_have_no_plan_says_why_and_runs_on(
    tmp_path: Path, change: dict[str, object], ranks: int, is_supervised: bool, why: str
) -> None:
    run: RunConfig = dataclasses.replace(RUN, **change)  # type: ignore[arg-type]
    planner = AutoPlanner(
        run,
        Publication(tmp_path),
        AutoPlan(is_supervised=is_supervised),
        ranks=Ranks(0, ranks, None, 1.0),
        channel=ALONE if ranks == 1 else _Two(),
    )
    assert planner.record.stage == "none"
    assert why in planner.record.why
    assert planner.owners is None
    assert not planner.ends(0, lambda: True)
    assert not (tmp_path / plan_record.FILE).exists()  # another start may differ in that


# --- the record -----------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    _TRIAL.write(tmp_path)
    found, reason = plan_record.read(tmp_path, RUN.model, 2, _MACHINE)
    assert (found, reason) == (_TRIAL, "")
    owners = found.owners(RUN.model)
    assert owners is not None
    assert owners.ranks == 2
    assert found.figures().keys() >= {"stage", "searched", "why"}
    refused = dataclasses.replace(_TRIAL, stage="refused")
    assert refused.owners(RUN.model) is None


def test_the_name_of_a_record_is_on_the_drive_once_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def sync(folder: Path) -> None:
        synced.append((folder, (folder / plan_record.FILE).exists()))

    monkeypatch.setattr(plan_record, "sync_folder", sync)
    _TRIAL.write(tmp_path)
    assert synced == [(tmp_path, True)]  # after the rename


def test_a_folder_without_a_record_begins_with_a_profile(tmp_path: Path) -> None:
    found, reason = plan_record.read(tmp_path, RUN.model, 2, _MACHINE)
    assert (found.stage, reason) == ("profile", "")


@pytest.mark.parametrize("of", ["ranks", "machine", "tables", "plan's ranks", "field", "JSON"])
def test_a_record_of_something_else_counts_for_nothing(tmp_path: Path, of: str) -> None:
    record, model, ranks, machine = _TRIAL, RUN.model, 2, _MACHINE
    if of == "ranks":
        ranks = 3
    elif of == "machine":
        machine = "another"
    elif of == "tables":
        record = dataclasses.replace(record, plan=record.plan.replace('"user"', '"users"'))
    elif of == "plan's ranks":
        record = dataclasses.replace(record, plan=text(model, balanced(model, 4)))
    record.write(tmp_path)
    path = tmp_path / plan_record.FILE
    if of == "field":
        path.write_text(path.read_text().replace('"why": ""', '"why": 1'))
    elif of == "JSON":
        path.write_text("{")
    found, reason = plan_record.read(tmp_path, model, ranks, machine)
    assert found == PlanRecord(ranks=ranks, machine=machine)
    words = {
        "ranks": "of 2 ranks, and 3",
        "machine": "another machine",
        "tables": "not for these tables",
        "plan's ranks": "not for these ranks",
        "field": "no record",
        "JSON": "cannot be read",
    }
    assert words[of] in reason
