"""Settings of a checkpoint against those of a run that goes on: new, gone and changed ones."""

import dataclasses
import json
from typing import Any

import pytest

from embertide.trainer.config import (
    BEFORE,
    CorrectionConfig,
    FeatureConfig,
    ModelConfig,
    OptimizerConfig,
    PruneConfig,
    PublishBudget,
    ReducedConfig,
    RunConfig,
    ScheduleConfig,
    TableConfig,
)
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.run.checkpoint import settings
from embertide.trainer.run.checkpoint.settings import Difference, changed_from_default, differences

MODEL = ModelConfig(
    name="news",
    tables=(TableConfig(name="user"), TableConfig(name="item", dim=8)),
    features=(
        FeatureConfig(name="user", table="user"),
        FeatureConfig(name="item", table="item"),
    ),
)
RUN = RunConfig(model=MODEL, prune=PruneConfig(ratio=10.0))


def saved(run: RunConfig = RUN) -> dict[str, Any]:
    """The settings as a checkpoint's JSON gives them back."""
    restored: dict[str, Any] = json.loads(json.dumps(settings.settings(run)))
    return restored


def with_optimizer(**fields: Any) -> RunConfig:
    return dataclasses.replace(RUN, optimizer=dataclasses.replace(RUN.optimizer, **fields))


def test_a_run_goes_on_from_its_own_checkpoint() -> None:
    assert differences(saved(), RUN) == []


def test_budgets_and_devices_are_free_to_change() -> None:
    assert differences(saved(), dataclasses.replace(RUN, devices=4, ddr_budget_bytes=1 << 30)) == []


def test_a_setting_that_the_checkpoint_lacks_counts_as_its_default() -> None:
    older = saved()
    del older["net_dtype"]
    for table in older["model"]["tables"]:
        del table["counters"]
    assert differences(older, RUN) == []
    run = dataclasses.replace(RUN, net_dtype="bf16")
    assert differences(older, run) == [Difference("net_dtype", "fp32", "bf16")]


def test_a_setting_whose_default_changes_behaviour_counts_as_what_it_was_before() -> None:
    older = saved()
    del older["prune"]["counts_worth"]
    assert differences(older, RUN) == [Difference("prune.counts_worth", 0.0, 0.05)]
    prune = PruneConfig(ratio=10.0, counts_worth=0.0)
    assert differences(older, dataclasses.replace(RUN, prune=prune)) == []


def test_every_former_value_that_a_field_names_is_one_that_it_may_have() -> None:
    for kind, arguments in ((PruneConfig, {"ratio": 2.0}), (OptimizerConfig, {}), (RunConfig, {})):
        for field in dataclasses.fields(kind):
            if BEFORE in field.metadata:
                kind(**{**arguments, field.name: field.metadata[BEFORE]})


def test_a_setting_that_is_gone_matters_only_if_it_was_used() -> None:
    older = saved()
    older["optimizer"]["momentum"] = 0.9
    older["model"]["tables"][1]["salt"] = 3
    changed = changed_from_default(RUN)
    assert differences(older, RUN, changed) == []
    used = differences(older, RUN, [*changed, "model.tables[1].salt"])
    assert [each.path for each in used] == ["model.tables[1].salt"]
    assert "go on with the build that trained it" in str(used[0])
    # An older build did not say what it had changed.
    assert len(differences(older, RUN, None)) == 2


def test_what_was_changed_from_its_default_is_named_by_path() -> None:
    assert changed_from_default(with_optimizer(epsilon=1e-6)) == [
        "model.name",
        "model.tables[0].name",
        "model.tables[1].name",
        "model.tables[1].dim",
        "model.features[0].name",
        "model.features[0].table",
        "model.features[1].name",
        "model.features[1].table",
        "optimizer.epsilon",
        "prune.ratio",
    ]


def test_each_difference_says_how_to_go_on_and_none_says_to_delete() -> None:
    tables = (MODEL.tables[0], dataclasses.replace(MODEL.tables[1], dim=16))
    for run, path, says in (
        (with_optimizer(sparse_learning_rate=0.2), "optimizer.sparse_learning_rate", "allow it: "),
        (with_optimizer(name="sgd"), "optimizer.name", "the state of rows is that optimizer's"),
        (dataclasses.replace(RUN, seed=2), "seed", "new rows get their values from it"),
        (dataclasses.replace(RUN, publish_every_s=60), "publish_every_s", "numbered by it"),
        (
            dataclasses.replace(RUN, model=dataclasses.replace(MODEL, tables=tables)),
            "model.tables[1].dim",
            "in every snapshot and node",
        ),
        (dataclasses.replace(RUN, prune=None), "prune", "begins with a run"),
    ):
        (found,) = differences(saved(), run)
        assert found.path == path
        text = str(found)
        assert says in text
        assert f"--allow-change {path}" in text or "--fork" in text
        assert not {"delete", "remove", "empty"} & set(text.split())


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            "optimizer.learning_rate",
            "did you mean optimizer.dense_learning_rate or optimizer.sparse_",
        ),
        ("seed", "what can change is batch_size"),
        ("model.tables[0].dim", "what can change is batch_size"),
        ("", "what can change is batch_size"),
    ],
)
def test_a_name_that_cannot_be_allowed_is_refused(path: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        settings.check_allowed([path])


def test_every_setting_that_can_change_exists() -> None:
    run = dataclasses.replace(
        RUN,
        publish_budget=PublishBudget(bytes_per_s=1),
        correction=CorrectionConfig(),
        serve_reduced=ReducedConfig(),
        optimizer=OptimizerConfig(schedule=ScheduleConfig(name="step", steps=1)),
    )
    for path in settings.ALLOWED_TO_CHANGE | settings.FREE_TO_CHANGE:
        value: Any = run
        for name in path.split("."):
            value = getattr(value, name)


def test_changes_of_a_run_are_remembered_up_to_a_bound() -> None:
    change = [Difference("threads", 1, 2)]
    assert change[0].change() == "threads changes from 1 to 2"
    parts = [{"name": "a", "dim": 16}, {"name": "b"}], [{"name": "a", "dim": 32}, {"name": "c"}]
    said = Difference("model.tables", *parts).change()
    assert said == "model.tables changes: c is added, b is dropped, a.dim is 32"
    changes = settings.remember([], 7, change)
    assert changes == [{"after": 7, "setting": "threads", "from": 1, "to": 2}]
    for number in range(8, 308):
        changes = settings.remember(changes, number, change)
    assert (len(changes), changes[-1]["after"]) == (256, 307)
