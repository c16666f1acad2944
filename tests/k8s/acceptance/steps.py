"""The steps of an acceptance, in order: each looks at one thing that docs/kubernetes.md says."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from acceptance.cluster import Json, RefusedError, wait_until
from acceptance.deployment import asker, events, training
from acceptance.site import LEAVE_S, Absence, Site, Versions

READY_S = 600.0
# A pod that was lost: the next version at the latest.
NEXT_VERSION_S = 60.0
REQUESTS_A_SECOND = 8.0  # of each kind of client
# Of an end: beside --leave-s.
END_S = 5.0
OPERATORS = "--as-group=embertide-operators"


# --- deploying ------------------------------------------------------------------------------------


def deploy(site: Site, *, options: tuple[str, ...] = ()) -> None:
    """Apply everything but training, and wait for what needs no model."""
    cluster = site.cluster
    with site.at("deploy"):
        began = time.monotonic()
        cluster.apply(site.deployment.resources(groups=1, options=options))
        site.find("resources admitted", time.monotonic() - began, "s")
        for what in ("deployment/embertide-bus", "statefulset/embertide-state"):
            cluster.roll_out(what, 180)
        cluster.roll_out("deployment/embertide-control", 180)
        site.find("Redis and control plane ready", time.monotonic() - began, "s")
        waiting = {each["status"]["phase"] for each in cluster.pods("embertide-node")}
        site.find(
            "nodes before there is a snapshot", waiting, "Pending", holds=waiting == {"Pending"}
        )


def train(site: Site) -> None:
    """One pod, then two, on a live stream."""
    cluster = site.cluster
    with site.at("train, one pod"):
        cluster.apply(events())
        cluster.run("wait", "--for=condition=Ready", "pod/events", "--timeout=180s", timeout_s=200)
        began = time.monotonic()
        cluster.apply(training(1))
        cluster.roll_out("statefulset/embertide-node", READY_S)
        site.find("nodes ready after the job began", time.monotonic() - began, "s")
        site.find("a version out and served after", site.followed(site.versions()), "s")
    with site.at("train, two pods"):
        before = site.versions()
        train_anew(site, 2)
        began = time.monotonic()
        wait_until("a version of two pods", lambda: _has_gone_on(site, before), 240)
        site.find_time("version of two pods, served", time.monotonic() - began, 2 * NEXT_VERSION_S)


def train_anew(site: Site, pods: int) -> None:
    """End the job and begin one of so many pods."""
    site.cluster.run("delete", "job", "train-news", "--cascade=foreground", timeout_s=660)
    site.cluster.apply(training(pods))


def _has_gone_on(site: Site, before: Versions) -> bool:
    """Whether a run that began anew has a version that is out and served."""
    now = site.versions()
    return now.lineage > before.lineage and now.served >= now.out > before.out


def infer(site: Site) -> None:
    """Four kinds of clients ask the Service, from now on."""
    with site.at("infer"):
        site.cluster.apply([asker(REQUESTS_A_SECOND)])
        site.cluster.run(
            "wait", "--for=condition=Ready", "pod/asker", "--timeout=120s", timeout_s=140
        )
        site.follow()
        began = time.monotonic()
        time.sleep(15)
        got = site.answers(began)
        site.find_answers("15 s of requests", got)
        kinds = sum(1 for count in got.answers.values() if count)
        site.find("kinds of clients answered", kinds, "4", holds=kinds == 4)


# --- operations -----------------------------------------------------------------------------------


def buckets(site: Site) -> dict[str, int]:
    """Buckets by node."""
    found: dict[str, int] = {}
    for each in site.status()["devices"]:
        node = each["device"].rsplit("/", 1)[0]
        found[node] = found.get(node, 0) + each["buckets"] + each["moving"]
    return found


def operation(site: Site, id: str) -> Json:
    """What the control plane says of an operation, once it can be asked."""
    found: list[Json] = []

    def listed() -> bool:
        try:
            said = site.embertide("reshard", "list", role="reader")
        except RefusedError:
            return False
        found.extend(each for each in said["operations"] if each["id"] == site.own(id))
        return bool(found)

    wait_until(f"operation {id}", listed, 60)
    return found[-1]


def state_of(site: Site, id: str) -> str:
    """RUNNING, PAUSED and so on."""
    return str(operation(site, id)["state"]).removeprefix("OPERATION_STATE_")


def ended(site: Site, id: str, timeout_s: float = 240.0) -> str:
    """Wait for an operation's end; return its state."""
    states = ("SUCCEEDED", "FAILED", "ABORTED")
    wait_until(f"end of operation {id}", lambda: state_of(site, id) in states, timeout_s)
    return state_of(site, id)


