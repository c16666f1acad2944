"""Ranks that are started, and started again; real processes, and agents of two pods."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from embertide.trainer.sync.launch import main
from embertide.trainer.sync.supervisor import Supervisor
from embertide.trainer.sync.verdict import AGAIN

TIMEOUT_S = 90.0
TERM = 128 + signal.SIGTERM


def agent(tmp_path: Path, *codes: int) -> tuple[list[str], Path]:
    """A command that ends with each code in turn, the last one again and again; and its diary."""
    script, diary = tmp_path / "agent.py", tmp_path / "diary"
    script.write_text(
        "import pathlib, sys\n"
        "diary = pathlib.Path(sys.argv[1])\n"
        "before = len(diary.read_text()) if diary.exists() else 0\n"
        "diary.open('a').write('x')\n"
        f"codes = {list(codes)}\n"
        "sys.exit(codes[min(before, len(codes) - 1)])\n"
    )
    return [sys.executable, str(script), str(diary)], diary


@pytest.mark.parametrize(
    ("codes", "restarts", "of_many", "code", "runs"),
    [
        ((0,), 3, True, 0, 1),
        ((1, 137, 0), 3, True, 0, 3),
        ((1,), 2, True, 1, 3),
        ((2,), 3, True, 2, 1),
        ((1, 2), 3, False, 2, 2),
        ((TERM,), 3, False, TERM, 1),
        ((TERM, TERM, 0), 0, True, 0, 3),
        ((AGAIN, AGAIN, 0), 0, False, 0, 3),
        ((AGAIN,), 0, False, AGAIN, 9),
    ],
    ids=[
        *("success", "failures", "too many", "configuration", "configuration later"),
        *("stopped", "another pod stopped", "asked for", "asked for again and again"),
    ],
)
def test_ranks_are_started_again_when_that_can_help(
    codes: tuple[int, ...], restarts: int, of_many: bool, code: int, runs: int, tmp_path: Path
) -> None:
    command, diary = agent(tmp_path, *codes)
    assert Supervisor(command, restarts=restarts, of_many=of_many).run() == code
    assert len(diary.read_text()) == runs


def test_failures_far_apart_do_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embertide.trainer.sync.supervisor._SETTLED_S", 0.0)
    command, diary = agent(tmp_path, 1, 1, 1, 1, 0)
    assert Supervisor(command, restarts=1, of_many=True).run() == 0
    assert len(diary.read_text()) == 5


def test_restarts_are_the_supervisors_and_the_rest_is_torchruns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []

    def supervise(arguments: list[str], *, restarts: int) -> int:
        seen.extend([arguments, restarts])
        return 0

    monkeypatch.setattr("embertide.trainer.sync.launch.supervise", supervise)
    assert main(["--nnodes=2", "--max-restarts=7", "-m", "x", "--", "--max-restarts=8"]) == 0
    assert seen == [["--nnodes=2", "-m", "x", "--", "--max-restarts=8"], 7]


# --- pods -----------------------------------------------------------------------------------------

RANK = """
import os, pathlib, signal, sys, time
import torch.distributed as dist
from embertide.trainer.sync.ranks import Ranks
folder = pathlib.Path(sys.argv[1])
ranks = Ranks.join()
rank = ranks.rank
signal.signal(signal.SIGTERM, lambda *_: (folder / "stop").touch())
met = ranks.channel("loop").gather(os.getpid())
(folder / f"met.{rank}.{time.monotonic_ns()}").write_text(str(met[rank]))
while not (folder / "end").exists():
    stopping = any(ranks.channel("loop").gather((folder / "stop").exists()))
    if stopping:
        ranks.channel("loop").gather(0)
        (folder / "stop").unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    time.sleep(0.05)
