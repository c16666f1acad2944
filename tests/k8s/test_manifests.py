"""What `kubectl apply` would take, and what it would take although it cannot work.

kubernetes-validate knows types and fields; the checks below know what it does not: names that must
meet, budgets that must fit, flags that the commands must have. A check returns its complaints, and
each one is shown a manifest broken on purpose.
"""

import atexit
import base64
import copy
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import pytest
import yaml

from embertide.server.services.tokens import EXAMPLE, TokensError, read_tokens

ROOT = Path(__file__).resolve().parent.parent.parent
K8S = ROOT / "k8s"
SCHEMA = "1.36"
PUBLIC_IMAGES = {"redis"}
OWN = "mine"  # the overlay that new-overlay.sh makes
FOLDERS = [OWN, "overlays/dev"]
LAUNCH = "embertide.trainer.sync.launch"
# Triton's own wait for requests in flight when it is told to end.
TRITON_EXIT_S = 3

NAME = "app.kubernetes.io/name"
JOBSET = "jobset.sigs.k8s.io/jobset-name"
INDEX = "batch.kubernetes.io/job-completion-index"
TRAINING = ["train-news.yaml", "train-news-jobset.yaml"]
# What a process of a pod ends with when it was told to end.
TERMINATED = 143

Resource = dict[str, Any]
Check = Callable[[list[Resource]], list[str]]


# --- reading manifests ----------------------------------------------------------------------------


def read(text: str) -> list[Resource]:
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
    return _kustomized(own_overlay() if folder == OWN else K8S / folder)


def _kustomized(folder: Path) -> str:
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def deployed(folder: str = OWN, training: str = "train-news.yaml") -> list[Resource]:
    """An overlay, and a training job beside it; a JobSet as what its controller makes of it."""
    return expanded(read(build(folder)) + read((K8S / training).read_text()))


def expanded(resources: list[Resource]) -> list[Resource]:
    """Put in place of each JobSet the Jobs and the Service that its controller would make."""
    found = []
    for each in resources:
        if each["kind"] != "JobSet":
            found.append(each)
            continue
        name, spec = each["metadata"]["name"], each["spec"]
        network = spec.get("network", {})
        subdomain = network.get("subdomain", name)
        for part in spec["replicatedJobs"]:
            job = copy.deepcopy(part["template"])
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


# --- checks ---------------------------------------------------------------------------------------


def selectors(resources: list[Resource]) -> list[str]:
    """Whatever selects pods selects some; a workload selects its own."""
    bad = []
    for each in resources:
        what = f"{each['kind']} {each['metadata']['name']}"
        spec = each.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector and not chosen(resources, selector):
            bad.append(f"{what} selects no pod: {selector}")
    for work in workloads(resources):
        own = [work.resource["spec"].get("selector")]
        own += [each["labelSelector"] for each in work.pod.get("topologySpreadConstraints", [])]
        bad += [f"{work.name} is not {s}" for s in own if s and not selects(s, work.labels)]
    return bad


def ports(resources: list[Resource]) -> list[str]:
    """Ports are named, once each, and what is asked for is open in every pod that is meant."""
    bad = []
    for each in workloads(resources):
        names = [p.get("name") for c in each.containers() for p in c.get("ports", [])]
        if None in names or len(set(names)) < len(names):
            bad.append(f"{each.name}: ports are {names}")
    wanted = [
        (name, service["spec"]["selector"], port["targetPort"])
        for name, service in of_kind(resources, "Service").items()
        for port in service["spec"]["ports"]
    ] + [
        (name, policy["spec"]["podSelector"], port["port"])
        for name, policy in of_kind(resources, "NetworkPolicy").items()
        for rule in policy["spec"]["ingress"]
        for port in rule.get("ports", [])
    ]
    for name, selector, port in wanted:
        for work in chosen(resources, selector):
            if port not in work.ports():
                bad.append(f"{name}: {work.name} has no port {port}")
    return bad


def probes(resources: list[Resource]) -> list[str]:
    """A probe asks a port of its own container; what runs for ever has the probes it needs."""
    bad = []
    for work in workloads(resources):
        for container in work.containers():
            here = {p["name"]: p["containerPort"] for p in container.get("ports", [])}
            kinds = ("startupProbe", "readinessProbe", "livenessProbe")
            found = {kind: container[kind] for kind in kinds if kind in container}
            for kind, probe in found.items():
                kinds_of_port = ("httpGet", "tcpSocket", "grpc")
                port = next((probe[k]["port"] for k in kinds_of_port if k in probe), None)
                if port is not None and port not in here and port not in here.values():
                    bad.append(f"{work.name}/{container['name']}: {kind} asks port {port}")
            serves = work.resource["kind"] != "Job" and here
            if serves and not {"readinessProbe", "livenessProbe"} <= found.keys():
                bad.append(f"{work.name}/{container['name']} has {sorted(found)} alone")
    return bad


