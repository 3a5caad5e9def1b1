"""Demand as Deployments and their autoscalers tell it."""

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


def a_deployment(name: str = "chat", *, gpus: int = 2, labels: dict[str, str] | None = None, **spec: Any) -> Any:
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    template = {"spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]}}
    metadata = {"namespace": "serving", "name": name, "labels": CHAT if labels is None else labels}
    return {"metadata": metadata, "spec": {"replicas": 3, "template": template, **spec}}


def an_autoscaler(desired: int | None, *, kind: str = "Deployment", api: str = "apps/v1", name: str = "chat") -> Any:
    status = {} if desired is None else {"status": {"desiredReplicas": desired}}
    target = {"apiVersion": api, "kind": kind, "name": name}
    return {"metadata": {"namespace": "serving", "name": "scaler"}, "spec": {"scaleTargetRef": target}, **status}


def wanted(*deployments: Any, autoscalers: tuple[Any, ...] = (), selector: dict[str, str] = CHAT) -> int | None:
    return compute_demand_gpus(selector, map(parse_deployment, deployments), map(parse_autoscaler, autoscalers))


def test_the_replicas_that_a_deployment_asks_for_count_with_the_gpus_of_each() -> None:
    assert wanted(a_deployment(), a_deployment("more", gpus=4, replicas=1)) == 3 * 2 + 4


def test_a_deployment_that_was_scaled_to_zero_wants_nothing_and_is_known_all_the_same() -> None:
    assert wanted(a_deployment(replicas=0)) == 0


def test_an_autoscaler_counts_before_the_spec_that_it_will_raise() -> None:
    assert wanted(a_deployment(), autoscalers=(an_autoscaler(7),)) == 14
    assert wanted(a_deployment(), autoscalers=(an_autoscaler(7), an_autoscaler(9))) == 18


def test_replicas_that_somebody_raised_past_an_autoscaler_count() -> None:
    """One that cannot read its metrics keeps its last word, and lets people scale by hand."""
    assert wanted(a_deployment(replicas=10), autoscalers=(an_autoscaler(3),)) == 20


@pytest.mark.parametrize(
    "autoscaler",
    [
        an_autoscaler(0),
        an_autoscaler(None),
        an_autoscaler(7, kind="StatefulSet"),
        an_autoscaler(7, api="example.dev/v1"),
        an_autoscaler(7, name="another"),
    ],
    ids=["undecided", "no status", "StatefulSet", "other group", "other name"],
)
def test_an_autoscaler_that_has_no_word_on_this_deployment_does_not_count(autoscaler: Any) -> None:
    assert wanted(a_deployment(), autoscalers=(autoscaler,)) == 6


def test_an_autoscaler_of_another_namespace_does_not_count() -> None:
    stranger = an_autoscaler(7)
    stranger["metadata"]["namespace"] = "elsewhere"
    assert wanted(a_deployment(), autoscalers=(stranger,)) == 6


@pytest.mark.parametrize(
    "deployment",
    [a_deployment(labels={}), a_deployment(labels={"app": "chats"}), a_deployment(gpus=0)],
    ids=["unlabelled", "other label", "no gpus"],
)
def test_where_no_deployment_for_gpus_matches_nothing_is_known(deployment: Any) -> None:
    assert wanted(deployment) is None


def test_a_deployment_that_is_being_deleted_wants_nothing() -> None:
    leaving = a_deployment()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert wanted(leaving) is None
    assert wanted(leaving, a_deployment("stays")) == 6


def test_who_looks_for_the_mistake_is_told_the_labels() -> None:
    said = describe_no_match({"b": "2", "a": "1"})
    assert said == "no Deployment labelled a=1,b=2 has pods that ask for nvidia.com/gpu"


_SERVINGS = st.lists(
    st.builds(
        ServingDeployment,
        key=st.tuples(st.sampled_from(["x", "y"]), st.sampled_from(["a", "b", "c"])),
        labels=st.sampled_from([{"app": "chat"}, {"app": "chat", "tier": "1"}, {"app": "draw"}, {}]),
        replicas=st.integers(0, 50),
        gpus=st.integers(0, 8),
        is_leaving=st.booleans(),
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
def test_demands_add_up_and_irrelevant_deployments_do_not_count(
    servings: list[ServingDeployment], scalings: list[AutoscalerTarget | None]
) -> None:
    relevant = [each for each in servings if each.labels.get("app") == "chat" and each.gpus and not each.is_terminating]
    alone = [compute_demand_gpus(CHAT, [each], scalings) for each in relevant]
    expected = sum(gpus for gpus in alone if gpus is not None) if relevant else None
    assert compute_demand_gpus(CHAT, servings, scalings) == expected
    assert all(gpus is not None and gpus % each.gpus == 0 for gpus, each in zip(alone, relevant, strict=True))
