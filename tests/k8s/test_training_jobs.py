"""The JobSet beside the Job: the same run for another controller."""

from manifests import K8S, TRAINING, Resource, deployed, read, workloads


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


def test_pods_of_the_job_and_of_the_jobset_are_alike() -> None:
    job, of_set = (
        next(each for each in workloads(deployed(training=name)) if each.resource["kind"] == "Job")
        for name in TRAINING
    )
    place = "--rdzv-endpoint="
    for each in (job, of_set):
        words = each.pod["containers"][0]["command"]
        words[:] = [word for word in words if not word.startswith(place)]
    assert job.labels == of_set.labels
    assert job.pod == of_set.pod


def test_what_stands_beside_the_job_and_the_jobset_is_the_same() -> None:
    job, of_set = (read((K8S / name).read_text()) for name in TRAINING)
    assert [each for each in of_set if each["kind"] != "JobSet"] == job[1:-1]
