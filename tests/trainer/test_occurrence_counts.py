"""Gradients of deduplicated keys, which say how many occurrences each key stands for."""

import numpy as np
import pytest
from numpy.typing import NDArray

from embertide import _store

_KEYS = np.array([7, -3, 12], np.int64)
_GRADIENTS = np.ones((3, 4), np.float32)


def _store_of_one_table(new_row_accesses: int = 1) -> _store.TrainingStore:
    layout = _store.RowLayout(chunks=1, chunk_dim=4, dtype="fp32")
    table = _store.TableConfig(name="t", id=0, layout=layout, bucket_bits=0)
    return _store.TrainingStore(
        tables=[table],
        utility="accesses",
        utility_decay=1.0,
        new_row_accesses=new_row_accesses,
    )


def test_a_key_with_a_count_is_as_many_occurrences() -> None:
    store = _store_of_one_table(new_row_accesses=3)
    counts = np.array([3, 2, 40], np.uint32)
    updated = store.apply_gradients([(0, _KEYS, None, _GRADIENTS, counts)], learning_rate=0.1)
    assert updated == 2, "two occurrences are one too few for a row"
    _, _, utilities, _, _ = store.bucket_state(0, 0)
    assert sorted(utilities[:, 0]) == [3.0, 40.0]


@pytest.mark.parametrize("counts", [None, np.ones(3, np.uint32)])
def test_counts_of_one_change_nothing(counts: NDArray[np.uint32] | None) -> None:
    with_counts, without = _store_of_one_table(), _store_of_one_table()
    with_counts.apply_gradients([(0, _KEYS, None, _GRADIENTS, counts)], learning_rate=0.1)
    without.apply_gradients([(0, _KEYS, None, _GRADIENTS)], learning_rate=0.1)
    assert with_counts.export_bucket(0, 0) == without.export_bucket(0, 0)


@pytest.mark.parametrize(
    ("offsets", "counts", "message"),
    [
        (None, [1, 0, 2], "key -3 has count 0"),
        (None, [1, 2], "2 counts for 3 keys"),
        ([0, 1, 2, 3], [1, 1, 1], "no offsets"),
    ],
)
def test_wrong_counts_are_refused(
    offsets: list[int] | None, counts: list[int], message: str
) -> None:
    store = _store_of_one_table()
    bags = None if offsets is None else np.array(offsets, np.uint32)
    wrong = (0, _KEYS, bags, _GRADIENTS, np.array(counts, np.uint32))
    with pytest.raises(_store.StoreError, match=message):
        store.apply_gradients([wrong], learning_rate=0.1)
    assert store.stats()["rows"] == 0
