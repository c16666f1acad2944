"""The dense net on a GPU, rows in the store; without a GPU, what can be told of it on the CPU."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bench.criteo import criteo
from embertide.trainer.config import NetDevice, RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.metrics import auc
from embertide.trainer.model.build import build_net
from embertide.trainer.model.device import net_device
from embertide.trainer.model.export import named_tensors
from embertide.trainer.model.layers import Columns
from embertide.trainer.model.learner import Learner
from embertide.trainer.presets import (
    news_counters,
    news_crossed,
    news_history,
    news_model,
    news_rates,
)
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.loop import Trainer

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
STREAM = NewsConfig(hours=3, views_per_hour=800, users=500, new_items_per_hour=5)
MODELS = {
    "dlrm": news_model(),
    "criteo": criteo(),
    "history": news_history(),
    "counters": news_counters(),
    "crossed": news_crossed(),
    "dcn_v2": dataclasses.replace(criteo(), net="dcn_v2"),
    "deepfm": dataclasses.replace(criteo(), net="deepfm"),
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")


def learned(net_device: NetDevice) -> tuple[Learner, NDArray[np.float32]]:
    """Return a learner that has learned the stream, and the scores from before each batch."""
    learner = Learner(
        RunConfig(model=MODELS["counters"], optimizer=news_rates(), net_device=net_device)
    )
    scores = []
    for batch in NewsSource(STREAM).batches(batch_size=128):
        scores.append(learner.score(batch))
        learner.learn(batch)
        learner.refresh(int(batch.ts_ms_B[-1]))
    return learner, np.concatenate(scores)


def records(learner: Learner) -> list[bytes]:
    return [each for _, _, each in learner.rows.buckets()]


def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="net_device is 'tpu'; use one of"):
        RunConfig(model=news_model(), net_device="tpu")  # type: ignore[arg-type]


@no_gpu
def test_without_a_gpu_cuda_is_refused_and_auto_is_the_cpu() -> None:
    with pytest.raises(ConfigurationError, match=r"finds no GPU: install .* or use net_device"):
        net_device("cuda")
    assert net_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("setting", ["auto", "cuda"])
def test_ranks_of_a_machine_take_its_gpus_in_turn(
    setting: NetDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"of {device}")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert [net_device(setting, rank).index for rank in range(4)] == [0, 1, 0, 1]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert net_device(setting) == torch.device("cuda", 1)
    assert net_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", MODELS)
def test_a_net_makes_nothing_on_the_cpu_when_it_is_elsewhere(name: str) -> None:
    model = MODELS[name]
    # On the device "meta" tensors have no values, and one on the CPU among them is refused.
    net = build_net(model).to("meta")
    for module in net.modules():
        if isinstance(module, Columns):
            module.set_now(60.0)
    x_BE = torch.zeros(3, sum(model.feature_widths), device="meta", requires_grad=True)
    net(torch.zeros(3, model.dense_columns, device="meta"), x_BE).sum().backward()
    assert x_BE.grad is not None
    assert {each.device.type for each in net.state_dict().values()} == {"meta"}


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_learns_what_the_cpu_does_and_repeats_bit_for_bit() -> None:
    label = np.concatenate([b.label_B for b in NewsSource(STREAM).batches(batch_size=128)])
    cpu, there = learned("cpu")
    gpu, here = learned("cuda")
    again, repeated = learned("cuda")
    assert {each.device.type for each in gpu.net.parameters()} == {"cuda"}
    assert (here == repeated).all()
    assert records(gpu) == records(again)
    assert auc(label, here) == pytest.approx(auc(label, there), abs=0.002)
    exported = named_tensors(gpu.served)
    assert {each.device.type for each in exported.values()} == {"cpu"}
    for name, tensor in named_tensors(cpu.served).items():
        assert torch.allclose(exported[name], tensor, atol=0.05), name


@pytest.mark.gpu
@needs_gpu
def test_a_run_on_a_gpu_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    goes_on_from_its_checkpoint("cuda", tmp_path)


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    goes_on_from_its_checkpoint("auto", tmp_path)


def goes_on_from_its_checkpoint(device: NetDevice, folder: Path) -> None:
    run = RunConfig(model=news_model(), optimizer=news_rates(), net_device=device)
    before = Trainer(run, Publication(folder), program_cache=CACHE)
    before.fit(NewsSource(STREAM))
    after = Trainer(run, Publication(folder), program_cache=CACHE)
    for name, tensor in before.learner.net.state_dict().items():
        found = after.learner.net.state_dict()[name]
        assert found.device == before.learner.device
        assert torch.equal(found, tensor), name
    states = (each.learner.optimizer.state_dict()["state"] for each in (before, after))
    for was, now in zip(*(state.values() for state in states), strict=True):
        assert {name: (t.device, t.tolist()) for name, t in was.items()} == {
            name: (t.device, t.tolist()) for name, t in now.items()
        }
