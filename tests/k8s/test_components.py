"""The components, each with an overlay of one's own."""

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from checks import CHECKS, Check
from checks.agreement import fleet, place_of
from manifests import (
    ROOT,
    SCHEMA,
    Resource,
    certificates,
    changed_overlay,
    command,
    given,
    of_kind,
    option,
    read,
    selects,
    with_components,
    workloads,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_groups_can_work(check: Check) -> None:
    resources = with_components("second-group")
    if check is fleet:
        node = of_kind(resources, "StatefulSet")["embertide-node"]["spec"]
        node["replicas"] = 4  # the first plan waits for both groups
    assert check(resources) == []


def test_a_second_group_is_a_group_of_its_own_and_not_upgraded_with_the_first() -> None:
    resources = with_components("second-group")
    first, second = (of_kind(resources, "StatefulSet")[f"embertide-node{b}"] for b in ("", "-b"))
    by_name = {each.name: each for each in workloads(resources)}
    words = [command(by_name[f"embertide-node{b}"].pod["containers"][0]) for b in ("", "-b")]
    assert [option(each, "--group") for each in words] == ["0", "1"]
    labels = [each["spec"]["selector"]["matchLabels"] for each in (first, second)]
    assert labels[0] != labels[1]
    for each, other in ((first, labels[1]), (second, labels[0])):
        assert not selects({"matchLabels": other}, each["spec"]["template"]["metadata"]["labels"])
    assert second["spec"]["updateStrategy"]["rollingUpdate"]["partition"] > 100
    names = certificates(resources)["embertide-node-tls"]["dnsNames"]
    for number in range(second["spec"]["replicas"]):
        assert f"embertide-node-b-{number}.embertide-nodes" in names


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_object_storage_can_work(check: Check) -> None:
    assert check(with_components("object-storage")) == []


def test_the_page_names_a_bucket_in_a_way_that_works() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (snippet,) = re.findall(r"mine/kustomization.yaml, beside what is there\n(.*?)```", page, re.S)

    def change(text: Resource) -> None:
        text["components"].append(str(Path(text["components"][0]).parent / "object-storage"))
        text.update(yaml.safe_load(snippet))

    made = of_kind(read(changed_overlay("bucket", change)), "ConfigMap")
    assert made["embertide-storage"]["data"] == {"url": "s3://models/news"}


def test_with_object_storage_a_node_reads_what_its_mirror_keeps() -> None:
    resources = with_components("second-group", "object-storage")
    (claim,) = of_kind(resources, "PersistentVolumeClaim").values()
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]  # the trainer's alone
    nodes = [each for each in workloads(resources) if each.name.startswith("embertide-node")]
    assert len(nodes) == 2
    for node in nodes:
        volumes = {each["name"]: each for each in node.pod["volumes"]}
        assert "persistentVolumeClaim" not in volumes["publication"]
        assert "emptyDir" in volumes["publication"]
        mirror = node.pod["initContainers"][0]
        assert mirror["restartPolicy"] == "Always"  # beside the others, and before they wait
        words = given(mirror, resources)
        serves = command(node.pod["containers"][0])
        assert words[:2] == ["embertide", "mirror"]
        assert words[2].startswith("s3://")
        assert words[3] == serves[2]
        writes = {each["name"]: each for each in mirror["volumeMounts"]}["publication"]
        assert not writes.get("readOnly")
    job = next(each for each in workloads(resources) if each.name == "train-news")
    mounted = {each["name"]: each["mountPath"] for each in job.pod["containers"][0]["volumeMounts"]}
    env = {each["name"]: each.get("value") for each in job.pod["containers"][0]["env"]}
    assert mounted["storage"] == env["EMBERTIDE_STORAGE_OPTIONS"]


def test_monitors_select_services_that_have_the_port() -> None:
    resources = with_components("prometheus")
    services = of_kind(resources, "Service").values()
    for name, monitor in of_kind(resources, "ServiceMonitor").items():
        selector = monitor["spec"]["selector"]
        chosen_services = [
            each for each in services if selects(selector, each["metadata"].get("labels", {}))
        ]
        assert len(chosen_services) == 1, name
        (port,) = [each["port"] for each in monitor["spec"]["endpoints"]]
        assert port in [each["name"] for each in chosen_services[0]["spec"]["ports"]]


def test_an_autoscaler_adds_nodes_that_have_names_and_takes_none_away() -> None:
    resources = with_components("autoscale")
    (scaler,) = of_kind(resources, "HorizontalPodAutoscaler").values()
    assert kubernetes_validate.validate(scaler, SCHEMA, strict=True) == SCHEMA
    spec = scaler["spec"]
    node = of_kind(resources, "StatefulSet")[spec["scaleTargetRef"]["name"]]["spec"]
    assert "replicas" not in node
    names = certificates(resources)["embertide-node-tls"]["dnsNames"]
    assert spec["maxReplicas"] == len(names)
    assert spec["behavior"]["scaleDown"] == {"selectPolicy": "Disabled"}


def test_a_redis_of_ones_own_is_named_in_one_place() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (snippet,) = re.findall(
        r"```yaml\n# in k8s/overlays/mine/kustomization.yaml\n(.*?)```", page, re.S
    )
    resources = read(changed_overlay("external", lambda text: text.update(yaml.safe_load(snippet))))
    assert "embertide-bus" not in of_kind(resources, "Deployment")
    node = next(each for each in workloads(resources) if each.name == "embertide-node")
    bus = option(given(node.pod["containers"][0], resources), "--bus")
    assert place_of(bus) == ("rediss", "redis.example.org", 6380, "/0")
