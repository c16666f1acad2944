"""Messages of a few gradients: what is packed is added up again, wherever the positions are."""

import numpy as np
import pytest

from embertide.trainer.sync.entries import Messages, room_of

POSITIONS = 300_000


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(
    "places",
    [
        (),
        (0,),
        (POSITIONS - 1,),
        (0, 1, 2),
        (65_534, 131_069),
        (65_535, 131_071),
        (7, POSITIONS - 1),
    ],
)
def test_what_is_packed_is_added_up_at_its_positions(
    dtype: type[np.float16 | np.float32], places: tuple[int, ...]
) -> None:
    messages = Messages(room_of(3, POSITIONS), dtype, 2, (), 2)
    values = np.arange(1, len(places) + 1).astype(dtype)
    message = messages.pack(1, np.ones(2, np.float32), np.array(places, np.int64), values)
    assert len(message) == messages.lengths_R[1]
    beside, total = np.ones(2, np.float32), np.ones(POSITIONS, np.float32)
    assert not messages.add(1, message, beside, total)
    assert beside.tolist() == [2, 2]
    wanted = np.ones(POSITIONS, np.float32)
    wanted[list(places)] += values.astype(np.float32)
    assert np.array_equal(total, wanted)


def test_a_rank_sends_its_own_span_and_what_all_give() -> None:
    spans = [(0, 3), (3, 3), (3, 5)]
    messages = Messages(1, np.float32, 6, spans, 3)
    nothing = np.empty(0, np.int64)
    beside = np.zeros(6, np.float32)
    total = np.zeros(1, np.float32)
    for rank, (begin, end) in enumerate(spans):
        own = np.zeros(6, np.float32)
        own[begin:end] = np.arange(begin, end) + 1
        own[5] = 1
        message = messages.pack(rank, own, nothing, nothing.astype(np.float32))
        assert len(message) == 4 * (2 + end - begin) + 6
        messages.add(rank, message, beside, total)
    assert beside.tolist() == [1, 2, 3, 4, 5, 3]


def test_a_rank_that_refuses_a_step_tells_the_others() -> None:
    messages = Messages(2, np.float16, 1, (), 2)
    beside, total = np.zeros(1, np.float32), np.zeros(9, np.float32)
    assert messages.add(0, messages.refuse(0, np.ones(1, np.float32)), beside, total)
    assert not np.any(total)
