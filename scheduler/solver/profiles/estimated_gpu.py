"""Profiles of reported GPUs: that of a known product, or one estimated from what the driver reports of an unknown one.

An estimate scales the most similar known GPU by reported ratios: peak by cores, clock and architecture; bandwidth by
bus width and memory clock; links by NVLinks, PCIe and network speed. Shares of the peak that kernels reach are reported
by nobody and stay those of the known GPU. `data/reported_gpus.json` holds what drivers report of the shipped models,
and of common products without a profile, for nodes of which only a label is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import inf, log
from typing import Any

from scheduler.domain.machine import GpuDevice, MachineInventory
from scheduler.solver.profiles.catalog import GPU_UNITS, list_gpu_names, load_gpu
from scheduler.solver.profiles.hardware_profile import HardwareProfile, Precision

NVLINK_BYTES_PER_S, NVLINK_5_BYTES_PER_S = 25e9, 50e9
"""One way, per link: NVLink 2 to 4 (V100, A100, H100 datasheets), and NVLink 5 (DGX B200 datasheet)."""
PCIE_3_LANE_BYTES_PER_S = 1e9
"""One way. Each later generation doubles it."""
NVLINK_SHARE, PCIE_SHARE, NETWORK_SHARE = 0.79, 0.6, 0.55
"""Shares of a link that collectives reach: NVLink and network as fitted for a100-80g, PCIe as estimated for t4."""
NVLINK_HOP_S, PCIE_HOP_S = 1.9e-6, 2.5e-6
"""Source: github.com/NVIDIA/nccl, src/graph/tuning.cc, hwLat, LL128 ring."""
_PREDICTION_ERROR = 0.3
_HBM_BUS_BITS_MIN = 1024
_OTHER_MEMORY, _OTHER_MAJOR, _OTHER_MINOR = 1.0, 1.0, 0.5
"""Distances, in units of the logarithm of watts per operation: memory of another kind has other kernels bound by it,
and the power that an operation has decides how far clocks fall under load."""
_BF16_ARCHITECTURE = (8.0, 0.0)
"""The oldest compute capability with bf16 (NVIDIA A100 white paper)."""
_CONSUMER_RATIO = 0.5
"""GeForce GPUs from 8.6 on accumulate in fp32 at half rate (RTX 4090: 165 TFLOPS, Ada white paper, table 2)."""
_RATE = "flops_per_core_cycle"
_VENDOR = re.compile(r"^(nvidia|amd|tesla)\b[- ]*|^instinct\b[- ]*", re.IGNORECASE)
_HAS_SIZE = re.compile(r"\d ?g(i?b)?\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ReportedGpu:
    """What drivers report of a shipped GPU model, and the product names under which they do."""

    profile: str
    names: frozenset[str]
    device: GpuDevice


@cache
def list_reported_gpus() -> tuple[ReportedGpu, ...]:
    """Return the shipped GPU models with the facts that their drivers report."""
    return tuple(
        ReportedGpu(each["profile"], frozenset(each["names"]), _to_device(each)) for each in _read_data()["gpus"]
    )


def find_profile(device: GpuDevice) -> str | None:
    """Return the name of the profile of a reported GPU: that of its product, or of its name in the catalog, or None.

    Labels of Kubernetes have hyphens where drivers report spaces. Both forms are found.
    """
    known = list_gpu_names()
    product = _profile_by_product().get(_to_product_key(device.name), "")
    names = (product, device.name.lower(), name_estimate(device))
    return next((name for name in names if name in known), None)


def find_known_product(name: str) -> GpuDevice | None:
    """Return what drivers report of a product without a shipped profile, by its name or label, or None."""
    return _unprofiled_products().get(_to_product_key(name))


def name_estimate(device: GpuDevice) -> str:
    """Return the name of an estimated profile, such as "rtx-a6000-48g": product and GiB of memory."""
    product = device.name.strip()
    while (shorter := _VENDOR.sub("", product)) not in ("", product):
        product = shorter
    size = "" if _HAS_SIZE.search(product) else f" {round(device.memory_bytes / 2**30)}g"
    return re.sub(r"[^a-z0-9.]+", "-", f"{product}{size}".lower()).strip("-.")[:63]


def estimate_profile(inventory: MachineInventory, *, hidden: AbstractSet[str] = frozenset()) -> str:
    """Return the profile of the machine's GPUs as JSON text, marked as estimated.

    Args:
        inventory: has at least one GPU; the first one stands for all.
        hidden: shipped profiles that must not be used as the known GPU.
    """
    device = inventory.gpus[0]
    reported = _find_most_similar(device, hidden)
    known = load_gpu(reported.profile)
    origin = f"estimate: as {known.gpu}, the most similar known GPU"
    entries = {
        name: (getattr(known, name), unit, origin)
        for name, unit in GPU_UNITS.items()
        if getattr(known, name) != HardwareProfile.__dataclass_fields__[name].default
    }
    entries["memory_bytes"] = device.memory_bytes, "bytes", "as the driver reports"
    entries["prediction_error"] = _PREDICTION_ERROR, "ratio", "step times of hidden GPUs were within 30%"
    entries |= _scale_chip(device, reported, known)
    entries |= _describe_links(device) | _describe_network(inventory)
    if device.architecture != reported.device.architecture:
        entries.pop("fp8_speedup", None)
        entries["gradient_overlap"] = 1.0, "ratio", "PyTorch DDP and FSDP reduce during the backward pass"
    precision, precisions = _find_precisions(device, known)
    document: dict[str, Any] = {"gpu": name_estimate(device), "estimated": True, "precision": precision}
    document |= {"precisions": precisions} if precisions else {}
    document["dimensions"] = sorted(dimension.value for dimension in known.dimensions)
    for name, (value, unit, source) in entries.items():
        document[name] = {"value": value, "unit": unit, "source": source}
    return json.dumps(document, indent=1)


def _find_precisions(device: GpuDevice, known: HardwareProfile) -> tuple[str, list[str]]:
    """Return the number format of training and all formats of the chip, as far as they are known."""
    key = _architecture_key(device.architecture)
    if (0, 0) < key < _BF16_ARCHITECTURE:
        return Precision.FP16.value, [Precision.FP16.value, Precision.FP32.value]
    if key >= _BF16_ARCHITECTURE and known.precision is Precision.FP16:
        return Precision.BF16.value, []
    return known.precision.value, sorted(known.precisions)


_Entries = dict[str, tuple[float, str, str]]


def _scale_chip(device: GpuDevice, reported: ReportedGpu, known: HardwareProfile) -> _Entries:
    entries, own, other = _Entries(), _peak_flops_per_s(device), _peak_flops_per_s(reported.device)
    if own and other:
        source = f"{known.gpu}, scaled by cores, clock and operations per core and cycle"
        entries["peak_flops_per_s"] = known.peak_flops_per_s * own / other, "flop/s", source
    own, other = _memory_bytes_per_s(device), _memory_bytes_per_s(reported.device)
    if own and other:
        source = f"{known.gpu}, scaled by bus width and memory clock"
        entries["memory_bandwidth_bytes_per_s"] = known.memory_bandwidth_bytes_per_s * own / other, "bytes/s", source
    return entries


def _describe_links(device: GpuDevice) -> _Entries:
    """Return bandwidth and latency between the GPUs of a node, as far as links were reported."""
    if device.nvlinks:
        per_link = NVLINK_5_BYTES_PER_S if _architecture_key(device.architecture) >= (10, 0) else NVLINK_BYTES_PER_S
        bandwidth, hop_s, source = NVLINK_SHARE * device.nvlinks * per_link, NVLINK_HOP_S, "reported NVLinks"
    elif device.pcie_generation and device.pcie_lanes:
        lane = PCIE_3_LANE_BYTES_PER_S * 2.0 ** (device.pcie_generation - 3)
        bandwidth, hop_s, source = PCIE_SHARE * device.pcie_lanes * lane, PCIE_HOP_S, "reported PCIe slot"
    else:
        return {}
    return {
        "intra_bandwidth_bytes_per_s": (bandwidth, "bytes/s", f"{source}; estimate of the share reached"),
        "intra_hop_s": (hop_s, "s", "github.com/NVIDIA/nccl, src/graph/tuning.cc, hwLat: LL128 ring"),
    }


def _describe_network(inventory: MachineInventory) -> _Entries:
    """Return the bandwidth of the fastest ports, and the GPUs that share one of them."""
    fastest = max((nic.speed_bits_per_s for nic in inventory.nics), default=0)
    if not fastest:
        return {}
    ports = sum(nic.speed_bits_per_s == fastest for nic in inventory.nics)
    bandwidth = NETWORK_SHARE * fastest / 8
    gpus_per_port = max(1.0, len(inventory.gpus) / ports)
    return {
        "inter_bandwidth_bytes_per_s": (bandwidth, "bytes/s", "fastest reported interfaces; estimate of the share"),
        "gpus_per_nic": (gpus_per_port, "ratio", "reported GPUs and network interfaces"),
    }


def _find_most_similar(device: GpuDevice, hidden: AbstractSet[str]) -> ReportedGpu:
    candidates = [each for each in list_reported_gpus() if each.profile not in hidden]
    return min(candidates, key=lambda each: (_distance(device, each.device), each.profile))


def _distance(device: GpuDevice, known: GpuDevice) -> tuple[float, float]:
    """Return how unlike two GPUs are; memory decides between equals, and alone if no other fact is known."""
    by_memory = abs(log(max(1, device.memory_bytes) / known.memory_bytes))
    peak, other = _peak_flops_per_s(device), _peak_flops_per_s(known)
    if not device.architecture and not peak:
        return 0.0, by_memory
    distance = 0.0
    if device.power_watts and peak:
        distance += abs(log(device.power_watts / peak * other / known.power_watts))
    if device.memory_bus_bits:
        is_hbm = device.memory_bus_bits >= _HBM_BUS_BITS_MIN
        distance += _OTHER_MEMORY * (is_hbm is not (known.memory_bus_bits >= _HBM_BUS_BITS_MIN))
    if _find_family(device.architecture) != _find_family(known.architecture):
        return distance + _OTHER_MAJOR, by_memory
    return distance + _OTHER_MINOR * (device.architecture != known.architecture), by_memory


def _peak_flops_per_s(device: GpuDevice) -> float:
    """Return the dense bf16 or fp16 peak at the highest clock, accumulating in fp32; 0 if it is unknown."""
    per_cycle = _flops_per_core_cycle(device.architecture)
    if limited := _limited_rates().get(_to_product_key(device.name)):
        return device.cores * device.clock_hz * limited
    is_consumer = "geforce" in device.name.lower() and _architecture_key(device.architecture) >= (8, 6)
    return device.cores * device.clock_hz * per_cycle * (_CONSUMER_RATIO if is_consumer else 1.0)


def _memory_bytes_per_s(device: GpuDevice) -> float:
    """Return the bandwidth of a bus that moves 2 bits per line and cycle of the reported clock; 0 if it is unknown."""
    return 2.0 * device.memory_clock_hz * device.memory_bus_bits / 8


def _flops_per_core_cycle(architecture: str) -> float:
    """Return the rate of an architecture; of an unknown compute capability, that of the nearest older one."""
    rates: Mapping[str, Any] = _read_data()["architectures"]
    if architecture in rates:
        return float(rates[architecture][_RATE])
    key = _architecture_key(architecture)
    older = [each for each in rates if (0, 0) < _architecture_key(each) <= key]
    return float(rates[max(older, key=_architecture_key)][_RATE]) if older else 0.0


def _find_family(architecture: str) -> str:
    """Return the major number of a compute capability, and of other vendors the name without its number."""
    found = re.match(r"\d+|[a-z]*", architecture.lower())
    return found[0] if found else ""


def _architecture_key(architecture: str) -> tuple[float, float]:
    """Return a compute capability as two numbers; below all of them for other vendors."""
    parts = architecture.split(".")
    if len(parts) == 2 and all(part.isdecimal() for part in parts):
        return float(parts[0]), float(parts[1])
    return (-inf, 0.0) if architecture else (0.0, 0.0)


@cache
def _profile_by_product() -> Mapping[str, str]:
    return {_to_product_key(name): each.profile for each in list_reported_gpus() for name in each.names}


@cache
def _unprofiled_products() -> Mapping[str, GpuDevice]:
    return {_to_product_key(name): _to_device(each) for each in _read_data()["products"] for name in each["names"]}


@cache
def _limited_rates() -> Mapping[str, float]:
    """Return operations per core and cycle of the products whose rate differs from that of their architecture."""
    limited = [each for each in _read_data()["gpus"] if _RATE in each]
    return {_to_product_key(name): each[_RATE] for each in limited for name in each["names"]}


def _to_product_key(name: str) -> str:
    return name.strip().replace(" ", "-").lower()


def _to_device(document: Mapping[str, Any]) -> GpuDevice:
    facts = {name: value for name, value in document.items() if name not in ("profile", "names", "source", _RATE)}
    names: Sequence[str] = document["names"]
    return GpuDevice(0, names[0], "", **facts)


@cache
def _read_data() -> dict[str, Any]:
    text = files("scheduler.solver.profiles").joinpath("data", "reported_gpus.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data