def done(site: Site, what: str, id: str, timeout_s: float = 240.0) -> None:
    """Wait for an operation's end and write down how it ended."""
    state = ended(site, id, timeout_s)
    site.find(what, state, "SUCCEEDED", holds=state == "SUCCEEDED")


def reshard(site: Site) -> None:
    """All buckets of a node move away and back, under requests."""
    with site.at("reshard under traffic"):
        began = time.monotonic()
        site.embertide("node", "drain", "embertide-node-1", "--id", "@drain-1")
        done(site, "drained", "@drain-1")
        left = buckets(site)["embertide-node-1"]
        site.find("buckets of the drained node", left, "0", holds=not left)
        site.embertide("reshard", "--planner", "join", "--id", "@back-1")
        done(site, "given its share again", "@back-1")
        share = buckets(site)["embertide-node-1"]
        site.find("its buckets", share, "> 0", holds=share > 0)
        site.find_answers("requests", site.answers(began))


def lose_control(site: Site) -> None:
    """The control plane's pod is killed in each state of an operation, which goes on."""
    label = "app.kubernetes.io/name=embertide-control"
    slow = ("reshard", "--planner", "join", "--bytes-per-s", "100000", "--id")

    def kill() -> None:
        site.cluster.run("delete", "pod", "-l", label, "--grace-period=0", "--force")
        site.status()

    def expect(what: str, id: str, *states: str) -> None:
        now = state_of(site, id)
        site.find(what, now, " or ".join(states), holds=now in states)

    with site.at("loss of the control plane"):
        began = time.monotonic()
        site.embertide("node", "drain", "embertide-node-1", "--id", "@lost-0")
        ended(site, "@lost-0")
        site.embertide(*slow, "@lost-1")
        expect("an operation", "@lost-1", "RUNNING")
        kill()
        expect("after the loss", "@lost-1", "RUNNING", "SUCCEEDED")
        done(site, "it goes on to its end", "@lost-1")
        site.embertide("node", "drain", "embertide-node-1", "--id", "@lost-2")
        ended(site, "@lost-2")
        site.embertide(*slow, "@lost-3")
        site.embertide("reshard", "pause", "@lost-3")
        kill()
        expect("one that is halted, after the loss", "@lost-3", "PAUSED")
        site.embertide("node", "drain", "embertide-node-0", "--id", "@lost-4")
        kill()
        expect("one that waits for it, after the loss", "@lost-4", "PENDING")
        site.embertide("reshard", "abort", "@lost-4")
        site.embertide("reshard", "resume", "@lost-3")
        kill()
        expect("one that was ended, after the loss", "@lost-4", "ABORTED")
        done(site, "the halted one, let go on, goes to its end", "@lost-3")
        site.find_answers("requests", site.answers(began))


# --- losses ---------------------------------------------------------------------------------------

HOW = {"deleted": (), "killed": ("--grace-period=0", "--force")}


def _gone(site: Site, pod: str, uid: str, timeout_s: float) -> float:
    """Wait until nothing of a pod runs. A Job keeps the object of one that ended for 10 s more."""
    return wait_until(f"end of {pod}", lambda: site.cluster.has_ended(pod, uid), timeout_s)


def lose_node(site: Site, pod: str, how: str) -> None:
    """A node of one group: its keys are degraded until it is back, and no request fails."""
    with site.at(f"{pod} {how}"):
        other = "embertide-node-1" if pod.endswith("0") else "embertide-node-0"
        before, uid = site.versions(other), site.cluster.uid(pod)
        began = time.monotonic()
        absence = Absence(site.cluster, pod, "node")
        site.cluster.run("delete", "pod", pod, "--wait=false", *HOW[how])
        if how == "deleted":
            site.find_time("end of the pod", _gone(site, pod, uid, 120), LEAVE_S + END_S)
        away = absence.seconds()
        site.find("away", away, "s")
        site.followed(before, pod)
        got = site.answers(began)
        # Connections of a killed pod break; a Service learns of it when the kubelet does.
        site.find_answers(
            "requests", got, failed="0 failed" if how == "deleted" else "", degraded_s=away + 2
        )


def lose_other(site: Site, label: str, how: str) -> None:
    """A pod that no request passes through."""
    (pod, *_) = [each["metadata"]["name"] for each in site.cluster.pods(label)]
    with site.at(f"{label} {how}"):
        before, uid, began = site.versions(), site.cluster.uid(pod), time.monotonic()
        site.cluster.run("delete", "pod", pod, "--wait=false", *HOW[how])
        if how == "deleted":
            site.find_time("end of the pod", _gone(site, pod, uid, 120), END_S)
        site.find_time("next version, served", site.followed(before), NEXT_VERSION_S)
        site.status()
        site.find("control plane answers after", time.monotonic() - began, "s")
        site.find_answers("requests", site.answers(began))


