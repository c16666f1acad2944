"""How soon a run of several pods goes on after it lost one, `python -m bench.ranks pods`.

Pods without a cluster: each is a process 1 with namespaces of its own (network, host name, mounts,
processes), its command that of k8s/train-news.yaml. A replacement has a new address under the old
name, and comes ten seconds after its predecessor has ended, as the Job controller's first one does.

Each fault is made several times in one run; the time is from the fault to the first version of the
group that met again. Needs root and iproute2. Namespaces are named embertide-pod-*, and removed.
"""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from bench.report import Row, measure
from bench.servers import BUILD, ROOT, BenchError
from embertide.trainer.publish.folder import Publication, VersionId
from embertide.trainer.run.checkpoint import checkpoint as checkpoints

CLAIM = "20.7"
TARGET_S = 60.0
_PODS = 2
_PAUSE_S = 10.0  # the Job controller's before it replaces the first lost pod
_GIVE_UP_S = 180.0
_SETTLE_S = 8.0  # of the group that met again, before the next fault
_MANIFEST = ROOT / "k8s" / "train-news.yaml"
_BRIDGE = "embertide-pods"
_NETWORK = "10.213.7"


def _sh(*words: str, check: bool = True) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise BenchError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(each) for each in text.split()]


def command(publication: Path) -> tuple[str, list[str]]:
    """Return the Job's name and its command, which publishes to a folder of ours instead."""
    documents = yaml.safe_load_all(_MANIFEST.read_text())
    job = next(each for each in documents if each and each["kind"] == "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    dropped = ("--bus=", "--metrics-port=", "--ssd-")
    words = [word for word in container["command"] if not word.startswith(dropped)]
    words[0] = sys.executable
    words[words.index("/publication/news")] = str(publication)
    return job["metadata"]["name"], [*words, f"--cache={BUILD / 'cache' / 'dense'}"]


class Pod:
    """A place of an Indexed Job: whenever its pod has ended, another one comes."""

    def __init__(self, job: "Job", index: int) -> None:
        """Start the first pod."""
        self.name = f"{job.name}-{index}"
        self.codes: list[int] = []
        self._job, self._index, self._space = job, index, f"embertide-pod-{index}"
        self._started = 0
        self._start()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _start(self) -> None:
        address = f"{_NETWORK}.{10 * (self._index + 1) + self._started % 10}"
        self._started += 1
        space, outer = self._space, f"emb-pod{self._index}"
        self._drop_space()
        _sh("ip", "netns", "add", space)
        _sh(*f"ip link add {outer} type veth peer name eth0 netns {space}".split())
        _sh(*f"ip link set {outer} master {_BRIDGE} up".split())
        _sh(*f"ip -n {space} addr add {address}/24 dev eth0".split())
        _sh(*f"ip -n {space} link set eth0 up".split())
        _sh(*f"ip -n {space} link set lo up".split())
        self._job.name_address(self._index, address)
        inside = f'hostname {self.name}; mount --bind {self._job.hosts} /etc/hosts; exec "$@"'
        names = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with self._job.log(self.name).open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *f"setpriv --pdeathsig KILL ip netns exec {space}".split(),
                    *names,
                    *("sh", "-c", inside, "sh"),
                    *self._job.words,
                ],
                cwd=ROOT,
                env=os.environ | {"JOB_COMPLETION_INDEX": str(self._index)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _drop_space(self) -> None:
        _sh("ip", "netns", "del", self._space, check=False)
        _sh("ip", "link", "del", f"emb-pod{self._index}", check=False)

    def _keep(self) -> None:
        while True:
            self.codes.append(self._process.wait())
            if self._job.ends.wait(_PAUSE_S):
                return
            self._start()

    @property
    def first_process(self) -> int:
        """Process 1 of the pod, as seen from here."""
        return _children(self._process.pid)[0]

    def rank(self) -> int:
        """The process of its rank: a child of the agent, which is one of process 1."""
        (agent,) = _children(self.first_process)
        return _children(agent)[0]

    def send(self, number: signal.Signals) -> None:
        """Signal process 1. SIGKILL ends everything in the pod."""
        os.kill(self.first_process, number)

    def cut_off(self) -> None:
        """End it as a machine that loses its power does: no connection is closed."""
        _sh("ip", "-n", self._space, "link", "set", "eth0", "down")
        self.send(signal.SIGKILL)

    def close(self) -> None:
        """Wait for the end of a pod that is not replaced."""
        self._keeper.join(_GIVE_UP_S)
        self._process.kill()
        self._drop_space()


class Job:
    """All pods of a run."""

    def __init__(self, folder: Path, pods: int) -> None:
        """Start them."""
        self.ends = threading.Event()
        self.hosts = folder / "hosts"
        self._folder = folder
        self.name, self.words = command(folder / "news")
        self.publication = Publication(folder / "news")
        self._addresses: dict[int, str] = {}
        self._lock = threading.Lock()
        self.pods = [Pod(self, index) for index in range(pods)]

    def log(self, name: str) -> Path:
        """Return the file with the log of all pods of a name."""
        return self._folder / f"{name}.log"

    def name_address(self, index: int, address: str) -> None:
        """Have the pod's name mean an address from now on, in all pods."""
        with self._lock:
            self._addresses[index] = address
            lines = [
                f"{each} {self.name}-{i}.{self.name} {self.name}-{i}"
                for i, each in self._addresses.items()
            ]
            # Not replaced: pods have this very file for theirs.
            self.hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def newest(self) -> VersionId | None:
        """The newest version that is out."""
        versions = self.publication.deltas()
        return versions[-1] if versions else None

    def wait_for(self, what: str, holds: Callable[[VersionId], bool]) -> float:
        """Return when a newest version was seen for which it holds, by the monotonic clock."""
        until = time.monotonic() + _GIVE_UP_S
        while time.monotonic() < until:
            newest = self.newest()
            if newest is not None and holds(newest):
                return time.monotonic()
            time.sleep(0.05)
        logs = [self.log(pod.name).read_text()[-2000:] for pod in self.pods]
        raise BenchError(f"no {what} within {_GIVE_UP_S:.0f} s:\n" + "\n---\n".join(logs))

    def end(self) -> list[int]:
        """Delete the Job: all pods are told to end, and none is replaced. Returns exit codes."""
        self.ends.set()
        for pod in self.pods:
            pod.send(signal.SIGTERM)
        for pod in self.pods:
            pod.close()
        return [pod.codes[-1] for pod in self.pods]


@contextmanager
def _bridge() -> Iterator[None]:
    _sh("ip", "link", "del", _BRIDGE, check=False)
    _sh("ip", "link", "add", _BRIDGE, "type", "bridge")
    _sh("ip", "link", "set", _BRIDGE, "up")
    try:
        yield
    finally:
        _sh("ip", "link", "del", _BRIDGE, check=False)


def _delete_all(job: Job) -> None:
    for pod in job.pods:
        pod.send(signal.SIGTERM)


FAULTS: dict[str, Callable[[Job], None]] = {
    "a pod's machine is lost": lambda job: job.pods[1].send(signal.SIGKILL),
    "a pod is moved": lambda job: job.pods[1].send(signal.SIGTERM),
    "the rendezvous is lost": lambda job: job.pods[0].send(signal.SIGKILL),
    "the rendezvous is moved": lambda job: job.pods[0].send(signal.SIGTERM),
    "a rank crashes": lambda job: os.kill(job.pods[1].rank(), signal.SIGKILL),
    "all pods are moved": _delete_all,
    "a machine loses its power": lambda job: job.pods[1].cut_off(),
    "the rendezvous loses its power": lambda job: job.pods[0].cut_off(),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a run."""

    seconds: dict[str, list[float]]
    codes: list[int]
    gaps: int  # versions that are missing
    learned: int  # events, as the last checkpoint counts them
    passed: int  # events of the stream that lie before it


def _seconds_after(job: Job, fault: str) -> float:
    """Make a fault; return the seconds until a version of the group that met after it."""
    before = job.newest()
    assert before is not None
    began = time.monotonic()
    FAULTS[fault](job)
    seen = job.wait_for(f"version after {fault}", lambda version: version.lineage > before.lineage)
    print(f"{fault}: {seen - began:.1f} s, {job.newest()}", flush=True)
    return seen - began


def run(folder: Path, repetitions: int) -> Outcome:
    """Make every fault so many times, in turn.

    Raises:
        BenchError: There are no namespaces here, or no version comes.
    """
    if os.geteuid() or shutil.which("ip") is None:
        raise BenchError("needs root and iproute2, for namespaces of pods")
    seconds: dict[str, list[float]] = {name: [] for name in FAULTS}
    with _bridge():
        job = Job(folder, _PODS)
        try:
            job.wait_for("version", lambda version: version.number > 3)
            for _ in range(repetitions):
                for name in FAULTS:
                    time.sleep(_SETTLE_S)
                    seconds[name].append(_seconds_after(job, name))
            time.sleep(_SETTLE_S)
        finally:
            codes = job.end()
    numbers = [version.number for version in job.publication.deltas()]
    saved = checkpoints.load_newest(job.publication)
    assert saved is not None
    return Outcome(
        seconds,
        codes,
        numbers[-1] - numbers[0] + 1 - len(numbers),
        saved.checkpoint.events,
        saved.checkpoint.done,
    )


def rows(outcome: Outcome) -> list[Row]:
    """Return the rows of the report."""
    found = [
        measure((name, "next version after", "s"), s, better="lower", target=TARGET_S, claim=CLAIM)
        for name, s in outcome.seconds.items()
    ]
    truths = {
        "every event is learned once": outcome.learned == outcome.passed,
        "no version is missing": outcome.gaps == 0,
        "a Job that is deleted ends with 143": set(outcome.codes) == {143},
    }
    return found + [
        measure((what, "holds", ""), [float(holds)], better="higher", target=1, claim=CLAIM)
        for what, holds in truths.items()
    ]
