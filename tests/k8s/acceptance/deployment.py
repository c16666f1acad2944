"""The deployment: k8s/ as docs/kubernetes.md has it, made small enough for one machine."""

import base64
import dataclasses
import datetime
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bench.authority import Authority

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
K8S = ROOT / "k8s"
STREAM = "redis://events:6379#news"
EVENTS_PER_S = 1_000
SMALL = {"cpu": "20m", "memory": "64Mi"}
# A live stream of events from the world; runs beside a Redis of its own.
SEND = f"""
import time
from embertide.trainer.commands.inputs import open_input
from embertide.trainer.data.redis_stream import EventSender, StreamConfig
source = open_input(None, None, 876_000, 1)
sender = EventSender(StreamConfig.of({STREAM.replace("events", "127.0.0.1")!r}), source.schema)
print("sending", flush=True)
began, sent = time.monotonic(), 0
for batch in source.batches(batch_size=100):
    sender.send(batch)
    sent += len(batch)
    time.sleep(max(began + sent / {EVENTS_PER_S} - time.monotonic(), 0))
"""


def containers(resource: Json) -> Iterator[Json]:
    """The containers of a workload, those that begin before the others included."""
    pod = resource.get("spec", {}).get("template", {}).get("spec", {})
    yield from pod.get("initContainers", [])
    yield from pod.get("containers", [])


