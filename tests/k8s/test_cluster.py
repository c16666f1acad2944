"""Two pods follow a live stream on a real cluster, and one is lost: when the run goes on.

`EMBERTIDE_KUBECONFIG=FILE pytest -m "" -s tests/k8s/test_cluster.py`, with a cluster that has the
images of k8s/images under the names of the manifests, and volumes for the claims
`embertide-publication` and `data-embertide-state-0` of the namespace `embertide-acceptance`. The
namespace is made, and deleted at the end. EMBERTIDE_RESULTS names a file for the figures, as JSON;
EMBERTIDE_REPETITIONS says how often each pod is taken away.
"""

import dataclasses
import datetime
import json
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
K8S = ROOT / "k8s"
NAMESPACE = "embertide-acceptance"
KUBECONFIG = os.environ.get("EMBERTIDE_KUBECONFIG", "")
READY_S = 600.0
TARGET_S = 60.0
GIVE_UP_S = 240.0
SETTLE_S = 15.0  # the group makes some versions and a checkpoint before the next fault

# Runs in a node's container: what is out, what the node answers with, and whether it is ready.
WATCH = """
import json, os, re, time, urllib.request
root, last = '/publication/news/deltas', None
while True:
    out = [n for n in os.listdir(root) if n[0] != '.' and os.path.exists(f'{root}/{n}/commit.pb')]
    number, lineage = map(int, max(out).split('-')) if out else (0, 0)
    served, ready = 0, False
    try:
        text = urllib.request.urlopen('http://127.0.0.1:8002/metrics', timeout=2).read().decode()
        found = re.search(r'^embertide_version(?:{[^}]*})? ([0-9.e+]+)', text, re.M)
        served = int(float(found[1])) if found else 0
        with urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=2) as answer:
            ready = answer.status == 200
    except OSError:
        pass
    now = dict(number=number, lineage=lineage, served=served, ready=ready)
    if now != last:
        print(json.dumps(now), flush=True)
    last = now
    time.sleep(0.1)
"""
STREAM = "redis://embertide-bus:6379/1#news"
EVENTS_PER_S = 2_000
# Runs in a pod of its own: what happens in the world, live.
SEND = f"""
import time
from embertide.trainer.commands.inputs import open_input
from embertide.trainer.data.redis_stream import EventSender, StreamConfig
source = open_input(None, None, 876_000, 1)
sender = EventSender(StreamConfig.of({STREAM!r}), source.schema)
began, sent = time.monotonic(), 0
for batch in source.batches(batch_size=256):
    sender.send(batch)
    sent += len(batch)
    time.sleep(max(began + sent / {EVENTS_PER_S} - time.monotonic(), 0))
"""
# Runs in a trainer's container: what the newest checkpoint says.
CHECK = """
import json
from pathlib import Path
from embertide.trainer.checkpoint.checkpoint import load_newest
from embertide.trainer.publish.folder import Publication
publication = Publication(Path('/publication/news'))
saved = load_newest(publication).checkpoint
numbers = [version.number for version in publication.deltas()]
print(json.dumps(dict(learned=saved.events, passed=saved.done, version=saved.version.number,
                      missing=numbers[-1] - numbers[0] + 1 - len(numbers))))
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not KUBECONFIG, reason="EMBERTIDE_KUBECONFIG names no cluster"),
]


def kubectl(*words: str, stdin: str | None = None, check: bool = True) -> str:
    """Run kubectl in the namespace and return what it prints."""
    done = subprocess.run(
        ["kubectl", "--kubeconfig", KUBECONFIG, "-n", NAMESPACE, *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=READY_S + 60,
        check=False,
    )
    assert not check or done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What a node's container saw at a moment."""

    at_s: float
    number: int
    lineage: int
    served: int
    ready: bool


class Watch:
    """A node's view of the publication and of itself, as it changes."""

    def __init__(self, node: str) -> None:
        """Begin to look."""
        self.seen: list[Seen] = []
        command = ["exec", node, "-c", "node", "--", "python3", "-u", "-c", WATCH]
        self._process = subprocess.Popen(
            ["kubectl", "--kubeconfig", KUBECONFIG, "-n", NAMESPACE, *command],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.seen.append(Seen(time.monotonic(), **json.loads(line)))

    def wait(self, what: str, holds: Callable[[Seen], bool]) -> Seen:
        """Return the first thing seen from now on for which it holds, the last one included."""
        done = max(len(self.seen) - 1, 0)
        until = time.monotonic() + GIVE_UP_S
        while time.monotonic() < until:
            assert self._process.poll() is None, "the node's container has ended"
            for each in self.seen[done:]:
                if holds(each):
                    return each
            done = max(done, len(self.seen) - 1)
            time.sleep(0.05)
        pods = kubectl("get", "pods", "-o", "wide")
        logs = kubectl("logs", "-l", "app.kubernetes.io/name=train-news", "--tail=20", check=False)
        pytest.fail(f"no {what} within {GIVE_UP_S:.0f} s\n{pods}\n{logs}")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


def training() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """train-news.yaml on the live stream, and its container; for a cluster of one small machine."""
    documents = list(yaml.safe_load_all((K8S / "train-news.yaml").read_text()))
    container = documents[-1]["spec"]["template"]["spec"]["containers"][0]
    container["resources"]["requests"] = {"cpu": "100m", "memory": "512Mi"}
    words = [word for word in container["command"] if not word.startswith(("--hours", "--publish"))]
    container["command"] = [*words, f"--data={STREAM}", "--publish-every-s=900"]
    return documents, container


def start_sender() -> None:
    """Make a pod that sends events, from the Job's image and as locked down as its pods."""
    documents, container = training()
    pod = documents[-1]["spec"]["template"]["spec"]
    own = {key: pod[key] for key in ("serviceAccountName", "securityContext", "enableServiceLinks")}
    container = {key: container[key] for key in ("image", "resources", "securityContext")}
    sender = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "events", "labels": {"app.kubernetes.io/part-of": "embertide"}},
        "spec": {
            **own,
            "automountServiceAccountToken": False,
            "containers": [{"name": "events", "command": ["python", "-c", SEND], **container}],
        },
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(sender))
    kubectl("wait", "--for=condition=Ready", "pod/events", "--timeout=120s")