def budgets(resources: list[Resource]) -> list[str]:
    """Requests and limits are given and in order, and what a container is told to use fits."""
    bad = []
    for work in workloads(resources):
        for container in work.containers():
            what = f"{work.name}/{container['name']}"
            given = container.get("resources", {})
            asked, limit = given.get("requests", {}), given.get("limits", {})
            for kind in ("cpu", "memory"):
                if kind not in asked or kind not in limit:
                    bad.append(f"{what}: {kind} is not both requested and limited")
                elif quantity(asked[kind]) > quantity(limit[kind]):
                    bad.append(f"{what}: requests {asked[kind]} {kind}, limit {limit[kind]}")
            memory = quantity(limit.get("memory", 0))
            ddr_mib = option(command(container), "--ddr-mib") or "0"
            volumes = {each["name"]: each for each in work.pod.get("volumes", [])}
            mounted = [volumes.get(m["name"], {}) for m in container.get("volumeMounts", [])]
            for volume in mounted:
                if volume.get("emptyDir", {}).get("medium") == "Memory":
                    memory -= quantity(volume["emptyDir"].get("sizeLimit", "1024Gi"))
            ranks = int(option(command(container), "--nproc-per-node") or 1)
            if ranks * quantity(f"{ddr_mib}Mi") >= memory:
                bad.append(f"{what}: {ddr_mib} MiB of rows and its memory volumes do not fit")
            ssd_mib = option(command(container), "--ssd-mib") or "0"
            place = option(command(container), "--ssd-directory")
            mounts = container.get("volumeMounts", [])
            drives = [volumes.get(m["name"], {}) for m in mounts if m["mountPath"] == place]
            room = [each["emptyDir"].get("sizeLimit", 0) for each in drives if "emptyDir" in each]
            room += [
                each["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"]
                for each in drives
                if "ephemeral" in each
            ]
            if ranks * quantity(f"{ssd_mib}Mi") > sum(map(quantity, room)):
                bad.append(f"{what}: {ssd_mib} MiB of rows do not fit a volume of the pod's own")
    return bad


