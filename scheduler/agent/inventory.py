"""Hardware of this machine as its drivers and the operating system report it.

NVIDIA GPUs are read with nvidia-ml-py, AMD GPUs from the JSON of `rocm-smi`. A machine without a driver has no GPUs,
unless the operator states them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import psutil

from scheduler.domain.machine import (
    CheckpointPath,
    GpuDevice,
    GpuLink,
    LinkKind,
    MachineInventory,
    NetworkInterface,
)

ROCM_COMMAND = (
    *("rocm-smi", "--json", "--showproductname", "--showuniqueid", "--showmaxpower", "--showtopo"),
    *("--showmeminfo", "vram", "--showbus"),
)
_ROCM_TIMEOUT_S = 30.0
_PATH_TIMEOUT_S = 5.0
_MEGA = 10**6
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InventoryOverrides:
    """Facts of the GPUs that the operator states. 0 and the empty string leave a value as the driver reports it.

    Args:
        gpus: number of GPUs; fewer than detected means the first ones.
        gpu: product or profile.
        gpu_memory_bytes: memory of each GPU.
    """

    gpus: int = 0
    gpu: str = ""
    gpu_memory_bytes: int = 0

    def __post_init__(self) -> None:
        for option, value in (("--gpus", self.gpus), ("--gpu-memory", self.gpu_memory_bytes)):
            if value < 0:
                raise ValueError(f"{option}: got {value}. Use a number of at least 1, or leave the option out.")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values that are stated, as in MachineInventory."""
        stated = {"gpus": self.gpus, "gpu": self.gpu, "gpu_memory": self.gpu_memory_bytes}
        return tuple(name for name, value in stated.items() if value)


