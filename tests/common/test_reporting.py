"""How a command ends: one message, its status, and no traceback for what the system refuses."""

import errno
import json
import os

import pytest
import typer

from embertide._common.errors import OperatingError
from embertide._common.reporting import extras_with, missing_package, report_errors
from embertide._store import StoreError
from embertide.trainer.errors import ConfigurationError, TrainerError


class _WithRemedyError(OperatingError):
    remedy = "do that"


def ended(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(typer.Exit) as caught, report_errors():
        raise error
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return caught.value.exit_code, said.err.strip()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (TrainerError("the drive fails; mend it"), 1, "error: the drive fails; mend it"),
        (ConfigurationError("no such column"), 2, "error: no such column"),
        (StoreError("a block is harmed"), 1, "error: a block is harmed"),
        (_WithRemedyError("it is wrong"), 1, "error: it is wrong; do that"),
        (KeyboardInterrupt(), 130, "stopped; nothing is left running"),
        (MemoryError(), 1, "error: Cannot allocate memory; give the machine or the container"),
    ],
)
def test_each_error_has_its_status(
    error: BaseException, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = ended(error, capsys)
    assert code == status
    assert said.startswith(message)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free room there"),
        (errno.EROFS, "can be written to"),
        (errno.EACCES, "this user may use"),
        (errno.EMFILE, "ulimit -n 65536"),
        (errno.ENOTDIR, "give another path"),
        (errno.EIO, "embertide doctor"),
    ],
)
def test_errors_of_the_system_name_file_and_remedy(
    number: int, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = ended(OSError(number, os.strerror(number), "/srv/news/run.py"), capsys)
    assert code == 1
    assert said.startswith(f"error: /srv/news/run.py: {os.strerror(number)}; ")
    assert remedy in said


def test_a_full_drive_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "`df -h` shows which" in ended(full, capsys)[1]


def test_errors_of_ours_and_readers_that_left_are_not_hidden() -> None:
    for error in (BrokenPipeError(errno.EPIPE, "gone"), KeyError("a fault of ours")):
        with pytest.raises(type(error)), report_errors():
            raise error


def test_json_has_the_error_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), report_errors(as_json=True):
        raise TrainerError("a\x1b[2J")
    said = capsys.readouterr()
    assert json.loads(said.out) == {"error": "a\x1b[2J"}
    assert said.err == "error: a\\x1b[2J\n"


def test_extras_are_those_of_the_package() -> None:
    assert extras_with("torch") == ["train"]
    assert extras_with("tritonclient.grpc") == ["client", "serve"]
    assert extras_with("grpc_health.v1") == ["console", "serve"]
    assert extras_with("nothing_of_the_kind") == []
    ours = ModuleNotFoundError("No module named 'embertide.x'", name="embertide.x")
    with pytest.raises(ModuleNotFoundError):
        missing_package("embertide serve", ours)