def lose_trainer(site: Site, index: int, how: str) -> None:
    """A rank's pod: the run goes on from its checkpoint."""
    label = f"batch.kubernetes.io/job-completion-index={index}"
    with site.at("a new job"):  # whose pauses begin at 10 s
        before = site.versions()
        train_anew(site, 2)
        wait_until("its version", lambda: _has_gone_on(site, before), 240)
        time.sleep(15)  # some versions and a checkpoint
    with site.at(f"train-news-{index} {how}"):
        pods = site.cluster.get("pods", "-l", label)["items"]
        (pod,) = [
            each["metadata"]["name"]
            for each in pods
            if "deletionTimestamp" not in each["metadata"] and each["status"]["phase"] == "Running"
        ]
        before, uid, began = site.versions(), site.cluster.uid(pod), time.monotonic()
        site.cluster.run("delete", "pod", pod, "--wait=false", *HOW[how])
        if how == "deleted":
            site.find_time(
                "end of the pod, its checkpoint written", _gone(site, pod, uid, 120), END_S
            )

        wait_until("the run's next version", lambda: _has_gone_on(site, before), 240)
        site.find_time("next version, served", time.monotonic() - began, NEXT_VERSION_S)
        site.find_answers("requests", site.answers(began))


def lose_each(site: Site) -> None:
    """Every pod, told to end and killed; the nodes also in the middle of a reshard."""
    for how in HOW:
        for pod in ("embertide-node-0", "embertide-node-1"):
            lose_node(site, pod, how)
        for label in ("embertide-bus", "embertide-state", "embertide-control"):
            lose_other(site, label, how)
        for index in (0, 1):
            lose_trainer(site, index, how)
    for number, pod in enumerate(("embertide-node-0", "embertide-node-1")):
        with site.at("reshard begun"):
            site.embertide("node", "drain", "embertide-node-1", "--id", f"@middle-{number}")
        lose_node(site, pod, "killed")
        with site.at("reshard that lost a node"):
            done(site, "drained all the same", f"@middle-{number}")
            site.embertide("reshard", "--planner", "join", "--id", f"@back-{number}")
            done(site, "given its share again", f"@back-{number}")


def nothing_lost(site: Site) -> None:
    """What the newest checkpoint says, after all of that."""
    check = (
        "import json\nfrom pathlib import Path\n"
        "from embertide.trainer.checkpoint.checkpoint import load_newest\n"
        "from embertide.trainer.publish.folder import Publication\n"
        "publication = Publication(Path('/publication/news'))\n"
        "saved = load_newest(publication).checkpoint\n"
        "numbers = [version.number for version in publication.deltas()]\n"
        "print(json.dumps(dict(learned=saved.events, passed=saved.done,"
        " missing=numbers[-1] - numbers[0] + 1 - len(numbers))))\n"
    )
    with site.at("nothing lost"):
        label = "batch.kubernetes.io/job-completion-index=0"
        (pod,) = [
            each["metadata"]["name"]
            for each in site.cluster.get("pods", "-l", label)["items"]
            if each["status"]["phase"] == "Running"
        ]
        said = json.loads(
            site.cluster.run("exec", pod, "--", "python", "-c", check).splitlines()[-1]
        )
        same = said["learned"] == said["passed"] > 0
        site.find(
            "events learned of those that passed",
            f"{said['learned']:,} of {said['passed']:,}",
            "all, once",
            holds=same,
        )
        site.find("versions missing", said["missing"], "0", holds=said["missing"] == 0)


# --- rollouts -------------------------------------------------------------------------------------


def restart(site: Site) -> None:
    """All nodes of one group, one after the other."""
    with site.at("rolling restart, one group"):
        began = time.monotonic()
        away = [Absence(site.cluster, f"embertide-node-{n}", "node") for n in (0, 1)]
        site.cluster.run("rollout", "restart", "statefulset/embertide-node")
        time.sleep(2)
        site.cluster.roll_out("statefulset/embertide-node", READY_S)
        site.find("took", time.monotonic() - began, "s")
        absent = [each.seconds() for each in away]
        site.find("a pod away", max(absent), "s")
        # Two absences lie within the time from the first degraded answer to the last.
        assert away[0].back_at
        assert away[1].gone_at
        most = away[0].back_at - away[1].gone_at + 2
        got = site.answers(began)
        site.find_answers("requests", got, degraded_s=most)
        shares = [
            site.traffic.between(a.gone_at - 2, a.back_at + 2)
            for a in away
            if site.traffic and a.gone_at and a.back_at
        ]
        outside = got.degraded - sum(each.degraded for each in shares)
        site.find("degraded answers outside of the absences", outside, "0", holds=outside <= 0)


