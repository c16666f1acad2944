"""Stores of several ranks that prune as one."""

import numpy as np
import pytest

from embertide import _store

_DIM = 4
_BUCKETS = 4


def _store_of_one_table(waiting_bytes: int = 1 << 14) -> _store.TrainingStore:
    layout = _store.RowLayout(chunks=1, chunk_dim=_DIM, dtype="fp32")
    table = _store.TableConfig(name="t", id=0, layout=layout, bucket_bits=2)
    return _store.TrainingStore(tables=[table], prune_groups=[([0], waiting_bytes, [])])


def _rank_of(key: int) -> int:
    return (_store.hash_key(key) & 0xFFFFFFFFFFFFFFFF) * _BUCKETS // 2**64 % 2


def _learn(whole: _store.TrainingStore, ranks: list[_store.TrainingStore]) -> None:
    keys = np.arange(500, dtype=np.int64)
    gradients = np.random.default_rng(1).standard_normal((500, _DIM), dtype=np.float32)
    whole.apply_gradients([(0, keys, None, gradients)], learning_rate=0.1)
    for rank, store in enumerate(ranks):
        owned = np.array([_rank_of(key) == rank for key in range(500)])
        store.apply_gradients([(0, keys[owned], None, gradients[owned])], learning_rate=0.1)


def test_two_ranks_prune_to_the_rows_of_one_store() -> None:
    whole, ranks = _store_of_one_table(), [_store_of_one_table(), _store_of_one_table()]
    _learn(whole, ranks)
    rows = sum(store.prune_rows(0) for store in ranks)
    assert rows == whole.prune_rows(0) == 500
    samples = [store.prune_sample(0, rows) for store in ranks]
    want = whole.prune(0, 10_000)
    outcomes = [store.prune(0, 10_000, samples=samples) for store in ranks]
    assert {outcome.price for outcome in outcomes} == {want.price}
    assert sum(outcome.bytes for outcome in outcomes) == want.bytes
    for bucket in range(_BUCKETS):
        parts = [store.export_bucket(0, bucket) for store in ranks]
        assert whole.export_bucket(0, bucket) in parts
    assert [store.prune_room(0) for store in ranks] == [0, 0], "nobody said yet what is theirs"
    ranks[0].set_prune_room(0, 100)
    assert ranks[0].prune_room(0) == 100


def test_a_sample_of_another_step_is_refused() -> None:
    whole, ranks = _store_of_one_table(), [_store_of_one_table(), _store_of_one_table()]
    _learn(whole, ranks)
    samples = [store.prune_sample(0, 500) for store in ranks]
    ranks[0].apply_gradients([], learning_rate=0.1)
    with pytest.raises(_store.StoreError, match="sample 0: step 2 in one sample and 1"):
        ranks[0].prune(0, 10_000, samples=samples)


def test_states_of_two_ranks_are_loaded_by_one() -> None:
    whole, ranks = _store_of_one_table(), [_store_of_one_table(), _store_of_one_table()]
    _learn(whole, ranks)
    for store in ranks:
        store.prune(0, 5_000)
    states = [store.prune_state(0) for store in ranks]
    for seen in (True, False):
        store = _store_of_one_table(waiting_bytes=1 << 12)
        store.load_prune_states(0, states, seen=seen)
        assert (store.seen_bytes(0) > 0) == seen
    with pytest.raises(_store.StoreError, match="its tables must be"):
        store.load_prune_states(0, [states[0], b"short"], seen=True)