def images(resources: list[Resource]) -> list[str]:
    """An image is built here, at this version, or public with a tag that stays."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    bad = []
    for each in (c for work in workloads(resources) for c in work.containers()):
        name, _, tag = each["image"].partition(":")
        if name.startswith("embertide/"):
            recipe = K8S / "images" / f"{name.removeprefix('embertide/')}.Dockerfile"
            if not recipe.is_file() or tag != version:
                bad.append(f"{each['image']}: {recipe.name} does not build it at {version}")
        elif name not in PUBLIC_IMAGES or tag in ("", "latest"):
            bad.append(f"{each['image']} is not a public image that we use, with a tag")
    return bad


def _volume_sources(pod: Mapping[str, Any], *, closed: bool) -> Iterator[tuple[str, str]]:
    for volume in pod.get("volumes", []):
        secrets = [each["secret"] for each in volume.get("projected", {}).get("sources", [])]
        for secret in (*secrets, *([volume["secret"]] if "secret" in volume else [])):
            if closed or not secret.get("optional"):
                yield "Secret", secret.get("secretName") or secret["name"]
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]


def references(resources: list[Resource]) -> list[str]:
    """Every name of another resource is one that there is."""
    wanted: list[tuple[str, str, str]] = []
    bad = []
    signed = {each["spec"]["secretName"] for each in of_kind(resources, "Certificate").values()}
    for work in workloads(resources):
        wanted.append((work.name, "ServiceAccount", work.pod.get("serviceAccountName", "default")))
        wanted += [
            (work.name, kind, name) for kind, name in _volume_sources(work.pod, closed=bool(signed))
        ]
        volumes = {each["name"] for each in work.pod.get("volumes", [])}
        claims = work.resource["spec"].get("volumeClaimTemplates", [])
        volumes |= {each["metadata"]["name"] for each in claims}
        for container in work.containers():
            mounts = {each["name"] for each in container.get("volumeMounts", [])}
            bad += [f"{work.name} mounts no volume {name}" for name in mounts - volumes]
        governing = work.resource["spec"].get("serviceName") or work.pod.get("subdomain")
        if governing:
            service = of_kind(resources, "Service").get(governing, {"spec": {}})["spec"]
            mine = service.get("selector") and selects(service["selector"], work.labels)
            if service.get("clusterIP") != "None" or not mine:
                bad.append(f"{work.name}: no headless Service {governing} selects it")
    for name, binding in of_kind(resources, "RoleBinding").items():
        wanted.append((name, binding["roleRef"]["kind"], binding["roleRef"]["name"]))
    there = {(each["kind"], each["metadata"]["name"]) for each in resources}
    there |= {("Secret", name) for name in signed}
    return bad + [
        f"{who}: no {kind} {name}" for who, kind, name in wanted if (kind, name) not in there
    ]


def addresses(resources: list[Resource]) -> list[str]:
    """HOST:PORT in a command is a Service and one of its ports; POD.HOST:PORT a headless one."""
    services = of_kind(resources, "Service")
    bad = []
    for work in workloads(resources):
        for word in (w for c in work.containers() for w in given(c, resources)):
            if word.startswith(("--peer-listen", "--health-listen", "--listen")):
                continue
            place = word.split("=", 1)[-1].split("?")[0]
            match = re.fullmatch(
                r"(?:rediss?://(?:\w+@)?)?(?:([\w$()-]+)\.)?([a-z][a-z-]*):(\d+)", place
            )
            if not match:
                continue
            pod, host, port = match.groups()
            spec = services.get(host, {"spec": {"ports": []}})["spec"]
            if int(port) not in [each["port"] for each in spec["ports"]]:
                bad.append(f"{work.name}: {word} leads to no Service")
            elif pod and not (
                spec.get("clusterIP") == "None" and spec.get("publishNotReadyAddresses")
            ):
                bad.append(f"{work.name}: {word} needs names before readiness")
    return bad


def jobs(resources: list[Resource]) -> list[str]:
    """Training ends with its data or with a configuration error, and with nothing else."""
    bad = []
    for work in (each for each in workloads(resources) if each.resource["kind"] == "Job"):
        spec = work.resource["spec"]
        rules = spec.get("podFailurePolicy", {}).get("rules", [])
        names = {each["name"] for each in work.containers()}
        by_action = {
            action: [
                (each["containerName"] in names, each["operator"], each["values"])
                for rule in rules
                if rule["action"] == action and (each := rule.get("onExitCodes"))
            ]
            for action in ("FailJob", "Ignore")
        }
        disrupted = [
            (rule["action"], each["type"], each["status"])
            for rule in rules[:1]
            for each in rule.get("onPodConditions", [])
        ]
        words = command(work.pod["containers"][0])
        truths = {
            "is Indexed": spec.get("completionMode") == "Indexed",
            "runs as many pods as torchrun waits for": (
                spec.get("completions")
                == spec.get("parallelism")
                == int(option(words, "--nnodes") or 0)
            ),
            "restarts no container: podFailurePolicy judges pods": (
                work.pod.get("restartPolicy") == "Never"
            ),
            "fails by exit code 2 of a container it has": (
                by_action["FailJob"] == [(True, "In", [2])]
            ),
            "has no deadline": "activeDeadlineSeconds" not in spec | work.pod,
            "stays to be read": "ttlSecondsAfterFinished" not in spec,
            "has one writer at a time": spec.get("podReplacementPolicy") == "Failed",
        }
        if JOBSET in work.resource["metadata"].get("labels", {}):
            truths["leaves lost pods to the JobSet"] = len(rules) == 1 and (
                spec.get("backoffLimit") == 0
            )
        else:
            truths |= {
                "first ignores disruptions": disrupted == [("Ignore", "DisruptionTarget", "True")],
                "ignores pods that were told to end": (
                    by_action["Ignore"] == [(True, "In", [TERMINATED])]
                ),
                "retries for ever": spec.get("backoffLimit", 6) >= 2**31 - 1,
            }
        bad += [
            f"{work.name}: not true that it {what}" for what, holds in truths.items() if not holds
        ]
    return bad


def ranks(resources: list[Resource]) -> list[str]:
    """The pods of a job meet at index 0, may talk, and have time and a place for what is theirs."""
    bad = []
    services = of_kind(resources, "Service").values()
    policies = of_kind(resources, "NetworkPolicy").values()
    for work in (each for each in workloads(resources) if each.resource["kind"] == "Job"):
        words = command(work.pod["containers"][0])
        grace = work.pod.get("terminationGracePeriodSeconds", 30)
        ends = int(option(words, "--shutdown-timeout") or 30)
        own = [each for each in policies if selects(each["spec"]["podSelector"], work.labels)]
        open_to_own = [
            rule
            for policy in own
            for rule in policy["spec"]["ingress"]
            if "ports" not in rule
            and any(selects(peer["podSelector"], work.labels) for peer in rule["from"])
        ]
        scraped = [
            each["spec"]["selector"].get(INDEX)
            for each in services
            if selects(each["spec"]["selector"], work.labels)
            and each["metadata"].get("annotations", {}).get("prometheus.io/scrape") == "true"
        ]
        host = f"{work.name}-0.{work.pod.get('subdomain')}:29400"
        mounts = work.pod["containers"][0]["volumeMounts"]
        shm = [each["name"] for each in mounts if each["mountPath"] == "/dev/shm"]
        memory = [
            each["name"]
            for each in work.pod["volumes"]
            if each.get("emptyDir", {}).get("medium") == "Memory"
        ]
        truths = {
            "meets at the pod of index 0": option(words, "--rdzv-endpoint") == host,
            "names its meeting": bool(option(words, "--rdzv-id")),
            "starts its ranks again by itself": int(option(words, "--max-restarts") or 0) > 0,
            "has time for the last checkpoint": 60 <= ends < grace,
            "lets its pods talk on all ports": not own or bool(open_to_own),
            "shows the metrics of rank 0 alone": (
                scraped == ["0"] and "annotations" not in _template(work)
            ),
            "has memory to share": bool(shm) and shm == [name for name in shm if name in memory],
        }
        bad += [
            f"{work.name}: not true that it {what}" for what, holds in truths.items() if not holds
        ]
    return bad


def _template(work: Workload) -> dict[str, Any]:
    metadata: dict[str, Any] = work.resource["spec"]["template"]["metadata"]
    return metadata


def security(resources: list[Resource]) -> list[str]:
    """Pods pass Pod Security's `restricted`, write to volumes alone, and have no API token."""
    bad = []
    for work in workloads(resources):
        pod = work.pod.get("securityContext", {})
        if not pod.get("runAsNonRoot") or not pod.get("runAsUser"):
            bad.append(f"{work.name} may run as root")
        if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            bad.append(f"{work.name} has no seccomp profile")
        if work.pod.get("automountServiceAccountToken") is not False:
            bad.append(f"{work.name} gets an API token")
        for container in work.containers():
            own = container.get("securityContext", {})
            locked = (
                own.get("allowPrivilegeEscalation") is False
                and own.get("readOnlyRootFilesystem") is True
                and own.get("capabilities") == {"drop": ["ALL"]}
            )
            if not locked:
                bad.append(f"{work.name}/{container['name']} is not locked down: {own}")
    return bad


