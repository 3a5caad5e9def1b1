"""GPU model and sharing of a cluster node, from the labels that NVIDIA's GPU feature discovery sets.

Source: NVIDIA k8s-device-plugin: docs/gpu-feature-discovery, "Generated Labels", and README, "Shared Access to GPUs".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from scheduler.domain.machine import GpuDevice, MachineInventory
from scheduler.kubernetes.api_objects import GPU_LABEL, GPU_MEMORY_LABEL, GPU_PRODUCT_LABEL, parse_count
from scheduler.solver.profiles.catalog import list_gpu_names
from scheduler.solver.profiles.estimated_gpu import estimate_profile, find_known_product, find_profile, name_estimate

_PREFIX = "nvidia.com/gpu"
_MIG_SUFFIX = re.compile(r"-MIG-.+$")
_SHARED_SUFFIX = "-SHARED"
_MEBIBYTE = 2**20

_PROFILE_BY_PRODUCT: Mapping[str, str] = MappingProxyType(
    {
        "Tesla-V100-SXM3-32GB": "v100-32g",
        "Tesla-V100-PCIE-32GB": "v100-32g",
        "NVIDIA-H200-NVL": "h200",
    }
)
"""Product labels of GPUs that share the profile of another form factor."""


_CHIP_BY_PRODUCT: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "NVIDIA-B300-SXM6-AC": (262, "10.3"),
        "NVIDIA-GB300": (262, "10.3"),
        "NVIDIA-L20": (44, "8.9"),
        "NVIDIA-A16": (15, "8.6"),
        "NVIDIA-RTX-A5000": (23, "8.6"),
        "NVIDIA-GB10": (96, "12.1"),
        "Tesla-K80": (11, "3.7"),
    }
)
"""Usable memory in GiB and compute capability of products by label. Source: datasheets, rounded down."""
_SIZE = re.compile(r"(\d+)GB\b")
_USABLE_SHARE = 0.95
"""Part of the memory in a product's name that drivers report, at least."""
_UNKNOWN_MEMORY_GIB = 8
"""Assumed for a product of which nothing is known: less than any GPU for training has, so that no plan exceeds it."""


class GpuSharing(StrEnum):
    """How the device plugin offers the GPUs of a node. Only whole GPUs can run ranks of a job."""

    WHOLE = "whole"
    MIG = "mig"
    TIME_SLICED = "time-slicing"
    MPS = "mps"


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """GPUs of a node according to its labels.

    Args:
        profile: name that an operator set with the label ebbtide.dev/gpu, which overrides the product. Else empty.
        product: product label without the suffixes of partitioned and shared GPUs. Empty without the label.
        memory_bytes: of one whole GPU; 0 if it is unknown.
        architecture: compute capability such as "9.0"; empty if it is unknown.
    """

    profile: str = ""
    product: str = ""
    memory_bytes: int = 0
    architecture: str = ""
    sharing: GpuSharing = GpuSharing.WHOLE

    @property
    def label(self) -> str:
        """What the operator of the cluster sees as the GPU model."""
        return self.profile or self.product


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU model of the fleet.

    `estimate` is its profile as JSON text if no profile exists, else empty. `assumes_memory`: no label states the
    memory of the estimate.
    """

    name: str
    memory_bytes: int = 0
    estimate: str = ""
    assumes_memory: bool = False


def parse_node_gpus(labels: Mapping[str, str]) -> NodeGpus:
    """Return what the labels say of the GPUs. Labels that are absent or malformed count as unknown."""
    product = labels.get(GPU_PRODUCT_LABEL, "")
    sharing = _parse_sharing(labels, product)
    major, minor = labels.get(f"{_PREFIX}.compute.major", ""), labels.get(f"{_PREFIX}.compute.minor", "")
    memory_mib = 0 if sharing is GpuSharing.MIG else parse_count(labels.get(GPU_MEMORY_LABEL))
    return NodeGpus(
        profile=labels.get(GPU_LABEL, ""),
        product=_MIG_SUFFIX.sub("", product).removesuffix(_SHARED_SUFFIX),
        memory_bytes=memory_mib * _MEBIBYTE,
        architecture=f"{major}.{minor}" if major.isdecimal() and minor.isdecimal() else "",
        sharing=sharing,
    )


def find_gpu_model(gpus: NodeGpus, *, pool_gpu: str = "") -> GpuModel | None:
    """Return the GPU model that the pool names, else that of the labels. An unknown product gets an estimated profile.

    None if a profile was named that does not exist, or without a product. Unknown memory is assumed, never too large.
    """
    named = pool_gpu or gpus.profile
    if named:
        return GpuModel(named) if named in list_gpu_names() else None
    if not gpus.product:
        return None
    name = _PROFILE_BY_PRODUCT.get(gpus.product) or _find_catalog_name(gpus.product)
    if name in list_gpu_names():
        return GpuModel(name)
    known = find_known_product(gpus.product)
    memory_bytes = gpus.memory_bytes or (_assume_memory_bytes(gpus.product) if known is None else known.memory_bytes)
    architecture = gpus.architecture or _CHIP_BY_PRODUCT.get(gpus.product, (0, ""))[1]
    device = known or GpuDevice(0, gpus.product, "", memory_bytes, architecture)
    return replace(_estimate(device, memory_bytes), assumes_memory=not (gpus.memory_bytes or known))


def _assume_memory_bytes(product: str) -> int:
    """Return the memory of a GPU whose node has no label for it: by its product, else by the size in its name."""
    size = _SIZE.search(product)
    named = int(_USABLE_SHARE * int(size[1]) * 2**30) if size and int(size[1]) else 0
    gibibytes, _ = _CHIP_BY_PRODUCT.get(product, (_UNKNOWN_MEMORY_GIB, ""))
    return named or gibibytes * 2**30


def _estimate(device: GpuDevice, memory_bytes: int) -> GpuModel:
    name = name_estimate(device)
    if name in list_gpu_names():
        return GpuModel(name, memory_bytes)
    return GpuModel(name, memory_bytes, estimate_profile(MachineInventory(gpus=(device,))))


def _find_catalog_name(product: str) -> str:
    """Return the profile of a shipped product, or of a profile that has the name of the product; else empty."""
    return find_profile(GpuDevice(0, product, "", 0)) or ""


def _parse_sharing(labels: Mapping[str, str], product: str) -> GpuSharing:
    if _MIG_SUFFIX.search(product):
        return GpuSharing.MIG
    strategy = labels.get(f"{_PREFIX}.sharing-strategy", "")
    replicas = parse_count(labels.get(f"{_PREFIX}.replicas"))
    if strategy == GpuSharing.MPS and replicas > 1:
        return GpuSharing.MPS
    return GpuSharing.TIME_SLICED if replicas > 1 or product.endswith(_SHARED_SUFFIX) else GpuSharing.WHOLE
