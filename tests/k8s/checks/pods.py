"""A pod's rights and needs: probes, budgets, images, rights, flags, an end when it is told."""

import functools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from manifests import K8S, ROOT, Resource, command, of_kind, option, quantity, workloads

PUBLIC_IMAGES = {"redis"}
LAUNCH = "embertide.trainer.sync.launch"


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
