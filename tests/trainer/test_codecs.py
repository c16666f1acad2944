"""Messages between ranks about rows and gradients: bytes counted, values rounded, and feedback."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embertide.trainer.sync import codec
from embertide.trainer.sync.codec import Block, Feedback

BLOCKS = [Block(3, 8), Block(0, 4), Block(5, 12, exact=4), Block(2, 4)]


def values_of(blocks: list[Block]) -> NDArray[np.float32]:
    rng = np.random.default_rng(2)
    return rng.standard_normal(sum(b.keys * b.width for b in blocks)).astype(np.float32)


@pytest.mark.parametrize(("name", "error"), [("fp32", 0.0), ("fp16", 1e-3), ("bf16", 1e-2)])
def test_bytes_are_counted_and_values_come_back(name: Any, error: float) -> None:
    values = values_of(BLOCKS)
    data = codec.encode(name, values, BLOCKS)
    assert len(data) == codec.wire_bytes(name, BLOCKS)
    back = codec.decode(name, data, BLOCKS)
    np.testing.assert_allclose(back, values, rtol=error)
    # Counters travel as they are.
    assert np.array_equal(back[24:84].reshape(5, 12)[:, 8:], values[24:84].reshape(5, 12)[:, 8:])


def test_int8_is_a_quarter_and_a_scale() -> None:
    values = values_of(BLOCKS)
    data = codec.encode("int8", values, BLOCKS)
    assert len(data) == codec.wire_bytes("int8", BLOCKS) == 3 * 12 + 5 * (8 + 4 + 16) + 2 * 8
    back = codec.decode("int8", data, BLOCKS)
    assert np.abs(back - values).max() <= np.abs(values).max() / 127
    plain = [Block(7, 16)]
    assert codec.wire_bytes("fp16", plain) * 2 == codec.wire_bytes("fp32", plain)


def test_what_is_too_large_is_cut_off() -> None:
    block = [Block(1, 2)]
    back = codec.decode(
        "fp16", codec.encode("fp16", np.array([1e6, -1e6], np.float32), block), block
    )
    assert back.tolist() == [65504.0, -65504.0]


def test_feedback_gives_back_what_rounding_took() -> None:
    feedback, rng = Feedback(64, [4]), np.random.default_rng(4)
    block, total, sent = [Block(1, 4)], np.zeros(4), np.zeros(4)
    key = np.array([77])
    for _ in range(200):
        gradient_UD = rng.standard_normal((1, 4)).astype(np.float32) * [1, 1e-3, 1e-3, 1e-3]
        gradient_UD = gradient_UD.astype(np.float32)
        total += gradient_UD[0]
        feedback.add(0, key, gradient_UD)
        data = codec.encode("int8", gradient_UD.reshape(-1), block)
        back = codec.decode("int8", data, block).reshape(1, 4)
        feedback.keep(0, key, gradient_UD - back)
        sent += back[0]
    assert np.abs(sent - total).max() < 0.05
    assert feedback.forgotten == 0
