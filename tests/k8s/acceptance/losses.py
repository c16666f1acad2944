"""Pods that are lost: told to end, or killed."""

import json
import time

from acceptance.operations import done
from acceptance.site import LEAVE_S, NEXT_VERSION_S, Absence, Site
from acceptance.training import has_gone_on, is_later, train_anew
from bench.cluster import wait_until

NODES = ("embertide-node-0", "embertide-node-1")
# Seconds for an end, beside --leave-s.
END_S = 5.0
# Runs in a trainer's container: what the newest checkpoint says.
CHECK = """
import json
from pathlib import Path
from embertide.trainer.run.checkpoint.checkpoint import load_newest
from embertide.trainer.publish.folder import Publication
publication = Publication(Path('/publication/news'))
saved = load_newest(publication).checkpoint
numbers = [version.number for version in publication.deltas()]
print(json.dumps(dict(learned=saved.events, passed=saved.done,
                      missing=numbers[-1] - numbers[0] + 1 - len(numbers))))
"""


def _named(what: str, *, kill: bool) -> str:
    return f"{what} {'killed' if kill else 'deleted'}"


def _gone(site: Site, pod: str, uid: str, timeout_s: float) -> float:
    """Wait until nothing of a pod runs. A Job keeps the object of one that ended for 10 s more."""
    return wait_until(f"end of {pod}", lambda: site.cluster.has_ended(pod, uid), timeout_s)


def lose_node(site: Site, pod: str, *, kill: bool) -> None:
    """A node of one group: its keys are degraded until it is back, and no request fails."""
    with site.at(_named(pod, kill=kill)):
        other = "embertide-node-1" if pod.endswith("0") else "embertide-node-0"
        before, uid = site.versions(other), site.cluster.uid(pod)
        began = time.monotonic()
        absence = Absence(site.cluster, pod, "node")
        site.cluster.lose(pod, kill=kill)
        if not kill:
            site.find_time("end of the pod", _gone(site, pod, uid, 120), LEAVE_S + END_S)
        away = absence.seconds()
        site.find("away", away, "s")
        site.followed(before, pod)
        got = site.answers(began)
        # Connections of a killed pod break; a Service learns of it when the kubelet does.
        site.find_answers("requests", got, failed="" if kill else "0 failed", degraded_s=away + 2)


def lose_other(site: Site, label: str, *, kill: bool) -> None:
    """A pod that no request passes through."""
    (pod, *_) = [each["metadata"]["name"] for each in site.cluster.pods(label)]
    with site.at(_named(label, kill=kill)):
        before, uid, began = site.versions(), site.cluster.uid(pod), time.monotonic()
        site.cluster.lose(pod, kill=kill)
        if not kill:
            site.find_time("end of the pod", _gone(site, pod, uid, 120), END_S)
        site.find_time("next version, served", site.followed(before), NEXT_VERSION_S)
        site.status()
        site.find("control plane answers after", time.monotonic() - began, "s")
        site.find_answers("requests", site.answers(began))


def lose_trainer(site: Site, index: int, *, kill: bool) -> None:
    """A rank's pod: the other stays, the run goes on from its checkpoint, and nodes follow."""
    with site.at("a new job"):  # whose pauses begin at 10 s
        before = site.versions()
        train_anew(site, 2)
        wait_until("its version", lambda: has_gone_on(site, before), 240)
        time.sleep(15)  # some versions and a checkpoint
    with site.at(_named(f"train-news-{index}", kill=kill)):
        pod, other = site.rank(index), site.rank(1 - index)
        before, uid, began = site.versions(), site.cluster.uid(pod), time.monotonic()
        stays = site.cluster.uid(other)
        site.cluster.lose(pod, kill=kill)
        if not kill:
            what = "end of the pod, its checkpoint written"
            site.find_time(what, _gone(site, pod, uid, 120), END_S)
        seen, ready = [before.served], []

        def goes_on() -> bool:
            ready.append(site.all_ready(2))
            now = site.versions()
            seen.extend([now.served] if now.served else [])
            return is_later(now, before)

        wait_until("the run's next version", goes_on, 240)
        site.find_time("next version, served", time.monotonic() - began, NEXT_VERSION_S)
        same = site.cluster.uid(other) == stays
        site.find("the other pod stayed", same, "True", holds=same)
        site.find("nodes always ready", all(ready), "True", holds=all(ready))
        rises = seen == sorted(seen)
        site.find("no node went back", rises, "True", holds=rises)
        site.find_answers("requests", site.answers(began))


def lose_each(site: Site) -> None:
    """Every pod, told to end and killed; the nodes also in the middle of a reshard."""
    for kill in (False, True):
        for pod in NODES:
            lose_node(site, pod, kill=kill)
        for label in ("embertide-bus", "embertide-state", "embertide-control"):
            lose_other(site, label, kill=kill)
        for index in (0, 1):
            lose_trainer(site, index, kill=kill)
    for number, pod in enumerate(NODES):
        with site.at("reshard begun"):
            site.embertide("node", "drain", "embertide-node-1", "--id", f"@middle-{number}")
        lose_node(site, pod, kill=True)
        with site.at("reshard that lost a node"):
            done(site, "drained all the same", f"@middle-{number}")
            site.embertide("reshard", "--planner", "join", "--id", f"@back-{number}")
            done(site, "given its share again", f"@back-{number}")


def nothing_lost(site: Site) -> None:
    """Record the newest checkpoint's state, after all of that."""
    with site.at("nothing lost"):
        said = json.loads(
            site.cluster.run("exec", site.rank(0), "--", "python", "-c", CHECK).splitlines()[-1]
        )
        same = said["learned"] == said["passed"] > 0
        site.find(
            "events learned of those that passed",
            f"{said['learned']:,} of {said['passed']:,}",
            "all, once",
            holds=same,
        )
        site.find("versions missing", said["missing"], "0", holds=said["missing"] == 0)
