"""A lasting failure of ranks is said once, and tried once."""

import errno
import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from killing import CACHE

import embertide.trainer
from embertide._common.errors import OperatingError
from embertide._common.reporting import failure_of
from embertide._store import StoreError
from embertide.trainer.config import RunConfig
from embertide.trainer.data.generator import NewsConfig, NewsSource
from embertide.trainer.errors import ConfigurationError, TrainerError
from embertide.trainer.presets import news_model
from embertide.trainer.publish.folder import Publication
from embertide.trainer.publish.lock import FolderLock, LockedError
from embertide.trainer.run.loop import Trainer
from embertide.trainer.sync import verdict
from embertide.trainer.sync.channel import RankLostError
from embertide.trainer.sync.supervisor import Supervisor

# The others are for good: a person has to change something. A class that is new is decided here.
MAY_PASS = {
    *("TrainerError", "BusError", "StorageError", "NoRoomError", "NoThreadError"),
    *("RankError", "RankLostError", "UnwrittenError"),
    # A failure of an owner of rows; ranks start again from their checkpoint.
    "LostGradientsError",
    *("NotFiniteError", "DamagedError"),  # of a batch; of an object, where another may be whole
    *("ProofError", "ServingError", "VersionNotHeldError"),  # of commands without ranks
}


def classes(of: type[OperatingError]) -> Iterator[type[OperatingError]]:
    for each in of.__subclasses__():
        yield each
        yield from classes(each)


def test_of_every_error_it_is_decided_whether_it_may_pass() -> None:
    for module in pkgutil.walk_packages(embertide.trainer.__path__, "embertide.trainer."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    ours = [each for each in classes(OperatingError) if ".trainer." in f"{each.__module__}."]
    assert len(ours) > 20
    may_pass = {each.__name__ for each in ours if not (each.final or each.exit_status == 2)}
    assert may_pass == MAY_PASS


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (LockedError("x"), True),
        (ConfigurationError("x"), True),
        (RankLostError("x"), False),
        (TrainerError("x"), False),
        (StoreError("x"), False),
        (MemoryError(), False),
        (OSError(errno.ENOSPC, "no room"), False),
        (FileNotFoundError(errno.ENOENT, "missing"), True),
        (PermissionError(errno.EACCES, "forbidden"), True),
        (ModuleNotFoundError("no boto", name="boto"), True),
    ],
)
def test_what_a_command_ends_with_is_final_or_not(error: Exception, final: bool) -> None:
    failure = failure_of(error)
    assert failure is not None
    assert failure.final is final


@pytest.mark.parametrize("error", [ValueError("ours"), BrokenPipeError(), KeyboardInterrupt()])
def test_a_fault_of_ours_is_no_verdict(error: BaseException) -> None:
    assert failure_of(error) is None


def test_the_first_verdict_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "verdict"
    monkeypatch.setenv(verdict.ENVIRONMENT, str(place))
    assert not verdict.is_left(TrainerError("x"))
    for error in (TrainerError("may pass"), LockedError("one"), LockedError("two")):
        with pytest.raises(TrainerError), verdict.leaving(as_json=error.args == ("one",)):
            raise error
    assert verdict.is_left(LockedError("two"))
    assert verdict.is_left(RankLostError("rank 0 failed"))
    found = verdict.read(place)
    assert found is not None
    assert (found[0].message, found[0].status, found[1]) == ("one", 1, True)


def test_ranks_alone_say_it_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(verdict.ENVIRONMENT, raising=False)
    with pytest.raises(LockedError), verdict.leaving(as_json=False):
        raise LockedError("one")
    assert not verdict.is_left(LockedError("one"))


@pytest.mark.parametrize("status", [1, 2])
def test_a_supervisor_says_a_verdict_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    script, diary = tmp_path / "agent.py", tmp_path / "diary"
    said = {"message": "the folder is taken", "status": status, "as_json": True}
    script.write_text(
        "import os, pathlib, sys\n"
        f"pathlib.Path({str(diary)!r}).open('a').write('x')\n"
        f"pathlib.Path(os.environ[{verdict.ENVIRONMENT!r}]).write_text({json.dumps(said)!r})\n"
        "sys.exit(1)\n"  # that of a rank which lost the one that knows
    )
    command = [sys.executable, str(script)]
    assert Supervisor(command, restarts=3, of_many=False).run() == status
    assert diary.read_text() == "x"
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": "the folder is taken"}
    assert err == "error: the folder is taken\n"


# --- the command ----------------------------------------------------------------------------------


def trained(folder: Path) -> None:
    """A run of other settings, all of it."""
    run = RunConfig(model=news_model(), batch_size=24, publish_every_s=1200, snapshot_every=6)
    Trainer(run, Publication(folder), program_cache=CACHE).fit(
        NewsSource(NewsConfig(hours=1, views_per_hour=60, users=80, new_items_per_hour=5))
    )


def refused(folder: Path, *words: str) -> tuple[int, list[str]]:
    """Train by two ranks, which is refused; the exit status, and the lines of stderr."""
    command = [sys.executable, "-m", "embertide.trainer", "train", str(folder), *words]
    done = subprocess.run(
        [*command, "--nproc", "2", "--cache", str(CACHE)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"},
    )
    # A rank that ends while torch's threads run may end by their complaint.
    noise = "terminate called without an active exception"
    return done.returncode, [line for line in done.stderr.splitlines() if line != noise]


def test_a_folder_that_another_trainer_has_is_refused_once(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "pub")
    status, lines = refused(tmp_path / "pub", "--demo", "--hours", "1")
    assert status == 1, lines
    assert len(lines) == 1, lines
    assert re.match(
        rf"error: .*pub is published to by pid {os.getpid()} on .*: stop that", lines[0]
    )
    del lock


@pytest.mark.long
@pytest.mark.parametrize("case", ["config", "data", "settings", "module"])
def test_what_ranks_cannot_begin_with_is_refused_once(tmp_path: Path, case: str) -> None:
    folder, words, says = tmp_path / "pub", ["--demo", "--hours", "1"], ""
    if case == "config":
        (tmp_path / "run.py").write_text("run = 3\n")
        words, says = ["--config", str(tmp_path / "run.py")], "run"
    elif case == "data":
        words, says = ["--data", str(tmp_path / "missing.parquet")], "missing.parquet"
    elif case == "settings":
        trained(tmp_path / "before")
        shutil.copytree(tmp_path / "before", folder)  # whose lock this process does not have
        words, says = [*words, "--batch-size", "48"], "batch_size = 24"
    else:
        words, says = [*words, "--storage", "nowhere://x"], "nowhere"
    status, lines = refused(folder, *words)
    # A folder of other settings is refused, as a checkpoint that does not fit.
    assert (status, len(lines)) == (1 if case == "settings" else 2, 1), lines
    assert lines[0].startswith("error: ")
    assert says in lines[0]
