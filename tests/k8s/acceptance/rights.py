"""Who may what: operators by the cluster's own rules, and a pod that is none of ours."""

import json
from collections.abc import Callable
from pathlib import Path

from acceptance.deployment import training
from acceptance.site import Site
from bench.cluster import Json

OPERATORS = "--as-group=embertide-operators"
# The rights of operators: verb, resource, whether. No line of docs/kubernetes.md is beyond these.
_LOOKED_AT = ("pods", "pods/log", "deployments", "statefulsets", "jobs", "services")
_CHANGED = ("deployments", "statefulsets", "deployments/scale", "statefulsets/scale")
_NOT_MADE = ("pods", "pods/exec", "pods/attach", "deployments", "statefulsets", "secrets")
_NOT_GIVEN = ("roles", "rolebindings", "serviceaccounts")
RBAC = [
    *(("get", kind, True) for kind in _LOOKED_AT),
    *(("patch", kind, True) for kind in _CHANGED),
    ("delete", "pods", True),
    ("create", "pods/portforward", True),
    *((verb, "jobs", True) for verb in ("create", "delete", "patch")),
    *((verb, "networkpolicies", True) for verb in ("create", "delete")),
    *(("get", kind, False) for kind in ("secrets", "configmaps", "persistentvolumeclaims")),
    *(("create", kind, False) for kind in (*_NOT_MADE, *_NOT_GIVEN)),
    *(("delete", kind, False) for kind in (*_CHANGED[:2], "persistentvolumeclaims")),
]  # fmt: skip


def rights(site: Site) -> None:
    """The table of operators' rights, and what policies keep them from, asked of the API server."""
    cluster = site.cluster
    who = ("--as=operator", OPERATORS)
    with site.at("operators' rights"):
        wrong = []
        for verb, kind, allowed in RBAC:
            name, _, sub = kind.partition("/")
            words = ["auth", "can-i", verb, name, *who, *([f"--subresource={sub}"] if sub else [])]
            if cluster.allows(*words) != allowed:
                wrong.append(f"{verb} {kind}")
        site.find(
            f"{len(RBAC)} rights", f"{len(wrong)} wrong {wrong or ''}", "0 wrong", holds=not wrong
        )
        job = training(1)[-1]
        job["metadata"]["name"] = "train-more"
        tries: list[tuple[str, bool, Json]] = [("a training job", True, job)]

        def changed(what: str, change: Callable[[Json], object]) -> None:
            copy = json.loads(json.dumps(job))
            change(copy["spec"]["template"]["spec"])
            tries.append((what, False, copy))

        tokens = {"name": "x", "secret": {"secretName": "embertide-tokens"}}
        changed("a job with the tokens", lambda pod: pod["volumes"].append(tokens))
        changed("a job on its machine's network", lambda pod: pod.update(hostNetwork=True))
        changed(
            "a job of another account",
            lambda pod: pod.update(serviceAccountName="embertide-control"),
        )
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "embertide-door"},
            "spec": {
                "selector": {"app.kubernetes.io/name": "embertide-bus"},
                "ports": [{"port": 6379}],
            },
        }
        tries.append(("a door to Redis", False, service))
        wrong = [
            what
            for what, right, resource in tries
            if cluster.allows(
                "create", "--dry-run=server", "-f", "-", *who, stdin=json.dumps(resource)
            )
            != right
        ]
        image = '{"spec":{"template":{"spec":{"containers":[{"name":"node","image":"x"}]}}}}'
        patch = ("patch", "statefulset", "embertide-node", "--dry-run=server", "-p", image)
        wrong += ["another image"] if cluster.allows(*patch, *who) else []
        restart = ("rollout", "restart", "deployment/embertide-control")
        wrong += (
            []
            if cluster.allows(*restart, "--dry-run=server", *who) or cluster.allows(*restart, *who)
            else ["a restart"]
        )
        site.find(
            f"{len(tries) + 2} things made or changed",
            f"{len(wrong)} wrong {wrong or ''}",
            "0 wrong",
            holds=not wrong,
        )
        cluster.roll_out("deployment/embertide-control", 180)


def strangers(site: Site) -> None:
    """Record what a pod that is none of ours gets."""
    with site.at("a stranger's pod"):
        script = (Path(__file__).parent / "stranger.py").read_text()
        said = site.cluster.run("exec", "asker", "--", "python", "-c", script)
        found: dict[str, str] = json.loads(said.splitlines()[-1])
        reached = [
            name for name, value in found.items() if name.startswith("reach") and value == "yes"
        ]
        site.find("network policies", "not enforced by this network" if reached else "enforced")
        for what, value in found.items():
            if not what.startswith("reach"):
                site.find(what, value, "refused", holds=value.startswith("refused"))


def logs(site: Site) -> None:
    """Every pod of ours says something."""
    with site.at("logs"):
        pods = site.cluster.get("pods", "-l", "app.kubernetes.io/part-of=embertide")["items"]
        quiet = []
        for pod in pods:
            name = pod["metadata"]["name"]
            said = site.cluster.run("logs", name, "--all-containers", "--tail=5")
            if not said.strip():
                quiet.append(name)
        site.find(f"of {len(pods)} pods say nothing", quiet or "none", "none", holds=not quiet)
