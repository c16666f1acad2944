"""`embertide.train` and `embertide train` choose the same where nobody says otherwise."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import embertide
from embertide import training
from embertide.trainer.__main__ import app
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.presets import PRESETS
from embertide.trainer.run import loop
from embertide.trainer.run.defaults import PublishSchedule

# The folder is the caller's; a cache saves compiling, and one rank is none or itself.
APART = {"self", "publication", "program_cache", "ranks"}
SAVED = PublishSchedule(publish_every_s=1800, snapshot_every=9)


class MadeError(BaseException):
    """Ends a run before it begins."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that trainers are made with, defaults too."""
    found: list[dict[str, Any]] = []
    signature = inspect.signature(loop.Trainer.__init__)

    def make(*given: Any, **named: Any) -> None:
        bound = signature.bind(None, *given, **named)
        bound.apply_defaults()
        arguments = {name: v for name, v in bound.arguments.items() if name not in APART}
        arguments["allow_change"] = tuple(arguments["allow_change"])
        schedule = arguments.pop("publish_schedule")
        assert schedule is not None
        found.append({**arguments, "publish_schedule": (schedule(None), schedule(SAVED))})
        raise MadeError

    monkeypatch.setattr(loop, "Trainer", make)
    monkeypatch.setattr(training, "Trainer", make)
    return found


@pytest.mark.parametrize("events", ["a file", "synthetic"])
@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_the_function_and_the_command_begin_the_same_run(
    made: list[dict[str, Any]], preset: str | None, events: str, tmp_path: Path
) -> None:
    folder, news = tmp_path / "pub", tmp_path / "news.parquet"
    NewsSource(NewsConfig(hours=9, views_per_hour=40, users=20)).write_parquet(str(news))
    synthetic = events == "synthetic"
    words = ["train", str(folder), *(["--demo"] if synthetic else ["--data", str(news)])]
    if preset is not None:
        words += ["--model", preset]
    with pytest.raises(MadeError):
        CliRunner().invoke(app, words)
    with pytest.raises(MadeError):
        embertide.train(
            preset,
            folder=folder,
            data=None if synthetic else str(news),
            hours=96 if synthetic else None,  # the command's
        )
    command, function = made
    assert function == command
    first, again = function["publish_schedule"]
    assert again == SAVED
    assert (first.publish_every_s == 600) == synthetic
