"""Training jobs: what ends them, and how their pods meet."""

from typing import Any

from manifests import (
    INDEX,
    JOBSET,
    Resource,
    Workload,
    command,
    of_kind,
    option,
    selects,
    workloads,
)

# The exit status of a pod's process that was told to end.
TERMINATED = 143


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
