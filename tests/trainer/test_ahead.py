"""Reading ahead: the same batches, errors in their place, a thread that ends."""

import threading
from collections.abc import Iterator

import pytest

from embertide.trainer.data.ahead import read_ahead
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.errors import DataError

NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=60, users=40, new_items_per_hour=5))


def readers() -> int:
    return sum(thread.name == "reader" for thread in threading.enumerate())


@pytest.mark.parametrize("max_bytes", [0, 1, 4096])
def test_batches_are_the_same_in_the_same_order(max_bytes: int) -> None:
    with read_ahead(NEWS.batches(batch_size=7), max_bytes) as ahead:
        seen = list(ahead)
    wanted = list(NEWS.batches(batch_size=7))
    assert len(seen) == len(wanted)
    for ours, theirs in zip(seen, wanted, strict=True):
        assert ours.next_offset == theirs.next_offset
        assert ours.keys_BF.tobytes() == theirs.keys_BF.tobytes()
    assert readers() == 0


def test_no_more_than_the_bytes_allowed_wait() -> None:
    read, full = [], threading.Event()
    (size,) = {batch.nbytes for batch in NEWS.batches(batch_size=1)}

    def batches() -> Iterator[Batch]:
        for batch in NEWS.batches(batch_size=1):
            read.append(batch)
            if len(read) == 4:
                full.set()
            yield batch

    with read_ahead(batches(), 2 * size) as ahead:
        next(ahead)
        # One is learned from, two wait, one is held by the thread.
        assert full.wait(5)
        assert not threading.Event().wait(0.2)
        assert len(read) == 4
    assert readers() == 0
    assert len(read) == 4


def test_an_error_comes_after_the_batches_before_it() -> None:
    def batches() -> Iterator[Batch]:
        yield next(NEWS.batches(batch_size=1))
        raise DataError("path", "is damaged")

    with read_ahead(batches(), 1 << 20) as ahead:
        next(ahead)
        with pytest.raises(DataError, match="is damaged"):
            next(ahead)


def test_leaving_early_ends_the_thread() -> None:
    with read_ahead(NEWS.batches(batch_size=1), 1) as ahead:
        next(ahead)
    assert readers() == 0


def test_work_that_waits_is_done_while_there_is_nothing_to_read() -> None:
    done = list[int]()
    work_is_done = threading.Event()

    def batches() -> Iterator[Batch]:
        first, second, *_ = NEWS.batches(batch_size=1)
        yield first
        assert work_is_done.wait(10)
        yield second

    def meanwhile() -> bool:
        done.append(len(done))
        if len(done) < 3:
            return True
        work_is_done.set()
        return False

    with read_ahead(batches(), 1 << 20, meanwhile=meanwhile) as ahead:
        assert len(list(ahead)) == 2
    assert len(done) >= 3
