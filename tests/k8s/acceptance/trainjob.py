"""The run as a TrainJob of Kubeflow Trainer."""

import time

from acceptance import deployment
from acceptance.site import NEXT_VERSION_S, Site
from acceptance.training import has_gone_on
from bench.cluster import wait_until

PODS = 2
CRD = "trainjobs.trainer.kubeflow.org"


def trainjob(site: Site) -> None:
    """The Job's run goes on as a TrainJob, and after each of its pods was killed.

    Nothing where Kubeflow Trainer is not installed.
    """
    cluster = site.cluster
    if not cluster.allows("get", "crd", CRD):
        return
    with site.at("as a TrainJob"):
        before = site.versions()
        cluster.run("delete", "job", "train-news", "--cascade=foreground", timeout_s=660)
        began = time.monotonic()
        cluster.apply(deployment.trainjob(PODS))
        wait_until("a version of the TrainJob", lambda: has_gone_on(site, before), 240)
        site.find_time("version of two pods, served", time.monotonic() - began, 2 * NEXT_VERSION_S)
    for index in range(PODS):
        _kill(site, index)


def _kill(site: Site, index: int) -> None:
    with site.at(f"as a TrainJob, pod {index} killed"):
        before, began = site.versions(), time.monotonic()
        site.cluster.lose(site.rank(index), kill=True)
        wait_until("the run's next version", lambda: has_gone_on(site, before), 240)
        site.find_time("next version, served", time.monotonic() - began, NEXT_VERSION_S)
