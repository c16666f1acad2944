"""Manifests that `kubectl apply` would take, and those it would take although they cannot work."""

import kubernetes_validate
import pytest
from checks import CHECKS, Check
from manifests import FOLDERS, K8S, SCHEMA, TRAINING, deployed, workloads

from embertide.server.services.tokens import EXAMPLE, TokensError, read_tokens


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("training", TRAINING)
def test_what_is_deployed_can_work(folder: str, training: str, check: Check) -> None:
    assert check(deployed(folder, training)) == []


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("training", TRAINING)
def test_every_resource_is_valid(folder: str, training: str) -> None:
    for resource in deployed(folder, training):
        if resource["apiVersion"] == "cert-manager.io/v1":
            continue  # of a schema that is not Kubernetes' own
        assert kubernetes_validate.validate(resource, SCHEMA, strict=True) == SCHEMA


def test_the_control_plane_reads_the_example_tokens() -> None:
    path = K8S / "base" / "secrets" / "tokens.example"
    roles = read_tokens(path, examples=True)
    assert sorted(each.role for each in roles.values()) == ["node", "operator", "reader"]
    with pytest.raises(TokensError, match=r"line 3: this is the token of an example.*openssl rand"):
        read_tokens(path)
    assert all(token.startswith(EXAMPLE) for token in roles)


def test_the_tokens_of_the_base_are_accepted_in_the_overlay_for_trials_alone() -> None:
    for folder, accepted in (("base", False), ("overlays/dev", True)):
        control = next(
            each for each in workloads(deployed(folder)) if each.name == "embertide-control"
        )
        flags = control.pod["containers"][0]["command"]
        assert ("--example-tokens" in flags) == accepted, folder


def test_nothing_names_a_namespace_or_a_second_resource_of_one_name() -> None:
    resources = deployed()
    assert not [each for each in resources if "namespace" in each["metadata"]]
    names = [(each["kind"], each["metadata"]["name"]) for each in resources]
    assert len(set(names)) == len(names)
