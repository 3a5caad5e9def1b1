"""Demand of Deployments and their autoscalers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.kubernetes.deployment_demand import (
    AutoscalerTarget,
    ServingDeployment,
    compute_demand_gpus,
    describe_no_match,
    parse_autoscaler,
    parse_deployment,
)

CHAT = {"app": "chat"}


def build_deployment(name: str = "chat", *, gpus: int = 2, labels: dict[str, str] | None = None, **spec: Any) -> Any:
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    template = {"spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]}}
    metadata = {"namespace": "serving", "name": name, "labels": CHAT if labels is None else labels}
    return {"metadata": metadata, "spec": {"replicas": 3, "template": template, **spec}}


def build_autoscaler(desired: int | None, *, kind: str = "Deployment", api: str = "apps/v1", name: str = "chat") -> Any:
    status = {} if desired is None else {"status": {"desiredReplicas": desired}}
    target = {"apiVersion": api, "kind": kind, "name": name}
    return {"metadata": {"namespace": "serving", "name": "scaler"}, "spec": {"scaleTargetRef": target}, **status}


def wanted(*deployments: Any, autoscalers: tuple[Any, ...] = (), selector: dict[str, str] = CHAT) -> int | None:
    return compute_demand_gpus(selector, map(parse_deployment, deployments), map(parse_autoscaler, autoscalers))


def test_demand_is_replicas_times_gpus() -> None:
    assert wanted(build_deployment(), build_deployment("more", gpus=4, replicas=1)) == 3 * 2 + 4


def test_deployment_scaled_to_zero_has_zero_demand() -> None:
    assert wanted(build_deployment(replicas=0)) == 0


def test_higher_autoscaler_replicas_count() -> None:
    assert wanted(build_deployment(), autoscalers=(build_autoscaler(7),)) == 14
    assert wanted(build_deployment(), autoscalers=(build_autoscaler(7), build_autoscaler(9))) == 18


def test_higher_spec_replicas_count() -> None:
    """An autoscaler that cannot read its metrics keeps its last status and allows manual scaling."""
    assert wanted(build_deployment(replicas=10), autoscalers=(build_autoscaler(3),)) == 20


@pytest.mark.parametrize(
    "autoscaler",
    [
        build_autoscaler(0),
        build_autoscaler(None),
        build_autoscaler(7, kind="StatefulSet"),
        build_autoscaler(7, api="example.dev/v1"),
        build_autoscaler(7, name="another"),
    ],
    ids=["undecided", "no status", "StatefulSet", "other group", "other name"],
)
def test_autoscaler_of_another_target_is_ignored(autoscaler: Any) -> None:
    assert wanted(build_deployment(), autoscalers=(autoscaler,)) == 6


def test_autoscaler_of_another_namespace_is_ignored() -> None:
    stranger = build_autoscaler(7)
    stranger["metadata"]["namespace"] = "elsewhere"
    assert wanted(build_deployment(), autoscalers=(stranger,)) == 6


@pytest.mark.parametrize(
    "deployment",
    [build_deployment(labels={}), build_deployment(labels={"app": "chats"}), build_deployment(gpus=0)],
    ids=["unlabelled", "other label", "no gpus"],
)
def test_demand_is_unknown_without_a_matching_gpu_deployment(deployment: Any) -> None:
    assert wanted(deployment) is None


def test_terminating_deployment_is_ignored() -> None:
    leaving = build_deployment()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert wanted(leaving) is None
    assert wanted(leaving, build_deployment("stays")) == 6


def test_no_match_message_names_the_labels() -> None:
    text = describe_no_match({"b": "2", "a": "1"})
    assert "a=1,b=2" in text
    assert "nvidia.com/gpu" in text


_SERVINGS = st.lists(
    st.builds(
        ServingDeployment,
        key=st.tuples(st.sampled_from(["x", "y"]), st.sampled_from(["a", "b", "c"])),
        labels=st.sampled_from([{"app": "chat"}, {"app": "chat", "tier": "1"}, {"app": "draw"}, {}]),
        replicas=st.integers(0, 50),
        gpus=st.integers(0, 8),
        is_terminating=st.booleans(),
    ),
    unique_by=lambda each: each.key,
)
_SCALINGS = st.lists(
    st.none()
    | st.builds(
        AutoscalerTarget, st.tuples(st.sampled_from(["x", "y"]), st.sampled_from(["a", "b", "c"])), st.integers(0, 50)
    )
)


@given(_SERVINGS, _SCALINGS)
def test_demand_sums_over_matching_deployments(
    servings: list[ServingDeployment], scalings: list[AutoscalerTarget | None]
) -> None:
    relevant = [each for each in servings if each.labels.get("app") == "chat" and each.gpus and not each.is_terminating]
    alone = [compute_demand_gpus(CHAT, [each], scalings) for each in relevant]
    expected = sum(gpus for gpus in alone if gpus is not None) if relevant else None
    assert compute_demand_gpus(CHAT, servings, scalings) == expected
    assert all(gpus is not None and gpus % each.gpus == 0 for gpus, each in zip(alone, relevant, strict=True))
