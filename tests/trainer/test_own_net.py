"""A net of one's own: found, tried, learned, killed, resumed, and scored as it is served.

Shapes: B samples, E all embedding values of a sample.
"""

import dataclasses
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fp64 import batch_of, model
from killing import train
from own_net import Tower
from snapshots import newest_files
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from embertide.trainer.commands.run_file import load
from embertide.trainer.config import DenseConfig, ModelConfig, RunConfig, ScheduleConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.errors import ConfigurationError, TrainerError
from embertide.trainer.model.build import build_net
from embertide.trainer.model.layers import Columns
from embertide.trainer.model.learner import Learner, NotFiniteError
from embertide.trainer.model.loss import Loss
from embertide.trainer.presets import news_counters, news_history, news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.run.checkpoint.settings import settings
from embertide.trainer.run.loop import Trainer

NEWS = NewsSource(NewsConfig(hours=2, views_per_hour=60, users=40, new_items_per_hour=5))
MODEL = dataclasses.replace(news_model(), net="own_net:Tower", net_arguments={"width": 8})
RUN = RunConfig(model=MODEL, batch_size=24, publish_every_s=600, snapshot_every=3)
STEP = RunConfig(
    model=dataclasses.replace(model(top_sees_embeddings=True), net="own_net:Tower"),
    ddr_budget_bytes=8 << 20,
)
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclasses.dataclass
class Whole:
    """A run that nothing stopped, and its end."""

    publication: Publication
    files: dict[str, bytes]
    auc: dict[int, float]

    def copy(self, path: Path) -> Publication:
        shutil.copytree(self.publication.path, path)
        return Publication(path)


def end_of(trainer: Trainer, publication: Publication) -> tuple[dict[str, bytes], dict[int, float]]:
    files = newest_files(publication)
    return files, trainer.state.prequential.daily()


def weight(learner: Learner) -> Tensor:
    return learner.net.get_parameter("first.weight")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> Whole:
    publication = Publication(tmp_path_factory.mktemp("own") / "whole")
    trainer = train(RUN, NEWS, publication)
    return Whole(publication, *end_of(trainer, publication))


# --- learning -------------------------------------------------------------------------------------


def test_a_killed_run_ends_with_the_same_bytes(whole: Whole, tmp_path: Path) -> None:
    publication = Publication(tmp_path / "killed")
    publication.path.mkdir()
    shutil.copyfile(whole.publication.program, publication.program)
    for batches in (14, 6):
        train(RUN, NEWS, publication, batches)
        torch.rand(5)  # whatever else draws from torch's numbers
    assert end_of(train(RUN, NEWS, publication), publication) == (whole.files, whole.auc)


def test_scores_are_those_of_eval_mode_and_dropout_is_there_in_learning() -> None:
    learner = Learner(STEP)
    assert isinstance(learner.net, Tower)
    rng = np.random.default_rng(3)
    for _ in range(5):
        batch = batch_of(rng, 40)
        expected = learner.score(batch)
        np.testing.assert_array_equal(learner.learn(batch), expected)
        assert learner.net.training
    assert float(learner.net.get_buffer("norm.running_var").std()) > 0
    # Without dropout the same steps lead elsewhere.
    dry = dataclasses.replace(
        STEP, model=dataclasses.replace(STEP.model, net_arguments={"dropout": 0.0})
    )
    other, rng = Learner(dry), np.random.default_rng(3)
    for _ in range(5):
        other.learn(batch_of(rng, 40))
    assert not torch.equal(weight(other), weight(learner))


def test_it_learns() -> None:
    learner, rng = Learner(STEP), np.random.default_rng(3)
    losses = []
    for _ in range(120):
        batch = batch_of(rng, 64)
        batch = dataclasses.replace(
            batch, label_B=(batch.keys_BF[:, 0] % 2 == 0).astype(np.float32)
        )
        score_B = learner.learn(batch)
        losses.append(-np.log(np.where(batch.label_B > 0, score_B, 1 - score_B)).mean())
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])


def test_one_event_is_learned_though_batch_norm_needs_two() -> None:
    learner, rng = Learner(STEP), np.random.default_rng(3)
    before = weight(learner).clone()
    learner.learn(batch_of(rng, 1))
    assert not torch.equal(weight(learner), before)
    assert learner.net.training