"""


class Pods:
    """Two pods of a Job on this machine; one that ended is started again by hand."""

    def __init__(self, folder: Path) -> None:
        """Start both."""
        self.folder = folder
        self.script = folder / "rank.py"
        self.script.write_text(RANK)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.processes = [self.start(0), self.start(1)]

    def start(self, index: int) -> subprocess.Popen[bytes]:
        """Start a pod."""
        words = [sys.executable, "-m", "embertide.trainer.sync.launch", "--nnodes=2"]
        words += ["--nproc-per-node=1", "--max-restarts=20", "--monitor-interval=0.1"]
        words += [f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=test"]
        words += [f"--local-addr=127.0.0.{1 + index}", str(self.script), str(self.folder)]
        environment = {"JOB_COMPLETION_INDEX": str(index), "GLOO_SOCKET_IFNAME": "lo"}
        with (self.folder / f"log.{index}").open("ab") as log:
            return subprocess.Popen(words, env=os.environ | environment, stderr=log)

    def met(self) -> int:
        """How often both ranks have met."""
        return min(len(list(self.folder.glob(f"met.{rank}.*"))) for rank in (0, 1))

    def wait(self, what: Callable[[], bool]) -> None:
        """Wait until it holds."""
        until = time.monotonic() + TIMEOUT_S
        while not what():
            if time.monotonic() > until:
                logs = [(self.folder / f"log.{i}").read_text()[-3000:] for i in (0, 1)]
                pytest.fail("\n---\n".join(logs))
            time.sleep(0.05)

    def wait_met(self, times: int) -> None:
        """Wait until both have met so often, and talk."""
        self.wait(lambda: self.met() >= times)

    def kill_pod(self, index: int) -> None:
        """End a pod as the loss of its machine does: everything in it at once."""
        tree = [self.processes[index].pid]
        for pid in tree:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                tree += [int(each) for each in children.read_text().split()]
        for pid in tree:
            os.kill(pid, signal.SIGKILL)
        self.processes[index].wait()

    def rank_pid(self, index: int) -> int:
        """The process of a pod's rank."""
        newest = max(self.folder.glob(f"met.{index}.*"), key=lambda p: int(p.suffix[1:]))
        return int(newest.read_text())


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    made = Pods(tmp_path)
    yield made
    for process in made.processes:
        process.terminate()
    for process in made.processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.mark.parametrize(
    "index", [0, pytest.param(1, marks=pytest.mark.long)], ids=["of the rendezvous", "another"]
)
def test_ranks_meet_again_when_a_pod_was_lost_and_came_anew(pods: Pods, index: int) -> None:
    pods.wait_met(1)
    pods.kill_pod(index)
    pods.processes[index] = pods.start(index)
    pods.wait_met(2)
    assert pods.processes[1 - index].poll() is None, "the pod that stayed has ended"
    (pods.folder / "end").touch()
    assert [process.wait(TIMEOUT_S) for process in pods.processes] == [0, 0]


def test_a_pod_that_is_told_to_end_stops_all_and_the_others_wait_for_the_next(pods: Pods) -> None:
    pods.wait_met(1)
    pods.processes[1].terminate()
    assert pods.processes[1].wait(TIMEOUT_S) == TERM
    assert pods.processes[0].poll() is None
    pods.processes[1] = pods.start(1)
    pods.wait_met(2)


def test_a_pod_is_told_to_end_while_it_waits_for_the_others(tmp_path: Path) -> None:
    pods = Pods(tmp_path)
    pods.kill_pod(0)
    time.sleep(5)  # by then it waits, in torch, which hears no signal
    pods.processes[1].terminate()
    assert pods.processes[1].wait(20) == TERM


@pytest.mark.long
def test_a_rank_that_crashes_takes_no_pod_with_it(pods: Pods) -> None:
    pods.wait_met(1)
    os.kill(pods.rank_pid(1), signal.SIGKILL)
    pods.wait_met(2)
    assert [process.poll() for process in pods.processes] == [None, None]


@pytest.mark.long
def test_a_pod_that_hangs_is_passed_over_when_it_came_anew(pods: Pods) -> None:
    # As a machine without power: its connections stay open, and nobody hears of it.
    pods.wait_met(1)
    stopped = [pods.processes[1].pid]
    for pid in stopped:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            stopped += [int(each) for each in children.read_text().split()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    frozen = pods.processes[1]
    pods.processes[1] = pods.start(1)
    try:
        pods.wait_met(2)
    finally:
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGKILL)
        frozen.wait()


KILLS_ITS_CHILD = """
import subprocess, sys, threading
from embertide.trainer.sync.agent import kill_children
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
thread = threading.Thread(target=kill_children)
thread.start()
thread.join()
sys.exit(-child.wait(10))
"""


def test_threads_do_not_hide_from_the_one_that_kills_ranks() -> None:
    # In a process of its own: all children are killed, and here those are the servers of the tests.
    done = subprocess.run([sys.executable, "-c", KILLS_ITS_CHILD], timeout=TIMEOUT_S, check=False)
    assert done.returncode == signal.SIGKILL


def test_an_address_that_a_lost_pod_has_left_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name gives first an address where nothing answers, then that of the pod that came."""
    from embertide.trainer.sync.agent import wait_for_host

    with contextlib.ExitStack() as stack:
        gone, came = (stack.enter_context(socket.socket()) for _ in range(2))
        gone.bind(("127.0.0.2", 0))
        gone.listen(0)
        for _ in range(2):  # it takes no more: the kernel answers the next not at all
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(gone.getsockname())
        came.bind(("127.0.0.1", 0))
        came.listen()
        found = [gone.getsockname(), came.getsockname()]
        asked: list[str] = []

        def looked_up(host: str, *_: object) -> list[tuple[object, ...]]:
            asked.append(host)
            address = found[min(len(asked), len(found)) - 1]
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address)]

        monkeypatch.setattr(socket, "getaddrinfo", looked_up)
        began = time.monotonic()
        wait_for_host("train-news-0.train-news", 29400, 60)
        assert asked == ["train-news-0.train-news"] * 2
        assert 1 < time.monotonic() - began < 20


def test_who_does_not_come_is_named_in_the_end() -> None:
    from embertide.trainer.sync.agent import wait_for_host

    with pytest.raises(RendezvousConnectionError, match=r"no-such-pod\.invalid:29400"):
        wait_for_host("no-such-pod.invalid", 29400, 0.3)
