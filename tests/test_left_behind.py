"""A test's changes to its process are put back, or fail it; a failure shows what was written."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import left_behind
import pytest
import torch

from embertide._common import quoting

HERE = Path(__file__).parent
CONSTANT = 1


class Holder:
    CONSTANT = 1

    def method(self) -> None:
        pass


def _other(*_: object) -> None:
    pass


def test_what_a_process_has_one_of_is_put_back(tmp_path: Path) -> None:
    def seen() -> list[object]:
        return [
            {**os.environ},
            Path.cwd(),
            [*sys.path],
            Path("/proc/self/status").read_text().split("Umask:")[1].split()[0],
            signal.getsignal(signal.SIGUSR1),
            (logging.root.level, [*logging.root.handlers]),
            torch.get_num_threads(),
        ]

    before = seen()
    with left_behind.process_put_back():
        os.environ["EMBERTIDE_LEFT"] = os.environ["PATH"] = "changed"
        del os.environ["HOME"]
        os.chdir(tmp_path)
        sys.path.insert(0, str(tmp_path))
        os.umask(0o70)
        signal.signal(signal.SIGUSR1, _other)
        logging.root.setLevel(1)
        logging.root.addHandler(logging.NullHandler())
        torch.set_num_threads(before[-1] % 2 + 1)  # type: ignore[operator]
        assert all(now != was for now, was in zip(seen(), before, strict=True))
    assert seen() == before


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    f"{quoting.__name__}.shown": lambda patch: patch.setattr(quoting, "shown", _other),
    f"{__name__}.CONSTANT": lambda patch: patch.setattr(sys.modules[__name__], "CONSTANT", 2),
    f"{__name__}.Holder.CONSTANT": lambda patch: patch.setattr(Holder, "CONSTANT", 2),
    f"{__name__}.Holder.method": lambda patch: patch.setattr(Holder, "method", _other),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_global_is_named_until_it_is_put_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = left_behind.names()
    with monkeypatch.context() as patch:
        CHANGES[name](patch)
        left = left_behind.changes(before, left_behind.names())
        assert [line.split(" is ")[0] for line in left] == [name]
    assert not left_behind.changes(before, left_behind.names())


def test_a_test_that_leaves_a_global_fails_and_what_it_wrote_is_shown_in_part(
    tmp_path: Path,
) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_some.py").write_text(
        "import os\n"
        "import pages\n"
        "def test_leaves():\n    pages.parse = os.environ['EMBERTIDE_LEFT'] = '1'\n"
        "def test_fails():\n    print('begin' + '.' * 50_000 + 'end')\n    assert 0\n"
        "def test_finds_none():\n    assert 'EMBERTIDE_LEFT' not in os.environ\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, tmp_path],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{HERE}:{HERE / 'support'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stdout
    assert "1 failed, 2 passed, 1 error" in found.stdout
    assert "pages.parse is another thing, was <function parse" in found.stdout
    assert "40009 characters before this" in found.stdout
    assert "end\n" in found.stdout
    assert len(found.stdout) < 15_000
