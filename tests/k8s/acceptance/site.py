"""A namespace under acceptance: what is there, who asks it, and what was found."""

import contextlib
import dataclasses
import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from acceptance.deployment import Deployment
from acceptance.traffic import Answers, Traffic
from bench.cluster import Cluster, Json, RefusedError, TooLateError, wait_until

LEAVE_S = 15.0
READY_S = 600.0  # nodes, from nothing
NEXT_VERSION_S = 60.0  # after a pod was lost
# Runs in a node's container: the newest version that is out, and the one that it answers with.
LOOK = """
import os, re, urllib.request
root = '/publication/news/deltas'
out = [n for n in os.listdir(root) if n[0] != '.' and os.path.exists(f'{root}/{n}/commit.pb')]
text = urllib.request.urlopen('http://127.0.0.1:8002/metrics', timeout=5).read().decode()
found = re.search(r'^embertide_version(?:{[^}]*})? ([0-9.e+]+)', text, re.M)
print(*(max(out).split('-') if out else (0, 0)), int(float(found[1])) if found else 0)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report.

    Attributes:
        step: Where it belongs.
        what: The thing that was looked at.
        value: The value that was found.
        bar: The value that it should have; empty if there is none.
        holds: Whether it is so.
    """

    step: str
    what: str
    value: str
    bar: str
    holds: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Versions:
    """Newest version that is out, its lineage, and the one that a node answers with."""

    out: int
    lineage: int
    served: int


class Absence:
    """From when a pod's process was told to end, or was gone, until the pod was ready again."""

    def __init__(self, cluster: Cluster, pod: str, container: str) -> None:
        """Begin to look."""
        self.gone_at: float | None = None
        self.back_at: float | None = None
        self._told_at: float | None = None
        self._cluster, self._pod, self._container = cluster, pod, container
        self._uid = cluster.uid(pod)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _runs(self) -> tuple[bool, bool]:
        try:
            pod = self._cluster.get("pod", self._pod)
        except RefusedError:
            return False, False
        runs = any(
            each["name"] == self._container and "running" in each["state"]
            for each in pod["status"].get("containerStatuses", [])
        )
        said = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
        same = pod["metadata"]["uid"] == self._uid
        if same and self._told_at is None and "deletionTimestamp" in pod["metadata"]:
            self._told_at = time.monotonic() + LEAVE_S
        told = self._told_at is not None and time.monotonic() >= self._told_at
        return runs and same and not told, not same and said.get("Ready") == "True"

    def _look(self) -> None:
        end = time.monotonic() + 300
        while self.back_at is None and time.monotonic() < end:
            same, back = self._runs()
            if self.gone_at is None and not same:
                self.gone_at = time.monotonic()
            if back:
                self.back_at = time.monotonic()
            time.sleep(0.2)

    def seconds(self) -> float:
        """Wait for the pod to be ready again; return how long it was away."""
        self._thread.join()
        if self.gone_at is None or self.back_at is None:
            raise TooLateError(f"{self._pod} did not come back within 300 s")
        return self.back_at - self.gone_at


