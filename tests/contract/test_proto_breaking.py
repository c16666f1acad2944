"""`make check` refuses a change of the protos that a build before it could not read."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).parent / "buf"


def breaking(tree: Path) -> "subprocess.CompletedProcess[str]":
    """Run the command of `make check` in another tree."""
    (line,) = re.findall(r"^\t\$\(BIN\)/buf breaking (.*)$", (ROOT / "Makefile").read_text(), re.M)
    return subprocess.run(
        [BUF, "breaking", *line.split()], cwd=tree, capture_output=True, text=True
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def change(tree: Path, old: str, new: str) -> None:
    path = tree / "proto/embertide/v1/update.proto"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_the_protos_as_they_stand_break_nothing(tree: Path) -> None:
    assert breaking(tree).returncode == 0


def test_a_new_field_breaks_nothing(tree: Path) -> None:
    change(tree, "message GlobalCommit {", "message GlobalCommit {\n  optional bool fresh = 4095;")
    assert breaking(tree).returncode == 0


def test_a_renumbered_field_is_refused_and_named(tree: Path) -> None:
    path = tree / "proto/embertide/v1/update.proto"
    (field,) = re.findall(
        r"^message GlobalCommit {.*?^  (\S+ watermark_ms) = \d+;", path.read_text(), re.M | re.S
    )
    path.write_text(re.sub(rf"{field} = \d+;", f"{field} = 4095;", path.read_text(), count=1))
    refused = breaking(tree)
    assert refused.returncode != 0
    assert "watermark_ms" in refused.stdout


def test_a_removed_message_is_refused_and_named(tree: Path) -> None:
    change(tree, "message CommitFile {", "message CommittedFile {")
    refused = breaking(tree)
    assert refused.returncode != 0
    assert '"CommitFile"' in refused.stdout
