"""Names that must meet: selectors and pods, ports, references, addresses."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from manifests import Resource, chosen, given, of_kind, selects, workloads


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


# A fleet does without: a pod's own identity may be all that object storage asks for.
_WITHOUT = {"embertide-storage"}


def _volume_sources(pod: Mapping[str, Any], *, closed: bool) -> Iterator[tuple[str, str]]:
    for volume in pod.get("volumes", []):
        secrets = [each["secret"] for each in volume.get("projected", {}).get("sources", [])]
        for secret in (*secrets, *([volume["secret"]] if "secret" in volume else [])):
            name = secret.get("secretName") or secret["name"]
            if not secret.get("optional") or (closed and name not in _WITHOUT):
                yield "Secret", name
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
