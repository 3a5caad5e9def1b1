"""Requirements of pods, and the nodes that meet them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.domain.node_selection import NodeRequirement, Taint, matches_terms, parse_terms, parse_tolerations
from scheduler.domain.pod_requirements import (
    NOTHING_ADDED,
    PLAIN_POD,
    PodRequirements,
    add_requirements,
    compute_pod_requests,
    find_added_requirements,
    parse_requirements,
)

LABELS = {"zone": "a", "generation": "4", "disk": "ssd"}


def container(resource_kind: str = "requests", **amounts: str) -> dict[str, Any]:
    return {"name": "main", "resources": {resource_kind: amounts}}


def required(*containers: dict[str, Any], per: str = "", **spec: Any) -> PodRequirements:
    return parse_requirements(json.dumps({"spec": {"containers": list(containers), **spec}}), per)


def test_job_without_a_template_needs_room_for_a_pod_only() -> None:
    assert parse_requirements("") == PLAIN_POD
    assert PLAIN_POD.compute_requests(8) == {"pods": 1}


def test_resources_per_gpu_grow_with_the_gpus_of_the_first_container_only() -> None:
    found = required(container(cpu="4"), container(cpu="500m"), per="gpu")
    assert found.compute_requests(8) == {"cpu": 32_500, "pods": 1}
    assert required(container(cpu="4"), container(cpu="500m")).compute_requests(8) == {"cpu": 4500, "pods": 1}


def test_limit_without_a_request_is_requested() -> None:
    assert required(container("limits", cpu="2")).compute_requests(1)["cpu"] == 2000


def test_init_containers_and_sidecars_count_as_in_the_kubernetes_scheduler() -> None:
    """An init container counts beside the sidecars that start before it. The overhead comes on top."""
    init = [{**container(memory="1"), "restartPolicy": "Always"}, container(memory="10")]
    found = required(container(memory="4"), initContainers=init, overhead={"memory": "2"})
    assert found.compute_requests(1)["memory"] == 13
    assert required(container(memory="40"), initContainers=init).compute_requests(1)["memory"] == 41


def test_requests_of_the_whole_pod_replace_those_of_its_containers() -> None:
    found = required(container(cpu="4"), container(cpu="4"), resources={"requests": {"cpu": "5"}})
    assert found.compute_requests(1)["cpu"] == 5000


@pytest.mark.parametrize("gpus", range(1, 9))
def test_count_of_fitting_gpus_agrees_with_the_requests(gpus: int) -> None:
    found = required(container(cpu="4", memory="10"), container(cpu="1"), per="gpu")
    free = {"cpu": 22_000, "memory": 1000, "pods": 1}
    fits = all(amount <= free.get(name, 0) for name, amount in found.compute_requests(gpus).items())
    assert (found.count_fitting_gpus(free, 8) >= gpus) is fits


def test_no_gpu_fits_without_room_for_what_does_not_depend_on_gpus() -> None:
    assert required(container(cpu="4")).count_fitting_gpus({"cpu": 3999, "pods": 1}, 8) == 0
    assert required(container(cpu="4")).count_fitting_gpus({"cpu": 4000, "pods": 1}, 8) == 8
    assert PLAIN_POD.count_fitting_gpus({"pods": 0}, 8) == 0


@pytest.mark.parametrize(
    ("requirement", "holds"),
    [
        (NodeRequirement("zone", "In", ("a", "b")), True),
        (NodeRequirement("zone", "NotIn", ("a",)), False),
        (NodeRequirement("rack", "NotIn", ("a",)), True),
        (NodeRequirement("zone", "Exists"), True),
        (NodeRequirement("rack", "DoesNotExist"), True),
        (NodeRequirement("generation", "Gt", ("3",)), True),
        (NodeRequirement("generation", "Lt", ("4",)), False),
        (NodeRequirement("zone", "Gt", ("3",)), False),
        (NodeRequirement("metadata.name", "In", ("n0",), is_field=True), True),
        (NodeRequirement("zone", "Near", ("a",)), False),
    ],
)
def test_operators_of_node_affinity(requirement: NodeRequirement, holds: bool) -> None:
    assert matches_terms(((requirement,),), "n0", LABELS) is holds


def test_terms_are_alternatives_of_joint_requirements() -> None:
    bad, good = NodeRequirement("zone", "In", ("b",)), NodeRequirement("disk", "Exists")
    assert not matches_terms(((bad, good),), "n0", LABELS)
    assert matches_terms(((bad,), (good,)), "n0", LABELS)
    assert not matches_terms(((),), "n0", LABELS)
    assert matches_terms((), "n0", LABELS)
    assert parse_terms({"nodeSelectorTerms": []}) == ((),)


def test_toleration_without_an_operator_compares_the_value() -> None:
    taint = Taint("team", "vision", "NoSchedule")
    tolerations: list[tuple[dict[str, str], bool]] = [
        ({"key": "team", "value": "vision"}, True),
        ({"key": "team"}, False),
        ({"key": "team", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
    ]
    for toleration, tolerates in tolerations:
        assert parse_tolerations([toleration])[0].tolerates(taint) is tolerates


def test_requests_of_a_foreign_pod_include_its_gpus() -> None:
    spec = {"containers": [container("limits", **{"nvidia.com/gpu": "2", "cpu": "1"})]}
    assert dict(compute_pod_requests(spec)) == {"cpu": 1000, "nvidia.com/gpu": 2, "pods": 1}


def test_additions_of_admission_count() -> None:
    """A LimitRange sets a default, a RuntimeClass adds overhead and a selector, and a webhook adds a sidecar."""
    sent = {"containers": [container(cpu="4")], "tolerations": [{"key": "team", "operator": "Exists"}]}
    proxy = {**container(cpu="500m"), "restartPolicy": "Always", "ports": [{"containerPort": 1, "hostPort": 9000}]}
    admitted = {
        "containers": [container(cpu="4", memory="8")],
        "initContainers": [proxy],
        "overhead": {"cpu": "250m"},
        "nodeSelector": {"sandbox": "yes"},
        "tolerations": [*sent["tolerations"], {"key": "sandbox", "operator": "Exists"}],
    }
    added = find_added_requirements(sent, admitted)
    assert add_requirements(parse_requirements(json.dumps({"spec": sent})), added) == parse_requirements(
        json.dumps({"spec": admitted})
    )
    assert find_added_requirements(admitted, admitted) == NOTHING_ADDED
