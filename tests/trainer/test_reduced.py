"""Nets in reduced precision: what programs score, what that costs, and when it is refused."""

import dataclasses
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from killing import CACHE, train, unserved
from numpy.typing import NDArray
from torch import Tensor, nn

from embertide.trainer.config import LocalSGD, ModelConfig, ReducedConfig, ReducedType, RunConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.eval.precision import PrecisionCheck
from embertide.trainer.model import export, products, reduced
from embertide.trainer.model.dlrm import Dlrm, Probability
from embertide.trainer.model.export import named_tensors, tensor_bytes
from embertide.trainer.model.quiet import quiet_torch
from embertide.trainer.model.reduced import PRECISIONS, multiplying_in
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.snapshot import TENSORS
from embertide.trainer.run.apart import check_supported
from embertide.trainer.run.loop import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

NEWS = NewsSource(NewsConfig(hours=3, views_per_hour=60, users=80, new_items_per_hour=5))
MODEL = dataclasses.replace(news_model(), top_mlp=(128, 64))
RUN = RunConfig(
    model=MODEL,
    batch_size=8,
    publish_every_s=600,
    snapshot_every=4,
    serve_reduced=ReducedConfig(min_events=20),
)
TYPES = list(PRECISIONS)


class Shared(nn.Module):
    """Uses one weight twice: in a layer, and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(128, 128)
        self.last = nn.Linear(128, 128)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        x = self.last(self.both(embeddings)) + self.both.weight.mean() + dense.sum(1, keepdim=True)
        return torch.sigmoid(x.sum(1))


def in_type(
    net: nn.Module, dense: int, embeddings: int, kind: ReducedType
) -> reduced.ReducedProgram | None:
    """The program of a net whose tensors are inputs, as packages have them."""
    with quiet_torch():
        programs = export._programs(net.eval(), named_tensors(net), dense, embeddings, 1)
        return reduced.of(programs["model"], PRECISIONS[kind])


def scored(made: reduced.ReducedProgram, net: nn.Module, kind: ReducedType, *inputs: Tensor) -> Any:
    """The scores of a program by the net's tensors, converted as nodes do."""
    tensors, scales = list(named_tensors(net).values()), []
    for place in made.weights:
        tensors[place - 2], *scale = PRECISIONS[kind].converted(tensors[place - 2])
        scales += scale
    with torch.no_grad():
        return made.program.module(check_guards=False)(*inputs, *tensors, *scales)


def widths(model: ModelConfig) -> tuple[int, int]:
    return model.dense_columns, sum(model.feature_widths)


@pytest.mark.parametrize("seed", [3, 4, 5])
@pytest.mark.parametrize("kind", TYPES)
def test_a_program_scores_as_the_net_does_while_it_is_measured(
    kind: ReducedType, seed: int
) -> None:
    torch.manual_seed(seed)
    net = Probability(Dlrm(MODEL)).eval()
    made = in_type(net, *widths(MODEL), kind)
    assert made is not None
    assert len(made.weights) >= 1
    inputs = tuple(torch.randn(33, width) for width in widths(MODEL))
    scores = scored(made, net, kind, *inputs)
    with torch.no_grad():
        exact = net(*inputs)
        with multiplying_in(PRECISIONS[kind]):
            measured = net(*inputs)
    torch.testing.assert_close(scores, measured, atol=1e-5, rtol=0)
    assert 0 < float((scores - exact).abs().max()) < 0.02


