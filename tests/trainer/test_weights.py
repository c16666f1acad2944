"""The weight of an event in the loss."""

import dataclasses

import numpy as np
import pytest
import torch

from embertide.trainer.config import RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.data.limit import take
from embertide.trainer.model.learner import Learner, NotFiniteError
from embertide.trainer.presets import news_model, news_rates

BATCH = next(NewsSource(NewsConfig(hours=1)).batches(batch_size=64))


def parameters(weights: list[float] | None, begin: int, end: int) -> list[torch.Tensor]:
    """The net's gradients for some of the events."""
    batch = take(BATCH, begin, end)
    if weights is not None:
        batch = dataclasses.replace(batch, weight_B=np.array(weights, np.float32))
    learner = Learner(RunConfig(model=news_model(), optimizer=news_rates()))
    learner.learn(batch)
    return [each.grad for each in learner.net.parameters() if each.grad is not None]


def test_an_event_of_weight_0_has_no_part_in_the_step_and_one_of_weight_2_counts_twice() -> None:
    half = len(BATCH) // 2
    end = 2 * half
    weights = [0.0] * half + [2.0] * half
    for weighed, alone in zip(
        parameters(weights, 0, end), parameters(None, half, end), strict=True
    ):
        # (0 + 2 x the sum of one half) / B is the mean of that half.
        assert torch.allclose(weighed, alone, rtol=1e-3, atol=1e-6)


def test_weights_are_cut_with_their_events() -> None:
    weight_B = np.arange(len(BATCH), dtype=np.float32)
    part = take(dataclasses.replace(BATCH, weight_B=weight_B), 8, 12)
    assert part.weight_B is not None
    assert part.weight_B.tolist() == [8, 9, 10, 11]


def test_equal_weights_of_1_are_no_weights() -> None:
    ones = [1.0] * len(BATCH)
    for weighed, plain in zip(
        parameters(ones, 0, len(BATCH)), parameters(None, 0, len(BATCH)), strict=True
    ):
        assert torch.equal(weighed, plain)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_puts_its_batch_aside(weight: float) -> None:
    with pytest.raises(NotFiniteError):
        parameters([weight] * len(BATCH), 0, len(BATCH))
