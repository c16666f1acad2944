"""The resources that operators may make: the expressions of policy.yaml, evaluated here."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import celpy
import kubernetes_validate
import pytest
import yaml
from celpy.adapter import json_to_cel
from manifests import jobset_of

K8S = Path(__file__).resolve().parent.parent.parent / "k8s"
GROUP = "embertide-operators"
Json = dict[str, Any]

RESOURCES = list(yaml.safe_load_all((K8S / "base" / "policy.yaml").read_text()))
POLICIES = {
    each["metadata"]["name"].removeprefix("embertide-operators-"): each["spec"]
    for each in RESOURCES
    if each["kind"] == "ValidatingAdmissionPolicy"
}
# The images that a deployer has named, among others.
IMAGES = {"a": f"registry.example/x@sha256:{'a' * 64}", "trainer": "embertide/trainer:0.2.0"}
OTHER_IMAGE = f"evil.example/embertide/trainer@sha256:{'b' * 64}"
_CEL = celpy.Environment()


def evaluate(expression: str, given: dict[str, Any]) -> Any:
    return _CEL.program(_CEL.compile(expression)).evaluate(given)


def meant(spec: Json, request: Json) -> bool:
    """Whether a policy is for this request."""
    rules = spec["matchConstraints"]["resourceRules"]
    asked = request["resource"]
    if not any(
        asked["group"] in rule["apiGroups"]
        and asked["resource"] in rule["resources"]
        and request["operation"] in rule["operations"]
        for rule in rules
    ):
        return False
    given = {"request": json_to_cel(request)}
    return all(evaluate(each["expression"], given) for each in spec["matchConditions"])


def complaints(
    resource: str,
    *,
    operation: str = "CREATE",
    name: str = "train-news",
    new: Json | None = None,
    old: Json | None = None,
    groups: tuple[str, ...] = (GROUP,),
) -> list[str]:
    """Return the complaints of all policies about a request."""
    group, _, kind = resource.rpartition("/")
    request = {
        "operation": operation,
        "name": name,
        "resource": {"group": group, "resource": kind},
        "userInfo": {"groups": list(groups)},
    }
    found: list[str] = []
    for spec in POLICIES.values():
        if not meant(spec, request):
            continue
        given = {
            "params": json_to_cel({"data": IMAGES}),
            "request": json_to_cel(request),
            "object": json_to_cel(new),
            "oldObject": json_to_cel(old),
        }
        variables: dict[Any, Any] = {}
        for each in spec.get("variables", []):
            given["variables"] = celpy.celtypes.MapType(variables)
            variables[celpy.celtypes.StringType(each["name"])] = evaluate(each["expression"], given)
        given["variables"] = celpy.celtypes.MapType(variables)
        found += [
            each["message"]
            for each in spec["validations"]
            if not evaluate(each["expression"], given)
        ]
    return found


def of(path: str, kind: str, name: str = "") -> Json:
    found: Json = next(
        each
        for each in yaml.safe_load_all((K8S / path).read_text())
        if each["kind"] == kind and name in ("", each["metadata"]["name"])
    )
    return found


JOB = of("train-news.yaml", "Job")
JOBSET = of("train-news-jobset.yaml", "JobSet")
TRAIN_JOB = of("train-news-trainjob.yaml", "TrainJob")
# Kubeflow Trainer makes a JobSet by an identity of its own, and within the same bounds.
TRAINING = [
    pytest.param("batch/jobs", JOB, id="Job"),
    pytest.param("jobset.x-k8s.io/jobsets", JOBSET, id="JobSet"),
    pytest.param("jobset.x-k8s.io/jobsets", jobset_of(TRAIN_JOB), id="JobSet-of-a-TrainJob"),
]


def pod_of(job: Json) -> Json:
    template = job["spec"]["replicatedJobs"][0]["template"] if job["kind"] == "JobSet" else job
    pod: Json = template["spec"]["template"]["spec"]
    return pod


def secret_volume(pod: Json) -> None:
    pod["volumes"].append({"name": "x", "secret": {"secretName": "embertide-tokens"}})


def projected_volume(pod: Json) -> None:
    sources = [{"secret": {"name": "embertide-tokens"}}]
    pod["volumes"].append({"name": "x", "projected": {"sources": sources}})


def host_volume(pod: Json) -> None:
    pod["volumes"].append({"name": "x", "hostPath": {"path": "/"}})


def volume_of_the_state(pod: Json) -> None:
    claim = {"claimName": "data-embertide-state-0"}
    pod["volumes"].append({"name": "x", "persistentVolumeClaim": claim})


def variable_of_a_secret(pod: Json) -> None:
    value = {"secretKeyRef": {"name": "embertide-tokens", "key": "tokens"}}
    pod["containers"][0]["env"] = [{"name": "X", "valueFrom": value}]


def variables_of_a_secret(pod: Json) -> None:
    pod["containers"][0]["envFrom"] = [{"secretRef": {"name": "embertide-tokens"}}]


def variable_before_it_starts(pod: Json) -> None:
    own = {"image": pod["containers"][0]["image"], "envFrom": [{"secretRef": {"name": "y"}}]}
    pod["initContainers"] = [{**restricted("x"), **own}]


def another_account(pod: Json) -> None:
    pod["serviceAccountName"] = "embertide-control"


def a_token_for_the_api(pod: Json) -> None:
    pod["automountServiceAccountToken"] = True


def the_usual_account(pod: Json) -> None:
    del pod["serviceAccountName"]


def security(pod: Json) -> Json:
    found: Json = pod["containers"][0]["securityContext"]
    return found


def privileged(pod: Json) -> None:
    security(pod)["privileged"] = True


def user_root(pod: Json) -> None:
    pod["securityContext"]["runAsUser"] = 0


def user_root_of_a_container(pod: Json) -> None:
    security(pod)["runAsUser"] = 0


def group_root(pod: Json) -> None:
    pod["securityContext"]["runAsGroup"] = 0


def perhaps_root(pod: Json) -> None:
    del pod["securityContext"]["runAsNonRoot"]


def perhaps_root_in_a_container(pod: Json) -> None:
    security(pod)["runAsNonRoot"] = False


def nothing_said(pod: Json) -> None:
    del pod["securityContext"]


def nothing_said_of_a_container(pod: Json) -> None:
    del pod["containers"][0]["securityContext"]


def one_capability(pod: Json) -> None:
    security(pod)["capabilities"]["add"] = ["SYS_ADMIN"]


def usual_capabilities(pod: Json) -> None:
    del security(pod)["capabilities"]


def more_privileges_later(pod: Json) -> None:
    del security(pod)["allowPrivilegeEscalation"]


def any_system_call(pod: Json) -> None:
    pod["securityContext"]["seccompProfile"] = {"type": "Unconfined"}


def any_system_call_of_a_container(pod: Json) -> None:
    security(pod)["seccompProfile"] = {"type": "Unconfined"}


def no_apparmor(pod: Json) -> None:
    security(pod)["appArmorProfile"] = {"type": "Unconfined"}


def whole_proc(pod: Json) -> None:
    security(pod)["procMount"] = "Unmasked"


def setting_of_the_kernel(pod: Json) -> None:
    pod["securityContext"]["sysctls"] = [{"name": "kernel.shm_rmid_forced", "value": "0"}]


def labels_of_selinux(pod: Json) -> None:
    security(pod)["seLinuxOptions"] = {"type": "spc_t"}


def port_of_the_machine(pod: Json) -> None:
    pod["containers"][0]["ports"] = [{"containerPort": 7100, "hostPort": 7100}]


def one_machine(pod: Json) -> None:
    pod["nodeName"] = "control-plane"


def image_that_changes(pod: Json) -> None:
    pod["containers"].append({**restricted("asker"), "image": "evil.example/asker:1"})


def trainer_of_another_tag(pod: Json) -> None:
    pod["containers"].append({**restricted("asker"), "image": "embertide/trainer"})


def restricted(name: str) -> Json:
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {"name": name, "securityContext": context}


def beside(pod: Json, volume: str, **how: Any) -> None:
    """Add a container of an image that is pinned, and not the trainer's."""
    mount = {"name": volume, "mountPath": "/x", **how}
    pod["containers"].append({**restricted("x"), "image": OTHER_IMAGE, "volumeMounts": [mount]})