@pytest.mark.parametrize("net", ["Tower", "Moving"])
def test_a_batch_put_aside_leaves_statistics_as_they_were(net: str) -> None:
    own = dataclasses.replace(STEP.model, net=f"own_net:{net}")
    learner, rng = Learner(dataclasses.replace(STEP, model=own)), np.random.default_rng(3)
    learner.learn(batch_of(rng, 20))
    before = {name: each.clone() for name, each in learner.net.state_dict().items()}
    batch = batch_of(rng, 20)
    batch.dense_BD[3] = 1e30  # of a variance that is not finite, and a loss that is
    with pytest.raises(NotFiniteError, match="statistics"):
        learner.learn(batch)
    for name, each in learner.net.state_dict().items():
        assert torch.equal(each, before[name]), name


def test_a_changed_index_is_not_published() -> None:
    run = dataclasses.replace(STEP, model=dataclasses.replace(STEP.model, net="own_net:Counting"))
    learner = Learner(run)
    learner.check_finite()
    learner.learn(batch_of(np.random.default_rng(3), 20))
    with pytest.raises(TrainerError, match="buffer order of the net has changed"):
        learner.check_finite()


# --- what is found before it learns ---------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "module": (
        {"net": "no_such_nets:Tower"},
        "there is no module 'no_such_nets'",
    ),
    "class": ({"net": "own_net:Towers"}, "'own_net' has no 'Towers'; it has .*Tower"),
    "run file": ({"net": "run_file:Tower"}, "is of a run's file, and none is loaded"),
    "arguments": ({"net_arguments": {"wide": 3}}, r"making it as \(model, wide=3\) failed"),
    "no net": ({"net": "own_net:nothing"}, "gives a int; it must be an nn.Module"),
    "blind": ({"net": "own_net:Blind"}, "no gradient comes to the embeddings"),
    "shape": ({"net": "own_net:Double"}, r"gives shape \[1, 2\] for 1 samples; it must give one"),
    "columns": (
        {"net": "own_net:Narrow"},
        "forward failed .* shown 4, who 4, before 4: embertide.nn.C",
    ),
    "frozen": ({"net": "own_net:Frozen"}, "no parameter that learns"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_net_that_cannot_work_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, message = WRONG[name]
    monkeypatch.delitem(sys.modules, "run_file", raising=False)
    config = dataclasses.replace(STEP.model, **changes)
    with pytest.raises(ConfigurationError, match=message) as raised:
        build_net(config)
    assert config.net_name.partition(":")[0] in str(raised.value)


@pytest.mark.parametrize("value", [{"f": print}, {"x": (1, 2)}, {3: 4}, {"x": float("nan")}])
def test_arguments_that_a_checkpoint_cannot_keep_are_refused(value: dict[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"net_arguments is .*; give a dict of"):
        dataclasses.replace(MODEL, net_arguments=value)
    with pytest.raises(ValueError, match="net 'dlrm' takes no net_arguments"):
        dataclasses.replace(news_model(), net_arguments={"a": 1})


def test_counters_need_columns() -> None:
    with pytest.raises(ConfigurationError, match=r"counters, for embertide.nn.Columns: make one"):
        build_net(dataclasses.replace(news_counters(), net="own_net:Plain", sequences=()))


def test_a_net_with_other_tensors_does_not_go_on(whole: Whole, tmp_path: Path) -> None:
    publication = whole.copy(tmp_path / "copy")
    wider = dataclasses.replace(MODEL, net_arguments={"width": 8, "dropout": 0.5})
    with pytest.raises(TrainerError, match=r"net_arguments = .* it cannot change by itself"):
        Trainer(dataclasses.replace(RUN, model=wider), publication)
    before = Tower.__init__

    def changed(self: Tower, model: ModelConfig, width: int) -> None:
        before(self, model, width + 1)
        self.more = torch.nn.Linear(2, 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tower, "__init__", changed)
        with pytest.raises(
            ConfigurationError,
            match=r"net 'own_net:Tower' is not .*: tensor first.bias was \[8\], is \[9\]; .*"
            r"more.bias was not there, is \[3\]",
        ):
            Trainer(RUN, publication)


def test_a_net_whose_code_has_changed_does_not_go_on(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication, forward = whole.copy(tmp_path / "copy"), Tower.forward
    monkeypatch.setattr(Tower, "forward", lambda *inputs: 2 * forward(*inputs))
    with pytest.raises(ConfigurationError, match=r"its scores differ from those of .* code has"):
        Trainer(RUN, publication)


# --- columns and run files ------------------------------------------------------------------------


def test_columns_say_where_each_feature_lies() -> None:
    plain = dataclasses.replace(
        news_model(), dense=(DenseConfig(name="price"), DenseConfig(name="age", missing=True))
    )
    columns = Columns(plain)
    assert columns.dense == {"price": slice(0, 1), "age": slice(1, 3)}
    assert columns.dense_width == 3
    dims = dict(zip((each.name for each in plain.features), plain.feature_dims, strict=True))
    assert {name: each.stop - each.start for name, each in columns.embedding.items()} == dims
    assert columns.embedding["prev"] == slice(16, 32)
    history = Columns(news_history())
    assert history.embedding["hist0"].start == sum(news_history().feature_dims[:10])
    assert history.dense == {"hist_length": slice(0, 1), "hist_repeat": slice(1, 2)}


def test_columns_lie_there_behind_counters_too() -> None:
    config = news_counters()
    columns = Columns(config)
    embeddings_BE = torch.zeros(2, sum(config.feature_widths))
    begin = sum(config.feature_widths[: config.feature_index("cand")])
    embeddings_BE[:, begin] = 5
    dense_BD = torch.zeros(2, config.dense_columns)
    dense, embeddings = columns(dense_BD, embeddings_BE)
    assert dense.shape[1] == columns.dense_width > config.dense_columns
    assert embeddings.shape[1] == sum(config.feature_dims)
    assert embeddings[0].nonzero().flatten().tolist() == [columns.embedding["cand"].start]


def test_a_class_of_the_runs_file_is_the_net(tmp_path: Path) -> None:
    (tmp_path / "parts_of_it.py").write_text("WIDTH = 5\n")
    path = tmp_path / "run.py"
    path.write_text(
        "import dataclasses\n"
        "from own_net import Tower\n"
        "from parts_of_it import WIDTH\n"
        "from embertide.trainer.config import RunConfig\n"
        "from embertide.trainer.presets import news_model\n\n"
        "class Mine(Tower):\n"
        "    def __init__(self, model):\n"
        "        super().__init__(model, WIDTH)\n\n"
        "run = RunConfig(model=dataclasses.replace(news_model(), net='run_file:Mine'))\n"
    )
    net = build_net(load(path).run.model)
    assert isinstance(net, Tower)
    assert type(net).__name__ == "Mine"
    assert net.first.out_features == 5
    # Another process, or a run that goes on, finds it by the same name.
    assert type(build_net(load(path).run.model)).__qualname__ == "Mine"


def no_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - labels) ** 2


def test_a_class_is_kept_as_the_text_that_it_was(tmp_path: Path) -> None:
    given = dataclasses.replace(MODEL, net=Tower)
    assert given == MODEL
    assert hash(given) == hash(MODEL)
    assert settings(dataclasses.replace(RUN, model=given)) == settings(RUN)
    run = dataclasses.replace(RUN, loss=no_mean)
    assert run.loss == f"{__name__}:no_mean"
    rate = ScheduleConfig(name=ExponentialLR, arguments={"gamma": 0.9})
    assert rate.name == "torch.optim.lr_scheduler:ExponentialLR"
    # The net of a run's file, as files and checkpoints of earlier builds name it.
    text = (
        "import dataclasses\n"
        "from own_net import Tower\n"
        "from embertide.config import RunConfig, news_model\n\n"
        "class Mine(Tower): pass\n\n"
        "def close(logits, labels): return (logits - labels) ** 2\n\n"
        "run = RunConfig(model=dataclasses.replace(news_model(), net={net}), loss={loss})\n"
    )
    runs = []
    for net, loss in (("Mine", "close"), ("'run_file:Mine'", "'run_file:close'")):
        (tmp_path / "run.py").write_text(text.format(net=net, loss=loss))
        runs.append(load(tmp_path / "run.py").run)
        assert type(build_net(runs[-1].model)).__name__ == "Mine"
        Loss(runs[-1])
    assert runs[0] == runs[1]


def test_what_no_run_could_find_again_is_refused() -> None:
    class Inner(Tower):
        pass

    for made in (Inner, lambda logits, labels: logits):
        with pytest.raises(ValueError, match=r"no name that a run could find it by when it goes"):
            dataclasses.replace(RUN, loss=made)
    with pytest.raises(ValueError, match=r"net is <class .*Inner'>, which has no name"):
        dataclasses.replace(MODEL, net=Inner)


def test_the_run_of_the_page_is_one(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "training.md"
    (block,) = re.findall(r"```python\n([^`]*class Tower.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "run.py").write_text(block)
    learner = Learner(dataclasses.replace(load(tmp_path / "run.py").run, ddr_budget_bytes=8 << 20))
    assert type(learner.net).__name__ == "Tower"
    batch = batch_of(np.random.default_rng(1), 8)
    batch = dataclasses.replace(batch, keys_BF=batch.keys_BF[:, :2], dense_BD=batch.dense_BD[:, :0])
    assert learner.learn(batch).shape == (8,)