def fleet(resources: list[Resource]) -> list[str]:
    """Control plane, nodes and tokens agree; nodes start together and end slowly enough."""
    by_name = {each.name: each for each in workloads(resources)}
    control, node = by_name["embertide-control"], by_name["embertide-node"]
    asks, runs = (given(work.pod["containers"][0], resources) for work in (control, node))
    spec = node.resource["spec"]
    pause = int(option(runs, "--leave-s") or 0)
    grace = node.pod.get("terminationGracePeriodSeconds", 30)
    secret = {name: each["data"] for name, each in of_kind(resources, "Secret").items()}
    truths = {
        "the first plan waits for all nodes": option(asks, "--expect-nodes")
        == str(spec["replicas"]),
        "one control plane at a time": control.resource["spec"]["strategy"]["type"] == "Recreate",
        "nodes start together": spec.get("podManagementPolicy") == "Parallel",
        "one model": option(asks, "--model") == option(runs, "--name"),
        "one state": _place(option(asks, "--state")) == _place(option(runs, "--state")),
        "a node's name is its pod's": option(runs, "--node") == "$(POD_NAME)",
        "leaving and Triton's end fit the grace period": 0 < pause < grace - TRITON_EXIT_S,
        "the node's token is a node's": (
            f"node:{_text(secret['embertide-node-token']['token']).strip()}"
            in _text(secret["embertide-tokens"]["tokens"]).splitlines()
        ),
    }
    return [f"not true: {what}" for what, holds in truths.items() if not holds]


def _place(url: str | None) -> tuple[str, str | None, int | None, str]:
    """Where a URL leads, whoever goes there."""
    parts = urlsplit(url or "")
    return parts.scheme, parts.hostname, parts.port, parts.path


def certificates(resources: list[Resource]) -> dict[str, Resource]:
    """What cert-manager is asked for, by the secret that it makes."""
    found = of_kind(resources, "Certificate").values()
    return {each["spec"]["secretName"]: each["spec"] for each in found}


def _folders(work: Workload, container: Mapping[str, Any]) -> dict[str, str]:
    """The secrets of a container, by where they are mounted: one that has a folder of its own."""
    secrets = {v["name"]: v["secret"]["secretName"] for v in work.pod["volumes"] if "secret" in v}
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    return {path: secrets[name] for path, name in mounts.items() if name in secrets}


def tls(resources: list[Resource]) -> list[str]:
    """Who speaks gRPC has a certificate of his role and names, or leave to do without."""
    bad = []
    by_name = {each.name: each for each in workloads(resources)}
    node = by_name["embertide-node"]
    replicas = range(node.resource["spec"]["replicas"])
    dialled = {
        "control": [str(option(command(node.pod["containers"][0]), "--control")).split(":")[0]],
        "node": [f"{node.name}-{n}.{node.resource['spec']['serviceName']}" for n in replicas],
    }
    for role, names in dialled.items():
        work = by_name[f"embertide-{role}"]
        container = work.pod["containers"][0]
        env = {each["name"]: each.get("value") for each in container["env"]}
        folder = env.get("EMBERTIDE_TLS")
        if folder is None:
            if env.get("EMBERTIDE_PLAINTEXT") != "1":
                bad.append(f"{work.name} has neither certificates nor leave to do without")
            continue
        secret = _folders(work, container).get(folder, "")
        made = certificates(resources).get(secret, {})
        if made.get("uris") != [f"spiffe://embertide/role/{role}"]:
            bad.append(f"{work.name}: the certificate in {folder} is not of role {role}")
        missing = set(names) - set(made.get("dnsNames", []))
        if missing:
            bad.append(f"{work.name} is dialled as {sorted(missing)}: its certificate says no such")
    return bad


def redis(resources: list[Resource]) -> list[str]:
    """Who comes to a Redis over TLS is a user there, with his password, and knows who signed it."""
    bad = []
    users = of_kind(resources, "Secret").get("embertide-redis-users", {}).get("data", {})
    made = certificates(resources)
    for work in workloads(resources):
        for container in work.containers():
            for word in given(container, resources):
                url = urlsplit(word.split("=", 1)[-1])
                if url.scheme == "redis" and made:
                    bad.append(f"{work.name} comes to {url.hostname} in plain text")
                if url.scheme != "rediss":
                    continue
                asked = {name: values[0] for name, values in parse_qs(url.query).items()}
                mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
                places = {str(Path(each).parent) for each in asked.values()}
                if asked.keys() != {"password_file", "ssl_ca_certs"} or not places <= mounts.keys():
                    bad.append(f"{work.name}: {asked} are not all mounted")
                role = str(url.hostname).removeprefix("embertide-")
                lines = _text(users.get(f"{role}.acl", "")).splitlines()
                (sent,) = [
                    _text(each["data"]["password"]).strip()
                    for name, each in of_kind(resources, "Secret").items()
                    if name == f"embertide-redis-{url.username}"
                ] or [""]
                hashed = hashlib.sha256(sent.encode()).hexdigest()
                if not any(line.startswith(f"user {url.username} on #{hashed} ") for line in lines):
                    bad.append(f"{work.name} is no user {url.username} of {url.hostname}")
                names = made.get("embertide-redis-tls", {}).get("dnsNames", [])
                if url.hostname not in names:
                    bad.append(f"the certificate of Redis says {names}, not {url.hostname}")
    return bad


def processes(resources: list[Resource]) -> list[str]:
    """Shells end when they are told, and a Redis writes where its volume is.

    A container's first process ignores TERM if it has no handler: its pod then ends only when the
    grace period has passed.
    """
    bad = []
    for work in workloads(resources):
        for container in work.containers():
            where, words = f"{work.name}/{container['name']}", command(container)
            if words[:2] == ["sh", "-c"] and not words[2].startswith("trap "):
                bad.append(f"{where} ignores TERM: begin with a trap")
            if words[:1] == ["redis-server"]:
                mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
                files = of_kind(resources, "ConfigMap")["embertide-redis"]["data"]
                config = files.get(Path(words[-1]).name, "")
                folder = re.search(r"^dir (.*)$", config, re.MULTILINE)
                if not folder or folder[1] not in mounts:
                    bad.append(f"{where} writes to its working directory: say `dir` in its file")
    return bad