def detect_inventory(
    overrides: InventoryOverrides,
    *,
    checkpoint_paths: Sequence[Path] = (),
    granted_gpus: Sequence[int] | None = None,
) -> MachineInventory:
    """Return the hardware of this machine, and whether the directories can hold checkpoints.

    Args:
        granted_gpus: driver indices of the GPUs that may be used. None: all.

    Raises:
        ValueError: `overrides` states a number of GPUs, but neither it nor a driver names their model.
    """
    gpus, links = _detect_nvidia_gpus()
    if not gpus:
        gpus, links = _detect_amd_gpus()
    if granted_gpus is not None:
        gpus, links = select_granted_gpus(gpus, links, granted_gpus)
    gpus = apply_overrides(gpus, overrides)
    return MachineInventory(
        hostname=socket.gethostname(),
        addresses=_list_addresses(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus,
        links=tuple(link for link in links if max(link.first, link.second) < len(gpus)),
        nics=list_network_interfaces(Path("/sys/class")),
        checkpoint_paths=tuple(check_checkpoint_path(path) for path in checkpoint_paths),
        overrides=overrides.names,
    )


def apply_overrides(detected: Sequence[GpuDevice], overrides: InventoryOverrides) -> tuple[GpuDevice, ...]:
    """Return the GPUs with the stated values. GPUs that no driver knows have no UUID.

    Raises:
        ValueError: no model is known.
    """
    count = overrides.gpus or len(detected)
    name = overrides.gpu or (detected[0].name if detected else "")
    if count and not name:
        raise ValueError(f"--gpus: got {count}, but no driver reports a GPU model. Add --gpu MODEL.")
    model = replace(detected[0], uuid="") if detected else GpuDevice(0, name, "", 0)
    all_gpus = [*detected, *(replace(model, index=index) for index in range(len(detected), count))][:count]
    memory_bytes = overrides.gpu_memory_bytes
    return tuple(
        replace(gpu, name=overrides.gpu or gpu.name, memory_bytes=memory_bytes or gpu.memory_bytes) for gpu in all_gpus
    )


def select_granted_gpus(
    gpus: Sequence[GpuDevice], links: Sequence[GpuLink], granted: Sequence[int]
) -> tuple[tuple[GpuDevice, ...], tuple[GpuLink, ...]]:
    """Return the granted GPUs with their links, numbered from 0.

    Where the kernel hides all other GPUs, the driver numbers the granted ones anew: as many as were granted are all of
    them then.

    Raises:
        ValueError: the driver lacks a granted GPU.
    """
    if len(gpus) == len(granted) or not gpus:
        return tuple(gpus), tuple(links)
    if missing := sorted(set(granted) - {gpu.index for gpu in gpus}):
        raise ValueError(f"the driver has no GPU {missing[0]}, which was granted. It has {len(gpus)} GPUs.")
    numbers = {index: number for number, index in enumerate(sorted(granted))}
    chosen = (replace(gpu, index=numbers[gpu.index]) for gpu in gpus if gpu.index in numbers)
    between = (link for link in links if link.first in numbers and link.second in numbers)
    return (
        tuple(sorted(chosen, key=lambda gpu: gpu.index)),
        tuple(replace(link, first=numbers[link.first], second=numbers[link.second]) for link in between),
    )


def _detect_nvidia_gpus() -> tuple[tuple[GpuDevice, ...], tuple[GpuLink, ...]]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return (), ()
    try:
        return read_nvml(pynvml)
    finally:
        pynvml.nvmlShutdown()


def read_nvml(
    nvml: ModuleType | Any, *, capabilities: Path = Path("/proc/driver/nvidia/capabilities")
) -> tuple[tuple[GpuDevice, ...], tuple[GpuLink, ...]]:
    """Return the GPUs and their links that an initialized NVML reports. MIG instances stand for their GPU.

    Args:
        nvml: has the interface of pynvml.
        capabilities: folder in which the driver lists the device nodes of MIG instances.
    """
    found = list[tuple[GpuDevice, Any]]()
    for number in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        gpu = _read_nvml_device(nvml, number, handle)
        instances = _list_mig_instances(nvml, gpu, handle, capabilities)
        found += [(instance, None) for instance in instances] or [(gpu, handle)]
    links = tuple(
        GpuLink(first, second, _read_nvml_link(nvml, found[first][1], found[second][1]))
        for first, second in combinations(range(len(found)), 2)
    )
    return tuple(replace(gpu, index=index) for index, (gpu, _) in enumerate(found)), links


def _list_mig_instances(nvml: Any, gpu: GpuDevice, handle: Any, capabilities: Path) -> list[GpuDevice]:
    """Return the MIG instances of a GPU, none if MIG is off. Its facts are shared in proportion to the memory."""
    read = partial(_read_nvml_value, nvml)
    if read((0, 0), nvml.nvmlDeviceGetMigMode, handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return []
    instances = []
    for number in range(read(0, nvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
        instance = read(None, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if instance is None:
            continue
        memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(instance).total)
        share = memory_bytes / gpu.memory_bytes
        ids = (nvml.nvmlDeviceGetGpuInstanceId(instance), nvml.nvmlDeviceGetComputeInstanceId(instance))
        scaled = replace(
            gpu,
            name=_to_text(nvml.nvmlDeviceGetName(instance)),
            uuid=_to_text(nvml.nvmlDeviceGetUUID(instance)),
            memory_bytes=memory_bytes,
            cores=int(gpu.cores * share),
            memory_bus_bits=int(gpu.memory_bus_bits * share),
            power_watts=gpu.power_watts * share,
            nvlinks=0,
            capability_minors=_read_capability_minors(capabilities / f"gpu{gpu.minor}" / "mig", *ids),
        )
        instances.append(scaled)
    return instances


def _read_capability_minors(folder: Path, gpu_instance: int, compute_instance: int) -> tuple[int, ...]:
    """Return the device nodes that permit the use of a MIG instance, as the driver lists them below /proc."""
    instance = folder / f"gi{gpu_instance}"
    files = (instance / "access", instance / f"ci{compute_instance}" / "access")
    found = (re.search(r"DeviceFileMinor: (\d+)", _read_file(file)) for file in files)
    return tuple(int(match[1]) for match in found if match)


def _read_nvml_device(nvml: Any, index: int, handle: Any) -> GpuDevice:
    read = partial(_read_nvml_value, nvml)
    major, minor = read((0, 0), nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return GpuDevice(
        index,
        _to_text(nvml.nvmlDeviceGetName(handle)),
        _to_text(nvml.nvmlDeviceGetUUID(handle)),
        int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        architecture=f"{major}.{minor}" if major else "",
        cores=read(0, nvml.nvmlDeviceGetNumGpuCores, handle),
        clock_hz=read(0, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM) * _MEGA,
        memory_clock_hz=read(0, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM) * _MEGA,
        memory_bus_bits=read(0, nvml.nvmlDeviceGetMemoryBusWidth, handle),
        power_watts=read(0, nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle) / 1000.0,
        nvlinks=sum(
            read(0, nvml.nvmlDeviceGetNvLinkState, handle, link) == nvml.NVML_FEATURE_ENABLED
            for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        ),
        pcie_generation=read(0, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_lanes=read(0, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        minor=read(None, nvml.nvmlDeviceGetMinorNumber, handle),
    )


def _read_nvml_link(nvml: Any, first: Any, second: Any) -> LinkKind:
    if first is None or second is None:  # MIG instances have no path to other GPUs
        return LinkKind.SYSTEM
    nvlink = nvml.NVML_P2P_CAPS_INDEX_NVLINK
    if _read_nvml_value(nvml, -1, nvml.nvmlDeviceGetP2PStatus, first, second, nvlink) == nvml.NVML_P2P_STATUS_OK:
        return LinkKind.NVLINK
    system = nvml.NVML_TOPOLOGY_SYSTEM
    level = _read_nvml_value(nvml, system, nvml.nvmlDeviceGetTopologyCommonAncestor, first, second)
    by_level = (
        (nvml.NVML_TOPOLOGY_MULTIPLE, LinkKind.PCIE_SWITCH),
        (nvml.NVML_TOPOLOGY_HOSTBRIDGE, LinkKind.PCIE_HOST),
        (nvml.NVML_TOPOLOGY_NODE, LinkKind.NUMA_NODE),
    )
    return next((kind for highest, kind in by_level if level <= highest), LinkKind.SYSTEM)


def _read_nvml_value(nvml: Any, unknown: T, read: Callable[..., T], *arguments: Any) -> T:
    """Return a value, or `unknown` where the GPU or the driver does not report it."""
    try:
        return read(*arguments)
    except nvml.NVMLError:
        return unknown


def _to_text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _detect_amd_gpus() -> tuple[tuple[GpuDevice, ...], tuple[GpuLink, ...]]:
    if shutil.which(ROCM_COMMAND[0]) is None:
        return (), ()
    try:
        found = subprocess.run(ROCM_COMMAND, capture_output=True, text=True, timeout=_ROCM_TIMEOUT_S, check=False)
        return parse_rocm_json(found.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):  # a driver that does not answer has no usable GPUs
        return (), ()


_CARD = re.compile(r"card(\d+)")
_ROCM_LINK = re.compile(r"\(Topology\) Link type between DRM devices (\d+) and (\d+)")


def parse_rocm_json(
    text: str, *, pci: Path = Path("/sys/bus/pci/devices")
) -> tuple[tuple[GpuDevice, ...], tuple[GpuLink, ...]]:
    """Return the GPUs and links in the output of ROCM_COMMAND. Names of fields differ in case between releases.

    Args:
        pci: folder of the PCI devices, in which the kernel lists the render nodes of each.

    Raises:
        ValueError: the text has no JSON object with cards.
    """
    document = json.loads(text[text.find("{") :])  # warnings may precede the document
    cards = sorted((int(match[1]), name) for name in document if (match := _CARD.fullmatch(name)))
    gpus = tuple(_parse_rocm_card(index, document[name], pci) for index, (_, name) in enumerate(cards))
    links = []
    for name, value in document.get("system", {}).items():
        if match := _ROCM_LINK.fullmatch(name):
            kind = LinkKind.XGMI if str(value).strip().upper() == "XGMI" else LinkKind.SYSTEM
            links.append(GpuLink(int(match[1]), int(match[2]), kind))
    return gpus, tuple(links)


def _parse_rocm_card(index: int, card: Mapping[str, Any], pci: Path) -> GpuDevice:
    fields = {name.lower(): str(value).strip() for name, value in card.items()}
    name = fields.get("card series") or fields.get("device name") or fields.get("card model") or "AMD GPU"
    unique_id = fields.get("unique id", "").removeprefix("0x")
    return GpuDevice(
        index,
        name,
        f"GPU-{unique_id}" if re.fullmatch(r"[0-9a-f]+", unique_id) else "",
        int(fields.get("vram total memory (b)", "0")),
        architecture=fields.get("gfx version", ""),
        power_watts=float(fields.get("max graphics package power (w)", "0")),
        minor=_find_render_minor(pci / fields.get("pci bus", "").lower() / "drm"),
    )


def _find_render_minor(folder: Path) -> int | None:
    """Return the number of the render node in a device's folder, None without one."""
    found = (re.fullmatch(r"renderD(\d+)", path.name) for path in _list_folder(folder))
    return next((int(match[1]) for match in found if match), None)


def list_network_interfaces(classes: Path) -> tuple[NetworkInterface, ...]:
    """Return the interfaces that are up, by name, with their speeds.

    Active RDMA ports stand for the network devices behind them. Interfaces without hardware count only if there are no
    others, as in a container.

    Args:
        classes: the folder `/sys/class`.
    """
    rdma, behind_rdma = _list_rdma_ports(classes / "infiniband")
    devices = [path for path in _list_folder(classes / "net") if path.name != "lo" and path.name not in behind_rdma]
    up = [path for path in devices if _read_file(path / "operstate") == "up"]
    physical = [path for path in up if (path / "device").exists() or (path / "bonding").exists()]
    listed = physical if physical or rdma else up
    return (*rdma, *(NetworkInterface(path.name, _read_speed(path / "speed")) for path in listed))


def _list_rdma_ports(folder: Path) -> tuple[list[NetworkInterface], set[str]]:
    """Return the active ports, and the names of the network devices that share their hardware."""
    ports, behind = list[NetworkInterface](), set[str]()
    for device in _list_folder(folder):
        for port in _list_folder(device / "ports"):
            rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", _read_file(port / "rate"))
            if rate and _read_file(port / "state").endswith("ACTIVE"):
                ports.append(NetworkInterface(f"{device.name}:{port.name}", int(float(rate[1]) * 10**9)))
                behind |= {path.name for path in _list_folder(device / "device" / "net")}
    return ports, behind


def _read_speed(path: Path) -> int:
    """Return the speed in bits per second. Interfaces without a link or a known speed report -1 or nothing."""
    text = _read_file(path)
    return int(text) * _MEGA if text.isdecimal() else 0


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _list_folder(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _list_addresses() -> tuple[str, ...]:
    """Return the addresses at which other machines may reach this one: neither loopback nor link-local."""
    entries: Iterable[Any] = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    addresses = {entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)}
    own = ("127.", "169.254.", "fe80:", "::1")
    return tuple(sorted(each for each in addresses if not each.startswith(own)))


def check_checkpoint_path(path: Path, *, timeout_s: float = _PATH_TIMEOUT_S) -> CheckpointPath:
    """Return whether this process can use a directory. A file system that does not answer in time counts as absent."""
    found = [CheckpointPath(str(path), False, False, 0)]

    def check() -> None:
        with suppress(OSError):  # it does not exist, or the file system fails
            status = os.statvfs(path)
            is_writable = os.access(path, os.W_OK | os.X_OK) and not status.f_flag & os.ST_RDONLY
            if path.is_dir():
                found[0] = CheckpointPath(str(path), True, is_writable, status.f_bavail * status.f_frsize)

    thread = threading.Thread(target=check, name=f"check {path}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return found[0]
