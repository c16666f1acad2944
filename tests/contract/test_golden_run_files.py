"""Run files of earlier builds, kept in tests/golden/run-files: today's build runs each.

`printed` is of `train --print-config news-crossed`, `guessed` of `init`, and `own` names every
private module that pages showed before `embertide.config`, `embertide.data` and `embertide.nn`.
"""

import shutil
from pathlib import Path

import pytest

from embertide.trainer.commands.run_file import RunFile, load, read_plain
from embertide.trainer.config import LabelJoin, RunConfig
from embertide.trainer.model.build import build_net
from embertide.trainer.model.layers import Columns
from embertide.trainer.presets import news_crossed, news_rates

FILES = Path(__file__).parents[1] / "golden/run-files"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = (f"{n % 9},{n % 5},{n % 3}|7,{n / 7:.2f},{n % 2},{1_750_000_000 + n}" for n in range(99))
    header = "user_id,item_id,tags,price,clicked,time\n"
    Path("clicks.csv").write_text(header + "\n".join(rows) + "\n")
    return tmp_path


def loaded(here: Path, name: str) -> RunFile:
    shutil.copy(FILES / f"{name}.txt", here / "run.py")
    return load(here / "run.py")


def test_a_printed_file_is_the_run_that_it_was(here: Path) -> None:
    run = loaded(here, "printed").run
    assert run == RunConfig(model=news_crossed(), optimizer=news_rates())


def test_a_guessed_file_reads_its_events(here: Path) -> None:
    found = loaded(here, "guessed")
    assert found.run == read_plain((FILES / "guessed.txt").read_text())["run"]
    assert found.run.publish_every_s == 14_400
    assert found.source is not None
    (batch,) = found.source.batches(batch_size=500)
    assert len(batch) == 99
    names = [feature.name for feature in found.source.schema.features]
    assert names == ["user_id", "item_id", "tags", "price_bin"]


def test_a_net_of_the_file_is_found_by_the_name_that_it_had(here: Path) -> None:
    found = loaded(here, "own").run
    assert found.model.net == "run_file:Tower"
    assert found.labels == LabelJoin(wait_s=1800)
    net = build_net(found.model)
    assert type(net).__name__ == "Tower"
    assert any(isinstance(each, Columns) for each in net.modules())