def publication_for_any_image(pod: Json) -> None:
    beside(pod, "publication")


def secret_for_any_image(pod: Json) -> None:
    beside(pod, "redis", readOnly=True)


def publication_before_it_starts(pod: Json) -> None:
    beside(pod, "publication")
    pod["initContainers"] = [pod["containers"].pop()]


def processes_of_the_machine(pod: Json) -> None:
    pod["hostPID"] = True


def network_of_the_machine(pod: Json) -> None:
    pod["hostNetwork"] = True


def copy_of_a_volume(pod: Json) -> None:
    source = {"kind": "PersistentVolumeClaim", "name": "data-embertide-state-0"}
    claim = {"volumeClaimTemplate": {"spec": {"dataSource": source}}}
    pod["volumes"].append({"name": "x", "ephemeral": claim})


@pytest.mark.parametrize(("resource", "job"), TRAINING)
def test_a_job_cannot_take_the_place_of_the_fleets_pods(resource: str, job: Json) -> None:
    for labels in ({"app.kubernetes.io/name": "embertide-state"}, {}):
        changed = copy.deepcopy(job)
        jobset = job["kind"] == "JobSet"
        own = (
            changed["spec"]["replicatedJobs"][0]["template"]["spec"] if jobset else changed["spec"]
        )
        own["template"]["metadata"]["labels"] = labels
        (said,) = complaints(resource, new=changed)
        assert "app.kubernetes.io/name" in said


