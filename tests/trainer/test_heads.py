"""Several heads, weights of events, losses of one's own, schedules, and batches in parts.

Shapes: B events, H heads, D dense columns, E all embedding values of a sample.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from fp64 import batch_of, model
from killing import CACHE, train
from rankjobs import in_parts
from shopping import HEADS, Shopping, tasks_of
from snapshots import newest_files

from embertide.trainer.commands.inputs import check_model
from embertide.trainer.config import (
    HeadConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from embertide.trainer.data import open_events
from embertide.trainer.data.base import EventSchema, FeatureColumn
from embertide.trainer.data.limit import FirstEvents, take, where
from embertide.trainer.data.shared import packed, unpacked
from embertide.trainer.embedding.store import store_table
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.build import build_net
from embertide.trainer.model.learner import Learner
from embertide.trainer.model.loss import Loss
from embertide.trainer.model.schedule import Schedule
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.snapshot import SnapshotInfo, read_manifest, schema_id
from embertide.trainer.run.checkpoint.checkpoint import CheckpointError
from embertide.trainer.run.checkpoint.settings import differences, settings
from embertide.trainer.run.loop import Trainer
from embertide.trainer.sync.ranks import Ranks

STEP = RunConfig(
    model=dataclasses.replace(model(top_sees_embeddings=True), heads=HEADS),
    ddr_budget_bytes=8 << 20,
)
SCHEDULE = ScheduleConfig(name="torch.optim.lr_scheduler:ExponentialLR", arguments={"gamma": 0.97})
pytestmark = pytest.mark.usefixtures("one_thread")


# --- learning -------------------------------------------------------------------------------------


def test_the_loss_is_the_weighed_sum_of_what_is_known() -> None:
    logits_BH = torch.tensor([[0.3, -1.0], [2.0, 0.5], [-0.7, 4.0]])
    labels_BH = torch.tensor([[1.0, 0.0], [0.0, torch.nan], [1.0, 1.0]])
    weight_B = torch.tensor([2.0, 0.0, 1.5])

    def bce(z: float, y: float) -> float:
        return float(np.log1p(np.exp(-z)) if y else np.log1p(np.exp(z)))

    first = 2.0 * (bce(0.3, 1) + 0.5 * bce(-1.0, 0))
    last = 1.5 * (bce(-0.7, 1) + 0.5 * bce(4.0, 1))
    logits_BH.requires_grad_()
    loss = Loss(STEP)(logits_BH, labels_BH, weight_B)
    assert loss.item() == pytest.approx((first + last) / 3, rel=1e-6)
    loss.backward()
    assert logits_BH.grad is not None
    assert not logits_BH.grad[1].any()
    unweighed = Loss(STEP)(logits_BH, labels_BH, None)
    assert unweighed.item() > 0
    assert torch.autograd.grad(unweighed, logits_BH)[0][1, 1] == 0


def test_one_head_without_weights_is_torchs_loss_bit_for_bit() -> None:
    run = dataclasses.replace(STEP, model=dataclasses.replace(STEP.model, heads=()))
    logits_B, label_B = torch.randn(50), (torch.rand(50) < 0.3).float()
    assert torch.equal(
        Loss(run)(logits_B, label_B, None), torch.nn.BCEWithLogitsLoss()(logits_B, label_B)
    )


@pytest.mark.parametrize("net", ["dlrm", "dcn_v2", "own_net:Tasks"])
def test_every_head_learns(net: str) -> None:
    run = dataclasses.replace(STEP, model=dataclasses.replace(STEP.model, net=net))
    learner, rng = Learner(run), np.random.default_rng(3)
    losses = []
    for _ in range(120):
        batch = batch_of(rng, 64)
        even_B, large_B = ((batch.keys_BF[:, f] % 2 == 0).astype(np.float32) for f in (0, 1))
        batch = dataclasses.replace(batch, label_B=even_B, more_labels_BL=large_B[:, None])
        score_BH = learner.learn(batch)
        label_BH = batch.labels(2)
        losses.append(-np.log(np.where(label_BH > 0, score_BH, 1 - score_BH)).mean(0))
    assert (np.mean(losses[-10:], axis=0) < 0.8 * np.mean(losses[:10], axis=0)).all()
    served_BH = learner.score_heads(batch)
    assert (learner.score(batch) == served_BH[:, 0]).all()
    np.testing.assert_allclose(served_BH, learner.learn(batch), atol=1e-6)


def test_a_loss_of_ones_own_is_weighed_as_ours() -> None:
    run = dataclasses.replace(STEP, loss="own_net:focal")
    logits_BH, labels_BH = torch.randn(6, 2), (torch.rand(6, 2) < 0.5).float()
    each_BH = torch.nn.functional.binary_cross_entropy_with_logits(
        logits_BH, labels_BH, reduction="none"
    )
    focal_BH = (1 - torch.exp(-each_BH)) ** 2 * each_BH
    wanted = (focal_BH @ torch.tensor([1.0, 0.5])).mean()
    torch.testing.assert_close(Loss(run)(logits_BH, labels_BH, None), wanted)
    equal = tuple(dataclasses.replace(head, weight=1.0) for head in HEADS)
    joint = dataclasses.replace(
        STEP, loss="own_net:joint", model=dataclasses.replace(STEP.model, heads=equal)
    )
    labels_BH[2, 1] = torch.nan
    with_unknown = Loss(joint)(logits_BH, labels_BH, None)
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(
        with_unknown, Loss(joint)(logits_BH[others], labels_BH[others], None) * 5 / 6
    )


WRONG = {
    "bce2": "use 'bce', or a function of yours",
    "own_net:focals": "has no 'focals'",
    "own_net:a_mean": r"gives \[\] for logits of \[3, 2\]; give the loss of each event",
    "own_net:infinite": "of logits of 0 and labels of 1 is not finite",
    "own_net:joint": "one loss an event for all heads, which have weights",
    "own_net:nothing": "failed on logits and labels",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_cannot_work_is_refused(name: str) -> None:
    with pytest.raises((ConfigurationError, ValueError), match=WRONG[name]):
        Loss(dataclasses.replace(STEP, loss=name))


def test_parts_of_a_batch_add_up_to_it() -> None:
    whole, *_ = in_parts(Ranks.alone(), 1)
    for parts in (3, 100):
        scores, net, rows = in_parts(Ranks.alone(), parts)
        for one, other in zip(whole, scores, strict=True):
            np.testing.assert_allclose(other, one, atol=1e-6)
        assert net.keys()
        assert rows


# --- schedules ------------------------------------------------------------------------------------


def factors(config: ScheduleConfig, steps: int) -> list[float]:
    schedule, found = Schedule(config), []
    for _ in range(steps):
        found.append(schedule.factor)
        schedule.step()
    return found


def test_schedules_are_what_they_say() -> None:
    cosine = factors(ScheduleConfig(name="warmup_cosine", warmup_steps=3, steps=7, factor=0.2), 10)
    assert cosine[:3] == [0.25, 0.5, 0.75]
    assert cosine[3] == 1.0
    assert cosine[5] == pytest.approx(0.6)
    assert cosine[7:] == pytest.approx([0.2] * 3)
    assert factors(ScheduleConfig(name="step", steps=2, factor=0.5), 5) == [1, 1, 0.5, 0.5, 0.25]
    assert factors(SCHEDULE, 4) == pytest.approx([0.97**n for n in range(4)])


def test_a_schedule_goes_on_where_it_was_and_by_new_settings_from_as_many_steps() -> None:
    cycle = ScheduleConfig(
        name="torch.optim.lr_scheduler:OneCycleLR",
        arguments={"max_lr": 1.0, "total_steps": 20, "cycle_momentum": False},
    )
    for config in (SCHEDULE, cycle, ScheduleConfig(name="step", steps=3, factor=0.5)):
        wanted = factors(config, 12)
        first = Schedule(config)
        for _ in range(5):
            first.step()
        second = Schedule(config)
        second.load(first.state())
        found = []
        for _ in range(7):
            found.append(second.factor)
            second.step()
        assert found == wanted[5:]
    slower = dataclasses.replace(SCHEDULE, arguments={"gamma": 0.5})
    other, changed = Schedule(SCHEDULE), Schedule(slower)
    for _ in range(3):
        other.step()
    changed.load(other.state())
    assert changed.factor == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("torch.optim.lr_scheduler:StepLR", {}, "failed: .*step_size"),
        ("torch.optim.lr_scheduler:Nothing", {}, "has no 'Nothing'"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Schedule(ScheduleConfig(name=name, arguments=arguments))


def test_settings_that_say_no_rate_are_refused() -> None:
    for wrong, message in (
        ({"name": "slower"}, "use one of warmup_cosine, step, or a class"),
        ({"name": "step"}, "steps 0; give 0 or more"),
        ({"name": "step", "steps": 3, "factor": 2.0}, "factor is 2.0; give a share"),
        ({"name": "a:B", "arguments": {"f": print}}, "a checkpoint can keep"),
    ):
        with pytest.raises(ValueError, match=message):
            ScheduleConfig(**wrong)


def test_the_rate_is_the_schedules() -> None:
    run = dataclasses.replace(
        STEP, optimizer=OptimizerConfig(dense_learning_rate=0.01, schedule=SCHEDULE)
    )
    learner, rng = Learner(run), np.random.default_rng(1)
    for n in range(3):
        learner.learn(tasks_of(batch_of(rng, 10)))
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.97**n)


def test_a_schedule_may_be_changed_if_it_is_allowed() -> None:
    with_one = dataclasses.replace(STEP, optimizer=OptimizerConfig(schedule=SCHEDULE))
    slower = dataclasses.replace(SCHEDULE, arguments={"gamma": 0.5})
    for run in (STEP, dataclasses.replace(STEP, optimizer=OptimizerConfig(schedule=slower))):
        (found,) = differences(settings(with_one), run)
        assert found.may_change, found.path
    saved = settings(STEP)
    for name in ("loss", "net_parts"):
        del saved[name]
    del saved["optimizer"]["schedule"], saved["model"]["net_arguments"]
    assert not differences(saved, STEP), "a run of an older build goes on"


# --- a killed run ---------------------------------------------------------------------------------

RUN = RunConfig(
    model=dataclasses.replace(news_model(), net="own_net:Tasks", heads=HEADS),
    optimizer=OptimizerConfig(schedule=SCHEDULE),
    loss="own_net:focal",
    net_parts=2,
    batch_size=24,
    publish_every_s=600,
    snapshot_every=3,
)


def test_a_killed_run_ends_with_the_same_bytes_and_figures(tmp_path: Path) -> None:
    def end_of(trainer: Trainer, publication: Publication) -> Any:
        assert trainer.learner.schedule is not None
        files = newest_files(publication)
        by_head = {name: each.daily() for name, each in trainer.state.heads.by_name.items()}
        figures = trainer.state.prequential.daily(), by_head, trainer.learner.schedule.state()
        return files, figures

    whole = Publication(tmp_path / "whole")
    wanted = end_of(train(RUN, Shopping(), whole), whole)
    assert 0 < wanted[1][1]["buy"][0] < 1
    killed = Publication(tmp_path / "killed")
    killed.path.mkdir()
    shutil.copyfile(whole.program, killed.program)
    for batches in (14, 6):
        train(RUN, Shopping(), killed, batches)
    assert end_of(train(RUN, Shopping(), killed), killed) == wanted


def test_a_folder_of_the_first_head_alone_goes_on_with_all_once_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication = Publication(tmp_path / "pub")

    def begun(*, change: bool = False) -> Trainer:
        return Trainer(RUN, publication, program_cache=CACHE, change_model=change)

    def manifest() -> dict[str, Any]:
        return read_manifest(publication.snapshot_path(publication.snapshots()[-1]))

    describe = SnapshotInfo.of

    def without_heads(*args: Any, **more: Any) -> SnapshotInfo:
        return dataclasses.replace(describe(*args, **more), heads=())

    with monkeypatch.context() as older:
        older.setattr(SnapshotInfo, "of", without_heads)
        begun().fit(FirstEvents(Shopping(), 240))
    said = manifest()
    first = said["version"], said["schema_id"]
    assert "heads" not in said
    with pytest.raises(CheckpointError, match=r"of its first head alone.*--change-model"):
        begun()
    changed = begun(change=True)
    assert changed.state.number == first[0]
    changed.fit(Shopping())
    said = manifest()
    assert said["heads"] == ["click", "buy"]
    assert said["version"] > first[0]
    assert said["schema_id"] != first[1]
    begun()  # it needs no permission any more


def test_heads_are_a_part_of_the_schema() -> None:
    tables = [store_table(table, i, 1) for i, table in enumerate(news_model().tables)]

    def schema(*heads: HeadConfig) -> int:
        model = dataclasses.replace(news_model(), heads=heads)
        return schema_id(SnapshotInfo.of(model, lineage=1, version=1, watermark_ms=0), tables)

    assert len({schema(), schema(*HEADS), schema(*HEADS[::-1])}) == 3
    assert schema() == schema(HEADS[0])  # a head alone has no name


# --- events ---------------------------------------------------------------------------------------

SCHEMA = EventSchema(
    features=(FeatureColumn(name="user", column="user"),),
    label="click",
    more_labels=("buy",),
    weight="w",
    ts="ts",
)
COLUMNS: dict[str, list[Any]] = {
    "user": [1, 2, 3, 4, 5, 6],
    "click": [1, 0, 1, 1, 0, 1],
    "buy": [1, None, 0, 2, 0, 0],
    "w": [1.0, 0.5, 2.0, 1.0, -1.0, None],
    "ts": [1, 2, 3, 4, 5, 6],
}


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_labels_and_weights_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"events.{kind}"
    if kind == "parquet":
        pa.parquet.write_table(pa.table(COLUMNS), path)
    else:
        rows = zip(*COLUMNS.values(), strict=True)
        lines = (",".join("" if each is None else str(each) for each in row) for row in rows)
        path.write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")
    source = open_events(str(path), schema=SCHEMA)
    (batch,) = source.batches(batch_size=10)
    assert batch.label_B.tolist() == [1, 0, 1]
    assert batch.weight_B is not None
    assert batch.weight_B.tolist() == [1, 0.5, 2]
    np.testing.assert_array_equal(batch.labels(2), np.array([[1, 1], [0, np.nan], [1, 0]]))
    assert source.dead_letters.by_reason == {
        "label buy is not 0 or 1": 1,
        "weight w is not a number of 0 or more": 2,
    }


def test_parts_of_a_batch_and_other_ranks_have_them() -> None:
    batch = next(Shopping().batches(batch_size=20))
    for part, rows in (
        (take(batch, 3, 9), slice(3, 9)),
        (where(batch, batch.event_B % 2 == 0), batch.event_B % 2 == 0),
        (unpacked(packed(batch)), slice(None)),
    ):
        np.testing.assert_array_equal(part.labels(2), batch.labels(2)[rows])
        assert part.weight_B is not None
        assert batch.weight_B is not None
        np.testing.assert_array_equal(part.weight_B, batch.weight_B[rows])


def test_heads_are_the_labels_of_the_events() -> None:
    check_model(RUN.model, Shopping())
    for heads in ((), HEADS[:1], HEADS[::-1]):
        with pytest.raises(ConfigurationError, match="the events have labels click, buy: give"):
            check_model(dataclasses.replace(RUN.model, heads=heads), Shopping())


def test_heads_that_no_net_has_are_refused() -> None:
    with pytest.raises(ValueError, match="net 'deepfm' has one output, for 2 heads"):
        dataclasses.replace(RUN.model, net="deepfm")
    with pytest.raises(ValueError, match="heads repeat"):
        dataclasses.replace(RUN.model, heads=HEADS[:1] * 2)
    with pytest.raises(ValueError, match="has 65 heads; give 64 at most"):
        dataclasses.replace(RUN.model, heads=tuple(HeadConfig(name=str(n)) for n in range(65)))
    with pytest.raises(ValueError, match="weight is 0; give more"):
        HeadConfig(name="a", weight=0)
    with pytest.raises(ConfigurationError, match=r"it must give 2 scores a sample, \[1, 2\]"):
        build_net(dataclasses.replace(RUN.model, net="own_net:Tower"))
    with pytest.raises(ValueError, match="'click' repeats; give each a column"):
        dataclasses.replace(SCHEMA, more_labels=("click",))
