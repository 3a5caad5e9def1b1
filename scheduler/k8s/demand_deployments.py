"""Demand of Deployments: the replicas that they should have, times the GPUs of each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler.k8s.kinds import DEPLOYMENT, GPU_RESOURCE
from scheduler.k8s.objects import Key, Object, is_terminating, key_of, labels_of, namespace_of
from scheduler.k8s.pod_facts import gpus_asked


@dataclass(frozen=True, slots=True)
class Serving:
    """A Deployment: the replicas that its spec asks for, and the GPUs of each."""

    key: Key
    labels: Mapping[str, str]
    replicas: int
    gpus: int
    is_leaving: bool = False

    def matches(self, selector: Mapping[str, str]) -> bool:
        return all(self.labels.get(name) == value for name, value in selector.items())


@dataclass(frozen=True, slots=True)
class Scaling:
    """An autoscaler's word on its Deployment; `replicas` is 0 where it has none."""

    target: Key
    replicas: int


def serving(item: Object) -> Serving:
    spec = item["spec"]
    gpus = gpus_asked(spec["template"].get("spec") or {})
    return Serving(key_of(item), labels_of(item), spec.get("replicas", 1), gpus, is_terminating(item))


def scaling(item: Object) -> Scaling | None:
    """None where it scales something else than a Deployment."""
    target = item["spec"]["scaleTargetRef"]
    group = str(target.get("apiVersion", "")).rpartition("/")[0]
    if target["kind"] != DEPLOYMENT.name or group not in ("", DEPLOYMENT.group):
        return None
    replicas = (item.get("status") or {}).get("desiredReplicas", 0)
    return Scaling((namespace_of(item), target["name"]), replicas)


def gpus_wanted(
    selector: Mapping[str, str], servings: Iterable[Serving], scalings: Iterable[Scaling | None]
) -> int | None:
    """GPUs that the Deployments with these labels should have; None where none of them is for GPUs.

    An autoscaler that wants more counts before the spec, which it will raise. It lowers the spec before it says so: one
    that says less has not decided yet (its status begins as 0), or cannot read its metrics. Then it keeps its last
    word, and does not undo what people scale by hand.
    """
    matching = [each for each in servings if each.gpus and not each.is_leaving and each.matches(selector)]
    if not matching:
        return None
    wanted: dict[Key, int] = {}
    for scaler in scalings:
        if scaler is not None:
            wanted[scaler.target] = max(wanted.get(scaler.target, 0), scaler.replicas)
    return sum(each.gpus * max(wanted.get(each.key, 0), each.replicas) for each in matching)


def none_matches(selector: Mapping[str, str]) -> str:
    labels = ",".join(f"{name}={value}" for name, value in sorted(selector.items()))
    return f"no Deployment labelled {labels} has pods that ask for {GPU_RESOURCE}"
