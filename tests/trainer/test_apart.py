"""Ranks that are not at the same step: every event is learned once, and versions are whole."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apartjobs import APART, refused, train_apart
from rankjobs import RUNS, train
from rankpool import RankFailedError, RankPool, rank_pool

from embertide.trainer.config import (
    LabelJoin,
    OptimizerConfig,
    PartialAllReduce,
    PruneConfig,
    ScheduleConfig,
)
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.apart import check_supported

EVENTS = 520  # of NEWS


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool() as made:
        yield made


def learned(found: list[Any]) -> list[int]:
    """Every event that a rank took a step with."""
    return sorted(event for each in found for batch in each["learned"] for event in batch.tolist())


@pytest.mark.parametrize("name", ["news", "meeting", "hop"])
def test_ranks_apart_learn_every_event_once_and_end_as_one(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    found = pool.run(3, train_apart, name, str(tmp_path))
    first = found[0]
    assert learned(found) == list(range(EVENTS))
    assert first["events"] == EVENTS
    for other in found[1:]:
        assert other["version"] == first["version"]
        for part, value in first["net"].items():
            np.testing.assert_array_equal(other["net"][part], value, err_msg=part)
    rows = first["apart"]["rows"]
    assert rows["repeated"] == 0
    assert sum(rows["staleness"].values()) == rows["applied"]
    assert {"gather", "apply", "next", "replicas"} <= set(first["traffic"])
    progress = first["progress"]
    assert sum(progress["batches"].values()) == sum(len(each["learned"]) for each in found)
    assert sum(progress["row_staleness"].values()) == rows["applied"]
    assert progress["waits_s"]["batch"] > 0
    if name == "meeting":
        assert sum(first["apart"]["meetings"]["groups"].values()) > 10
        assert progress["groups"] == first["apart"]["meetings"]["groups"]
        assert first["traffic"]["models"]["bytes"] > 0
    if name == "hop":
        assert first["apart"]["neighbours"]["iterations"] == sum(
            len(each["learned"]) for each in found
        )
        gaps = first["apart"]["neighbours"]["gaps"]
        assert progress["iteration_gap"] == gaps
        assert sum(gaps.values()) > 10
        assert first["traffic"]["net"]["bytes"] > 0


def test_versions_are_numbered_and_timed_as_those_of_ranks_that_step_together(
    pool: RankPool, tmp_path: Path
) -> None:
    pool.run(2, train, "news", str(tmp_path / "together"))
    pool.run(2, train_apart, "news", str(tmp_path / "apart"))
    together, apart = (Publication(tmp_path / name) for name in ("together", "apart"))
    assert [v.number for v in apart.versions()] == [v.number for v in together.versions()]
    for one, other in zip(together.deltas(), apart.deltas(), strict=True):
        mine, its = together.read_commit(one).commit, apart.read_commit(other).commit
        assert mine.watermark_ms == its.watermark_ms


@pytest.mark.parametrize("name", ["free", "meeting", "hop that skips"])
def test_a_slow_rank_takes_fewer_batches_and_none_is_split(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    found = pool.run(3, train_apart, name, str(tmp_path), 0, "", 1.0)
    assert learned(found) == list(range(EVENTS))
    counts = [len(each["learned"]) for each in found]
    assert counts[2] < min(counts[:2]) / 2
    times = [ts_ms for each in found for batch in each["times"] for ts_ms in set(batch.tolist())]
    assert len(times) == len(set(times)), "events of one time were learned apart"


@pytest.mark.parametrize("name", ["held out, sampled", "counters"])
def test_what_the_first_rank_counts_is_what_ranks_together_count(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    apart = pool.run(2, train_apart, name, str(tmp_path / "apart"))
    together = pool.run(2, train_apart, f"{name}, together", str(tmp_path / "together"))
    for figure in ("events", "unsampled", "version"):
        assert apart[0][figure] == together[0][figure], figure
    assert list(apart[0]["held"]) == list(together[0]["held"])
    assert apart[0]["store"]["rows"] > 0
    assert apart[0]["store"]["rows"] == together[0]["store"]["rows"]


@pytest.mark.parametrize("name", ["news", "hop, versions"])
def test_a_killed_rank_ends_all_and_a_new_start_learns_each_event_once(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    whole = pool.run(2, train_apart, name, str(tmp_path / "whole"))
    folder = str(tmp_path / "killed")
    first, lost = pool.results(2, train_apart, name, folder, 0, "kill")
    assert lost is None
    assert isinstance(first, RankFailedError)
    # Whichever thread is the first to miss it; one that writes a checkpoint says so, too.
    assert "rank 1 is gone without a word" in first.text
    found = pool.run(2, train_apart, name, folder)
    begun_at = found[0]["began_events"]
    assert 0 < begun_at < EVENTS
    # Events of the checkpoint, and no others, are not learned again.
    assert learned(found) == list(range(begun_at, EVENTS))
    assert found[0]["events"] == EVENTS
    assert found[0]["version"] >= whole[0]["version"]


def test_a_rank_that_is_told_to_stop_stops_all_with_a_checkpoint(
    pool: RankPool, tmp_path: Path
) -> None:
    found = pool.run(2, train_apart, "news", str(tmp_path), 2, "stop", 0.3)
    begun = found[0]["events"]
    assert found[0]["stopped"]
    assert begun < EVENTS
    again = pool.run(2, train_apart, "news", str(tmp_path))
    assert again[0]["began_events"] == begun
    assert learned(found) + learned(again) == list(range(EVENTS))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sync": PartialAllReduce(schedule="static")}, "ranks that are at the same step"),
        ({"prune": PruneConfig(bytes=40_000)}, "prune, for all ranks make a pass"),
        ({"labels": LabelJoin(wait_s=60)}, "labels, for impressions are scored"),
        ({"ssd_budget_bytes": 1 << 20, "ssd_directory": "ssd"}, "ssd_budget_bytes"),
        ({"codecs": dataclasses.replace(RUNS["news"].codecs, gradients="int8")}, "int8 rounds off"),
        (
            {"optimizer": OptimizerConfig(schedule=ScheduleConfig(name="step", steps=10))},
            "optimizer.schedule, for it counts steps",
        ),
    ],
)
def test_what_ranks_apart_cannot_do_is_refused_with_the_reason(
    change: dict[str, Any], words: str
) -> None:
    run = dataclasses.replace(APART["news"], **change)
    with pytest.raises(ConfigurationError, match=words):
        check_supported(run)


@pytest.mark.parametrize("what", ["everywhere", "statistics"])
def test_a_plan_or_a_net_they_cannot_do_is_refused(
    pool: RankPool, tmp_path: Path, what: str
) -> None:
    with pytest.raises(RankFailedError, match=r"sync=LocalSGD\(\) does not go with"):
        pool.run(2, refused, what, str(tmp_path))
