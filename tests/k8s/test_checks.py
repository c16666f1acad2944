"""Each check is shown what it is for: a manifest that is broken on purpose."""

import copy
from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
from checks import CHECKS, Check
from checks.agreement import fleet, redis, tls
from checks.names import addresses, ports, references, selectors
from checks.pods import budgets, flags, images, probes, processes, security
from checks.training_jobs import jobs, ranks
from manifests import INDEX, NAME, SCHEMA, Resource, deployed, of_kind


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
    (ports, "renamed", edit(*NODE, *FIRST, "ports", 2, "name", to="shard")),
    (ports, "twice", edit(*NODE, *FIRST, "ports", 2, "name", to="grpc")),
    (probes, "name", edit(*NODE, *FIRST, "livenessProbe", "httpGet", "port", to="metric")),
    (probes, "number", edit(*CONTROL, *FIRST, "readinessProbe", "grpc", "port", to=7109)),
    (probes, "none", edit(*STATE, *FIRST, "readinessProbe", to=None)),
    (budgets, "order", edit(*NODE, *FIRST, "resources", "requests", "memory", to="4Gi")),
    (budgets, "no limit", edit(*CONTROL, *FIRST, "resources", "limits", "cpu", to=None)),
    (budgets, "none", edit(*NODE, *POD, "initContainers", 0, "resources", to={})),
    (budgets, "rows", say(*NODE, "--ddr-mib", "3072")),
    (budgets, "shm", edit(*JOB, *POD, "volumes", 2, "emptyDir", "sizeLimit", to="8Gi")),
    (budgets, "ranks of a pod", say(*JOB, "--nproc-per-node", "2")),
    (budgets, "drive", edit(*JOB, *POD, "volumes", 1, "emptyDir", "sizeLimit", to="4Gi")),
    (budgets, "no drive", say(*JOB, "--ssd-directory", "/publication/ssd")),
    (images, "unbuilt", edit(*NODE, *FIRST, "image", to="embertide/nodes:0.2.0")),
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


def test_the_schema_refuses_an_unknown_field() -> None:
    resources = deployed()
    edit(*JOB, "spec", "backofLimit", to=1)(resources)
    with pytest.raises(kubernetes_validate.ValidationError, match="backofLimit"):
        kubernetes_validate.validate(of_kind(resources, "Job")["train-news"], SCHEMA, strict=True)
