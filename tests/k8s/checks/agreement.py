"""The fleet: control plane, nodes, their certificates and Redis agree."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from manifests import (
    Resource,
    Workload,
    certificates,
    command,
    decoded,
    given,
    of_kind,
    option,
    workloads,
)

# Triton's own wait for requests in flight when it is told to end.
TRITON_EXIT_S = 3


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
        "one state": place_of(option(asks, "--state")) == place_of(option(runs, "--state")),
        "a node's name is its pod's": option(runs, "--node") == "$(POD_NAME)",
        "leaving and Triton's end fit the grace period": 0 < pause < grace - TRITON_EXIT_S,
        "the node's token is a node's": (
            f"node:{decoded(secret['embertide-node-token']['token']).strip()}"
            in decoded(secret["embertide-tokens"]["tokens"]).splitlines()
        ),
    }
    return [f"not true: {what}" for what, holds in truths.items() if not holds]


def place_of(url: str | None) -> tuple[str, str | None, int | None, str]:
    """Where a URL leads, whoever goes there."""
    parts = urlsplit(url or "")
    return parts.scheme, parts.hostname, parts.port, parts.path


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
                lines = decoded(users.get(f"{role}.acl", "")).splitlines()
                (sent,) = [
                    decoded(each["data"]["password"]).strip()
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
