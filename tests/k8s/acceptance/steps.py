"""The steps of an acceptance, in order: each looks at one thing that docs/kubernetes.md says."""

import json
import time
from collections.abc import Callable

from acceptance.deployment import asker
from acceptance.losses import NODES, lose_each, nothing_lost
from acceptance.operations import buckets, done, lose_control, reshard
from acceptance.rights import logs, rights, strangers
from acceptance.site import READY_S, Absence, Site
from acceptance.storage import storage
from acceptance.training import train
from acceptance.trainjob import trainjob
from bench.cluster import wait_until

REQUESTS_A_SECOND = 8.0  # of each kind of client
# Runs in a node's container: what the newest snapshot says.
COLUMNS = """
import glob, json
manifest = json.load(open(max(glob.glob('/publication/news/snapshots/*/manifest.json'))))
print(len(manifest['features']), manifest['dense_features'])
"""


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


def columns(site: Site) -> tuple[int, int]:
    """Return the numbers of features and dense features that the model has."""
    said = site.cluster.run("exec", NODES[0], "-c", "node", "--", "python3", "-c", COLUMNS)
    features, dense = map(int, said.split())
    return features, dense


def infer(site: Site) -> None:
    """Four kinds of clients ask the Service, from now on."""
    with site.at("infer"):
        site.cluster.apply([asker(REQUESTS_A_SECOND, *columns(site))])
        site.cluster.run(
            "wait", "--for=condition=Ready", "pod/asker", "--timeout=120s", timeout_s=140
        )
        site.follow()
        began = time.monotonic()
        time.sleep(15)
        got = site.answers(began)
        site.find_answers("15 s of requests", got)
        kinds = sum(1 for count in got.answers.values() if count)
        site.find("kinds of clients answered", kinds, "2", holds=kinds == 2)


# --- rollouts -------------------------------------------------------------------------------------


def restart(site: Site) -> None:
    """All nodes of one group, one after the other."""
    with site.at("rolling restart, one group"):
        began = time.monotonic()
        away = [Absence(site.cluster, node, "node") for node in NODES]
        site.cluster.run("rollout", "restart", "statefulset/embertide-node")
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
        time.sleep(5)  # what the pod says to its end does not bring it back
        nodes = sorted(each["node"] for each in site.status()["nodes"])
        site.find("nodes", nodes, "2", holds=nodes == list(NODES))
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
        cluster.roll_out("statefulset/embertide-node", READY_S)
        first = time.monotonic()
        patch = {"spec": {"updateStrategy": {"rollingUpdate": {"partition": 0}}}}
        cluster.run("patch", "statefulset", "embertide-node-b", "-p", json.dumps(patch))
        cluster.roll_out("statefulset/embertide-node-b", READY_S)
        site.find("took", f"{first - began:.0f} s and {time.monotonic() - first:.0f} s")
        site.find_answers("requests", site.answers(began))
    with site.at("two groups, a node killed"):
        began = time.monotonic()
        absence = Absence(cluster, "embertide-node-1", "node")
        cluster.lose("embertide-node-1", kill=True)
        site.find("away", absence.seconds(), "s")
        site.find_answers("requests", site.answers(began), failed="")


STEPS: dict[str, Callable[[Site], None]] = {
    "deploy": lambda site: deploy(site, options=("--max-degraded-share=1",)),
    "train": train,
    "infer": infer,
    "reshard": reshard,
    "control": lose_control,
    "lose": lose_each,
    "storage": storage,
    "nothing-lost": nothing_lost,
    "restart": restart,
    "scale": scale,
    "rights": rights,
    "strangers": strangers,
    "logs": logs,
    "groups": two_groups,
    "trainjob": trainjob,
}
# Those of a publication in object storage, with one training pod and a namespace of their own.
WITH_STORAGE = ("deploy", "train", "infer", "storage", "nothing-lost", "restart", "logs", "groups")
