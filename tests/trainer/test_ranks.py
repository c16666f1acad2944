"""Many ranks learn what one does: steps, versions, checkpoints; and what is said when one fails."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fp64 import KEYS, SEED, Reference, batch_of
from killing import unserved
from numpy.typing import NDArray
from rankjobs import (
    OWNERS,
    RUNS,
    STEP,
    Steps,
    empty_parts,
    events_that_pause,
    failing,
    from_the_first,
    in_parts,
    let_go,
    own_loop,
    own_net_steps,
    some_steps,
    told_of_a_quiet_stream,
    train,
    train_wide,
    with_another_seed,
    wrong_events,
)
from rankpool import RankFailedError, RankPool, rank_pool
from snapshots import newest_files

from embertide.trainer.config import Codecs
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.model.dlrm import Dlrm
from embertide.trainer.model.learner import Learner, part_of
from embertide.trainer.publish.folder import Publication


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool() as made:
        yield made


# --- a step ---------------------------------------------------------------------------------------


def in_fp64(steps: int) -> tuple[list[NDArray[np.float64]], Reference]:
    learner = Learner(STEP)
    assert isinstance(learner.net, Dlrm)
    reference = Reference(STEP, learner.net)
    rng = np.random.default_rng(3)
    scores = []
    for _ in range(steps):
        batch = batch_of(rng, 12)
        dense_BD, label_B = batch.dense_BD.astype(np.float64), batch.label_B.astype(np.float64)
        scores.append(reference.step(batch.keys_BF, dense_BD, label_B))
    return scores, reference


def rows_of(found: list[Steps]) -> dict[tuple[int, int], NDArray[np.float32]]:
    """The rows of all ranks, by table and key."""
    store = EmbeddingStore(STEP.model, seed=SEED)
    for _, _, buckets in found:
        for (t, bucket), records in buckets.items():
            store.store.import_records(t, bucket, records)
    return {
        (t, key): store.store.lookup(t, np.array([key]))[0][0]
        for t in range(2)
        for key in range(KEYS)
    }


@pytest.mark.parametrize("how", list(OWNERS))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_of_any_ranks_is_that_of_fp64(pool: RankPool, ranks: int, how: str) -> None:
    found: list[Steps] = pool.run(ranks, some_steps, how, Codecs(), 5)
    want, reference = in_fp64(5)
    for scores, net, _ in found:  # the same on every rank
        for got_B, want_B in zip(scores, want, strict=True):
            np.testing.assert_allclose(got_B, want_B, rtol=1e-5, atol=1e-6)
        for name, value in net.items():
            np.testing.assert_allclose(value, reference.weights[name], rtol=1e-5, atol=2e-6)
            assert np.array_equal(value, found[0][1][name])
    rows = rows_of(found)
    for of, row in reference.rows.items():
        np.testing.assert_allclose(rows[of], row.w, rtol=1e-5, atol=2e-6)
    # Each bucket is written by one rank.
    places = [place for _, _, buckets in found for place in buckets]
    assert sorted(places) == [(t, b) for t in range(2) for b in range(4)]


@pytest.mark.parametrize("how", list(OWNERS))
def test_a_repeat_is_bit_for_bit_the_same_and_owners_do_not_matter(
    pool: RankPool, how: str
) -> None:
    first: list[Steps] = pool.run(4, some_steps, how, Codecs(), 4)
    again: list[Steps] = pool.run(4, some_steps, how, Codecs(), 4)
    other: list[Steps] = pool.run(4, some_steps, "by rows", Codecs(), 4)
    for found in (again, other):
        assert np.array_equal(found[0][0], first[0][0])
        mine = {place: records for _, _, buckets in first for place, records in buckets.items()}
        theirs = {place: records for _, _, buckets in found for place, records in buckets.items()}
        assert mine == theirs


@pytest.mark.parametrize(
    ("codecs", "atol"),
    [(Codecs(rows="fp16", gradients="fp16"), 2e-3), (Codecs(rows="bf16", gradients="int8"), 2e-2)],
)
@pytest.mark.parametrize("how", ["by rows", "everywhere"])
def test_codecs_round_and_replicas_stay_one(
    pool: RankPool, codecs: Codecs, atol: float, how: str
) -> None:
    found: list[Steps] = pool.run(2, some_steps, how, codecs, 5)
    _, reference = in_fp64(5)
    assert np.array_equal(found[0][0], found[1][0])
    rows = rows_of(found)
    for of, row in reference.rows.items():
        np.testing.assert_allclose(rows[of], row.w, atol=atol)


def test_a_rank_without_a_part_takes_the_step_as_all_do(pool: RankPool) -> None:
    (alone,) = pool.run(1, empty_parts)
    for scores in pool.run(4, empty_parts):
        np.testing.assert_allclose(scores, alone, rtol=1e-5, atol=1e-6)


def test_what_adds_up_gradients_goes_with_its_learner(pool: RankPool) -> None:
    assert pool.run(2, let_go) == [True, True]


def test_a_net_of_ones_own_has_the_same_statistics_on_all_ranks(pool: RankPool) -> None:
    one, *others = pool.run(2, own_net_steps)
    assert any("running_mean" in name for name in one)
    for other in others:
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)


def test_batches_in_parts_are_learned_alike_by_ranks(pool: RankPool) -> None:
    (alone,) = pool.run(1, in_parts, 1)
    for scores, net, _ in pool.run(2, in_parts, 3):
        for one, other in zip(alone[0], scores, strict=True):
            np.testing.assert_allclose(other, one, atol=1e-6)
        for name, value in alone[1].items():
            np.testing.assert_allclose(net[name], value, atol=1e-5, err_msg=name)


def test_parts_cover_a_batch_and_split_no_group() -> None:
    rng = np.random.default_rng(1)
    for size in (1, 2, 3, 7):
        batch = batch_of(rng, 40)
        ts_ms_B = np.sort(rng.integers(0, 12, 40))
        batch = dataclasses.replace(batch, ts_ms_B=ts_ms_B)
        parts = [part_of(batch, rank, size) for rank in range(size)]
        assert parts[0][0] == 0
        assert parts[-1][1] == 40
        for (_, end), (begin, _) in itertools.pairwise(parts):
            assert end == begin
            assert begin in (0, 40) or ts_ms_B[begin - 1] != ts_ms_B[begin]


def test_the_store_works_in_a_loop_of_ones_own(pool: RankPool) -> None:
    ((alone, rows),) = pool.run(1, own_loop)
    both = pool.run(2, own_loop)
    pooled = np.concatenate([np.split(out, 3) for out, _ in both], axis=1).reshape(alone.shape)
    np.testing.assert_allclose(pooled, alone, rtol=1e-5, atol=1e-6)
    found = {**both[0][1], **both[1][1]}
    assert found.keys() == rows.keys()
    assert {place: len(records) for place, records in found.items()} == {
        place: len(records) for place, records in rows.items()
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 1001])
def test_what_the_first_rank_gives_all_get(pool: RankPool, ranks: int, size: int) -> None:
    found = pool.run(ranks, from_the_first, size)
    assert [data for data, _ in found] == [bytes(range(256)) * size] * ranks
    sent = [bytes_ for _, bytes_ in found]
    # All get it once; where there are many, the first one does not send it to each.
    assert sum(sent) >= (ranks - 1) * 256 * size
    assert max(sent) <= 2 * 256 * size + 8


# --- runs -----------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return newest_files(Publication(folder))


@pytest.fixture(scope="module", params=list(RUNS))
def runs(
    request: pytest.FixtureRequest, pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[int, tuple[Path, list[dict[str, Any]]]]]:
    """A run that nothing stopped, by 1, 2 and 4 ranks."""
    name: str = request.param
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for ranks in (1, 2, 4):
        path = unserved(folder / str(ranks)).path
        found[ranks] = path, pool.run(ranks, train, name, str(path))
    return name, found


def test_ranks_publish_what_one_does(
    runs: tuple[str, dict[int, tuple[Path, list[dict[str, Any]]]]],
) -> None:
    name, found = runs
    one, (alone,) = found[1]
    for ranks in (2, 4):
        path, said = found[ranks]
        assert [each["events"] for each in said] == [alone["events"]] * ranks
        for figures in ("scores", "held", "gauc", "slices"):
            assert all(each[figures] == said[0][figures] for each in said)
        assert said[0]["held"].keys() == alone["held"].keys()
        assert said[0]["held"] == pytest.approx(alone["held"], abs=0.1)
        assert abs(said[0]["auc"] - alone["auc"]) < (0.01 if "pruned" in name else 0.002)
        for deltas in ("snapshots", "deltas", "checkpoints"):
            names = [sorted(p.name for p in (each / deltas).iterdir()) for each in (one, path)]
            assert names[0] == names[1]
        assert files_of(path).keys() == files_of(one).keys()
        if name == "under a budget":
            assert alone["held"]
            assert said[0]["gauc"] == pytest.approx(alone["gauc"], abs=0.01)
            assert said[0]["published"]["deferred_rows"] > 0
        elif "pruned" not in name:
            assert said[0]["store"]["rows"] == alone["store"]["rows"]
            assert said[0]["published"]["rows"] == alone["published"]["rows"]
        else:
            assert said[0]["pruning"]["bytes"] <= 40_000


def test_ranks_with_rows_on_ssds_publish_what_those_in_memory_do(
    pool: RankPool, tmp_path: Path
) -> None:
    folders = [unserved(tmp_path / name).path for name in ("memory", "ssd")]
    in_memory = pool.run(2, train_wide, "in memory", str(folders[0]))
    on_ssd = pool.run(2, train_wide, "on an SSD", str(folders[1]))
    for stats in (said["stats"] for said in on_ssd):
        assert min(stats["evictions_to_ssd"], stats["promotions"]) > 300
    assert on_ssd[0]["scores"] == in_memory[0]["scores"]
    assert files_of(folders[1]) == files_of(folders[0])


@pytest.mark.parametrize("batches", [pytest.param(5, marks=pytest.mark.long), 16])
def test_a_killed_rank_and_a_new_start_end_as_a_run_never_killed(
    runs: tuple[str, dict[int, tuple[Path, list[dict[str, Any]]]]],
    pool: RankPool,
    tmp_path: Path,
    batches: int,
) -> None:
    name, found = runs
    whole, said = found[2]
    folder = unserved(tmp_path / "pub").path
    first, second = pool.results(2, train, name, str(folder), batches, "kill", timeout_s=20)
    assert second is None
    assert isinstance(first, RankFailedError)
    assert first.kind == "RankLostError"
    assert "rank 1 is gone without a word" in first.text
    again = pool.run(2, train, name, str(folder))
    assert again[0]["lineage"] == 2
    assert again[0]["scores"] == said[0]["scores"]
    assert files_of(folder) == files_of(whole)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_goes_on_with_other_ranks(
    runs: tuple[str, dict[int, tuple[Path, list[dict[str, Any]]]]],
    pool: RankPool,
    tmp_path: Path,
    ranks: int,
) -> None:
    name, found = runs
    whole, said = found[2]
    folder = unserved(tmp_path / "pub").path
    pool.results(2, train, name, str(folder), 12, "kill", timeout_s=20)
    again = pool.run(ranks, train, name, str(folder))
    assert again[0]["events"] == said[0]["events"]
    assert abs(again[0]["auc"] - said[0]["auc"]) < (0.01 if "pruned" in name else 0.002)
    assert files_of(folder).keys() == files_of(whole).keys()


@pytest.mark.parametrize(
    ("ranks", "how", "after"),
    [(1, "kill within an increment", 20), pytest.param(2, "kill", 50, marks=pytest.mark.long)],
)
def test_a_run_killed_by_sigkill_goes_on_from_an_incremental_snapshot(
    pool: RankPool, tmp_path: Path, ranks: int, how: str, after: int
) -> None:
    whole = pool.run(ranks, train, "all rows", str(unserved(tmp_path / "whole").path))
    folder = unserved(tmp_path / "pub").path
    pool.results(ranks, train, "increments", str(folder), after, how, timeout_s=20)
    publication = Publication(folder)
    newest = publication.increments()[-1]
    assert newest > publication.snapshots()[-1]
    if ranks == 1:  # the newest is the one before the one that was being written
        torn = [path for path in (folder / "increments").iterdir() if path.name > newest.folder]
        assert [path.name for path in torn[0].iterdir()] == ["rows.safetensors"]
    again = pool.run(ranks, train, "increments", str(folder))
    assert [each["began_at"] for each in again] == [newest.number] * ranks
    assert again[0]["scores"] == whole[0]["scores"]
    assert again[0]["published"]["increments"] > 0
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_one_rank_that_is_told_to_stop_stops_all_with_a_checkpoint(
    runs: tuple[str, dict[int, tuple[Path, list[dict[str, Any]]]]],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    name, found = runs
    _, said = found[2]
    folder = unserved(tmp_path / "pub").path
    stopped = pool.run(2, train, name, str(folder), 7, "stop")
    assert [each["stopped"] for each in stopped] == [True, True]
    assert 0 < stopped[0]["events"] < said[0]["events"]
    publication = Publication(folder)
    assert publication.snapshots()[-1].number == stopped[0]["version"]
    again = pool.run(2, train, name, str(folder))
    assert again[0]["events"] == said[0]["events"]
    assert not again[0]["stopped"]
    assert abs(again[0]["auc"] - said[0]["auc"]) < (0.01 if "pruned" in name else 0.002)


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_rank_with_another_configuration_is_named(pool: RankPool, tmp_path: Path) -> None:
    for each in pool.results(2, with_another_seed, str(tmp_path)):
        assert each.kind == "ConfigurationError"
        assert "rank 1 has another configuration than rank 0: seed is 2, not 1" in each.text


@pytest.mark.parametrize(
    "stage",
    [
        *(pytest.param(stage, marks=pytest.mark.long) for stage in ("keys", "rows", "dense")),
        "gradients",
    ],
)
def test_a_rank_that_fails_in_any_stage_is_named_by_all(
    pool: RankPool, tmp_path: Path, stage: str
) -> None:
    folder = str(unserved(tmp_path / "pub").path)  # compiling takes longer than the other waits
    # The other one waits for so long in an exchange.
    first, second = pool.results(2, failing, stage, folder, timeout_s=8)
    assert second.kind == "OSError"
    assert first.kind == "RankLostError"
    assert "rank 1 failed: OSError: [Errno 28] No space left on device" in first.text


def test_a_drive_that_is_full_for_one_rank_costs_all_the_version_and_no_more(
    pool: RankPool, tmp_path: Path
) -> None:
    folder = str(unserved(tmp_path / "pub").path)
    # Every version but the first cannot be written by rank 1; the last one ends the run.
    found = pool.results(2, failing, "publish", folder, timeout_s=20)
    assert [each.kind for each in found] == ["NoRoomError", "NoRoomError"]
    assert "rank 1: " in found[0].text
    publication = Publication(tmp_path / "pub")
    assert not list((tmp_path / "pub" / "deltas").glob("*/.*"))
    for version in publication.deltas():
        assert list(publication.read_batches(version))


def test_events_that_cannot_be_read_end_all_ranks_with_the_same_words(
    pool: RankPool, tmp_path: Path
) -> None:
    for each in pool.results(2, wrong_events, str(tmp_path / "pub"), timeout_s=20):
        assert each.kind == "ConfigurationError"
        assert each.text.endswith("the events end here")


def test_a_stream_may_stand_still_for_longer_than_ranks_wait(
    pool: RankPool, tmp_path: Path
) -> None:
    found = pool.results(2, events_that_pause, str(tmp_path / "pub"), 8.0, timeout_s=6)
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_learned_is_told_while_nothing_comes(
    pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    """Also what ranks learn once they wait, as they ask for the keys of a batch ahead."""
    told = pool.run(ranks, told_of_a_quiet_stream, str(tmp_path / "pub"))[0]
    assert told[0][1] < told[-1][1]
    assert all(learned == events for learned, events in told)
    assert len(told) < 10, "what is told already is told again"