class Site:
    """The cluster that steps act on, and the record of their findings."""

    def __init__(
        self, cluster: Cluster, deployment: Deployment, say: Callable[[str], None]
    ) -> None:
        """Nothing is deployed by it."""
        self.cluster, self.deployment, self._say = cluster, deployment, say
        self.findings: list[Finding] = []
        self.traffic: Traffic | None = None
        self.step = ""
        self._run = secrets.token_hex(2)

    def find(self, what: str, value: object, bar: str = "", *, holds: bool = True) -> None:
        """Write down what was found."""
        text = f"{value:.1f}" if isinstance(value, float) else str(value)
        self.findings.append(Finding(self.step, what, text, bar, holds))
        self._say(
            f"{'ok  ' if holds else 'FAIL'} {self.step}: {what}: {text}"
            + (f" ({bar})" if bar else "")
        )

    def find_time(self, what: str, seconds: float, at_most: float) -> None:
        """Write down how long something took."""
        self.find(what, f"{seconds:.1f} s", f"<= {at_most:.0f} s", holds=seconds <= at_most)

    def find_answers(
        self, what: str, got: Answers, *, failed: str = "0 failed", degraded_s: float | None = 0.0
    ) -> None:
        """Write down what became of requests; no failure is allowed unless `failed` is empty."""
        total = sum(got.answers.values())
        value = f"{len(got.failed)} of {total + len(got.failed)} failed, {got.degraded} degraded"
        if got.degraded:
            value += f" within {got.degraded_s:.1f} s"
        bars = [failed] if failed else []
        holds = total > 0 and (not failed or not got.failed)
        if degraded_s is not None:
            bars.append(f"degraded for <= {degraded_s:.1f} s" if degraded_s else "0 degraded")
            holds = holds and (got.degraded_s <= degraded_s if degraded_s else not got.degraded)
        self.find(what, value, ", ".join(bars), holds=holds)
        for each in got.failed[:3]:
            self._say(f"       {each}")

    def answers(self, begin: float) -> Answers:
        """Return the outcome of requests since a moment."""
        assert self.traffic is not None
        time.sleep(1.5)  # the counts of a second come at its end
        return self.traffic.between(begin, time.monotonic())

    def follow(self) -> None:
        """Follow what the asker says from now on."""
        self.traffic = Traffic(self.cluster)

    def close(self) -> None:
        """Follow it no more."""
        if self.traffic is not None:
            self.traffic.close()

    def own(self, word: str) -> str:
        """An operation's id, which begins with @, as one of this run; other words as they are."""
        return self._run + word[1:] if word.startswith("@") else word

    # --- the fleet -------------------------------------------------------------------------------

    def embertide(self, *words: str, role: str = "operator") -> Json:
        """Run a command against the control plane; return what it prints as JSON."""
        with self.cluster.forwarded("embertide-control", 7100) as address:
            tls = str(self.deployment.tls(role))
            said = map(self.own, words)
            command = [sys.executable, "-m", "embertide.server.cli", *said, "--json"]
            done = subprocess.run(
                [*command, "--control", address, "--tls", tls],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        if done.returncode != 0:
            raise RefusedError(f"embertide {' '.join(words)}: {done.stdout}{done.stderr}")
        found: Json = json.loads(done.stdout)
        return found

    def accepts(self, *words: str) -> bool:
        """Whether the control plane does it."""
        try:
            self.embertide(*words)
        except RefusedError:
            return False
        return True

    def status(self) -> Json:
        """Return the output of `embertide status`, retried while the control plane may be away."""
        found: list[Json] = []

        def asked() -> bool:
            with contextlib.suppress(RefusedError, subprocess.TimeoutExpired):
                found.append(self.embertide("status", role="reader"))
            return bool(found)

        wait_until("the control plane's answer", asked, 60)
        return found[-1]

    def versions(self, node: str = "embertide-node-0") -> Versions:
        """Return the newest version and a node's; zeros while the node cannot be asked."""
        try:
            said = self.cluster.run("exec", node, "-c", "node", "--", "python3", "-c", LOOK)
        except RefusedError:
            return Versions(0, 0, 0)
        return Versions(*map(int, said.split()))

    def followed(
        self, after: Versions, node: str = "embertide-node-0", timeout_s: float = 240.0
    ) -> float:
        """Wait until a version newer than one is out and served; return the seconds."""

        def newer() -> bool:
            now = self.versions(node)
            return now.out > after.out and now.served > after.out

        return wait_until(f"a version after {after.out} at {node}", newer, timeout_s)

    def rank(self, index: int) -> str:
        """The pod of a rank that runs and is not ending."""
        label = f"batch.kubernetes.io/job-completion-index={index}"
        (pod,) = [
            each["metadata"]["name"]
            for each in self.cluster.get("pods", "-l", label)["items"]
            if "deletionTimestamp" not in each["metadata"] and each["status"]["phase"] == "Running"
        ]
        return str(pod)

    def all_ready(self, nodes: int) -> bool:
        """Whether so many nodes are ready, and none is ending."""
        pods = self.cluster.pods("embertide-node")
        names = [each["metadata"]["name"] for each in pods]
        return len(names) == nodes and all(map(self.cluster.ready, names))

    @contextlib.contextmanager
    def at(self, step: str) -> Iterator[None]:
        """A step; one that cannot be done is a finding, and the next begins."""
        self.step = step
        try:
            yield
        except (RefusedError, TooLateError, subprocess.SubprocessError, AssertionError) as error:
            self.find("cannot be done", f"{type(error).__name__}: {error}"[:600], holds=False)
