"""A profile is measured of steps that are taken, and a plan is made of it and of no other."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stepprofiles import LINK, NO_WORK, profile, table
from typer.testing import CliRunner

from embertide.trainer.__main__ import app
from embertide.trainer.config import FeatureConfig, LocalSGD, ModelConfig, RunConfig, TableConfig
from embertide.trainer.data.base import Batch
from embertide.trainer.errors import ConfigurationError
from embertide.trainer.model.learner import Learner
from embertide.trainer.run.step_profile import machine, measure, take_steps
from embertide.trainer.run.step_spans import StepSpans
from embertide.trainer.sync.placing import profile as profiles
from embertide.trainer.sync.placing.profile import HotKey
from embertide.trainer.sync.placing.search import usual
from embertide.trainer.sync.placing.step import StepModel, Strategy
from embertide.trainer.sync.plan import read_for
from embertide.trainer.sync.ranks import Ranks

_MODEL = ModelConfig(
    name="m",
    tables=(TableConfig(name="user", bucket_bits=2), TableConfig(name="item")),
    features=(
        FeatureConfig(name="user", table="user"),
        FeatureConfig(name="item", table="item"),
        FeatureConfig(name="other", table="item"),
    ),
)
_RUN = RunConfig(model=_MODEL, batch_size=128)
_UNEVEN = profile(
    ranks=(LINK, dataclasses.replace(LINK, pace=5.0)),
    tables=(table("user", (0.25,) * 4), table("item")),
    work=dataclasses.replace(NO_WORK, update_s=1e-4),
)


def _batches(count: int) -> list[Batch]:
    chance = np.random.default_rng(1)
    return [
        Batch(
            first=128 * n,
            next_offset=128 * (n + 1),
            event_B=np.arange(128) + 128 * n,
            ts_ms_B=np.arange(128) + 128 * n,
            keys_BF=chance.integers(-50, 50, (128, 3)),
            dense_BD=np.zeros((128, 0), np.float32),
            label_B=chance.integers(0, 2, 128).astype(np.float32),
        )
        for n in range(count)
    ]


def test_a_profile_is_measured_and_explains_the_step_that_was_measured() -> None:
    made = measure(_RUN, _batches(6), Ranks.alone())
    profiles.check(made, _MODEL)
    profiles.check_machine(made, machine())
    assert [each.keys for each in made.tables] == [1.0, 2.0]
    user = made.tables[0]
    assert user.distinct[-1][0] == 128
    assert 60 < user.distinct[-1][1] <= 100
    assert user.rows <= 100
    assert sum(user.load_P) == pytest.approx(1)
    work = dataclasses.asdict(made.work)
    assert all(work[name] > 0 for name in ("route_s", "lookup_s", "pool_s", "give_s", "update_s"))
    assert made.layers
    model = StepModel(made, 1)
    assert model.step_s(Strategy(usual(made, 1))) >= 0.99 * made.step_s
    # A hundred keys of each table, which most batches have: 4 of 6 at the least.
    assert 150 < len(made.hot) <= 200
    assert all(0 < key.bucket + 1 <= len(made.tables[key.table].load_P) for key in made.hot)
    assert sum(key.share for key in made.hot if key.table == 0) == pytest.approx(1, abs=0.3)
    assert made.work.count_s > 0
    # 128 ms of events a batch, and a version each ten minutes.
    assert made.version_steps == pytest.approx(600_000 / 128, rel=0.01)


def test_the_parts_of_a_step_that_was_taken_follow_one_another() -> None:
    learner = Learner(_RUN)
    spans, untouched = StepSpans(learner), set(vars(learner.rows))
    take_steps(learner, _batches(6), spans)
    assert [(lane, name) for lane, name, *_ in spans.found] == [
        ("rank 0 core", name) for name in ("rows", "forward", "backward", "adam", "apply")
    ]
    times = [at for *_, begin, end in spans.found for at in (begin, end)]
    assert times == sorted(times)
    assert times[0] >= 0
    assert set(vars(learner.rows)) == untouched, "nothing of it is left"


def test_a_step_of_two_ranks_is_in_the_profile_and_drawn(tmp_path: Path) -> None:
    profiled, drawn = tmp_path / "profile.json", tmp_path / "step.svg"
    words = ("step-profile", str(profiled), "--demo", "--hours", "6", "--nproc", "2")
    trainer = [sys.executable, "-m", "embertide.trainer"]
    done = subprocess.run([*trainer, *words], capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    made = profiles.read(profiled)
    for rank in (0, 1):
        mine = [span for span in made.measured if span[0].startswith(f"rank {rank} ")]
        core = [name for lane, name, *_ in mine if lane.endswith(" core")]
        assert core == ["rows", "forward", "backward", "sum", "adam", "apply"]
        assert (f"rank {rank} asker", "route") in [(lane, name) for lane, name, *_ in mine]
        assert all(0 <= begin <= end for _, _, begin, end in mine)
    code, output = _search(profiled, 2, "--plot", drawn)
    assert code == 0, output
    text = drawn.read_text()
    assert "measured: rank 1 core" in text
    assert "predicted: rank 1 core" in text


def test_a_profile_with_hot_keys_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = dataclasses.replace(_UNEVEN, hot=(HotKey(0, 3, 0.25), HotKey(1, 0, 0.5)))
    profiles.write(made, tmp_path / "profile.json")
    assert profiles.read(tmp_path / "profile.json") == made
    said = json.loads((tmp_path / "profile.json").read_text())
    for wrong in ([0, 4, 0.25], [2, 0, 0.25], [0, 0, -0.5], [0, 0], "0"):
        (tmp_path / "wrong.json").write_text(json.dumps(said | {"hot": [wrong]}))
        with pytest.raises(ConfigurationError, match="damaged"):
            profiles.read(tmp_path / "wrong.json")


@pytest.mark.parametrize("step_s", [1e-5, 10.0])
def test_a_step_that_a_run_has_measured_is_explained_exactly(step_s: float) -> None:
    owners = usual(measure(_RUN, _batches(4), Ranks.alone()), 1)
    made = measure(_RUN, _batches(4), Ranks.alone(), owners=owners, step_s=step_s)
    assert made.step_s == step_s
    assert StepModel(made, 1).step_s(Strategy(owners)) == pytest.approx(step_s, rel=1e-6)
    assert made.work.step_s == pytest.approx(max(0.0, step_s - 0.1), abs=0.1)


def test_a_profile_is_of_steps_without_hot_rows() -> None:
    made = measure(dataclasses.replace(_RUN, hot_rows=5), _batches(4), Ranks.alone())
    assert [each.keys for each in made.tables] == [1.0, 2.0]


def test_steps_that_cannot_be_measured_are_refused() -> None:
    apart = dataclasses.replace(_RUN, sync=LocalSGD())
    with pytest.raises(ConfigurationError, match="LocalSGD"):
        measure(apart, _batches(4), Ranks.alone())
    with pytest.raises(ConfigurationError, match="events for 3 batches"):
        measure(_RUN, _batches(3), Ranks.alone())
    lists = dataclasses.replace(
        _MODEL, features=(*_MODEL.features[:2], FeatureConfig(name="o", table="item", keys="list"))
    )
    with pytest.raises(ConfigurationError, match="lists or sequences"):
        measure(dataclasses.replace(_RUN, model=lists), _batches(4), Ranks.alone())


# --- the command ----------------------------------------------------------------------------------


def _search(*words: object) -> tuple[int, str]:
    said = CliRunner().invoke(app, ["plan-search", *map(str, words)])
    return said.exit_code, said.output


def test_the_command_writes_a_plan_that_a_run_reads(tmp_path: Path) -> None:
    path, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    profiles.write(_UNEVEN, path)
    code, output = _search(path, 2, "--elsewhere", "--output", plan, "--seconds", 0.5, "--json")
    assert code == 0, output
    said = json.loads(output)
    assert said["step_s"] < said["usual_s"]
    owners = read_for(plan, {"user": 4, "item": 1}, 2)
    assert StepModel(_UNEVEN, 2).step_s(Strategy(owners)) == said["step_s"]


def test_the_command_finds_hot_rows_and_a_run_has_as_many(tmp_path: Path) -> None:
    path, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    hot = tuple(HotKey(1, 0, 0.1) for _ in range(8))
    work = dataclasses.replace(NO_WORK, lookup_s=1e-4, update_s=1e-4)
    tables = (table("user", (0.25,) * 4), table("item"))
    made = profile(ranks=(LINK,) * 4, tables=tables, work=work)
    made = dataclasses.replace(made, hot=hot, version_steps=100.0)
    profiles.write(made, path)
    words = ["--elsewhere", "--output", plan, "--seconds", 0.5, "--json"]
    code, output = _search(path, 4, *words)
    assert code == 0, output
    found = read_for(plan, {"user": 4, "item": 1}, 4)
    assert found.hot_rows == 8
    assert 0 < json.loads(output)["hot_rows"] <= 8
    # Without counts, what the plan before says stays.
    profiles.write(dataclasses.replace(made, hot=()), path)
    before = tmp_path / "before.json"
    before.write_text(plan.read_text().replace('"hot_rows": 8', '"hot_rows": 5'))
    code, output = _search(path, 4, "--plan", before, *words)
    assert code == 0, output
    assert read_for(plan, {"user": 4, "item": 1}, 4).hot_rows == 5


def test_the_command_explains_and_draws_a_step(tmp_path: Path) -> None:
    path, plot = tmp_path / "profile.json", tmp_path / "step.svg"
    profiles.write(_UNEVEN, path)
    code, output = _search(path, 2, "--elsewhere", "--plot", plot)
    assert code == 0, output
    assert "apply of rank 1" in output
    assert "<svg" in plot.read_text()


def test_the_command_says_what_was_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profiles.write(_UNEVEN, path)
    code, output = _search(path, 3, "--elsewhere")
    assert code == 0, output
    assert "not measured: 3 ranks: measured were 2" in output


@pytest.mark.parametrize("change", ["machine", "tables", "ranks"])
def test_the_command_refuses_what_is_of_something_else(tmp_path: Path, change: str) -> None:
    path, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    profiles.write(_UNEVEN, path)
    tables = {"user": 0, "item": 0} if change != "tables" else {"user": 0}
    ranks = 2 if change != "ranks" else 4
    plan.write_text(json.dumps({"format": "embertide ranks 1", "ranks": ranks, "tables": tables}))
    elsewhere = ["--elsewhere"] if change != "machine" else []
    code, output = _search(path, 2, "--plan", plan, *elsewhere)
    assert code == 2
    words = {"machine": "another machine", "tables": "names the tables", "ranks": "for 4 ranks"}
    assert words[change] in output
