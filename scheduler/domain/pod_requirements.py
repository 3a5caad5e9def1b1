"""Requirements of a job's pods on their node besides GPUs, and the capacity of a node."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from scheduler.domain.host_ports import compute_port_requests, find_amount
from scheduler.domain.node_selection import (
    NodeTerms,
    Taint,
    Toleration,
    matches_terms,
    parse_terms,
    parse_tolerations,
)
from scheduler.domain.quantities import Resources, freeze_resources, parse_resources, sum_resources

GPU_RESOURCE = "nvidia.com/gpu"
PODS = "pods"
PER_GPU = "gpu"
"""Value of `resourcesPer` for resources that are those for one GPU."""


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """What a node offers to pods besides GPUs.

    `requested` are the requests of pods that do not belong to a job, host ports included. `taints` are those that keep
    all pods off which do not tolerate them; taints that the node's pool tolerates are left out.
    """

    allocatable: Resources = ()
    requested: Resources = ()
    labels: tuple[tuple[str, str], ...] = ()
    taints: tuple[Taint, ...] = ()


UNKNOWN_CAPACITY = NodeCapacity()
"""Capacity of a node of Kubernetes that was not observed yet. No pod fits."""


@dataclass(frozen=True, slots=True)
class PodRequirements:
    """Requirements of a pod of a job, which depend on its number of GPUs.

    A pod requests `steady` and `per_gpu` for each GPU, but at least `peak`, which its init containers need. `selector`
    are labels that its node must have, `terms` the required node affinity, `claims` the volume claims that it mounts.
    """

    steady: Resources = ((PODS, 1),)
    per_gpu: Resources = ()
    peak: Resources = ()
    selector: tuple[tuple[str, str], ...] = ()
    terms: NodeTerms = ()
    tolerations: tuple[Toleration, ...] = ()
    claims: tuple[str, ...] = ()

    def compute_requests(self, gpus: int) -> dict[str, int]:
        """Return the requests of a pod with this many GPUs, without the GPUs."""
        total = dict(self.steady)
        for name, amount in self.per_gpu:
            total[name] = total.get(name, 0) + gpus * amount
        for name, amount in self.peak:
            total[name] = max(total.get(name, 0), amount)
        return total

    def count_fitting_gpus(self, free: Mapping[str, int], gpus: int) -> int:
        """Return the largest number of GPUs up to `gpus` with which a pod fits into the free resources."""
        if any(find_amount(free, name) < amount for name, amount in self.peak):
            return 0
        steady = dict(self.steady)
        for name, amount in self.steady:
            if find_amount(free, name) < amount:
                return 0
        for name, amount in self.per_gpu:
            gpus = min(gpus, (free.get(name, 0) - steady.get(name, 0)) // amount)
        return max(0, gpus)

    def matches_labels(self, node: str, labels: Mapping[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in self.selector) and matches_terms(self.terms, node, labels)

    def find_untolerated(self, taints: Iterable[Taint]) -> tuple[Taint, ...]:
        return tuple(taint for taint in taints if not any(each.tolerates(taint) for each in self.tolerations))


PLAIN_POD = PodRequirements()


@dataclass(frozen=True, slots=True)
class AddedRequirements:
    """Requirements that admission by the API server adds to the pods of a job.

    A LimitRange adds default requests, a RuntimeClass overhead, a node selector and tolerations, a webhook whole
    containers. `steady` and `peak` are added to those of the pods.
    """

    steady: Resources = ()
    peak: Resources = ()
    selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()


NOTHING_ADDED = AddedRequirements()


def find_added_requirements(sent: Mapping[str, Any], admitted: Mapping[str, Any]) -> AddedRequirements:
    """Return what the admitted pod requires more than the one that was sent. Both are specs of pods."""
    before, after = (_compute_requests(spec, is_per_gpu=False) for spec in (sent, admitted))
    ports = _subtract(compute_port_requests(admitted), compute_port_requests(sent))
    own_labels, own_tolerations = sent.get("nodeSelector") or {}, set(parse_tolerations(sent.get("tolerations")))
    selector = {key: value for key, value in (admitted.get("nodeSelector") or {}).items() if key not in own_labels}
    return AddedRequirements(
        steady=freeze_resources(_subtract(after[0], before[0]) | ports),
        peak=freeze_resources(_subtract(after[2], before[2])),
        selector=tuple(sorted(selector.items())),
        tolerations=tuple(
            each for each in parse_tolerations(admitted.get("tolerations")) if each not in own_tolerations
        ),
    )


@lru_cache(maxsize=4096)
def add_requirements(own: PodRequirements, added: AddedRequirements) -> PodRequirements:
    """Return the requirements of the pods as the API server admits them."""
    return replace(
        own,
        steady=freeze_resources(sum_resources((own.steady, added.steady))),
        peak=freeze_resources(sum_resources((own.peak, added.peak))),
        selector=tuple(sorted({*own.selector, *added.selector})),
        tolerations=(*own.tolerations, *added.tolerations),
    )


@lru_cache(maxsize=4096)
def parse_requirements(template_json: str, resources_per: str = "", claim: str = "") -> PodRequirements:
    """Return the requirements of a job's pods.

    Args:
        template_json: the pod template, empty for a job without one.
        resources_per: `gpu` if the first container's resources are those for one GPU, else they are for the pod.
        claim: the volume claim with the job's checkpoints, empty without one.
    """
    spec: dict[str, Any] = json.loads(template_json)["spec"] if template_json else {}
    steady, per_gpu, peak = _compute_requests(spec, is_per_gpu=resources_per == PER_GPU)
    steady |= {PODS: 1, **compute_port_requests(spec)}
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    return PodRequirements(
        steady=freeze_resources(steady),
        per_gpu=freeze_resources(per_gpu),
        peak=freeze_resources(peak),
        selector=tuple(sorted((spec.get("nodeSelector") or {}).items())),
        terms=() if affinity is None else parse_terms(affinity),
        tolerations=parse_tolerations(spec.get("tolerations")),
        claims=tuple(sorted({*_list_claims(spec), *([claim] if claim else [])})),
    )


def compute_pod_requests(spec: Mapping[str, Any]) -> Resources:
    """Return what a pod with this spec requests, GPUs included, as the Kubernetes scheduler counts it.

    That is the sum of its containers and sidecars (init containers that restart always), or the largest init container,
    plus its overhead. Host ports count as resources.
    """
    steady, _, peak = _compute_requests(spec, is_per_gpu=False)
    total = {name: max(steady.get(name, 0), peak.get(name, 0)) for name in {*steady, *peak}}
    return freeze_resources(total | {PODS: 1} | compute_port_requests(spec))


def _compute_requests(
    spec: Mapping[str, Any], *, is_per_gpu: bool
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return the requests of a pod: the constant part, the part for each GPU, and what init containers need."""
    steady: dict[str, int] = {}
    per_gpu: dict[str, int] = {}
    for number, container in enumerate(spec.get("containers") or ()):
        _add(per_gpu if is_per_gpu and not number else steady, _parse_container(container))
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        requests = _parse_container(container)
        if container.get("restartPolicy") == "Always":
            _add(sidecars, requests)
            _add(steady, requests)
            requests = {}
        for name in {*requests, *sidecars}:
            peak[name] = max(peak.get(name, 0), requests.get(name, 0) + sidecars.get(name, 0))
    pod_level = (spec.get("resources") or {}).get("requests") or (spec.get("resources") or {}).get("limits") or {}
    for name, amount in parse_resources(pod_level).items():
        steady[name] = amount
        per_gpu.pop(name, None)
        peak.pop(name, None)
    for name, amount in parse_resources(spec.get("overhead") or {}).items():
        steady[name] = steady.get(name, 0) + amount
        if name in peak:
            peak[name] += amount
    return steady, per_gpu, peak


def _parse_container(container: Mapping[str, Any]) -> dict[str, int]:
    """Return the requests of a container. A resource with a limit only is requested up to the limit."""
    resources = container.get("resources") or {}
    return parse_resources({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _subtract(total: Mapping[str, int], part: Mapping[str, int]) -> dict[str, int]:
    """Return the amounts by which resources other than GPUs exceed those of `part`."""
    return {name: max(0, amount - part.get(name, 0)) for name, amount in total.items() if name != GPU_RESOURCE}


def _list_claims(spec: Mapping[str, Any]) -> Iterator[str]:
    for volume in spec.get("volumes") or ():
        if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
            yield str(claim)


def _add(total: dict[str, int], amounts: Mapping[str, int]) -> None:
    for name, amount in amounts.items():
        total[name] = total.get(name, 0) + amount