def scale(site: Site) -> None:
    """A third node, and without it again."""
    cluster = site.cluster
    with site.at("scale to 3"):
        began = time.monotonic()
        cluster.run("scale", "statefulset/embertide-node", "--replicas=3")
        cluster.roll_out("statefulset/embertide-node", READY_S)
        site.find("third node ready", time.monotonic() - began, "s")
        # Nodes that have just begun do not say yet what they read.
        join = ("reshard", "--planner", "join", "--id", "@join-2")
        wait_until("what nodes read", lambda: site.accepts(*join, "--dry-run"), 60)
        site.embertide(*join)
        done(site, "given its share", "@join-2")
        share = buckets(site).get("embertide-node-2", 0)
        site.find("its buckets", share, "> 0", holds=share > 0)
        site.find_answers("requests", site.answers(began))
    with site.at("scale to 2"):
        began = time.monotonic()
        site.embertide("node", "drain", "embertide-node-2", "--id", "@drain-2")
        done(site, "drained", "@drain-2")
        cluster.run("scale", "statefulset/embertide-node", "--replicas=2")
        site.embertide("node", "remove", "embertide-node-2")
        wait_until("end of embertide-node-2", lambda: not cluster.uid("embertide-node-2"), 60)
        time.sleep(5)
        nodes = sorted(each["node"] for each in site.status()["nodes"])
        site.find("nodes", nodes, "2", holds=nodes == ["embertide-node-0", "embertide-node-1"])
        site.find_answers("requests", site.answers(began))


def two_groups(site: Site) -> None:
    """A second group comes; an upgrade of both, one after the other, costs no answer."""
    cluster = site.cluster
    with site.at("a second group"):
        began = time.monotonic()
        cluster.apply(site.deployment.resources(groups=2))
        cluster.roll_out("deployment/embertide-control", 180)
        cluster.roll_out("statefulset/embertide-node", READY_S)

        def registered() -> bool:
            names = [each["node"] for each in site.status()["nodes"] if each["versions"][1]]
            return sum(str(name).startswith("embertide-node-b-") for name in names) == 2

        wait_until("the new group's nodes", registered, READY_S)
        site.embertide("node", "add-group", "1", "--id", "@group-1")
        done(site, "added", "@group-1", 300)
        wait_until("4 ready nodes", lambda: site.all_ready(4), 120)
        site.find("took", time.monotonic() - began, "s")
    with site.at("upgrade of two groups"):
        began = time.monotonic()
        cluster.run(
            "rollout", "restart", "statefulset/embertide-node", "statefulset/embertide-node-b"
        )
        time.sleep(2)
        cluster.roll_out("statefulset/embertide-node", READY_S)
        first = time.monotonic()
        patch = {"spec": {"updateStrategy": {"rollingUpdate": {"partition": 0}}}}
        cluster.run("patch", "statefulset", "embertide-node-b", "-p", json.dumps(patch))
        time.sleep(2)
        cluster.roll_out("statefulset/embertide-node-b", READY_S)
        site.find("took", f"{first - began:.0f} s and {time.monotonic() - first:.0f} s")
        site.find_answers("requests", site.answers(began))
    with site.at("two groups, a node killed"):
        began = time.monotonic()
        absence = Absence(cluster, "embertide-node-1", "node")
        cluster.run(
            "delete", "pod", "embertide-node-1", "--wait=false", "--grace-period=0", "--force"
        )
        site.find("away", absence.seconds(), "s")
        site.find_answers("requests", site.answers(began), failed="")


# --- who may what ---------------------------------------------------------------------------------

# What operators may: verb, resource, whether. No line of docs/kubernetes.md is beyond these.
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
    """What a pod that is none of ours gets."""
    with site.at("a stranger's pod"):
        script = (Path(__file__).parent / "stranger.py").read_text()
        said = site.cluster.run("exec", "asker", "--", "python", "-c", script)
        found: dict[str, str] = json.loads(said.splitlines()[-1])
        reached = [
            name for name, value in found.items() if name.startswith("reach") and value == "yes"
        ]
        inside = [name for name in reached if "control" not in name]
        site.find("network policies", "not enforced by this network" if inside else "enforced")
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


STEPS: dict[str, Callable[[Site], None]] = {
    "deploy": lambda site: deploy(site, options=("--max-degraded-share=1",)),
    "train": train,
    "infer": infer,
    "reshard": reshard,
    "control": lose_control,
    "lose": lose_each,
    "nothing-lost": nothing_lost,
    "restart": restart,
    "scale": scale,
    "rights": rights,
    "strangers": strangers,
    "logs": logs,
    "groups": two_groups,
}
