"""Two pods of one run on a Kubernetes node, one with a fifth of the CPU of the other.

    python -m bench.sync pods --kubeconfig FILE

The pods run `embertide train --demo` as k8s/train-news.yaml does, with the image of that manifest.
Their rate is that of the progress lines between `_FROM` and `_TO` events; strategies take turns.
The namespace is made, and deleted at the end. The default storage class offers ReadWriteMany.
"""

import contextlib
import datetime
import json
import time
from collections.abc import Iterator
from typing import Any

import yaml

from bench.cluster import Cluster
from bench.report import Row
from bench.servers import ROOT, BenchError
from bench.sync.runs import against_all_reduce

_MANIFEST = ROOT / "k8s" / "train-news.yaml"
_NAMESPACE = "embertide-uneven"
_CPU = ("1", "200m")  # of each pod
_STRATEGIES = {
    "all-reduce": "all_reduce",
    "partial all-reduce": "partial_all_reduce",
    "LocalSGD": "local_sgd",
}
_TARGET = 1.5
_FROM, _TO = 20_000, 120_000
_GIVE_UP_S = 420.0


def _image() -> str:
    documents = yaml.safe_load_all(_MANIFEST.read_text())
    job = next(each for each in documents if each and each["kind"] == "Job")
    return str(job["spec"]["template"]["spec"]["containers"][0]["image"])


def _shared() -> list[dict[str, Any]]:
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "uneven"},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"app": "uneven"},
                "ports": [{"port": 29400}],
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "publication"},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "2Gi"}},
            },
        },
    ]


def _pod(index: int, run: str, sync: str) -> dict[str, Any]:
    launch = ["python", "-m", "embertide.trainer.sync.launch", f"--nnodes={len(_CPU)}"]
    launch += ["--nproc-per-node=1", "--rdzv-endpoint=uneven-0.uneven:29400", f"--rdzv-id={run}"]
    train = ["train", f"/publication/{run}", "--demo", "--hours=96", f"--events={_TO}", "--json"]
    # No version ends within the run: the manifest's stream has one an hour.
    train += [f"--sync={sync}", "--publish-every-s=31536000", "--ddr-mib=512"]
    cpu = _CPU[index]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"uneven-{index}", "labels": {"app": "uneven"}},
        "spec": {
            "hostname": f"uneven-{index}",
            "subdomain": "uneven",
            "restartPolicy": "Never",
            "securityContext": {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001},
            "containers": [
                {
                    "name": "trainer",
                    "image": _image(),
                    "command": [*launch, "-m", "embertide.trainer", "--", *train],
                    "resources": {"limits": {"cpu": cpu, "memory": "4Gi"}},
                    "volumeMounts": [
                        {"name": "publication", "mountPath": "/publication"},
                        {"name": "tmp", "mountPath": "/tmp"},
                    ],
                }
            ],
            "volumes": [
                {"name": "publication", "persistentVolumeClaim": {"claimName": "publication"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }


def rate(log: str) -> float:
    """Return events a second between the progress lines of a log with Kubernetes' times.

    Raises:
        BenchError: The log does not reach so far.
    """
    points = []
    for line in log.splitlines():
        at, _, said = line.partition(" ")
        with contextlib.suppress(ValueError):
            told = json.loads(said)
            if isinstance(told, dict) and "progress" in told:
                # Python takes no more than microseconds.
                when = datetime.datetime.fromisoformat(at[:26].rstrip("Z") + "+00:00")
                points.append((when.timestamp(), int(told["progress"]["events"])))
    points = [each for each in points if each[1] >= _FROM]
    if len(points) < 2 or points[-1][1] < 0.9 * _TO:
        raise BenchError(f"the run ended early:\n{log[-2000:]}")
    (began, first), (ended, last) = points[0], points[-1]
    return (last - first) / (ended - began)


def _events_per_s(cluster: Cluster, run: str, sync: str) -> float:
    cluster.apply([_pod(index, run, sync) for index in range(len(_CPU))])
    try:
        deadline = time.monotonic() + _GIVE_UP_S
        phases: set[str] = set()
        while time.monotonic() < deadline and not phases & {"Succeeded", "Failed"}:
            time.sleep(2)
            said = cluster.run("get", "pods", "-o", "jsonpath={.items[*].status.phase}")
            phases = set(said.split())
        return rate(cluster.run("logs", "uneven-0", "--timestamps"))
    finally:
        cluster.run("delete", "pods", "--all", "--grace-period=0", "--force")


def rows(kubeconfig: str, repetitions: int) -> Iterator[Row]:
    """Yield what the pods learn a second, by strategy, against all-reduce."""
    if not kubeconfig:
        raise BenchError("give --kubeconfig, of a cluster that has the trainer's image")
    cluster = Cluster(kubeconfig, _NAMESPACE)
    cluster.run("create", "namespace", _NAMESPACE)
    try:
        cluster.apply(_shared())
        rates: dict[str, list[float]] = {name: [] for name in _STRATEGIES}
        for turn in range(repetitions):
            for name, sync in _STRATEGIES.items():
                run = f"{name.replace(' ', '-').lower()}-{turn}"
                rates[name].append(_events_per_s(cluster, run, sync))
                print(f"{run}: {rates[name][-1]:,.0f} events/s", flush=True)
    finally:
        cluster.run("delete", "namespace", _NAMESPACE, "--wait=false")
    case = f"two pods, {_CPU[0]} and {_CPU[1]} of CPU"
    yield from against_all_reduce(case, rates, "LocalSGD", _TARGET, "D.8")
