"""Inference demand of Deployments: desired replicas times the GPUs of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from scheduler.domain.demand_source import KnownDemand, PoolDemand, UnknownDemand, UnknownDemandReason
from scheduler.kubernetes.api_objects import (
    AUTOSCALER,
    DEPLOYMENT,
    GPU_RESOURCE,
    Object,
    ObjectKey,
    is_terminating,
    key_of,
    labels_of,
    namespace_of,
)
from scheduler.kubernetes.client import KubernetesClient
from scheduler.kubernetes.object_cache import ObjectCache
from scheduler.kubernetes.pod_view import count_requested_gpus
from scheduler.kubernetes.reflector import JOIN_TIMEOUT_S, Reflector


@dataclass(frozen=True, slots=True)
class ServingDeployment:
    """A Deployment with its desired replicas and the GPUs of each."""

    key: ObjectKey
    labels: Mapping[str, str]
    replicas: int
    gpus: int
    is_terminating: bool = False

    def matches(self, selector: Mapping[str, str]) -> bool:
        return all(self.labels.get(name) == value for name, value in selector.items())


@dataclass(frozen=True, slots=True)
class AutoscalerTarget:
    """The replicas that an autoscaler wants for its Deployment, or 0 if it has not decided."""

    target: ObjectKey
    replicas: int


def parse_deployment(item: Object) -> ServingDeployment:
    spec = item["spec"]
    gpus = count_requested_gpus(spec["template"].get("spec") or {})
    return ServingDeployment(key_of(item), labels_of(item), spec.get("replicas", 1), gpus, is_terminating(item))


def parse_autoscaler(item: Object) -> AutoscalerTarget | None:
    """Return None if the autoscaler scales something other than a Deployment."""
    target = item["spec"]["scaleTargetRef"]
    group = str(target.get("apiVersion", "")).rpartition("/")[0]
    if target["kind"] != DEPLOYMENT.name or group not in ("", DEPLOYMENT.group):
        return None
    replicas = (item.get("status") or {}).get("desiredReplicas", 0)
    return AutoscalerTarget((namespace_of(item), target["name"]), replicas)


def compute_demand_gpus(
    selector: Mapping[str, str],
    deployments: Iterable[ServingDeployment],
    autoscalers: Iterable[AutoscalerTarget | None],
) -> int | None:
    """Return the GPUs that the matching Deployments should have, or None if none of them uses GPUs.

    The larger of the autoscaler's and the spec's replicas counts. When scaling up, the autoscaler's status leads the
    spec. When scaling down, the spec leads: a lower status means that the autoscaler has not decided, or cannot read
    metrics.
    """
    matching = [each for each in deployments if each.gpus and not each.is_terminating and each.matches(selector)]
    if not matching:
        return None
    autoscaled: dict[ObjectKey, int] = {}
    for scaler in autoscalers:
        if scaler is not None:
            autoscaled[scaler.target] = max(autoscaled.get(scaler.target, 0), scaler.replicas)
    return sum(each.gpus * max(autoscaled.get(each.key, 0), each.replicas) for each in matching)


def describe_no_match(selector: Mapping[str, str]) -> str:
    labels = ",".join(f"{name}={value}" for name, value in sorted(selector.items()))
    return f"demand.selector: no Deployment with labels {labels} has pods that request {GPU_RESOURCE}"


_PARSED_KEY = "facts"
_METADATA_FIELDS = ("name", "namespace", "uid", "resourceVersion")


class DeploymentWatch:
    """Watch of Deployments and autoscalers. Used by one thread; `on_change` is called from watch threads."""

    def __init__(self, cluster: KubernetesClient, *, on_change: Callable[[], None]) -> None:
        self._cluster = cluster
        self._on_change = on_change
        self._reflectors: tuple[Reflector, ...] = ()

    def start(self) -> None:
        if self._reflectors:
            return

        def notify(_key: ObjectKey) -> None:
            self._on_change()

        caches = (
            ObjectCache(DEPLOYMENT, transform=_trim_deployment, on_change=notify),
            ObjectCache(AUTOSCALER, transform=_trim_autoscaler, on_change=notify),
        )
        self._reflectors = tuple(Reflector(self._cluster, cache) for cache in caches)
        for reflector in self._reflectors:
            reflector.start()

    def stop(self, *, join_s: float = JOIN_TIMEOUT_S) -> None:
        for reflector in self._reflectors:
            reflector.stop(join_s=join_s)
        self._reflectors = ()

    def get_demand(self, selector: Mapping[str, str], now_s: float) -> PoolDemand:
        """Return the demand of the Deployments with these labels, in all namespaces."""
        stale = [reflector.cache.kind.plural for reflector in self._reflectors if reflector.is_stale]
        if stale:
            return UnknownDemand(UnknownDemandReason.STALE, f"the watch of {' and '.join(stale)} is stale")
        if not all(reflector.cache.has_synced for reflector in self._reflectors):
            return UnknownDemand(UnknownDemandReason.NOT_ASKED_YET, "Deployments are being listed")
        servings, scalings = (
            [item[_PARSED_KEY] for item in each.cache.snapshot().values()] for each in self._reflectors
        )
        gpus = compute_demand_gpus(selector, servings, scalings)
        if gpus is None:
            return UnknownDemand(UnknownDemandReason.NO_DEPLOYMENT_MATCHES, describe_no_match(selector))
        return KnownDemand(float(gpus), now_s)


def _trim_deployment(item: Object) -> Object:
    return {**_trim_metadata(item), _PARSED_KEY: parse_deployment(item)}


def _trim_autoscaler(item: Object) -> Object:
    return {**_trim_metadata(item), _PARSED_KEY: parse_autoscaler(item)}


def _trim_metadata(item: Object) -> Object:
    return {"metadata": {name: item["metadata"][name] for name in _METADATA_FIELDS}}
