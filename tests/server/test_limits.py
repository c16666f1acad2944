"""Limits of files, threads and memory: servers that would end for want of them say so first."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from embertide.server.adapters import limits
from embertide.server.adapters.limits import check_limits, free_threads, memory_bytes, open_files
from embertide.server.adapters.process import ProcessError

COMMAND = f"{sys.executable} -m embertide.server.cli"


def limited(limit: str, command: str) -> "subprocess.CompletedProcess[str]":
    script = f"ulimit {limit} && exec {COMMAND} {command}"
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("command", ["serve nowhere", "control --state redis://127.0.0.1:1/0"])
@pytest.mark.parametrize("files", [40, 64])
def test_a_server_says_that_it_has_too_few_files(command: str, files: int) -> None:
    done = limited(f"-n {files}", command)
    assert done.returncode == 1
    assert f"this process may open {files} files" in done.stderr
    assert "ulimit -Hn 65536" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_soft_limit_of_files_is_raised() -> None:
    done = limited("-Sn 64", "serve nowhere")
    assert "nowhere holds neither a snapshot" in done.stderr


def test_doctor_looks_at_the_limits() -> None:
    done = limited("-n 512", "doctor --json")
    found = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert not found["open files"]["ok"]
    assert found["open files"]["found"] == "512"
    assert "ulimit" in found["open files"]["remedy"]
    assert {"threads", "memory"} <= set(found)
    assert done.returncode == 1


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree like that of the kernel, in which this process is in the group /a/b."""
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    read = Path.read_text

    def read_text(path: Path, encoding: str | None = None) -> str:
        return "0::/a/b\n" if path == Path("/proc/self/cgroup") else read(path, encoding=encoding)

    monkeypatch.setattr(Path, "read_text", read_text)
    (tmp_path / "a/b").mkdir(parents=True)
    return tmp_path


def test_a_containers_limits_hold(cgroup: Path) -> None:
    (cgroup / "a/b/pids.max").write_text("max\n")
    (cgroup / "a/pids.max").write_text("100\n")
    (cgroup / "a/b/pids.current").write_text("30\n")
    (cgroup / "a/b/memory.max").write_text("1073741824\n")
    assert free_threads() == 70
    assert memory_bytes() == 1 << 30
    with pytest.raises(ProcessError, match="70 more threads may be started"):
        check_limits()


def test_no_limit_is_no_limit(cgroup: Path) -> None:
    (cgroup / "a/b/memory.max").write_text("max\n")
    assert memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert open_files() >= limits.MIN_FILES
    check_limits()


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the user")
def test_a_users_limit_of_threads_is_seen() -> None:
    # The limit does not hold for root, and no other user may read this checkout.
    code = (
        "import os, resource; from embertide.server.adapters import limits;"
        "os.setuid(65534); resource.setrlimit(resource.RLIMIT_NPROC, (50, 50));"
        "print(limits.free_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 <= int(done.stdout) < 50
