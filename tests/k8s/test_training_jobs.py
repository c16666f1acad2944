"""The JobSet and the TrainJob beside the Job: the same run for other controllers."""

import pytest
from manifests import (
    K8S,
    RUNTIME,
    TRAINING,
    Resource,
    command,
    deployed,
    jobset_of,
    of_kind,
    read,
    with_components,
    workloads,
)


def jobset(training: str = TRAINING[1]) -> Resource:
    resources = read((K8S / training).read_text())
    (found,) = [each for each in resources if each["kind"] == "JobSet"]
    return found


def test_a_jobset_is_of_its_api_and_has_no_field_that_this_does_not_know() -> None:
    found = jobset()
    assert found["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    spec = found["spec"]
    assert spec.keys() == {"network", "failurePolicy", "replicatedJobs"}
    assert spec["network"].keys() == {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}
    (part,) = spec["replicatedJobs"]
    assert part.keys() == {"name", "replicas", "template"}
    assert part["template"].keys() == {"spec"}


def test_a_jobset_fails_by_configuration_errors_alone_and_starts_again_for_ever() -> None:
    policy = jobset()["spec"]["failurePolicy"]
    reasons = [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]]
    assert reasons == [
        ("FailJobSet", ["PodFailurePolicy"]),
        ("RestartJobSetAndIgnoreMaxRestarts", ["BackoffLimitExceeded"]),
    ]
    assert policy.keys() == {"maxRestarts", "rules"}


@pytest.mark.parametrize("training", TRAINING[1:])
def test_pods_are_alike_whoever_makes_them(training: str) -> None:
    pods = []
    for name in (TRAINING[0], training):
        (job,) = of_kind(deployed(training=name), "Job").values()
        (work,) = workloads([job])
        (container,) = work.pod["containers"]
        words = command(container)
        for key in ("name", "command", "args"):
            container.pop(key, None)
        place = "--rdzv-endpoint="
        pods.append((work.labels, work.pod, {word for word in words if not word.startswith(place)}))
    assert pods[0] == pods[1]


@pytest.mark.parametrize("training", TRAINING[1:])
def test_what_stands_beside_the_training_is_the_same(training: str) -> None:
    job, other = (read((K8S / name).read_text()) for name in (TRAINING[0], training))
    assert other[:-1] == job[1:-1]


def test_a_train_job_and_its_runtime_have_no_field_that_this_does_not_know() -> None:
    """Fields are those of the schema of Kubeflow Trainer 2.3 that we use."""
    (runtime,) = read(RUNTIME.read_text())
    train_job = read((K8S / TRAINING[2]).read_text())[-1]
    assert {each["apiVersion"] for each in (runtime, train_job)} == {
        "trainer.kubeflow.org/v1alpha1"
    }
    assert runtime["spec"].keys() == {"mlPolicy", "template"}
    assert runtime["spec"]["mlPolicy"].keys() == {"numNodes"}
    assert runtime["spec"]["template"].keys() == {"spec"}
    assert train_job["spec"].keys() == {"runtimeRef", "trainer"}
    assert train_job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": "train-news"}
    assert train_job["spec"]["trainer"].keys() == {"numNodes", "args"}
    (part,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert part.keys() == {"name", "replicas", "template"}
    assert part["template"].keys() == {"metadata", "spec"}


def test_a_run_ends_by_the_same_rules_under_both_controllers() -> None:
    made = jobset_of(read((K8S / TRAINING[2]).read_text())[-1])["spec"]
    own = jobset()["spec"]
    assert made["failurePolicy"] == own["failurePolicy"]
    assert made["network"].items() <= own["network"].items()


def test_the_component_brings_the_runtime() -> None:
    made = of_kind(with_components("kubeflow-trainer"), "TrainingRuntime")
    assert [*made.values()] == read(RUNTIME.read_text())
