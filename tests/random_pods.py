"""Random nodes, foreign pods and jobs: requests, host ports, selectors, affinities, taints, volumes, sidecars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from scheduler.domain.job_account import OnResize
from scheduler.domain.job_spec import JobSpec
from scheduler.kubernetes.api_objects import Object

ZONES, DISKS = ("a", "b", "c"), ("ssd", "hdd")
CORES = (32, 64, 96)
MEMORY_GI = (256, 512)
FABRIC = "rdma/hca"
TEAM_TAINT = {"key": "team", "value": "vision", "effect": "NoSchedule"}
ONCE_CLAIM = "once"
"""A claim that one node at a time can mount."""
CLAIMS: dict[str, tuple[str, ...]] = {"data": (), "zonal": ("a", "b"), ONCE_CLAIM: ()}
"""Claims that exist, with the zones of their volumes. An empty tuple means all zones."""
LOST_CLAIM = "lost"
RUNTIME_CLASS, OVERHEAD = "sandboxed", {"cpu": "250m", "memory": "1Gi"}
DRAIN_TAINT = {"key": "maintenance", "value": "", "effect": "NoExecute"}


@dataclass(frozen=True)
class RandomNode:
    name: str
    gpus: int
    capacity: dict[str, str]
    labels: dict[str, str]
    taints: list[dict[str, str]]


def make_node(rng: Random, name: str) -> RandomNode:
    capacity = {"cpu": str(rng.choice(CORES)), "memory": f"{rng.choice(MEMORY_GI)}Gi", "pods": "20"}
    capacity["ephemeral-storage"] = f"{rng.choice((200, 1000))}Gi"
    if rng.random() < 0.5:
        capacity[FABRIC] = "8"
    labels = {"zone": rng.choice(ZONES), "disk": rng.choice(DISKS), "generation": str(rng.randrange(1, 6))}
    labels["kubernetes.io/hostname"] = name
    taints = [TEAM_TAINT] if rng.random() < 0.2 else [DRAIN_TAINT] if rng.random() < 0.1 else []
    return RandomNode(name, rng.choice((4, 8)), capacity, labels, taints)


def make_job(rng: Random, number: int, *, namespace: str) -> JobSpec:
    """Return a job of 1 to 16 GPUs. About one in eight fits on no node."""
    least = rng.choice((1, 1, 2, 2, 4, 8, 16))
    is_per_gpu = rng.random() < 0.5
    requests = _make_requests(rng, is_per_gpu=is_per_gpu)
    limits = {name: amount for name, amount in requests.items() if name == FABRIC}  # these cannot be overcommitted
    container: dict[str, Any] = {"name": "main", "image": "none", "resources": {"requests": requests, "limits": limits}}
    if rng.random() < 0.15:
        container["ports"] = [_make_port(rng)]
    spec: dict[str, Any] = {"containers": [container]}
    if rng.random() < 0.2:
        spec["nodeSelector"] = {"disk": rng.choice((*DISKS, "none"))}
    if rng.random() < 0.2:
        spec["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": _make_terms(rng)}}
        }
    if rng.random() < 0.3:
        spec["tolerations"] = [{"key": "team", "operator": "Equal", "value": "vision", "effect": "NoSchedule"}]
    if rng.random() < 0.1:
        spec["tolerations"] = [*spec.get("tolerations", []), {"key": "maintenance", "operator": "Exists"}]
    if rng.random() < 0.1:
        spec["initContainers"] = [{"name": "fetch", "image": "none", "resources": {"requests": {"memory": "200Gi"}}}]
    if rng.random() < 0.15:
        resources = {"requests": {"cpu": "2", "memory": "4Gi"}}
        sidecar = {"name": "proxy", "image": "none", "restartPolicy": "Always", "resources": resources}
        spec["initContainers"] = [sidecar, *spec.get("initContainers", [])]
    if rng.random() < 0.1:
        spec |= {"runtimeClassName": RUNTIME_CLASS, "overhead": OVERHEAD}
    if rng.random() < 0.2:
        claim = rng.choice((*CLAIMS, LOST_CLAIM))
        spec["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]
    return JobSpec(
        name=f"job-{number}",
        min_gpus=least,
        max_gpus=least * rng.choice((1, 1, 2)),
        command=("true",),
        namespace=namespace,
        template_json=json.dumps({"spec": spec}),
        resources_per="gpu" if is_per_gpu else "",
        on_resize=rng.choice((OnResize.CHECKPOINT, OnResize.NEVER)),
        priority=rng.randrange(2),
    )


def find_access_mode(claim: str) -> str:
    return "ReadWriteOnce" if claim == ONCE_CLAIM else "ReadWriteMany"


def build_volume_affinity(zones: Sequence[str]) -> dict[str, Any]:
    """Return the part of a PersistentVolume's spec that limits it to the zones. Empty for all zones."""
    if not zones:
        return {}
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": list(zones)}]}]
    return {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}


def make_foreign_pod(rng: Random, number: int, *, namespace: str) -> Object:
    """Return a pod of others, without a node."""
    requests = {"cpu": f"{rng.randrange(100, 8000)}m", "memory": f"{rng.randrange(1, 64)}Gi"}
    if rng.random() < 0.2:
        requests["nvidia.com/gpu"] = str(rng.randrange(1, 3))
    ports = [_make_port(rng)] if rng.random() < 0.1 else []
    resources = {"requests": requests, "limits": {k: v for k, v in requests.items() if k.startswith("nvidia")}}
    spec = {
        "schedulerName": "nobody",
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "main", "image": "none", "resources": resources, "ports": ports}],
    }
    return {"metadata": {"name": f"other-{number}", "namespace": namespace}, "spec": spec}


def _make_port(rng: Random) -> dict[str, Any]:
    number = rng.choice((9000, 9001))
    address = {"hostIP": rng.choice(("10.0.0.1", "10.0.0.2"))} if rng.random() < 0.3 else {}
    return {"containerPort": number, "hostPort": number, "protocol": rng.choice(("TCP", "UDP")), **address}


def _make_requests(rng: Random, *, is_per_gpu: bool) -> dict[str, str]:
    cores = rng.choice((1, 2, 4, 8, 12, 40)) if is_per_gpu else rng.choice((1, 8, 16, 32, 60, 96, 200))
    requests = {"cpu": str(cores) if rng.random() < 0.8 else f"{cores * 1000 - 250}m"}
    if rng.random() < 0.7:
        requests["memory"] = f"{rng.choice((8, 16, 32) if is_per_gpu else (32, 128, 256, 600))}Gi"
    if rng.random() < 0.2:
        requests["ephemeral-storage"] = f"{rng.choice((10, 300))}Gi"
    if rng.random() < 0.15:
        requests[FABRIC] = "1"
    return requests


def _make_terms(rng: Random) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = [
        {"key": "zone", "operator": "In", "values": rng.sample(ZONES, 2)},
        {"key": "zone", "operator": "NotIn", "values": [rng.choice(ZONES)]},
        {"key": "generation", "operator": "Gt", "values": [str(rng.randrange(1, 6))]},
        {"key": "generation", "operator": "Lt", "values": ["3"]},
        {"key": "disk", "operator": "Exists"},
        {"key": "spinning", "operator": "DoesNotExist"},
    ]
    return [{"matchExpressions": rng.sample(choices, rng.choice((1, 2)))} for _ in range(rng.choice((1, 2)))]