def start_job() -> None:
    """Apply the Job: a new one, whose pauses begin at 10 s."""
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(training()[0]))


def end_job() -> None:
    """Delete the Job and wait for its pods: each writes its part of a last checkpoint."""
    kubectl("delete", "job", "train-news", "--cascade=foreground", "--wait=true")


def pod_of(index: int) -> str:
    """The newest pod of an index that is not ending."""
    label = f"batch.kubernetes.io/job-completion-index={index}"
    pods = json.loads(kubectl("get", "pods", "-l", label, "-o", "json"))["items"]
    live = [
        each
        for each in pods
        if "deletionTimestamp" not in each["metadata"] and each["status"]["phase"] == "Running"
    ]
    (pod,) = live
    return str(pod["metadata"]["name"])


FAULTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "a pod is deleted": (1, ()),
    "the pod of the rendezvous is deleted": (0, ()),
    "a pod is killed": (1, ("--grace-period=0", "--force")),
    "the pod of the rendezvous is killed": (0, ("--grace-period=0", "--force")),
}


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, Any]]:
    """What is measured; written when all is done."""
    version = json.loads(kubectl("version", "-o", "json", check=False))["serverVersion"]
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kubernetes": version["gitVersion"],
        "machine": f"{os.cpu_count()} cores, {platform.platform()}",
        "events_per_s": EVENTS_PER_S,
        "target_s": TARGET_S,
        "faults": {},
    }
    yield found
    if path := os.environ.get("EMBERTIDE_RESULTS"):
        Path(path).write_text(json.dumps(found, indent=2) + "\n")


@pytest.fixture(scope="module")
def watch(figures: dict[str, Any]) -> Iterator[Watch]:
    """Everything deployed: two nodes that follow what two pods publish."""
    kubectl("create", "namespace", NAMESPACE)
    label = "pod-security.kubernetes.io/enforce=restricted"
    kubectl("label", "namespace", NAMESPACE, label)
    made: Watch | None = None
    try:
        kubectl("apply", "-k", str(K8S / "overlays" / "dev"))
        kubectl("rollout", "status", "deployment/embertide-bus", "--timeout=120s")
        start_sender()
        began = time.monotonic()
        start_job()
        kubectl("rollout", "status", "statefulset/embertide-node", f"--timeout={READY_S:.0f}s")
        figures["nodes_ready_s"] = round(time.monotonic() - began, 1)
        made = Watch("embertide-node-0")
        made.wait("node that follows", lambda seen: seen.served > 1)
        yield made
    finally:
        if made is not None:
            made.close()
        kubectl("delete", "namespace", NAMESPACE, "--timeout=180s", check=False)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("repetition", range(int(os.environ.get("EMBERTIDE_REPETITIONS", "1"))))
def test_a_run_that_lost_a_pod_goes_on_and_nodes_follow(
    fault: str, repetition: int, watch: Watch, figures: dict[str, Any]
) -> None:
    if figures["faults"]:
        end_job()
        start_job()
    index, how = FAULTS[fault]
    first = watch.wait("run of two pods", lambda seen: bool(seen.lineage))
    if figures["faults"]:
        watch.wait("version of the new Job", lambda seen: seen.lineage > first.lineage)
    time.sleep(SETTLE_S)
    before = watch.seen[-1]
    stays = pod_of(1 - index)
    began = time.monotonic()
    kubectl("delete", "pod", pod_of(index), "--wait=false", *how)
    out = watch.wait(f"version after {fault}", lambda seen: seen.lineage > before.lineage)
    served = watch.wait("node that follows", lambda seen: seen.served >= out.number)
    after = [each for each in watch.seen if began <= each.at_s <= served.at_s]
    found = {
        "next_version_s": round(out.at_s - began, 1),
        "nodes_follow_s": round(served.at_s - began, 1),
        "version_before": before.number,
        "version_after": out.number,
        "nodes_always_ready": all(each.ready for each in after),
        "other_pod_stayed": pod_of(1 - index) == stays,
    }
    figures["faults"].setdefault(fault, []).append(found)
    print(f"{repetition}: {fault}: {found}")
    assert out.at_s - began <= TARGET_S
    assert found["nodes_always_ready"]
    assert found["other_pod_stayed"]


def test_nothing_was_lost(watch: Watch, figures: dict[str, Any]) -> None:
    name = pod_of(0)
    said = kubectl("exec", name, "--", "python", "-c", CHECK)
    figures["checkpoint"] = found = json.loads(said.splitlines()[-1])
    assert found["learned"] == found["passed"] > 0
    assert found["missing"] == 0
    served = [each.served for each in watch.seen if each.served]
    assert served == sorted(served), "a node went back"