@pytest.mark.parametrize(("resource", "job"), TRAINING)
def test_training_is_admitted(resource: str, job: Json) -> None:
    assert complaints(resource, new=job) == []


@pytest.mark.parametrize(("resource", "job"), TRAINING)
@pytest.mark.parametrize(
    "change",
    [
        *(secret_volume, projected_volume, host_volume, volume_of_the_state),
        *(variable_of_a_secret, variables_of_a_secret, variable_before_it_starts),
        *(another_account, a_token_for_the_api, the_usual_account),
        *(privileged, processes_of_the_machine, network_of_the_machine, copy_of_a_volume),
        *(user_root, user_root_of_a_container, group_root, perhaps_root, nothing_said),
        *(perhaps_root_in_a_container, nothing_said_of_a_container, one_capability),
        *(usual_capabilities, more_privileges_later, any_system_call, no_apparmor, whole_proc),
        *(any_system_call_of_a_container, setting_of_the_kernel, labels_of_selinux),
        *(port_of_the_machine, one_machine, image_that_changes, trainer_of_another_tag),
        *(publication_for_any_image, secret_for_any_image, publication_before_it_starts),
    ],
    ids=lambda change: change.__name__,
)
def test_a_job_cannot_reach_what_its_maker_may_not(
    resource: str, job: Json, change: Callable[[Json], None]
) -> None:
    changed = copy.deepcopy(job)
    change(pod_of(changed))
    assert len(complaints(resource, new=changed)) == 1
    assert complaints(resource, new=changed, groups=("administrators",)) == []


@pytest.mark.parametrize(("resource", "job"), TRAINING)
def test_a_pinned_image_may_read_the_publication(resource: str, job: Json) -> None:
    changed = copy.deepcopy(job)
    beside(pod_of(changed), "publication", readOnly=True)
    assert complaints(resource, new=changed) == []


def test_without_the_images_of_who_deploys_no_job_is_admitted() -> None:
    kustomization = yaml.safe_load((K8S / "base" / "kustomization.yaml").read_text())
    (training,) = (
        each for each in kustomization["configMapGenerator"] if each["name"] == "embertide-training"
    )
    (job,) = (each["image"] for each in pod_of(JOB)["containers"])
    assert training["literals"] == [f"trainer={job}"]
    (bound,) = (
        each["spec"]
        for each in RESOURCES
        if each["kind"] == "ValidatingAdmissionPolicyBinding" and "paramRef" in each["spec"]
    )
    assert bound["paramRef"] == {
        "name": training["name"],
        "parameterNotFoundAction": "Deny",
    }
    assert POLICIES["jobs"]["paramKind"] == {"apiVersion": "v1", "kind": "ConfigMap"}


TRAIN_JOBS = "trainer.kubeflow.org/trainjobs"


def test_a_train_job_is_admitted() -> None:
    assert complaints(TRAIN_JOBS, new=TRAIN_JOB) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runtimeRef": {"name": "train-news"}}, "ClusterTrainingRuntime"),
        ({"runtimeRef": {"name": "x", "kind": "ClusterTrainingRuntime"}}, "ClusterTrainingRuntime"),
        ({"runtimePatches": [{"manager": "example.org/mine"}]}, "leaves its pods"),
        ({"podTemplateOverrides": [{}]}, "leaves its pods"),
        ({"podSpecOverrides": [{}]}, "leaves its pods"),
        ({"initializer": {"model": {"secretRef": {"name": "embertide-tokens"}}}}, "initializer"),
        (
            {
                "trainer": {
                    "env": [
                        {"name": "A", "value": "1"},
                        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "x", "key": "y"}}},
                    ]
                }
            },
            "variable from a secret",
        ),
    ],
)
def test_a_train_job_adds_nothing_to_its_runtime(change: Json, message: str) -> None:
    changed = TRAIN_JOB | {"spec": TRAIN_JOB["spec"] | change}
    for operation in ("CREATE", "UPDATE"):
        (said,) = complaints(TRAIN_JOBS, operation=operation, new=changed)
        assert message in said
    assert complaints(TRAIN_JOBS, new=changed, groups=("administrators",)) == []