def _text(data: str) -> str:
    return base64.b64decode(data).decode()


@functools.cache
def known_flags(*program: str) -> frozenset[str]:
    """The flags that a program's --help names; none if there is no such program."""
    done = subprocess.run(
        [sys.executable, *program, "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
    )
    return frozenset(re.findall(r"--[a-z][a-z0-9-]*", done.stdout if done.returncode == 0 else ""))


def flags(resources: list[Resource]) -> list[str]:
    """Commands of ours have the flags that manifests give them."""
    bad = []
    for container in (c for work in workloads(resources) for c in work.containers()):
        words = command(container)
        parts: list[tuple[tuple[str, ...], list[str]]] = []
        if words[0] == "embertide":
            parts = [(("-m", "embertide.server.cli", words[1]), words[2:])]
        elif words[:3] == ["python", "-m", LAUNCH] and words[3:].count("-m") == 1:
            cut = words.index("-m", 3)
            module, separator, name = words[cut + 1 : cut + 4]
            if separator != "--":  # torchrun takes prefixes of its own options from it
                bad.append(f"{container['name']}: no -- before the program's arguments")
            parts = [(("-m", LAUNCH), words[3:cut]), (("-m", module, name), words[cut + 4 :])]
        elif container["image"].startswith("embertide/") and words[0] != "sh":
            bad.append(f"{container['name']} runs {words[0]}, which nobody knows")
        for program, rest in parts:
            used = {word.split("=")[0] for word in rest if word.startswith("--")}
            unknown = used - known_flags(*program)
            bad += [f"{' '.join(program)} has no {flag}" for flag in sorted(unknown)]
    return bad


CHECKS: list[Check] = [
    selectors, ports, probes, budgets, images, references, addresses, jobs, ranks, security, fleet,
    flags, processes, tls, redis,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("training", TRAINING)
def test_what_is_deployed_can_work(folder: str, training: str, check: Check) -> None:
    assert check(deployed(folder, training)) == []


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("training", TRAINING)
def test_every_resource_is_valid(folder: str, training: str) -> None:
    for resource in deployed(folder, training):
        if resource["apiVersion"] == "cert-manager.io/v1":
            continue  # of a schema that is not Kubernetes' own
        assert kubernetes_validate.validate(resource, SCHEMA, strict=True) == SCHEMA


def test_the_control_plane_reads_the_example_tokens() -> None:
    path = K8S / "base" / "secrets" / "tokens.example"
    roles = read_tokens(path, examples=True)
    assert sorted(each.role for each in roles.values()) == ["node", "operator", "reader"]
    with pytest.raises(TokensError, match=r"line 3: this is the token of an example.*openssl rand"):
        read_tokens(path)
    assert all(token.startswith(EXAMPLE) for token in roles)


def test_the_tokens_of_the_base_are_accepted_in_the_overlay_for_trials_alone() -> None:
    for folder, accepted in (("base", False), ("overlays/dev", True)):
        control = next(each for each in workloads(deployed(folder)) if each.name == CONTROL[1])
        flags = control.pod["containers"][0]["command"]
        assert ("--example-tokens" in flags) == accepted, folder


def test_nothing_names_a_namespace_or_a_second_resource_of_one_name() -> None:
    resources = deployed()
    assert not [each for each in resources if "namespace" in each["metadata"]]
    names = [(each["kind"], each["metadata"]["name"]) for each in resources]
    assert len(set(names)) == len(names)


# --- components -----------------------------------------------------------------------------------


def with_components(*names: str) -> list[Resource]:
    """One's own overlay with more components."""

    def add(text: Resource) -> None:
        place = Path(text["components"][0]).parent
        text["components"] += [str(place / name) for name in names]

    return read(changed_overlay("-".join(names), add)) + read((K8S / TRAINING[0]).read_text())


def changed_overlay(name: str, change: Callable[[Resource], None]) -> str:
    """What one's own overlay builds once its kustomization is changed, in a copy."""
    other = own_overlay().parent / name
    shutil.copytree(own_overlay(), other, dirs_exist_ok=True)
    file = other / "kustomization.yaml"
    text = yaml.safe_load(file.read_text())
    change(text)
    file.write_text(yaml.safe_dump(text))
    return _kustomized(other)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_groups_can_work(check: Check) -> None:
    resources = with_components("second-group")
    if check is fleet:
        node = of_kind(resources, "StatefulSet")["embertide-node"]["spec"]
        node["replicas"] = 4  # the first plan waits for both groups
    assert check(resources) == []


def test_a_second_group_is_a_group_of_its_own_and_not_upgraded_with_the_first() -> None:
    resources = with_components("second-group")
    first, second = (of_kind(resources, "StatefulSet")[f"embertide-node{b}"] for b in ("", "-b"))
    by_name = {each.name: each for each in workloads(resources)}
    words = [command(by_name[f"embertide-node{b}"].pod["containers"][0]) for b in ("", "-b")]
    assert [option(each, "--group") for each in words] == ["0", "1"]
    labels = [each["spec"]["selector"]["matchLabels"] for each in (first, second)]
    assert labels[0] != labels[1]
    for each, other in ((first, labels[1]), (second, labels[0])):
        assert not selects({"matchLabels": other}, each["spec"]["template"]["metadata"]["labels"])
    assert second["spec"]["updateStrategy"]["rollingUpdate"]["partition"] > 100
    names = certificates(resources)["embertide-node-tls"]["dnsNames"]
    for number in range(second["spec"]["replicas"]):
        assert f"embertide-node-b-{number}.embertide-nodes" in names


def test_monitors_select_services_that_have_the_port() -> None:
    resources = with_components("prometheus")
    services = of_kind(resources, "Service").values()
    for name, monitor in of_kind(resources, "ServiceMonitor").items():
        selector = monitor["spec"]["selector"]
        chosen_services = [
            each for each in services if selects(selector, each["metadata"].get("labels", {}))
        ]
        assert len(chosen_services) == 1, name
        (port,) = [each["port"] for each in monitor["spec"]["endpoints"]]
        assert port in [each["name"] for each in chosen_services[0]["spec"]["ports"]]


def test_an_autoscaler_adds_nodes_that_have_names_and_takes_none_away() -> None:
    resources = with_components("autoscale")
    (scaler,) = of_kind(resources, "HorizontalPodAutoscaler").values()
    assert kubernetes_validate.validate(scaler, SCHEMA, strict=True) == SCHEMA
    spec = scaler["spec"]
    node = of_kind(resources, "StatefulSet")[spec["scaleTargetRef"]["name"]]["spec"]
    assert "replicas" not in node
    names = certificates(resources)["embertide-node-tls"]["dnsNames"]
    assert spec["maxReplicas"] == len(names)
    assert spec["behavior"]["scaleDown"] == {"selectPolicy": "Disabled"}


def test_a_redis_of_ones_own_is_named_in_one_place() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (snippet,) = re.findall(
        r"```yaml\n# in k8s/overlays/mine/kustomization.yaml\n(.*?)```", page, re.S
    )
    resources = read(changed_overlay("external", lambda text: text.update(yaml.safe_load(snippet))))
    assert "embertide-bus" not in of_kind(resources, "Deployment")
    node = next(each for each in workloads(resources) if each.name == "embertide-node")
    bus = option(given(node.pod["containers"][0], resources), "--bus")
    assert _place(bus) == ("rediss", "redis.example.org", 6380, "/0")


# --- each check, shown what it is for -------------------------------------------------------------


def edit(kind: str, name: str, *path: str | int, to: object) -> Callable[[list[Resource]], None]:
    """A mutation: set what lies at the path of one resource, or remove it (`to` is None)."""

    def mutate(resources: list[Resource]) -> None:
        place: Any = of_kind(resources, kind)[name]
        for step in path[:-1]:
            place = place[step]
        if to is None:
            del place[path[-1]]
        else:
            place[path[-1]] = to

    return mutate


def say(kind: str, name: str, flag: str, to: str) -> Callable[[list[Resource]], None]:
    """A mutation: give a flag of the first container another value, or give it at all."""

    def mutate(resources: list[Resource]) -> None:
        words = of_kind(resources, kind)[name]["spec"]["template"]["spec"]["containers"][0][
            "command"
        ]
        words[:] = [word for word in words if not word.startswith(f"{flag}=")] + [f"{flag}={to}"]

    return mutate


POD = ("spec", "template", "spec")
FIRST = (*POD, "containers", 0)
NODE = ("StatefulSet", "embertide-node")
STATE = ("StatefulSet", "embertide-state")
CONTROL = ("Deployment", "embertide-control")
JOB = ("Job", "train-news")
SERVICE = ("Service", "embertide")
BUDGET = ("PodDisruptionBudget", "embertide-node")
POLICY = ("NetworkPolicy", "embertide-node")
MATCH = ("matchLabels", NAME)
SPREAD = (*POD, "topologySpreadConstraints", 0, "labelSelector")
TOKENS = (*POD, "volumes", 0, "projected", "sources", 0)
RULES = ("spec", "podFailurePolicy", "rules")
REDIS = ("ConfigMap", "embertide-redis", "data")
URLS = ("ConfigMap", "embertide-redis-urls", "data")
FILES = "password_file=/etc/embertide/redis-password&ssl_ca_certs=/etc/embertide-tls/ca.crt"

BROKEN: list[tuple[Check, str, Callable[[list[Resource]], None]]] = [
    (selectors, "service", edit(*SERVICE, "spec", "selector", NAME, to="node")),
    (selectors, "workload", edit(*NODE, "spec", "selector", *MATCH, to="node")),
    (selectors, "pods", edit(*NODE, "spec", "template", "metadata", "labels", NAME, to="node")),
    (selectors, "PDB", edit(*BUDGET, "spec", "selector", *MATCH, to="x")),
    (selectors, "policy", edit(*POLICY, "spec", "podSelector", *MATCH, to="x")),
    (selectors, "spread", edit(*JOB, *SPREAD, *MATCH, to="x")),
    (ports, "target", edit(*SERVICE, "spec", "ports", 0, "targetPort", to="https")),
    (ports, "renamed", edit(*NODE, *FIRST, "ports", 3, "name", to="shard")),
    (ports, "twice", edit(*NODE, *FIRST, "ports", 3, "name", to="http")),
    (probes, "name", edit(*NODE, *FIRST, "startupProbe", "httpGet", "port", to="htp")),
    (probes, "number", edit(*CONTROL, *FIRST, "readinessProbe", "grpc", "port", to=7102)),
    (probes, "none", edit(*STATE, *FIRST, "readinessProbe", to=None)),
    (budgets, "order", edit(*NODE, *FIRST, "resources", "requests", "memory", to="4Gi")),
    (budgets, "no limit", edit(*CONTROL, *FIRST, "resources", "limits", "cpu", to=None)),
    (budgets, "none", edit(*NODE, *POD, "initContainers", 0, "resources", to={})),
    (budgets, "rows", say(*NODE, "--ddr-mib", "3072")),
    (budgets, "shm", edit(*JOB, *POD, "volumes", 2, "emptyDir", "sizeLimit", to="8Gi")),
    (budgets, "ranks of a pod", say(*JOB, "--nproc-per-node", "2")),
    (budgets, "drive", edit(*JOB, *POD, "volumes", 1, "emptyDir", "sizeLimit", to="4Gi")),
    (budgets, "no drive", say(*JOB, "--ssd-directory", "/publication/ssd")),
    (images, "unbuilt", edit(*NODE, *FIRST, "image", to="embertide/nodes:0.1.0")),
    (images, "version", edit(*JOB, *FIRST, "image", to="embertide/trainer:0.0.9")),
    (images, "latest", edit(*STATE, *FIRST, "image", to="redis:latest")),
    (images, "no tag", edit(*STATE, *FIRST, "image", to="redis")),
    (images, "unknown", edit(*STATE, *FIRST, "image", to="example.org/redis:7")),
    (references, "volume", edit(*NODE, *FIRST, "volumeMounts", 1, "name", to="runs")),
    (
        references,
        "claim",
        edit(*JOB, *POD, "volumes", 0, "persistentVolumeClaim", "claimName", to="x"),
    ),
    (references, "secret", edit(*NODE, *POD, "volumes", 3, "secret", "secretName", to="token")),
    (references, "optional", edit(*JOB, *POD, "volumes", 3, "secret", "secretName", to="x")),
    (references, "projected", edit(*CONTROL, *TOKENS, "secret", "name", to="tokens")),
    (
        references,
        "config map",
        edit(*CONTROL, *POD, "volumes", 1, to={"name": "tmp", "configMap": {"name": "x"}}),
    ),
    (references, "account", edit(*NODE, *POD, "serviceAccountName", to="node")),
    (references, "default account", edit(*NODE, *POD, "serviceAccountName", to=None)),
    (references, "governing", edit(*NODE, "spec", "serviceName", to="embertide")),
    (references, "subdomain", edit(*JOB, *POD, "subdomain", to="train")),
    (references, "role", edit("RoleBinding", "embertide-operator", "roleRef", "name", to="admin")),
    (addresses, "host", say(*NODE, "--bus", "redis://embertide-buss:6379")),
    (addresses, "port", say(*CONTROL, "--state", "redis://embertide-state:6380")),
    (addresses, "peer", say(*NODE, "--peer", "$(POD_NAME).embertide:7200")),
    (addresses, "rendezvous", say(*JOB, "--rdzv-endpoint", "train-news-0.train:29400")),
    (
        addresses,
        "early names",
        edit("Service", "train-news", "spec", "publishNotReadyAddresses", to=False),
    ),
    (jobs, "indexed", edit(*JOB, "spec", "completionMode", to="NonIndexed")),
    (jobs, "parallelism", edit(*JOB, "spec", "parallelism", to=3)),
    (jobs, "completions", edit(*JOB, "spec", "completions", to=3)),
    (jobs, "nnodes", say(*JOB, "--nnodes", "3")),
    (jobs, "restart", edit(*JOB, *POD, "restartPolicy", to="OnFailure")),
    (jobs, "disruptions", edit(*JOB, *RULES, 0, "action", to="Count")),
    (jobs, "container", edit(*JOB, *RULES, 2, "onExitCodes", "containerName", to="train")),
    (jobs, "code", edit(*JOB, *RULES, 2, "onExitCodes", "values", to=[1, 2])),
    (jobs, "told to end", edit(*JOB, *RULES, 1, "onExitCodes", "values", to=[137])),
    (jobs, "policy", edit(*JOB, "spec", "podFailurePolicy", to=None)),
    (jobs, "back-off", edit(*JOB, "spec", "backoffLimit", to=6)),
    (jobs, "deadline", edit(*JOB, "spec", "activeDeadlineSeconds", to=86_400)),
    (jobs, "time to live", edit(*JOB, "spec", "ttlSecondsAfterFinished", to=60)),
    (jobs, "two writers", edit(*JOB, "spec", "podReplacementPolicy", to="TerminatingOrFailed")),
    (ranks, "meeting", say(*JOB, "--rdzv-endpoint", "train-news-1.train-news:29400")),
    (ranks, "nameless", say(*JOB, "--rdzv-id", "")),
    (ranks, "no restart", say(*JOB, "--max-restarts", "0")),
    (ranks, "grace", edit(*JOB, *POD, "terminationGracePeriodSeconds", to=570)),
    (ranks, "no grace", edit(*JOB, *POD, "terminationGracePeriodSeconds", to=None)),
    (ranks, "no time", say(*JOB, "--shutdown-timeout", "30")),
    (
        ranks,
        "ports",
        edit("NetworkPolicy", "train-news", "spec", "ingress", 0, "ports", to=[{"port": 29400}]),
    ),
    (
        ranks,
        "metrics of all",
        edit("Service", "train-news-metrics", "spec", "selector", INDEX, to=None),
    ),
    (
        ranks,
        "metrics twice",
        edit(
            *(*JOB, "spec", "template", "metadata", "annotations"),
            to={"prometheus.io/scrape": "true"},
        ),
    ),
    (ranks, "shm", edit(*JOB, *POD, "volumes", 2, "emptyDir", "medium", to=None)),
    (security, "root", edit(*NODE, *POD, "securityContext", "runAsNonRoot", to=False)),
    (security, "seccomp", edit(*STATE, *POD, "securityContext", "seccompProfile", to=None)),
    (security, "API token", edit(*JOB, *POD, "automountServiceAccountToken", to=True)),
    (
        security,
        "root disk",
        edit(*JOB, *FIRST, "securityContext", "readOnlyRootFilesystem", to=False),
    ),
    (security, "init", edit(*NODE, *POD, "initContainers", 0, "securityContext", to=None)),
    (fleet, "replicas", edit(*NODE, "spec", "replicas", to=3)),
    (fleet, "strategy", edit(*CONTROL, "spec", "strategy", "type", to="RollingUpdate")),
    (fleet, "ordered", edit(*NODE, "spec", "podManagementPolicy", to="OrderedReady")),
    (fleet, "model", say(*CONTROL, "--model", "ads")),
    (fleet, "state", say(*NODE, "--state", "redis://embertide-bus:6379")),
    (fleet, "name", say(*NODE, "--node", "node-0")),
    (fleet, "grace", edit(*NODE, *POD, "terminationGracePeriodSeconds", to=18)),
    (fleet, "no pause", say(*NODE, "--leave-s", "0")),
    (flags, "serve", say(*NODE, "--ddr-gib", "1")),
    (flags, "train", say(*JOB, "--publish-every", "1")),
    (flags, "program", edit(*CONTROL, *FIRST, "command", 0, to="embertided")),
    (tls, "nothing", edit(*NODE, *FIRST, "env", 3, "name", to="EMBERTIDE_PLAINTEXT")),
    (tls, "whose", edit(*CONTROL, *FIRST, "env", 3, "value", to="/etc/embertide")),
    (tls, "named", edit(*NODE, "spec", "replicas", to=9)),
    (tls, "dialled", say(*NODE, "--control", "control.example:7100")),
    (processes, "deaf", edit(*NODE, *POD, "initContainers", 0, "command", 2, to="sleep 60")),
    (processes, "no file", edit(*STATE, *FIRST, "command", to=["redis-server"])),
    (processes, "folder", edit(*REDIS, "state.conf", to="dir /tmp\n")),
    (redis, "plain", edit(*URLS, "node-bus", to="redis://embertide-bus:6379")),
    (redis, "user", edit(*URLS, "node-bus", to=f"rediss://reader@embertide-bus:6379?{FILES}")),
    (redis, "place", edit(*URLS, "node-bus", to=f"rediss://node@embertide-nodes:7200?{FILES}")),
    (redis, "no password", edit(*URLS, "node-bus", to="rediss://node@embertide-bus:6379?x=1")),
    (
        redis,
        "folder",
        edit(*URLS, "trainer-bus", to=f"rediss://trainer@embertide-bus:6379?{FILES}"),
    ),
    (redis, "password", edit("Secret", "embertide-redis-node", "data", "password", to="eA==")),
    (redis, "certificate", edit("Certificate", "embertide-redis", "spec", "dnsNames", to=["x"])),
    (addresses, "by a ConfigMap", edit(*URLS, "node-state", to="redis://embertide-stat:6379")),
]


@pytest.mark.parametrize(
    ("check", "mutate"),
    [pytest.param(c, m, id=f"{c.__name__}-{what}") for c, what, m in BROKEN],
)
def test_a_check_finds_what_it_is_for(
    check: Check, mutate: Callable[[list[Resource]], None]
) -> None:
    resources = copy.deepcopy(deployed())
    mutate(resources)
    assert check(resources)


def test_each_check_was_shown_something_broken() -> None:
    assert {check for check, _, _ in BROKEN} == set(CHECKS)


# --- the JobSet -----------------------------------------------------------------------------------


def jobset(training: str = TRAINING[1]) -> Resource:
    resources = read((K8S / training).read_text())
    (found,) = [each for each in resources if each["kind"] == "JobSet"]
    return found


def test_a_jobset_is_of_its_api_and_has_no_field_that_this_does_not_know() -> None:
    found = jobset()
    assert found["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    spec = found["spec"]
    assert spec.keys() == {"network", "failurePolicy", "replicatedJobs"}
    assert spec["network"].keys() == {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}
    (part,) = spec["replicatedJobs"]
    assert part.keys() == {"name", "replicas", "template"}
    assert part["template"].keys() == {"spec"}


def test_a_jobset_fails_by_configuration_errors_alone_and_starts_again_for_ever() -> None:
    policy = jobset()["spec"]["failurePolicy"]
    reasons = [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]]
    assert reasons == [
        ("FailJobSet", ["PodFailurePolicy"]),
        ("RestartJobSetAndIgnoreMaxRestarts", ["BackoffLimitExceeded"]),
    ]
    assert policy.keys() == {"maxRestarts", "rules"}


def test_pods_of_the_job_and_of_the_jobset_are_alike() -> None:
    job, of_set = (
        next(each for each in workloads(deployed(training=name)) if each.resource["kind"] == "Job")
        for name in TRAINING
    )
    place = "--rdzv-endpoint="
    for each in (job, of_set):
        words = each.pod["containers"][0]["command"]
        words[:] = [word for word in words if not word.startswith(place)]
    assert job.labels == of_set.labels
    assert job.pod == of_set.pod


def test_what_stands_beside_the_job_and_the_jobset_is_the_same() -> None:
    job, of_set = (read((K8S / name).read_text()) for name in TRAINING)
    assert [each for each in of_set if each["kind"] != "JobSet"] == job[1:-1]


def test_the_schema_refuses_an_unknown_field() -> None:
    resources = deployed()
    edit(*JOB, "spec", "backofLimit", to=1)(resources)
    with pytest.raises(kubernetes_validate.ValidationError, match="backofLimit"):
        kubernetes_validate.validate(of_kind(resources, "Job")["train-news"], SCHEMA, strict=True)
