"""Which rank owns which buckets: balanced plans, and plans that are read from a file."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from rankjobs import STEP

from embertide.trainer.config import TableConfig
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.presets import news_history, news_model
from embertide.trainer.sync import plan
from embertide.trainer.sync.plan import EVERYWHERE, Ownership, balanced


def test_a_plan_may_say_how_many_rows_are_hot(tmp_path: Path) -> None:
    path, owners = tmp_path / "plan.json", plan.balanced(STEP.model, 2)
    names = [table.name for table in STEP.model.tables]
    for hot_rows in (None, 0, 40):
        said = dataclasses.replace(owners, hot_rows=hot_rows)
        path.write_text(plan.text_for(names, said))
        assert plan.read(path, STEP.model, 2).hot_rows == hot_rows
        # A checkpoint has all rows at home, whatever the plan says.
        assert plan.text(STEP.model, said) == plan.text(STEP.model, owners)
    for wrong in (-1, 1.5, "many", True):
        path.write_text(json.dumps(json.loads(plan.text(STEP.model, owners)) | {"hot_rows": wrong}))
        with pytest.raises(ConfigurationError, match="hot_rows"):
            plan.read(path, STEP.model, 2)


def test_a_balanced_plan_is_balanced() -> None:
    wide = dataclasses.replace(
        news_model(),
        tables=tuple(TableConfig(name=t.name, bucket_bits=4) for t in news_model().tables),
    )
    for ranks in (2, 3, 8):
        owners = balanced(wide, ranks).owners_T
        counts = np.bincount(np.concatenate(owners), minlength=ranks)
        assert counts.max() - counts.min() <= 1
    load = [[0] * 16 for _ in wide.tables]
    for each in load:
        each[3] = 100
        each[:3] = [20, 20, 20]
    owners = balanced(wide, 2, load).owners_T
    of_rank = np.zeros(2)
    for keys_P, owner_P in zip(load, owners, strict=True):
        np.add.at(of_rank, owner_P.astype(np.int64), keys_P)
    assert of_rank.max() / of_rank.mean() < 1.05


def test_a_plan_is_read_as_it_is_written_and_refused_when_it_does_not_fit(tmp_path: Path) -> None:
    tables = (np.array([0, 1, 1, 0], np.uint16), np.full(4, EVERYWHERE, np.uint16))
    path = tmp_path / "plan.json"
    path.write_text(plan.text(STEP.model, Ownership(2, tables)))
    read = plan.read(path, STEP.model, 2)
    assert [each.tolist() for each in read.owners_T] == [each.tolist() for each in tables]
    with pytest.raises(ConfigurationError, match="is for 2 ranks, and 3 were started"):
        plan.read(path, STEP.model, 3)
    said = json.loads(path.read_text())
    for table, why in (
        ([0, 1], "give a rank below 2"),
        (2, "give a rank below 2"),
        ("all", "everywhere"),
    ):
        said["tables"]["item"] = table
        path.write_text(json.dumps(said))
        with pytest.raises(ConfigurationError, match=why):
            plan.read(path, STEP.model, 2)
    path.write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        plan.read(path, STEP.model, 2)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        plan.read(tmp_path / "none.json", STEP.model, 2)


def test_a_plan_may_name_histories_that_versions_carry(tmp_path: Path) -> None:
    model = news_history()
    said = json.loads(plan.text(model, plan.balanced(model, 2)))
    said["tables"]["hist_of_user"] = [0, 1, 0, 1]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(said))
    assert len(plan.read(path, model, 2).owners_T) == len(model.tables)
