"""kubectl, in one namespace."""

import contextlib
import dataclasses
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.servers import BenchError

Json = dict[str, Any]


class RefusedError(BenchError):
    """The cluster did not do what it was asked; the message is kubectl's."""


class TooLateError(RuntimeError):
    """Something did not come true in time."""


def wait_until(what: str, holds: Callable[[], bool], timeout_s: float) -> float:
    """Wait for it and return the seconds that it took.

    Raises:
        TooLateError: It does not hold within the time.
    """
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > timeout_s:
            raise TooLateError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.25)
    return time.monotonic() - began


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """A namespace of a cluster, as an administrator reaches it."""

    kubeconfig: str
    namespace: str

    def words(self, *words: str) -> list[str]:
        """The command line of kubectl."""
        return ["kubectl", "--kubeconfig", self.kubeconfig, "-n", self.namespace, *words]

    def run(self, *words: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
        """Run kubectl and return what it prints.

        Raises:
            RefusedError: It failed.
        """
        done = subprocess.run(
            self.words(*words),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise RefusedError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def allows(self, *words: str, stdin: str | None = None) -> bool:
        """Whether kubectl does it."""
        try:
            self.run(*words, stdin=stdin)
        except RefusedError:
            return False
        return True

    def apply(self, resources: Sequence[Json]) -> None:
        """Apply resources."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(resources)}
        self.run("apply", "-f", "-", stdin=json.dumps(listed))

    def get(self, *words: str) -> Json:
        """Return a resource or a list of them."""
        found: Json = json.loads(self.run("get", *words, "-o", "json"))
        return found

    def pods(self, label: str) -> list[Json]:
        """Pods with this app.kubernetes.io/name, those that end included."""
        items: list[Json] = self.get("pods", "-l", f"app.kubernetes.io/name={label}")["items"]
        return items

    def ready(self, name: str) -> bool:
        """Whether a pod is there, ready and not ending."""
        with contextlib.suppress(RefusedError):
            pod = self.get("pod", name)
            said = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
            return "deletionTimestamp" not in pod["metadata"] and said.get("Ready") == "True"
        return False

    def uid(self, name: str) -> str:
        """The identity of a pod; empty if it is not there."""
        with contextlib.suppress(RefusedError):
            return str(self.get("pod", name)["metadata"]["uid"])
        return ""

    def lose(self, pod: str, *, kill: bool) -> None:
        """Have a pod end, or kill it at once; does not wait."""
        how = ("--grace-period=0", "--force") if kill else ()
        self.run("delete", "pod", pod, "--wait=false", *how)

    def has_ended(self, name: str, uid: str) -> bool:
        """Whether a pod is gone, or nothing in it runs any more."""
        try:
            pod = self.get("pod", name)
        except RefusedError:
            return True
        return pod["metadata"]["uid"] != uid or pod["status"]["phase"] in ("Succeeded", "Failed")

    def roll_out(self, what: str, timeout_s: float) -> float:
        """Wait until a workload is as it should be; return the seconds."""
        began = time.monotonic()
        self.run("rollout", "status", what, f"--timeout={timeout_s:.0f}s", timeout_s=timeout_s + 30)
        return time.monotonic() - began

    @contextlib.contextmanager
    def forwarded(self, service: str, port: int) -> Iterator[str]:
        """Reach a Service's pod from here: HOST:PORT."""
        command = self.words("port-forward", f"service/{service}", f":{port}")
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, stdout=pipe, stderr=nothing, text=True) as forward:
            assert forward.stdout is not None
            line = forward.stdout.readline()
            if "Forwarding from" not in line:
                forward.kill()
                raise RefusedError(f"no way to {service}:{port}: {line}")
            try:
                yield line.split()[2]
            finally:
                forward.kill()