def test_a_train_job_does_not_bear_the_name_of_the_fleets_service() -> None:
    (said,) = complaints(TRAIN_JOBS, name="embertide-nodes", new=TRAIN_JOB)
    assert "names that begin with embertide" in said


def test_a_rollout_may_be_restarted_and_scaled_and_nothing_else() -> None:
    old = of("base/group/nodes.yaml", "StatefulSet")
    restarted, scaled, changed = copy.deepcopy(old), copy.deepcopy(old), copy.deepcopy(old)
    restarted["spec"]["template"]["metadata"]["annotations"][
        "kubectl.kubernetes.io/restartedAt"
    ] = "now"
    scaled["spec"]["replicas"] = 3
    changed["spec"]["template"]["spec"]["containers"][0]["image"] = "mine"
    said = [
        complaints("apps/statefulsets", operation="UPDATE", new=new, old=old)
        for new in (restarted, scaled, changed)
    ]
    assert [len(each) for each in said] == [0, 0, 1]


def test_services_of_the_fleet_are_not_the_operators() -> None:
    own, fleets = of("train-news.yaml", "Service"), of("base/node.yaml", "Service", "embertide")
    assert complaints("/services", new=own) == []
    assert complaints("/services", operation="DELETE", name="train-news", old=own) == []
    for operation in ("CREATE", "UPDATE", "DELETE"):
        new = None if operation == "DELETE" else fleets
        assert complaints("/services", operation=operation, name="embertide", new=new)
    caught = copy.deepcopy(own)
    caught["spec"]["selector"] = {"app.kubernetes.io/part-of": "embertide"}
    assert complaints("/services", new=caught)
    for outside in ({"externalIPs": ["10.0.0.1"]}, {"type": "LoadBalancer"}):
        led = copy.deepcopy(own)
        led["spec"] |= outside
        assert complaints("/services", new=led)
    policy = of("train-news.yaml", "NetworkPolicy")
    assert complaints("networking.k8s.io/networkpolicies", new=policy) == []
    for selector in ({}, {"matchLabels": {"app.kubernetes.io/name": "embertide-state"}}):
        opened = copy.deepcopy(policy)
        opened["spec"]["podSelector"] = selector
        assert complaints("networking.k8s.io/networkpolicies", new=opened)
    assert complaints(
        "networking.k8s.io/networkpolicies", operation="DELETE", name="embertide-redis", old=policy
    )


def test_policies_are_bound_and_valid_for_operators_alone() -> None:
    bound = {
        each["spec"]["policyName"]
        for each in RESOURCES
        if each["kind"] == "ValidatingAdmissionPolicyBinding"
        and each["spec"]["validationActions"] == ["Deny"]
    }
    assert bound == {f"embertide-operators-{name}" for name in POLICIES}
    for each in RESOURCES:
        assert kubernetes_validate.validate(each, "1.36", strict=True) == "1.36"
    for spec in POLICIES.values():
        assert spec["failurePolicy"] == "Fail"
        (condition,) = spec["matchConditions"]
        assert condition["expression"] == f"'{GROUP}' in request.userInfo.groups"


def test_the_role_allows_what_the_page_does_and_no_secret() -> None:
    role = of("base/access.yaml", "Role", "embertide-operator")
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {
        ("", "pods", "delete"),
        ("", "pods/portforward", "create"),
        ("apps", "statefulsets/scale", "patch"),
        ("apps", "statefulsets", "patch"),
        ("apps", "deployments", "patch"),
        ("batch", "jobs", "create"),
        ("trainer.kubeflow.org", "trainjobs", "create"),
    } <= allowed
    runtimes = {verb for _, resource, verb in allowed if resource == "trainingruntimes"}
    assert runtimes == {"get", "list", "watch"}
    resources = {resource for _, resource, _ in allowed}
    assert resources.isdisjoint({"secrets", "pods/exec", "pods/attach", "configmaps", "*"})
    assert "*" not in {verb for *_, verb in allowed}
