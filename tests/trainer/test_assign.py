"""`embertide train --set SETTING=VALUE`: any field of a run by its path."""

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.config import DCT, PruneConfig, PublishBudget, RunConfig
from embertide.trainer.config.assign import assigned
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.presets import news_model

RUN = RunConfig(model=news_model())


def test_fields_are_assigned_by_their_types() -> None:
    run = assigned(
        RUN,
        [
            *("batch_size=512", "negative_rate=0.25", "net_dtype=bf16", "cpu=native"),
            *("optimizer.dense_learning_rate=1e-2", "codecs.rows=int8", "batch_size=64"),
            *("model.tables[1].dim=32", f"model.tables[{news_model().tables[0].name}].dim=48"),
            *("loss=mine:focal", "evaluation.user=user", "sync=dct:density=0.02"),
        ],
    )
    first, second = run.model.tables[:2]
    assert (run.batch_size, run.negative_rate, run.net_dtype, run.cpu) == (
        64,
        0.25,
        "bf16",
        "native",
    )
    assert run.optimizer == dataclasses.replace(RUN.optimizer, dense_learning_rate=0.01)
    assert (run.codecs.rows, run.codecs.gradients) == ("int8", "fp32")
    assert (first.dim, second.dim) == (48, 32)
    assert run.model.tables[2:] == RUN.model.tables[2:]
    assert (run.loss, run.evaluation.user) == ("mine:focal", "user")
    assert run.sync == DCT(density=0.02)
    assert assigned(RUN, []) is RUN


def test_a_group_that_was_not_there_begins_with_its_defaults() -> None:
    run = assigned(
        RUN, ["prune.ratio=10", "publish_budget.bytes_per_s=5", "prune.tables=cand,user"]
    )
    assert run.prune == PruneConfig(ratio=10, tables=("cand", "user"))
    assert run.prune is not None
    assert run.publish_budget == PublishBudget(bytes_per_s=5)
    assert assigned(run, ["prune=none"]).prune is None
    assert assigned(run, ["prune.first=7,9"]).prune == dataclasses.replace(run.prune, first=(7, 9))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("batch_size", "write SETTING=VALUE"),
        ("=3", "write SETTING=VALUE"),
        ("bach_size=3", "--set bach_size: RunConfig has no 'bach_size'; did you mean batch_size"),
        ("optimizer.learning_rate=1", "did you mean dense_learning_rate or sparse_learning_rate"),
        ("zzz=3", "RunConfig has no 'zzz'; it has model, optimizer"),
        ("batch_size=x", "--set batch_size=x: give a whole number"),
        ("negative_rate=x", "--set negative_rate=x: give a number"),
        ("batch_size=0", "--set batch_size: batch_size is 0; it must be at least 1"),
        ("prune.first=1,x", "--set prune.first=1,x: give a whole number"),
        ("codecs.rows=fp64", "--set codecs.rows=fp64: use one of fp32, bf16, fp16, int8"),
        ("optimizer=3", "it has settings of its own, each with a --set: name"),
        ("batch_size.x=3", "it has no settings of its own"),
        ("batch_size[2]=3", "--set batch_size[2]: it has no parts; leave [2] out"),
        ("model.tables[nothing].dim=3", "there is no such part; there are ["),
        ("model.tables[99].dim=3", "there is no such part"),
        ("model.tables[0]=3", "name one of its settings, as model.tables[0].NAME=VALUE"),
        ("model.tables=3", "it is no plain value: give it in a run's file, --config"),
        ("sync=nothing", "--set sync=nothing: "),
        ("publish_budget.image_bytes=3", "--set publish_budget.image_bytes: "),
        ("model.tables[0].chunks=7", "--set model.tables[0].chunks: "),
    ],
)
def test_what_cannot_be_assigned_names_the_setting_and_the_remedy(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        assigned(RUN, [text])
    assert why in str(caught.value)


def test_a_setting_and_the_group_it_is_in_are_not_both_assigned() -> None:
    for texts in (["prune=none", "prune.ratio=3"], ["prune.ratio=3", "prune=none"]):
        with pytest.raises(ConfigurationError, match="another --set gives"):
            assigned(RUN, texts)


def test_the_command_refuses_a_setting_before_it_trains(tmp_path: Path) -> None:
    words = ["train", str(tmp_path / "pub"), "--demo", "--hours", "1", "--set", "batch_sise=3"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "did you mean batch_size" in " ".join(done.output.split())
    assert not (tmp_path / "pub").exists()