def secret(name: str, files: dict[str, bytes]) -> Json:
    """A Secret of these files."""
    data = {key: base64.b64encode(value).decode() for key, value in files.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """Where a publication in object storage lies.

    Attributes:
        url: The URL of a bucket and a prefix.
        options: A folder with a file for each option, credentials among them.
    """

    url: str
    options: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """An overlay, in a folder, and what it is made into.

    Certificates are signed by an authority of its own, as cert-manager would from the same
    resources: a cluster need not have cert-manager.
    """

    folder: Path
    authority: Authority | None  # none: certificates are those of before
    storage: Storage | None = None  # none: the publication is a volume of all

    @classmethod
    def left(cls, folder: Path, storage: Storage | None) -> "Deployment":
        """The one that was made in a folder."""
        return cls(folder, None, storage)

    @classmethod
    def make(cls, folder: Path, storage: Storage | None) -> "Deployment":
        """Make the overlay as one's own is made."""
        overlay = folder / "overlay"
        subprocess.run([str(K8S / "new-overlay.sh"), str(overlay)], check=True, timeout=60)
        return cls(folder, Authority(), storage)

    def tls(self, role: str) -> Path:
        """The folder of a person's certificate: operator or reader."""
        return self.folder / f"embertide-{role}-tls"

    def resources(self, *, groups: int, options: tuple[str, ...] = ()) -> list[Json]:
        """All but training, with more options for the nodes' command."""
        overlay = self.folder / "overlay" / "kustomization.yaml"
        text = yaml.safe_load(overlay.read_text())
        names = ["second-group"] * (groups - 1) + ["object-storage"] * bool(self.storage)
        components = Path(text["components"][0]).parent
        text["components"][1:] = [str(components / each) for each in names]
        if self.storage is not None:
            url = json.dumps([{"op": "replace", "path": "/data/url", "value": self.storage.url}])
            target = {"kind": "ConfigMap", "name": "embertide-storage"}
            text["patches"] = [{"target": target, "patch": url}]
        overlay.write_text(yaml.safe_dump(text))
        made = subprocess.run(
            ["kubectl", "kustomize", str(overlay.parent)],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        resources = []
        for each in yaml.safe_load_all(made.stdout):
            if each["apiVersion"].startswith("cert-manager.io"):
                if each["kind"] == "Certificate" and not each["spec"].get("isCA"):
                    resources.append(self._signed(each["spec"]))
                continue
            for container in containers(each):
                container["resources"]["requests"] = dict(SMALL)
                if container["command"][:2] == ["embertide", "serve"]:
                    container["command"] += options
            resources.append(each)
        if self.storage is not None:
            files = {each.name: each.read_bytes() for each in self.storage.options.iterdir()}
            resources.append(secret("embertide-storage", files))
        return resources

    def training(self, pods: int) -> list[Json]:
        """train-news.yaml with a number of pods, on the live stream."""
        options = [f"--storage={self.storage.url}"] if self.storage else []
        return training(pods, *options)

    def _signed(self, spec: Json) -> Json:
        folder = self.folder / spec["secretName"]
        if not folder.exists() or set(spec.get("dnsNames", [])) - set(
            (folder / "names").read_text().split()
        ):
            self._issue(folder, spec)
        names = ("tls.crt", "tls.key", "ca.crt")
        return secret(spec["secretName"], {each: (folder / each).read_bytes() for each in names})

    def _issue(self, folder: Path, spec: Json) -> None:
        hosts = (*spec.get("dnsNames", []), *spec.get("ipAddresses", []))
        uri = (spec.get("uris") or [""])[0]
        if self.authority is None:
            raise RuntimeError(f"{folder.name} is for other names, and who signed it is gone")
        self.authority.issue(folder, uri=uri, hosts=hosts, valid=datetime.timedelta(days=1))
        (folder / "names").write_text(" ".join(hosts))


def training(pods: int, *options: str) -> list[Json]:
    """train-news.yaml with a number of pods, on the live stream, with more options."""
    documents = list(yaml.safe_load_all((K8S / "train-news.yaml").read_text()))
    spec = documents[-1]["spec"]
    spec["completions"] = spec["parallelism"] = pods
    (container,) = containers(documents[-1])
    container["resources"]["requests"] = dict(SMALL)
    container["command"] = [*_on_stream(container["command"], pods), *options]
    return documents


def trainjob(pods: int) -> list[Json]:
    """train-news-trainjob.yaml with a number of pods, on the live stream, and its runtime."""
    runtime = yaml.safe_load((K8S / "components/kubeflow-trainer/runtime.yaml").read_text())
    (group,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = containers(group["template"])
    container["resources"]["requests"] = dict(SMALL)
    documents = list(yaml.safe_load_all((K8S / "train-news-trainjob.yaml").read_text()))
    trainer = documents[-1]["spec"]["trainer"]
    trainer["numNodes"] = pods
    trainer["args"] = _on_stream(trainer["args"], pods)
    return [runtime, *documents]


def _on_stream(words: list[str], pods: int) -> list[str]:
    return [
        *(
            f"--nnodes={pods}" if word.startswith("--nnodes=") else word
            for word in words
            if not word.startswith(("--demo", "--hours", "--publish-every-s"))
        ),
        f"--data={STREAM}",
        "--publish-every-s=600",
    ]


def _pod(name: str, made: list[Json], volumes: list[Json]) -> Json:
    job = training(1)[-1]["spec"]["template"]["spec"]
    own = {key: job[key] for key in ("securityContext", "enableServiceLinks")}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": name}},
        "spec": {
            **own,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "containers": made,
            "volumes": volumes,
        },
    }


def _locked(name: str, image: str, command: list[str]) -> Json:
    (container,) = containers(training(1)[-1])
    return {
        "name": name,
        "image": image,
        "command": command,
        "securityContext": container["securityContext"],
        "resources": {"requests": dict(SMALL), "limits": {"cpu": "1", "memory": "1Gi"}},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def events() -> list[Json]:
    """A stream of one's own: a Redis and what sends to it."""
    store = ["redis-server", "--save", "", "--protected-mode", "no", "--dir", "/tmp"]
    made = [
        _locked("redis", "redis:7.4-bookworm", store),
        _locked("sender", "embertide/trainer:0.2.0", ["python", "-c", SEND]),
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "events"},
        "spec": {"selector": {"app.kubernetes.io/name": "events"}, "ports": [{"port": 6379}]},
    }
    return [service, _pod("events", made, [{"name": "tmp", "emptyDir": {}}])]


def asker(requests_a_second: float, features: int, dense: int) -> Json:
    """The pod of asker.py. Its labels are none of ours: policies let it reach Triton alone."""
    script = (Path(__file__).parent / "asker.py").read_text()
    words = ["python", "-c", script, str(requests_a_second), str(features), str(dense)]
    container = _locked("asker", "embertide/control:0.2.0", words)
    return _pod("asker", [container], [{"name": "tmp", "emptyDir": {}}])
