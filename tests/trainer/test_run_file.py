"""A run's file: what it defines, what is wrong with it and where, and the file of all defaults."""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from embertide.trainer import config
from embertide.trainer.__main__ import app
from embertide.trainer.commands.inputs import open_run
from embertide.trainer.commands.run_file import attributes, explained, load
from embertide.trainer.config import RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.errors import ConfigurationError, DataError, TrainerError
from embertide.trainer.presets import PRESETS, news_crossed, news_rates

CACHE = Path(__file__).parents[2] / "build" / "cache" / "dense"
OWN_SCHEMA = """\
from embertide.trainer.config import (
    EvalConfig, FeatureConfig, ModelConfig, RunConfig, TableConfig
)
from embertide.trainer.data import open_events
from embertide.trainer.data.base import EventSchema, FeatureColumn

schema = EventSchema(features=(FeatureColumn(name="who", column="who"),), label="liked")
run = RunConfig(
    model=ModelConfig(
        name="likes",
        tables=(TableConfig(name="who"),),
        features=(FeatureConfig(name="who", table="who"),),
        top_mlp=(4,),
    ),
    evaluation=EvalConfig(user="who", slices=("who",)),
)
"""
CONFIGS = [each for each in vars(config).values() if dataclasses.is_dataclass(each)]
HEAD = """\
from embertide.trainer.config import RunConfig
from embertide.trainer.presets import news_model
"""


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_every_setting_is_explained_and_nothing_else(kind: type) -> None:
    fields = [field.name for field in dataclasses.fields(kind) if field.init]
    assert list(attributes(kind)) == fields
    assert all(attributes(kind).values())


@pytest.mark.parametrize("preset", PRESETS.values())
def test_the_printed_file_is_the_run_itself(tmp_path: Path, preset: object) -> None:
    assert callable(preset)
    run = RunConfig(model=preset(), batch_size=77)
    path = tmp_path / "run.py"
    path.write_text(explained(run))
    assert load(path).run == run
    assert max(map(len, path.read_text().splitlines())) <= 100
    for field in dataclasses.fields(RunConfig):
        assert f"    {field.name}=" in path.read_text()


