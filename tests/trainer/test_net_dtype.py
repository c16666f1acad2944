"""A dense net that multiplies in bf16 while it learns; weights, rows and served scores are fp32.

"bf16_emulated" is "bf16" where the CPU has it.
"""

from typing import Any

import numpy as np
import pytest
import torch

from embertide.trainer.config import NetDtype, RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.metrics import auc
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import news_model, news_rates

STREAM = NewsConfig(hours=6, views_per_hour=800, users=500, new_items_per_hour=5)


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return list(NewsSource(STREAM).batches(batch_size=128))


def learned(batches: list[Batch], net_dtype: NetDtype) -> tuple[Learner, np.ndarray[Any, Any]]:
    """Return a learner that has learned from the batches, and the scores from before each."""
    run = RunConfig(model=news_model(), optimizer=news_rates(), net_dtype=net_dtype)
    learner = Learner(run)
    scores = []
    for batch in batches:
        scores.append(learner.score(batch))
        learner.learn(batch)
    return learner, np.concatenate(scores)


def records(learner: Learner) -> list[bytes]:
    return [each for _, _, each in learner.rows.buckets()]


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="net_dtype is 'fp8'; use one of"):
        RunConfig(model=news_model(), net_dtype="fp8")  # type: ignore[arg-type]


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this CPU lack what does bf16."""
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)


@pytest.mark.usefixtures("without_bf16")
def test_bf16_is_refused_where_it_would_be_emulated(batches: list[Batch]) -> None:
    with pytest.raises(ConfigurationError, match=r"neither AMX nor AVX-512 BF16.*'bf16_emulated'"):
        learned(batches[:1], "bf16")


@pytest.mark.usefixtures("without_bf16")
def test_who_asks_for_emulation_is_warned(
    batches: list[Batch], caplog: pytest.LogCaptureFixture
) -> None:
    learned(batches[:1], "bf16_emulated")
    assert "many times slower than fp32" in caplog.text


@pytest.mark.parametrize("name", ["_is_amx_tile_supported", "_is_avx512_bf16_supported"])
@pytest.mark.usefixtures("without_bf16")
def test_either_way_of_doing_bf16_is_enough(
    batches: list[Batch], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.cpu, name, lambda: True)
    learned(batches[:1], "bf16")


def test_bf16_learns_as_much_and_repeats_bit_for_bit(batches: list[Batch]) -> None:
    label = np.concatenate([batch.label_B for batch in batches])
    _, exact = learned(batches, "fp32")
    learner, quick = learned(batches, "bf16_emulated")
    again, repeated = learned(batches, "bf16_emulated")
    assert not (quick == exact).all(), "bf16 is not used"
    assert (quick == repeated).all()
    assert records(learner) == records(again)
    assert auc(label, quick) == pytest.approx(auc(label, exact), abs=0.004)
    assert auc(label, quick) > 0.6


def test_only_the_multiplications_of_learning_are_in_bf16(batches: list[Batch]) -> None:
    learner, _ = learned(batches[:5], "bf16_emulated")
    assert {each.dtype for each in learner.net.parameters()} == {torch.float32}
    with torch.no_grad():
        dense_BD, keys_BF = torch.from_numpy(batches[5].dense_BD), batches[5].keys_BF
        exact_B = torch.sigmoid(learner.net(dense_BD, learner.rows(keys_BF))).numpy()
    assert (learner.score(batches[5]) == exact_B).all()
    assert not (learner.learn(batches[5]) == exact_B).all()
