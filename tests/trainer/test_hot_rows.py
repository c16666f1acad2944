"""Rows with a rank of their own: nothing that is learned depends on them, and ranks are even."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hotjobs import added_up, chosen, planned, room, steps, train
from killing import unserved
from rankjobs import RUNS, STEP
from rankpool import RankFailedError, RankPool, rank_pool
from snapshots import newest_files

from embertide import _store
from embertide.trainer.config import Codecs, LocalSGD, RunConfig
from embertide.trainer.embedding.store import EmbeddingStore
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.publish.folder import Publication
from embertide.trainer.sync.hot import COUNTED_EVERY, AskCounts, Asks, candidates, choose


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool() as made:
        yield made


# --- which rows -----------------------------------------------------------------------------------


def asks_of(counts: list[int]) -> Asks:
    keys = len(counts)
    return Asks(np.zeros(keys, np.int32), np.arange(keys), np.array(counts))


def test_a_busy_rank_gives_its_most_frequent_keys_until_all_are_even() -> None:
    rng = np.random.default_rng(1)
    ranks, keys = 16, 4000
    count_K = np.sort(rng.zipf(1.3, keys).clip(4, 100))[::-1]
    home_K = np.where(rng.random(keys) < 0.3, 0, rng.integers(0, ranks, keys)).astype(np.uint16)
    load_R = np.bincount(home_K, count_K, ranks)
    assert load_R[0] > 4 * load_R.mean()
    asks = asks_of(count_K.tolist())
    hot = choose(asks, home_K, load_R, max_rows=keys)
    assert set(home_K[hot.key_K]) == {0}
    left_R = load_R - np.bincount(home_K[hot.key_K], count_K[hot.key_K], ranks)
    left_R += np.bincount(hot.host_K, count_K[hot.key_K], ranks)
    assert left_R.sum() == load_R.sum()
    assert left_R.max() <= 1.06 * left_R.mean()
    # No key of that rank that stays is asked for more often than one that goes.
    stay = np.setdiff1d(np.flatnonzero(home_K == 0), hot.key_K)
    assert count_K[stay].max() <= count_K[hot.key_K].min()
    few = choose(asks, home_K, load_R, max_rows=7)
    assert few.key_K.tolist() == hot.key_K[:7].tolist()


def test_the_choice_does_not_depend_on_who_counted_a_key() -> None:
    rng = np.random.default_rng(2)
    count_K = rng.integers(4, 30, 300)
    home_K = np.where(rng.random(300) < 0.6, 1, rng.integers(0, 4, 300)).astype(np.uint16)
    load_R = np.bincount(home_K, count_K, 4)
    order = rng.permutation(300)
    asks = asks_of(count_K.tolist())
    other = asks.of(order)
    sets = choose(asks, home_K, load_R, 200), choose(other, home_K[order], load_R, 200)
    assert len(sets[0].key_K) > 20
    for name in ("table_K", "key_K", "host_K"):
        assert getattr(sets[0], name).tolist() == getattr(sets[1], name).tolist()


def test_even_ranks_have_no_hot_rows() -> None:
    home_K = (np.arange(1000) % 2).astype(np.uint16)
    asks = asks_of([8] * 1000)
    load_R = np.bincount(home_K, asks.count_K, 2)
    assert not len(choose(asks, home_K, load_R, 100).key_K)
    assert not len(candidates(asks, home_K, load_R).key_K)
    assert not len(choose(asks, home_K, np.array([4200, 3800]), 100).key_K)  # within a tenth
    nothing = asks.of(np.zeros(1000, np.bool_))
    assert not len(choose(nothing, home_K[:0], np.zeros(2), 100).key_K)


def test_candidates_are_enough_of_a_busy_home_and_pay_for_their_way() -> None:
    asks = asks_of([100, 50, 20, 10, 4, 1, 0])
    home_K = np.array([0, 0, 1, 0, 0, 0, 0], np.uint16)
    found = candidates(asks, home_K, np.array([165.0, 20.0]))
    assert found.key_K.tolist() == [0], "half of the difference is 73"
    found = candidates(asks, home_K, np.array([1000.0, 20.0]))
    assert found.key_K.tolist() == [0, 1, 3, 4], "the last two are asked for too rarely"


def test_counts_are_bounded_and_keep_the_most_frequent() -> None:
    counts = AskCounts(2, max_rows=1)
    often = np.arange(100)
    for step in range(8 * COUNTED_EVERY):
        once = np.arange(1000 * step, 1000 * (step + 1)) + 1_000_000
        counts.add([[np.concatenate([often, once]), often, often[:50], often[:0]]])
    asks = counts.asks()
    assert len(asks.key_K) <= 1 << 14
    counted = {(t, k): n for t, k, n in zip(*(each.tolist() for each in asks), strict=True)}
    assert counted[0, 0] == 16, "once of its table, and once of its hot rows"
    assert counted[0, 99] == counted[1, 0] == 8


@pytest.mark.parametrize(("of_run", "of_plan", "want"), [(9, None, 9), (9, 0, 0), (0, 7, 7)])
def test_a_plan_says_how_many_rows_are_hot_before_the_run(
    pool: RankPool, of_run: int, of_plan: int | None, want: int
) -> None:
    assert pool.run(2, planned, of_run, of_plan) == [want, want]


# --- nothing depends on it ------------------------------------------------------------------------


def same(found: list[Any], want: list[Any]) -> None:
    for (scores, _, _), (expected, _, _) in zip(found, want, strict=True):
        np.testing.assert_array_equal(np.concatenate(scores), np.concatenate(expected))
    rows = [{at: of for _, each, _ in ranks for at, of in each.items()} for ranks in (found, want)]
    assert rows[0].keys() == rows[1].keys()
    for at, (records, state) in rows[1].items():
        assert rows[0][at][0] == records, f"rows of bucket {at}"
        assert rows[0][at][1] == state, f"what learning keeps of rows of bucket {at}"


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [(2, "rowwise_adagrad"), (3, "rowwise_adam"), (4, "adagrad"), (2, "sgd")],
)
def test_steps_with_hot_rows_are_bit_for_bit_those_without(
    pool: RankPool, ranks: int, optimizer: str, pruned: bool
) -> None:
    want = pool.run(ranks, steps, optimizer, pruned, Codecs(), False)
    found = pool.run(ranks, steps, optimizer, pruned, Codecs(), True)
    same(found, want)
    figures = [each[2] for each in found]
    assert sum(each["hot_asks"] for each in figures) > 0
    assert sum(each["home"] for each in figures) > 0
    assert figures[0]["passes"] == want[0][2]["passes"]
    assert (figures[0]["passes"] > 2) == pruned


def test_a_host_adds_gradients_up_in_the_order_of_ranks(pool: RankPool) -> None:
    """Sums are of fp64, so gradients of a usual size hide their order."""
    for found, want in pool.run(2, added_up):
        assert found == want


def test_rounded_gradients_stay_near_with_hot_rows(pool: RankPool) -> None:
    codecs = Codecs(rows="fp16", gradients="int8")
    want = pool.run(2, steps, "rowwise_adagrad", False, codecs, False)
    found = pool.run(2, steps, "rowwise_adagrad", False, codecs, True)
    for (scores, _, _), (expected, _, _) in zip(found, want, strict=True):
        np.testing.assert_allclose(np.concatenate(scores), np.concatenate(expected), atol=2e-2)


@pytest.mark.parametrize(
    "name",
    [n if n == "counters, pruned" else pytest.param(n, marks=pytest.mark.long) for n in RUNS],
)
def test_a_run_with_hot_rows_publishes_the_bytes_of_one_without(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    folders = [unserved(tmp_path / each).path for each in ("without", "with", "killed")]
    want = pool.run(3, train, name, str(folders[0]), False)
    found = pool.run(3, train, name, str(folders[1]), True)
    assert found[0]["scores"] == want[0]["scores"]
    assert newest_files(Publication(folders[1])) == newest_files(Publication(folders[0]))
    for deltas in ("snapshots", "deltas", "checkpoints"):
        names = [sorted(p.name for p in (each / deltas).iterdir()) for each in folders[:2]]
        assert names[0] == names[1]
    assert found[0]["hot"]["sets"] > 2
    assert found[0]["hot"]["hot_asks"] > 100
    assert found[0]["hot"]["rows"] == 0, "at the end all rows are at home"
    first, *_, last = pool.results(3, train, name, str(folders[2]), True, 16, timeout_s=20)
    assert last is None
    assert isinstance(first, RankFailedError)
    again = pool.run(3, train, name, str(folders[2]), True)
    assert again[0]["scores"] == want[0]["scores"]
    assert newest_files(Publication(folders[2])) == newest_files(Publication(folders[0]))


def test_a_run_goes_on_with_other_ranks_and_without_hot_rows(
    pool: RankPool, tmp_path: Path
) -> None:
    folders = [unserved(tmp_path / each).path for each in ("without", "with")]
    scores = []
    for folder, hot in zip(folders, (False, True), strict=True):
        pool.results(3, train, "news", str(folder), hot, 12, timeout_s=20)
        scores.append(pool.run(2, train, "news", str(folder), False)[0]["scores"])
    assert scores[1] == scores[0]
    assert newest_files(Publication(folders[1])) == newest_files(Publication(folders[0]))


# --- what it is for -------------------------------------------------------------------------------


def test_a_rank_with_a_whole_table_gives_keys_to_others(pool: RankPool) -> None:
    """Tables of few keys, whole at the first and at the last rank: two of four have nothing."""
    found = pool.run(4, chosen, 24, 100, True)
    assert all(each["set"] == found[0]["set"] for each in found)
    before, after = zip(*(each["asks"] for each in found), strict=True)
    assert max(before) > 1.9 * sum(before) / 4
    assert max(after) < 1.2 * sum(after) / 4
    assert sum(after) == pytest.approx(sum(before), rel=0.05)


# --- the store ------------------------------------------------------------------------------------


def made(optimizer: str = "rowwise_adam", buckets: int = 2) -> _store.TrainingStore:
    layout = _store.RowLayout(chunks=2, chunk_dim=2, dtype="fp32")
    table = _store.TableConfig(name="t", id=0, layout=layout, bucket_bits=buckets)
    return _store.TrainingStore(tables=[table], optimizer=optimizer)


def test_rows_that_another_store_has_learned_are_as_if_learned_here() -> None:
    rng = np.random.default_rng(4)
    keys = np.arange(20)
    whole, home, host = made(), made(), made(buckets=0)
    gradients = rng.standard_normal((6, 20, 4)).astype(np.float32)
    lent = keys[::3]

    def learn(stores: list[tuple[_store.TrainingStore, Any]], step: int) -> None:
        for store, of in stores:
            store.apply_gradients([(0, of, None, gradients[step][of])], learning_rate=0.1)

    for step in range(2):
        learn([(whole, keys), (home, keys)], step)
    for store in (whole, home):
        store.set_live(0, 3, 0b10)
        for bucket in range(4):
            store.take_changes(0, bucket)
    records, states = home.export_rows(0, np.append(lent, 999).astype(np.uint64))
    got = _store.record_keys(_store.RowLayout(chunks=2, chunk_dim=2, dtype="fp32"), records)
    assert got.tolist() == lent.tolist(), "a key without a row is left out"
    host.import_records(0, 0, records)
    host.set_states(0, got, states)
    assert host.take_changes(0, 0) == b""
    for step in range(2, 5):
        some = keys[:15]
        learn([(whole, some), (home, np.setdiff1d(some, lent))], step)
        learn([(host, np.intersect1d(some, lent))], step)
    changed = host.take_changes(0, 0)
    home.put_rows(0, *host.export_rows(0, _store.record_keys(whole_layout(), changed)))
    for bucket in range(4):
        assert home.take_changes(0, bucket) == whole.take_changes(0, bucket)
        assert home.export_bucket(0, bucket) == whole.export_bucket(0, bucket)
        for ours, theirs in zip(
            home.bucket_state(0, bucket), whole.bucket_state(0, bucket), strict=True
        ):
            assert ours.tobytes() == theirs.tobytes()


def whole_layout() -> _store.RowLayout:
    return _store.RowLayout(chunks=2, chunk_dim=2, dtype="fp32")


def test_rows_that_cannot_be_put_are_refused() -> None:
    store, other = made(), made()
    for each in (store, other):
        each.ensure_rows(0, np.arange(3))
    records, states = other.export_rows(0, np.arange(3).astype(np.uint64))
    with pytest.raises(_store.StoreError, match="3 rows of 4 elements of state"):
        store.put_rows(0, records, tuple(each[:2] for each in states))  # type: ignore[arg-type]
    store.set_live(0, 1, 0b01)
    with pytest.raises(_store.StoreError, match=r"key 1 of table t comes with chunks 3.*has 1"):
        store.put_rows(0, records, states)
    store.set_live(0, 1, 0)
    with pytest.raises(_store.StoreError, match="key 1 has no row"):
        store.put_rows(0, records, states)
    with pytest.raises(_store.StoreError, match="table 1 does not exist"):
        store.export_rows(1, np.arange(3).astype(np.uint64))


def test_hot_keys_stand_in_blocks_of_their_own() -> None:
    table = (1, 4, 4, np.array([0, 1], np.uint16))
    router = _store.Router([table, (0, 4, 4, np.zeros(1, np.uint16))], ranks=3, rank=0)
    keys = np.arange(10)
    router.set_hosts(0, 1, keys[:3], np.array([2, 0, 1], np.uint16))
    routed = router.route([(0, np.tile(keys, 2), None)])
    lengths_RT = routed.lengths.reshape(3, 2)
    assert lengths_RT[:, 1].tolist() == [1, 1, 1]
    assert lengths_RT[:, 0].sum() == 7
    assert sorted(routed.keys.tolist()) == keys.tolist()
    assert router.take_load().sum() == 10, "their buckets are asked for all the same"
    router.set_hosts(0, 1, keys[:0], np.empty(0, np.uint16))
    assert router.route([(0, keys, None)]).lengths.reshape(3, 2)[:, 1].sum() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, [1], [0]), "table 2 does not exist"),
        ((0, 1, [1, 2], [0]), "1 ranks for 2 hot keys"),
        ((0, 1, [1], [3]), "a hot key is at rank 3; there are 3 ranks"),
    ],
)
def test_wrong_hosts_are_refused(arguments: Any, message: str) -> None:
    table = (0, 4, 4, np.zeros(1, np.uint16))
    router = _store.Router([table, table], ranks=3, rank=0)
    t, as_table, keys, hosts = arguments
    with pytest.raises(_store.StoreError, match=message):
        router.set_hosts(t, as_table, np.array(keys), np.array(hosts, np.uint16))


# --- what is refused ------------------------------------------------------------------------------


def test_settings_that_cannot_be_are_refused() -> None:
    model = STEP.model
    with pytest.raises(ValueError, match="hot_rows is -1; give 0, which is none, or more"):
        RunConfig(model=model, hot_rows=-1)
    with pytest.raises(ValueError, match="hot_rows is 5, and the ranks of LocalSGD take no step"):
        RunConfig(model=model, hot_rows=5, sync=LocalSGD(every=2))
    with pytest.raises(ConfigurationError, match="one rank alone has all rows: leave it out"):
        EmbeddingStore(model, hot_rows=5)


def test_more_than_memory_has_room_for_is_refused_with_a_number_that_fits(pool: RankPool) -> None:
    fits = set(pool.run(2, room))
    assert len(fits) == 1
    assert 1_000 < fits.pop() < 100_000