class Odd(nn.Module):
    """Layers over places, of odd widths and without a bias; and one of one column."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(61, 167, bias=False)
        self.last = nn.Linear(167, 101)
        self.column = nn.Linear(1, 8192)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        x = torch.relu(self.first(embeddings.reshape(-1, 3, 61)))
        return torch.sigmoid(self.last(x).sum((1, 2)) / 50 + self.column(dense).mean(1))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("samples", [1, 2, 33])
def test_layers_of_any_shape_multiply_in_it(kind: ReducedType, samples: int) -> None:
    torch.manual_seed(7)
    net = Odd()
    made = in_type(net, 1, 183, kind)
    assert made is not None
    names = [list(named_tensors(net))[place - 2] for place in made.weights]
    assert names == ["first.weight", "last.weight"]  # oneDNN reads one column of int8 wrongly
    inputs = torch.randn(samples, 1), torch.randn(samples, 183)
    with torch.no_grad(), multiplying_in(PRECISIONS[kind]):
        measured = net(*inputs)
    torch.testing.assert_close(
        scored(made, net, kind, *inputs), measured, atol=1e-5, rtol=0, equal_nan=False
    )


def test_rows_in_int8_are_exact_to_half_a_level_and_zeros_stay_zeros() -> None:
    torch.manual_seed(1)
    weight_NK = torch.randn(5, 40) * torch.tensor([1e-30, 1e-3, 1.0, 1e3, 0.0])[:, None]
    levels_NK, scale_N = PRECISIONS["int8"].converted(weight_NK)
    assert levels_NK.dtype == torch.int8
    assert levels_NK[1:4].abs().amax(1).tolist() == [127] * 3
    back_NK = levels_NK * scale_N[:, None]
    assert ((back_NK - weight_NK).abs() <= scale_N[:, None] * 0.5001).all()
    assert not levels_NK[4].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_in_int8_and_harms_no_other_sample(value: float) -> None:
    torch.manual_seed(3)
    net = Probability(Dlrm(MODEL)).eval()
    made = in_type(net, *widths(MODEL), "int8")
    assert made is not None
    inputs = tuple(torch.randn(33, width) for width in widths(MODEL))
    want = scored(made, net, "int8", *inputs)
    inputs[1][3, 5] = value
    got = scored(made, net, "int8", *inputs)
    assert got[3].isnan()
    assert torch.equal(got[:3], want[:3])
    assert torch.equal(got[4:], want[4:])
    weight = dict(net.named_parameters())["net.top.0.weight"]
    weight.data[2, 1] = value
    assert scored(made, net, "int8", *inputs).isnan().all()


@pytest.mark.parametrize("kind", TYPES)
def test_a_score_does_not_depend_on_the_other_samples(kind: ReducedType) -> None:
    torch.manual_seed(3)
    net = Probability(Dlrm(MODEL)).eval()
    dense, embeddings = (torch.randn(33, width) for width in widths(MODEL))
    with torch.no_grad(), multiplying_in(PRECISIONS[kind]):
        one = net(dense[:1], embeddings[:1])
        embeddings[1:] *= 1000
        of_many = net(dense, embeddings)[:1]
    torch.testing.assert_close(one, of_many, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", TYPES)
def test_a_weight_that_is_used_otherwise_too_stays_in_fp32(kind: ReducedType) -> None:
    made = in_type(Shared(), 1, 128, kind)
    assert made is not None
    names = [list(named_tensors(Shared()))[place - 2] for place in made.weights]
    assert names == ["last.weight"]


@pytest.mark.parametrize("kind", TYPES)
def test_a_net_of_small_layers_has_no_such_program(kind: ReducedType) -> None:
    small = dataclasses.replace(MODEL, top_mlp=(8,))
    assert products.MIN_WEIGHTS > 8 * 128
    assert in_type(Probability(Dlrm(small)), *widths(small), kind) is None


# --- what it costs --------------------------------------------------------------------------------

DAY_MS = 86_400_000


def batch(label_B: NDArray[Any], ts_ms: int, first: int = 0) -> Batch:
    made = next(NEWS.batches(batch_size=len(label_B), start=0))
    count = len(label_B)
    assert len(made) >= count
    return dataclasses.replace(
        made,
        first=first,
        ts_ms_B=np.full(count, ts_ms),
        label_B=label_B.astype(np.float32),
    )


def checked(config: ReducedConfig, off: float, ts_ms: int = 0) -> PrecisionCheck:
    """A check that has seen 8 events, whose scores in it lie that far off, half of them down."""
    check = PrecisionCheck(config, 8)
    label_B = np.arange(8) % 2
    score_B1 = np.linspace(0.2, 0.8, 8, dtype=np.float32)[:, None]
    sign_B1 = np.where(label_B, -1, 1)[:, None].astype(np.float32)
    check.add(batch(label_B, ts_ms), score_B1, score_B1 + off * sign_B1)
    return check


def test_what_is_within_the_bounds_is_taken_and_the_version_says_the_figures() -> None:
    measured = checked(ReducedConfig(min_events=8), 0.001).measured()
    assert measured.taken
    said = json.loads(measured.metadata()["reduced"])
    assert said == {
        "type": "bf16",
        "taken": True,
        "events": 8,
        "auc": measured.auc,
        "auc_loss": 0.0,
        "max_error": pytest.approx(0.001, abs=1e-6),
        "why": "",
    }


@pytest.mark.parametrize(
    ("config", "off", "why"),
    [
        (
            ReducedConfig(min_events=9),
            0.001,
            "8 events of the last day were measured, min_events=9",
        ),
        (ReducedConfig(min_events=8), 0.011, "a score differs by 0.011000, max_error=0.01"),
        (ReducedConfig(min_events=8, max_error=1), 0.06, "lower, max_auc_loss=0.0005"),
    ],
)
def test_what_is_beyond_a_bound_is_refused_and_says_why(
    config: ReducedConfig, off: float, why: str
) -> None:
    measured = checked(config, off).measured()
    assert not measured.taken
    assert why in measured.why
    assert json.loads(measured.metadata()["reduced"])["taken"] is False


def test_events_of_one_label_have_no_auc_and_are_refused() -> None:
    check = PrecisionCheck(ReducedConfig(min_events=1), 8)
    score_B1 = np.full((8, 1), 0.5, np.float32)
    check.add(batch(np.ones(8), 0), score_B1, score_B1)
    assert "have no AUC" in check.measured().why


def test_scores_that_are_not_finite_count_as_wrong_and_events_without_any_not_at_all() -> None:
    score_B1 = np.full((8, 1), 0.5, np.float32)
    unknown_B1 = np.full((8, 1), np.nan, np.float32)
    check = checked(ReducedConfig(min_events=8), 0.001)
    check.add(batch(np.ones(8), 0), unknown_B1, unknown_B1)
    assert check.measured() == checked(ReducedConfig(min_events=8), 0.001).measured()
    check.add(batch(np.ones(8), 0), score_B1, unknown_B1)
    measured = check.measured()
    assert (measured.events, measured.max_error, measured.taken) == (16, 1, False)
    assert "NaN" not in measured.metadata()["reduced"]


def test_only_the_last_day_counts() -> None:
    check = checked(ReducedConfig(min_events=8), 0.3)
    good = checked(ReducedConfig(min_events=8), 0.001)
    score_B1 = good._score_N[:, None]
    check.add(batch(good._label_N, DAY_MS), score_B1, score_B1)
    assert check.measured().events == 8
    assert check.measured().taken
    check = checked(ReducedConfig(min_events=8), 0.3)
    check.add(batch(good._label_N, DAY_MS - 1), score_B1, score_B1)
    assert check.measured().events == 16
    assert not check.measured().taken


def test_one_batch_of_sixteen_is_measured() -> None:
    check = PrecisionCheck(ReducedConfig(), 8)
    taken = [check.takes(batch(np.ones(8), 0, first=8 * n)) for n in range(40)]
    assert [n for n, each in enumerate(taken) if each] == [0, 16, 32]


@pytest.mark.parametrize(
    "wrong", [{"max_auc_loss": 0}, {"max_error": -1.0}, {"min_events": 0}, {"type": "fp8"}]
)
def test_bounds_that_bound_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"serve_reduced: {next(iter(wrong))} is"):
        ReducedConfig(**wrong)


# --- in a run -------------------------------------------------------------------------------------


def metadata(publication: Publication) -> dict[str, Any]:
    newest = publication.snapshot_path(publication.snapshots()[-1])
    with safetensors.safe_open(newest / TENSORS, "pt") as file:
        said = file.metadata() or {}
    return dict(json.loads(said["reduced"])) if "reduced" in said else {}


@pytest.mark.parametrize("kind", TYPES)
def test_each_version_says_what_it_costs_and_a_killed_run_ends_with_the_same_bytes(
    tmp_path: Path, kind: ReducedType
) -> None:
    run = dataclasses.replace(RUN, serve_reduced=ReducedConfig(type=kind, min_events=20))
    whole, killed = unserved(tmp_path / "whole"), unserved(tmp_path / "killed")
    trainer = train(run, NEWS, whole)
    said = metadata(whole)
    assert said["type"] == kind
    assert said["events"] >= 20
    assert 0 < said["max_error"] < 0.01
    assert said["taken"] is True
    # The first version is of no event.
    assert trainer.versions.counters()["reduced_refused"] >= 1
    train(run, NEWS, killed, batches=60)
    train(run, NEWS, killed)
    files = [each.snapshot_path(each.snapshots()[-1]) / TENSORS for each in (whole, killed)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_bound_that_does_not_hold_is_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strict = dataclasses.replace(RUN, serve_reduced=ReducedConfig(min_events=20, max_error=1e-9))
    publication = unserved(tmp_path / "pub")
    trainer = train(strict, NEWS, publication)
    assert metadata(publication)["taken"] is False
    assert trainer.versions.counters()["reduced_refused"] >= 18
    said = [each for each in caplog.messages if "bf16 is refused: a score differs" in each]
    assert len(said) >= 1


def test_a_run_that_does_not_choose_it_publishes_as_before(tmp_path: Path) -> None:
    publication = unserved(tmp_path / "pub")
    trainer = train(dataclasses.replace(RUN, serve_reduced=None), NEWS, publication)
    data = (publication.snapshot_path(publication.snapshots()[-1]) / TENSORS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert b"__metadata__" not in data[8 : 8 + length]
    assert data == tensor_bytes(trainer.learner.served)
    assert "reduced_refused" not in trainer.versions.counters()


def test_ranks_that_are_apart_do_not_measure() -> None:
    with pytest.raises(ConfigurationError, match="serve_reduced"):
        check_supported(dataclasses.replace(RUN, sync=LocalSGD()))


def test_scores_in_one_type_are_not_gone_on_with_in_another() -> None:
    state = checked(ReducedConfig(min_events=8), 0.001).state()
    other = PrecisionCheck(ReducedConfig(type="int8", min_events=8), 8)
    other.restore(state)
    assert other.measured().events == 0


@pytest.mark.parametrize("kind", [pytest.param("bf16", marks=pytest.mark.long), "int8"])
def test_a_package_has_it_for_contexts_too(tmp_path: Path, kind: ReducedType) -> None:
    context = tuple(each.name for each in MODEL.event_features if each.name != "cand")
    model = dataclasses.replace(MODEL, context=context)
    run = dataclasses.replace(RUN, model=model, serve_reduced=ReducedConfig(type=kind))
    publication = Publication(tmp_path / "pub")
    Trainer(run, publication, program_cache=CACHE)
    with zipfile.ZipFile(publication.program) as package:
        models = {name.split("/")[3] for name in package.namelist() if "/aotinductor/" in name}
    assert {"reduced", "context_reduced"} <= models
