"""Nodes of the cluster as the fleet knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from scheduler.domain.fleet import Node
from scheduler.k8s.kinds import GPU_LABEL, GPU_PRODUCT_LABEL, GPU_RESOURCE
from scheduler.k8s.resources.metadata import Resource, metadata, part
from scheduler.k8s.resources.pool import PoolResource
from scheduler.k8s.taints import closing
from scheduler.solver.profiles.shipped import gpu_names, load_gpu

GPU_OF_PRODUCT: Mapping[str, str] = MappingProxyType(
    {
        "Tesla-T4": "t4",
        "Tesla-V100-SXM2-32GB": "v100-32g",
        "Tesla-V100-SXM3-32GB": "v100-32g",
        "Tesla-V100-PCIE-32GB": "v100-32g",
        "NVIDIA-A100-SXM4-40GB": "a100-40g",
        "NVIDIA-A100-PCIE-40GB": "a100-40g",
        "NVIDIA-A100-SXM4-80GB": "a100-80g",
        "NVIDIA-A100-80GB-PCIe": "a100-80g",
        "NVIDIA-A800-SXM4-80GB": "a800-80g",
        "NVIDIA-A800-80GB-PCIe": "a800-80g",
        "NVIDIA-H100-80GB-HBM3": "h100-80g",
        "NVIDIA-H100-PCIe": "h100-80g",
        "NVIDIA-H200": "h200",
        "NVIDIA-H200-NVL": "h200",
        "NVIDIA-L40S": "l40s",
    }
)
"""What NVIDIA's feature discovery writes into the label nvidia.com/gpu.product, by the driver's name of the product.
Shared and partitioned GPUs have a suffix there and are none of these."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A node as the cluster tells of it. `product` is what it says of its GPU model, empty where it says nothing;
    `taints` are all of them."""

    name: str
    labels: Mapping[str, str]
    gpus: int
    is_cordoned: bool
    product: str
    taints: tuple[Mapping[str, Any], ...] = ()


def machine(node: Resource) -> Machine:
    meta = metadata(node)
    labels = meta.labels
    return Machine(
        name=meta.name,
        labels=labels,
        gpus=_gpus(node),
        is_cordoned=part(node, "spec").get("unschedulable") is True or meta.is_deleting,
        product=labels.get(GPU_LABEL) or labels.get(GPU_PRODUCT_LABEL, ""),
        taints=tuple(part(node, "spec").get("taints") or ()),
    )


def node_of(host: Machine, pool: PoolResource) -> Node | None:
    """The host as a node of the pool, cordoned where nothing new is to begin there; None where it has no GPUs or their
    model is not known."""
    gpu = gpu_of(host, pool)
    if host.gpus < 1 or gpu is None:
        return None
    memory_bytes = pool.gpu_memory_bytes or load_gpu(gpu).memory_bytes
    is_closed = host.is_cordoned or bool(closing(host.taints, pool.tolerations))
    return Node(host.name, pool.pool.name, gpu, host.gpus, memory_bytes, cordoned=is_closed)


def gpu_of(host: Machine, pool: PoolResource) -> str | None:
    """The host's GPU model: what its pool says, else its labels; None where there is no profile of it."""
    name = pool.gpu or GPU_OF_PRODUCT.get(host.product, host.product)
    return name if name in _gpu_names() else None


@cache
def _gpu_names() -> frozenset[str]:
    return frozenset(gpu_names())


def _gpus(node: Resource) -> int:
    """What kubelet lets pods have: a GPU that has failed its health check does not count."""
    text = str(part(part(node, "status"), "allocatable").get(GPU_RESOURCE, 0))
    return int(text) if text.isascii() and text.isdigit() else 0
