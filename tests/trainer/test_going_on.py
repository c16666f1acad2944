"""Yesterday's folder and today's same command: pairs of `going_on.PAIRS`, a few in process.

What is refused instead says what the folder is, and what to do.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import going_on
import pytest
import redis
from buckets import s3_server
from days_of_news import news
from killing import CACHE, train
from typer.testing import CliRunner

import embertide
from embertide.server.adapters.process import free_ports
from embertide.server.adapters.redis import RedisOptions, RedisServer
from embertide.trainer.__main__ import app
from embertide.trainer.config import RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.presets import news_model
from embertide.trainer.publish.bus import Keys
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.lock import LockedError
from embertide.trainer.publish.origin import FolderOrigin
from embertide.trainer.run.checkpoint import checkpoint as checkpoints
from embertide.trainer.run.checkpoint.checkpoint import CheckpointError
from embertide.trainer.run.defaults import PublishSchedule
from embertide.trainer.run.loop import Trainer
from embertide.v1 import update_pb2

RUN = RunConfig(model=news_model(), batch_size=64, publish_every_s=600, snapshot_every=4)
NEWS = NewsSource(NewsConfig(hours=1, views_per_hour=60, users=40, new_items_per_hour=5))


def command(*arguments: object) -> Any:
    said = ["train", *map(str, arguments), "--cache", str(CACHE)]
    return CliRunner().invoke(app, said, catch_exceptions=False)


class InProcess(going_on.Work):
    """A pair whose commands are functions: a process takes seconds to begin."""

    def train(self, *arguments: object, into: Path | None = None) -> dict[str, Any]:
        done = command(into or self.publication, "--json", *arguments)
        assert done.exit_code == 0, done.output
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["result"]
        return result

    def call(self, data: Path) -> int:
        folder = self.publication
        return embertide.train(data=str(data), folder=folder, program_cache=CACHE).events


@pytest.mark.parametrize(
    "name",
    [
        "a glob with nine more days",
        "a file that did not change",
        "embertide.train(), then the command",
    ],
)
def test_yesterdays_folder_goes_on(tmp_path: Path, name: str) -> None:
    going_on.PAIRS[name](InProcess(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("name", going_on.PAIRS)
def test_yesterdays_folder_goes_on_with_processes_of_their_own(tmp_path: Path, name: str) -> None:
    with contextlib.ExitStack() as stack:
        s3 = stack.enter_context(s3_server(tmp_path)) if "storage" in name else None
        going_on.PAIRS[name](going_on.Work(tmp_path, s3))


def test_an_empty_folder_with_object_storage_has_the_cadence_of_before(tmp_path: Path) -> None:
    work = InProcess(tmp_path)
    days = news(10, views_per_hour=60)
    events = work.write("news.parquet", days[:1])
    said = ("--data", tmp_path / "news.parquet", "--storage", f"file://{tmp_path}/bucket")
    work.learned(events, *said)
    before = PublishSchedule.of(checkpoints.saved_settings(Publication(work.publication)))
    work.publication.rename(tmp_path / "lost")
    events = work.write("news.parquet", days)
    work.learned(events, *said)
    after = PublishSchedule.of(checkpoints.saved_settings(Publication(work.publication)))
    assert before == after
    assert work.train("--data", tmp_path / "news.parquet", into=tmp_path / "fresh")
    fresh = PublishSchedule.of(checkpoints.saved_settings(Publication(tmp_path / "fresh")))
    assert fresh != before  # or this shows nothing


def test_a_folder_says_where_it_comes_from(tmp_path: Path) -> None:
    work = InProcess(tmp_path)
    events = work.write("news.parquet", news(1))
    work.learned(events, "--data", tmp_path / "news.parquet")
    wanted = FolderOrigin(model="news", events=str(tmp_path / "news.parquet"))
    assert FolderOrigin.read(work.publication) == wanted
    found = checkpoints.load_newest(Publication(work.publication))
    assert found is not None
    assert FolderOrigin.of(found.checkpoint.origin) == wanted
    refused = command(
        work.publication, "--data", tmp_path / "news.parquet", "--publish-every-s", "77"
    )
    assert refused.exit_code == 1
    assert f"(model 'news', {tmp_path}/news.parquet) was trained with publish_every_s" in (
        refused.stderr
    )
    assert "use the same (--publish-every-s " in refused.stderr


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("", "is a variable not set?"),
        ("s3://bucket/x", "--storage s3://bucket/x"),
        ("{file}", "is a file: give a folder to publish to"),
        ("{file}/below", "is a file: give a folder to publish to"),
    ],
)
def test_what_is_no_folder_is_refused_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, said: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    done = command(folder.format(file=tmp_path / "file"), "--demo", "--hours", 1)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_server_that_is_away_is_told_from_a_missing_file(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    done = command(tmp_path / "pub", "--data", f"http://127.0.0.1:{port}/news.parquet")
    assert done.exit_code == 2
    assert "ClientConnectorError" in done.stderr
    assert f"127.0.0.1:{port}" in done.stderr


def test_a_second_trainer_is_told_who_has_the_folder(tmp_path: Path) -> None:
    """Also before the first one has published anything, and whatever it is asked to learn."""
    code = (
        "import sys; from pathlib import Path; from embertide.trainer.publish.lock import "
        "FolderLock; lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "pub")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(LockedError, match=f"is published to by pid {other.pid} on "):
            Trainer(RUN, Publication(tmp_path / "pub"), program_cache=CACHE)
        assert not (tmp_path / "pub" / "program.pt2").exists()
        other.communicate("\n", 10)


def test_a_live_trainer_of_another_folder_is_not_ended(tmp_path: Path) -> None:
    with RedisServer(RedisOptions(log=tmp_path / "redis.log")) as server:
        client = redis.Redis.from_url(server.url)
        sign = update_pb2.TrainerSign(
            host="prod\x1b[2J", pid=77, folder="/data/news", lineage=3, started_ms=1_790_000_000_000
        )

        def begin(folder: Path) -> None:
            Trainer(RUN, Publication(folder), bus=server.url, program_cache=CACHE)

        client.set(Keys("news").trainer, sign.SerializeToString(), ex=7 * 86_400)
        with pytest.raises(LockedError) as caught:
            begin(tmp_path / "demo")
        said = str(caught.value)
        assert "pid 77 on prod\\x1b[2J, folder /data/news, since 2026-09-21 " in said
        assert "another --bus" in said
        assert not (tmp_path / "demo").exists()
        # It has ended, or has been silent for long, or is of the same folder: the run begins.
        sign.ended_ms = 1
        client.set(Keys("news").trainer, sign.SerializeToString(), ex=7 * 86_400)
        begin(tmp_path / "a")
        sign.ended_ms = 0
        client.set(Keys("news").trainer, sign.SerializeToString(), ex=7 * 86_400 - 60)
        begin(tmp_path / "b")
        sign.folder = str(tmp_path / "c")
        client.set(Keys("news").trainer, sign.SerializeToString(), ex=7 * 86_400)
        begin(tmp_path / "c")


def test_another_runs_settings_are_named_with_the_folder(tmp_path: Path) -> None:
    publication = Publication(tmp_path / "pub")
    train(RUN, NEWS, publication)
    with pytest.raises(
        CheckpointError, match=r"\(model .news., news\(seed=1\)\) was trained with batch_size"
    ):
        Trainer(dataclasses.replace(RUN, batch_size=32), publication, program_cache=CACHE)


def test_a_warm_start_is_said_with_its_figures_also_when_it_goes_on(tmp_path: Path) -> None:
    work = InProcess(tmp_path)
    days = news(2, views_per_hour=60)
    work.write("news.parquet", days[:1])
    data = ("--data", tmp_path / "news.parquet")
    work.train(*data, into=tmp_path / "first")
    for upto in (1, 2):
        work.write("news.parquet", days[:upto])
        done = command(work.publication, *data, "--warm-start", tmp_path / "first")
        said = " ".join(done.stdout.split())  # a folder of a certain length breaks the line
        assert f"the run in {tmp_path}/first may have learned these events before" in said
    assert "may have learned" not in command(tmp_path / "first", *data).stdout


def test_a_gate_that_nobody_opens_is_refused(tmp_path: Path) -> None:
    done = command(tmp_path / "pub", "--demo", "--hours", 1, "--behind-scorer")
    assert done.exit_code == 2
    assert "--behind-scorer: give --bus" in done.stderr
