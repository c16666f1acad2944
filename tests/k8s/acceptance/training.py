"""Training pods: one, two, and a new job."""

import time

from acceptance.deployment import events
from acceptance.site import NEXT_VERSION_S, READY_S, Site, Versions
from bench.cluster import wait_until


def train(site: Site) -> None:
    """One pod, then two, on a live stream; with object storage one alone."""
    cluster = site.cluster
    with site.at("train, one pod"):
        cluster.apply(events())
        cluster.run("wait", "--for=condition=Ready", "pod/events", "--timeout=180s", timeout_s=200)
        began = time.monotonic()
        cluster.apply(site.deployment.training(1))
        cluster.roll_out("statefulset/embertide-node", READY_S)
        site.find("nodes ready after the job began", time.monotonic() - began, "s")
        site.find("a version out and served after", site.followed(site.versions()), "s")
    if site.deployment.storage is not None:
        return
    with site.at("train, two pods"):
        before = site.versions()
        train_anew(site, 2)
        began = time.monotonic()
        wait_until("a version of two pods", lambda: has_gone_on(site, before), 240)
        site.find_time("version of two pods, served", time.monotonic() - began, 2 * NEXT_VERSION_S)


def train_anew(site: Site, pods: int) -> None:
    """End the job and begin one of so many pods."""
    site.cluster.run("delete", "job", "train-news", "--cascade=foreground", timeout_s=660)
    site.cluster.apply(site.deployment.training(pods))


def has_gone_on(site: Site, before: Versions) -> bool:
    """Whether a run that began anew has a version that is out and served."""
    return is_later(site.versions(), before)


def is_later(now: Versions, before: Versions) -> bool:
    """Whether it is a version of a run that began anew, out and served."""
    return now.lineage > before.lineage and now.served >= now.out > before.out
