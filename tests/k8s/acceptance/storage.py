"""The publication in object storage: what is lost comes back from there."""

import time

from acceptance.losses import NODES, lose_node
from acceptance.site import NEXT_VERSION_S, READY_S, Site
from acceptance.training import has_gone_on
from bench.cluster import wait_until

CLAIM = "embertide-publication"


def storage(site: Site) -> None:
    """Nodes, a mirror, and the trainer with its volume are lost. Nothing without object storage."""
    if site.deployment.storage is None:
        return
    for kill in (False, True):
        lose_node(site, NODES[0], kill=kill)
    lose_mirror(site)
    lose_volume(site)


def lose_mirror(site: Site) -> None:
    """A mirror that ends is started again beside a node that serves on."""
    node = NODES[1]
    with site.at("a mirror ended"):
        before, began = site.versions(node), time.monotonic()
        site.cluster.run("exec", node, "-c", "mirror", "--", "sh", "-c", "kill 1")
        wait_until("the mirror's next start", lambda: _starts(site, node) == 1, READY_S)
        site.followed(before, node)
        site.find_time("next version, served", time.monotonic() - began, NEXT_VERSION_S)
        site.find_answers("requests", site.answers(began))


def _starts(site: Site, node: str) -> int:
    said = site.cluster.get("pod", node)["status"]["initContainerStatuses"]
    (starts,) = [each["restartCount"] for each in said if each["name"] == "mirror"]
    return int(starts)


def lose_volume(site: Site) -> None:
    """A trainer that was killed goes on in an empty volume."""
    cluster = site.cluster
    with site.at("the trainer and its volume lost"):
        before, began = site.versions(), time.monotonic()
        cluster.lose(site.rank(0), kill=True)
        cluster.run("delete", "job", "train-news", "--cascade=foreground", timeout_s=660)
        cluster.run("delete", "pvc", CLAIM)
        made = site.deployment.resources(groups=1)
        cluster.apply([each for each in made if each["metadata"]["name"] == CLAIM])
        cluster.apply(site.deployment.training(1))
        wait_until("the run's next version", lambda: has_gone_on(site, before), READY_S)
        site.find_time("next version, served", time.monotonic() - began, NEXT_VERSION_S)
        site.find_answers("requests", site.answers(began))
