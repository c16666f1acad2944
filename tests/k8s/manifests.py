"""Manifests as the cluster would see them: read, built by kustomize, and asked for their parts."""

import atexit
import base64
import copy
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
K8S = ROOT / "k8s"
SCHEMA = "1.36"
OWN = "mine"  # the overlay that new-overlay.sh makes
FOLDERS = [OWN, "overlays/dev"]

NAME = "app.kubernetes.io/name"
JOBSET = "jobset.sigs.k8s.io/jobset-name"
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
INDEX = "batch.kubernetes.io/job-completion-index"
TRAINING = ["train-news.yaml", "train-news-jobset.yaml", "train-news-trainjob.yaml"]
RUNTIME = K8S / "components" / "kubeflow-trainer" / "runtime.yaml"

Resource = dict[str, Any]


def read(text: str) -> list[Resource]:
    return copy.deepcopy(_documents(text))  # whoever asks may change it


@functools.cache
def _documents(text: str) -> list[Resource]:
    return [document for document in yaml.safe_load_all(text) if document]


@functools.cache
def own_overlay() -> Path:
    """An overlay as docs/kubernetes.md has it made; removed when the process ends."""
    place = tempfile.mkdtemp(prefix="overlay-")
    atexit.register(shutil.rmtree, place)
    folder = Path(place) / OWN
    subprocess.run([str(K8S / "new-overlay.sh"), str(folder)], check=True, timeout=60)
    return folder


@functools.cache
def build(folder: str) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    return kustomized(own_overlay() if folder == OWN else K8S / folder)


def kustomized(folder: Path) -> str:
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def deployed(folder: str = OWN, training: str = "train-news.yaml") -> list[Resource]:
    """An overlay, and a training job beside it as what the controllers make of it."""
    return expanded(read(build(folder)) + read((K8S / training).read_text()))


def jobset_of(train_job: Resource) -> Resource:
    """The JobSet that Kubeflow Trainer makes of a TrainJob and the runtime that it names."""
    (runtime,) = read(RUNTIME.read_text())
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer, spec = train_job["spec"]["trainer"], copy.deepcopy(runtime["spec"]["template"]["spec"])
    for part in spec["replicatedJobs"]:
        job = part["template"]
        if job["metadata"]["labels"].get(ANCESTOR) != "trainer":
            continue
        job["spec"] |= dict.fromkeys(("completions", "parallelism"), trainer["numNodes"])
        for container in job["spec"]["template"]["spec"]["containers"]:
            if container["name"] == "node":
                container["args"] = trainer["args"]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": train_job["metadata"]["name"]},
        "spec": spec,
    }


def with_components(*names: str) -> list[Resource]:
    """One's own overlay with more components."""
    return read(_built_with(names)) + read((K8S / TRAINING[0]).read_text())


@functools.cache
def _built_with(names: tuple[str, ...]) -> str:
    def add(text: Resource) -> None:
        place = Path(text["components"][0]).parent
        text["components"] += [str(place / name) for name in names]

    return changed_overlay("-".join(names), add)


def changed_overlay(name: str, change: Callable[[Resource], None]) -> str:
    """Return the resources of one's own overlay once its kustomization is changed, in a copy."""
    other = own_overlay().parent / name
    shutil.copytree(own_overlay(), other, dirs_exist_ok=True)
    file = other / "kustomization.yaml"
    text = yaml.safe_load(file.read_text())
    change(text)
    file.write_text(yaml.safe_dump(text))
    return kustomized(other)


def expanded(resources: list[Resource]) -> list[Resource]:
    """Put in place of each TrainJob and JobSet the Jobs and the Service that come of it."""
    found = []
    for each in resources:
        if each["kind"] == "TrainJob":
            each = jobset_of(each)
        if each["kind"] != "JobSet":
            found.append(each)
            continue
        name, spec = each["metadata"]["name"], each["spec"]
        network = spec.get("network", {})
        subdomain = network.get("subdomain", name)
        for part in spec["replicatedJobs"]:
            job = {"spec": copy.deepcopy(part["template"]["spec"])}
            pod = job["spec"]["template"]["spec"]
            if network.get("enableDNSHostnames"):
                pod["subdomain"] = subdomain
            metadata = {"name": f"{name}-{part['name']}-0", "labels": {JOBSET: name}}
            found.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata} | job)
        labels = found[-1]["spec"]["template"]["metadata"]["labels"]
        names = {
            "clusterIP": "None",
            "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
            "selector": {NAME: labels[NAME]},
            "ports": [{"port": 29400, "targetPort": "rendezvous"}],  # a name serves all ports
        }
        found.append(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": subdomain},
                "spec": names,
            }
        )
    return found


class Workload(NamedTuple):
    """A resource that makes pods."""

    resource: Resource
    labels: dict[str, str]
    pod: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])

    def containers(self) -> list[dict[str, Any]]:
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]

    def ports(self) -> dict[str, int]:
        ports = [port for each in self.containers() for port in each.get("ports", [])]
        return {port["name"]: port["containerPort"] for port in ports}


def workloads(resources: list[Resource]) -> list[Workload]:
    found = []
    for each in resources:
        if template := each.get("spec", {}).get("template"):
            labels = template["metadata"]["labels"]
            if each["spec"].get("completionMode") == "Indexed":
                labels = labels | {INDEX: "0"}  # of the pod that hosts the rendezvous
            found.append(Workload(each, labels, template["spec"]))
    return found


def of_kind(resources: list[Resource], kind: str) -> dict[str, Resource]:
    return {each["metadata"]["name"]: each for each in resources if each["kind"] == kind}


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a selector, of a Service or with matchLabels and matchExpressions, means the pod."""
    if not {"matchLabels", "matchExpressions"} & selector.keys():
        selector = {"matchLabels": selector}
    wanted = selector.get("matchLabels", {}).items()
    listed = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in listed)
    return wanted <= labels.items() and all(labels.get(e["key"]) in e["values"] for e in listed)


def chosen(resources: list[Resource], selector: Mapping[str, Any]) -> list[Workload]:
    return [each for each in workloads(resources) if selects(selector, each.labels)]


def quantity(text: object) -> float:
    match = re.fullmatch(r"([0-9.]+)(m|Ki|Mi|Gi)?", str(text))
    assert match, f"not a quantity: {text}"
    scale = {None: 1.0, "m": 1e-3, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
    return float(match[1]) * scale[match[2]]


def command(container: Mapping[str, Any]) -> list[str]:
    return [*container.get("command", []), *container.get("args", [])]


def given(container: Mapping[str, Any], resources: list[Resource]) -> list[str]:
    """The command of a container, with the values of ConfigMaps in place of $(VARIABLE)."""
    maps = of_kind(resources, "ConfigMap")
    values = {}
    for each in container.get("env", []):
        if source := each.get("valueFrom", {}).get("configMapKeyRef"):
            found = maps.get(source["name"], {}).get("data", {})
            values[each["name"]] = found.get(source["key"], "")
    return [
        re.sub(r"\$\((\w+)\)", lambda name: values.get(name[1], name[0]), word)
        for word in command(container)
    ]


def option(words: list[str], flag: str) -> str | None:
    return next((w.split("=", 1)[1] for w in words if w.startswith(f"{flag}=")), None)


def certificates(resources: list[Resource]) -> dict[str, Resource]:
    """Return the certificates that cert-manager is asked for, by the secret that it makes."""
    found = of_kind(resources, "Certificate").values()
    return {each["spec"]["secretName"]: each["spec"] for each in found}


def decoded(data: str) -> str:
    return base64.b64decode(data).decode()