def test_the_command_prints_it_and_needs_nothing_else() -> None:
    done = CliRunner().invoke(app, ["train", "--print-config", "news-crossed"])
    assert done.exit_code == 0
    assert done.stdout == explained(RunConfig(model=news_crossed(), optimizer=news_rates()))
    assert "# Versions from one snapshot" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEAD + "\nrun = RunConfig(model=news_model(), batch_size=0)\n",
            r"run.py:4: .*batch_size is 0",
        ),
        (
            HEAD + "run = RunConfig(model=news_model(), batches=1)\n",
            r"run.py:3: .*argument 'batches'",
        ),
        (HEAD + "def f():\n    return 1 / 0\n\nf()\n", "run.py:4: ZeroDivisionError"),
        ("x = 1\nrun = (\n", "run.py:2: SyntaxError"),
        ("x = 1\n", r"run.py defines no run; write run = RunConfig\(model=...\)"),
        ("run = 3\n", "run.py defines run as a int"),
        (HEAD + "run = RunConfig(model=news_model())\nsource = 'a.csv'\n", "source as a str"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.py"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        load(path)
    with pytest.raises(ConfigurationError, match="there is no such file"):
        load(tmp_path / "gone.py")


def test_it_is_imported_as_the_module_that_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a-b c.py"  # no name of a module
    path.write_text(
        HEAD + "import inspect\nclass Mine: pass\nrun = RunConfig(model=news_model())\n"
    )
    load(path)
    module = sys.modules["run_file"]
    assert module.__file__ == str(path)
    assert module.__spec__ is not None
    assert inspect.getsource(module.Mine) == "class Mine: pass\n"
    # One of the same length within the same second is no other's code, and nothing lies beside it.
    path.write_text(path.read_text().replace("Mine", "Ours"))
    load(path)
    assert sys.modules["run_file"].Ours.__module__ == "run_file"
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("x = 1 / 0\n")
    with pytest.raises(ConfigurationError, match="py:1: ZeroDivisionError"):
        load(path)
    assert "run_file" not in sys.modules


@pytest.mark.parametrize("name", ["TrainerError('away')", "DataError('a.csv', 'is gone')"])
def test_what_another_try_may_mend_stays_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.py"
    path.write_text(f"from embertide.trainer.errors import *\nraise {name}\n")
    with pytest.raises(TrainerError, match=r"run.py:2: (away|a.csv: is gone)") as caught:
        load(path)
    assert isinstance(caught.value, ConfigurationError) == name.startswith(DataError.__name__)


def run_file(path: Path, source: str = "") -> list[str]:
    path.write_text(f"{HEAD}run = RunConfig(model=news_model(), batch_size=64)\n{source}")
    return ["train", str(path.parent / "pub"), "--config", str(path)]


def test_an_option_that_the_file_decides_is_refused(tmp_path: Path) -> None:
    command = run_file(tmp_path / "run.py")
    done = CliRunner().invoke(app, [*command, "--batch-size", "64"])
    assert done.exit_code == 2
    assert "--batch-size: " in done.stderr
    assert "change it there" in done.stderr
    source = "from embertide.trainer.data.generator import NewsSource\nsource = NewsSource()\n"
    done = CliRunner().invoke(app, [*run_file(tmp_path / "run.py", source), "--hours", "2"])
    assert done.exit_code == 2
    assert "--hours: " in done.stderr


def test_a_model_that_the_events_do_not_fit_is_refused(tmp_path: Path) -> None:
    news = tmp_path / "news.parquet"
    NewsSource(NewsConfig(hours=1, views_per_hour=5)).write_parquet(str(news))
    path = tmp_path / "run.py"
    path.write_text(OWN_SCHEMA.replace("schema = ", "unused = "))
    command = ["train", str(tmp_path / "pub"), "--config", str(path), "--data", str(news)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "the events have user, prev, cand" in done.stderr


@pytest.mark.parametrize(
    ("events", "total"), [("source = open_events({old!r}, schema=schema)", 3), ("", 2)]
)
def test_data_is_read_by_the_schema_of_the_file(tmp_path: Path, events: str, total: int) -> None:
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    old.write_text("who,liked\n1,1\n2,0\n3,1\n")
    new.write_text("who,liked\n4,1\n5,0\n")
    path = tmp_path / "run.py"
    path.write_text(OWN_SCHEMA + events.format(old=str(old)))
    run, source = open_run(path, str(new), None, None, 1)
    assert run is not None
    assert source.schema.label == "liked"
    (batch,) = source.batches(batch_size=9)
    assert batch.keys_BF.tolist() == [[4], [5]]
    folder = str(tmp_path / "pub")
    command = ["train", folder, "--config", str(path), "--cache", str(CACHE)]
    done = CliRunner().invoke(app, [*command, *(() if events else ("--data", str(new)))])
    assert done.exit_code == 0, done.output
    assert f"{total} learned, 0 rejected" in done.output
    done = CliRunner().invoke(app, ["eval", folder, "--config", str(path), "--data", str(new)])
    assert done.exit_code == 0, done.output
    assert "2 of these events are not after" in done.stderr
    assert "2 more have labels of one kind" in done.stdout  # users that the file names
    assert len(re.findall(r"^ *[45] +1 ", done.stdout, re.MULTILINE)) == 2  # and slices


def test_a_schema_that_is_none_and_events_that_are_named_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text(OWN_SCHEMA + "schema = 'who'\n")
    with pytest.raises(ConfigurationError, match=r"defines schema as a str; write schema = Event"):
        load(path)
    path.write_text(OWN_SCHEMA)
    with pytest.raises(ConfigurationError, match="no events: give --data FILE"):
        open_run(path, None, None, None, 1)


def test_a_stream_in_the_file_is_for_train_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    stream = "from embertide.trainer.data.redis_stream import RedisStreamSource as Stream\n"
    path.write_text(
        HEAD + stream + "run = RunConfig(model=news_model())\nsource = Stream.__new__(Stream)\n"
    )
    with pytest.raises(ConfigurationError, match="a stream, which has no end, is for train"):
        open_run(path, None, None, None, 1)
