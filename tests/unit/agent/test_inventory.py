"""Inventory of a machine: what NVML, rocm-smi and the operating system report, and what the operator states."""

# FakeNvml has the names of the vendor's library.
# ruff: noqa: N802
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.agent.inventory import (
    InventoryOverrides,
    apply_overrides,
    check_checkpoint_path,
    detect_inventory,
    list_network_interfaces,
    parse_rocm_json,
    read_nvml,
    select_granted_gpus,
)
from scheduler.domain.machine import GpuDevice, GpuLink, LinkKind, NetworkInterface

L4 = GpuDevice(0, "NVIDIA L4", "GPU-0", 24 * 10**9, "8.9", 7424)


class NvmlError(Exception):
    """What the calls of FakeNvml raise that its GPUs do not support."""


class FakeNvml:
    """NVML of a machine with `gpus` A100 of which the first two are linked; a handle is the index of a GPU."""

    NVMLError = NvmlError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_FEATURE_ENABLED, NVML_NVLINK_MAX_LINKS = 1, 18
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_TOPOLOGY_MULTIPLE, NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM = 20, 30, 40, 50

    def __init__(self, gpus: int = 3, *, is_old: bool = False, partitioned: tuple[int, ...] = ()) -> None:
        self._gpus, self._is_old, self._partitioned = gpus, is_old, partitioned

    def nvmlDeviceGetCount(self) -> int:
        return self._gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> SimpleNamespace:
        return SimpleNamespace(total=(20 if isinstance(handle, str) else 80) * 2**30)

    def nvmlDeviceGetMinorNumber(self, handle: int) -> int:
        if self._is_old:
            raise NvmlError
        return handle + 4

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if self._is_old:
            raise NvmlError
        return int(handle in self._partitioned), 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, number: int) -> str:
        if number not in (0, 3):
            raise NvmlError
        return f"{handle}/{number}"

    def nvmlDeviceGetUUID(self, handle: Any) -> bytes | str:
        return f"MIG-{handle}" if isinstance(handle, str) else b"GPU-6f0c"

    def nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:
        return int(handle[-1]) + 1

    def nvmlDeviceGetComputeInstanceId(self, handle: str) -> int:
        return 0

    def nvmlDeviceGetP2PStatus(self, first: int, second: int, _: int) -> int:
        return 0 if (first, second) == (0, 1) else 3

    def nvmlDeviceGetTopologyCommonAncestor(self, first: int, second: int) -> int:
        return {(0, 2): 30, (1, 2): 10}[first, second]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 12:
            raise NvmlError
        return 1

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return {1: 1410, 2: 1593}[kind]

    def __getattr__(self, name: str) -> Any:
        values = {
            "nvmlDeviceGetName": "NVIDIA A100-SXM4-80GB",
            "nvmlDeviceGetCudaComputeCapability": (8, 0),
            "nvmlDeviceGetNumGpuCores": 6912,
            "nvmlDeviceGetMemoryBusWidth": 5120,
            "nvmlDeviceGetPowerManagementDefaultLimit": 400_000,
            "nvmlDeviceGetMaxPcieLinkGeneration": 4,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
        }

        def read(*_: object) -> Any:
            if self._is_old and name != "nvmlDeviceGetName":
                raise NvmlError
            return values[name]

        return read


def test_nvml_reports_facts_and_topology() -> None:
    gpus, links = read_nvml(FakeNvml())
    assert gpus[2] == GpuDevice(
        2, "NVIDIA A100-SXM4-80GB", "GPU-6f0c", 80 * 2**30, "8.0", 6912, 1_410_000_000, 1_593_000_000, 5120, 400.0, 12,
        4, 16, minor=6,
    )  # fmt: skip
    assert links == (
        GpuLink(0, 1, LinkKind.NVLINK),
        GpuLink(0, 2, LinkKind.PCIE_HOST),
        GpuLink(1, 2, LinkKind.PCIE_SWITCH),
    )


def test_values_that_a_driver_does_not_report_are_unknown() -> None:
    [gpu], links = read_nvml(FakeNvml(1, is_old=True))
    assert (gpu.architecture, gpu.cores, gpu.memory_bus_bits, gpu.power_watts, links) == ("", 0, 0, 0.0, ())
    assert gpu.minor is None


def test_mig_instances_stand_for_their_gpu(tmp_path: Path) -> None:
    for place, minor in (("gi1", 12), ("gi1/ci0", 13), ("gi4", 21)):
        folder = tmp_path / "gpu5" / "mig" / place
        folder.mkdir(parents=True)
        (folder / "access").write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    gpus, links = read_nvml(FakeNvml(2, partitioned=(1,)), capabilities=tmp_path)
    assert [(gpu.index, gpu.uuid, gpu.minor, gpu.capability_minors) for gpu in gpus] == [
        (0, "GPU-6f0c", 4, ()), (1, "MIG-1/0", 5, (12, 13)), (2, "MIG-1/3", 5, (21,)),
    ]  # fmt: skip
    assert [(gpu.memory_bytes, gpu.cores, gpu.memory_bus_bits, gpu.nvlinks) for gpu in gpus[1:]] == [
        (20 * 2**30, 1728, 1280, 0)
    ] * 2
    assert {link.kind for link in links} == {LinkKind.SYSTEM}


ROCM_TEXT = """WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status
{"card1": {"Unique ID": "0x7f3a9c0d12e4b586", "Max Graphics Package Power (W)": "750.0",
"VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "297648128",
"Card Series": "AMD Instinct MI300X", "Card Model": "0x74a1", "Card Vendor": "Advanced Micro Devices, Inc. [AMD/ATI]",
"Card SKU": "M3000100", "PCI Bus": "0000:C1:00.0", "Subsystem ID": "0x74a1", "Node ID": "2", "GUID": "28851",
"GFX Version": "gfx942"},
"card2": {"Unique ID": "N/A", "Max Graphics Package Power (W)": "750.0", "VRAM Total Memory (B)": "206141652992",
"Card series": "AMD Instinct MI300X", "GFX Version": "gfx942"},
"system": {"(Topology) Weight between DRM devices 0 and 1": "15", "(Topology) Hops between DRM devices 0 and 1": "1",
"(Topology) Link type between DRM devices 0 and 1": "XGMI", "(Topology) Numa Node of device 0": "0"}}
"""
"""In the form of rocm_smi_lib, python_smi_tools/rocm_smi.py: showAllConcise and showTopology with --json."""


def test_rocm_smi_reports_cards_and_links(tmp_path: Path) -> None:
    for name in ("card1", "renderD129"):
        (tmp_path / "0000:c1:00.0" / "drm" / name).mkdir(parents=True)
    gpus, links = parse_rocm_json(ROCM_TEXT, pci=tmp_path)
    assert gpus[0] == GpuDevice(
        0, "AMD Instinct MI300X", "GPU-7f3a9c0d12e4b586", 206141652992, "gfx942", power_watts=750.0, minor=129
    )
    assert gpus[1].minor is None
    assert [(gpu.index, gpu.name, gpu.uuid) for gpu in gpus[1:]] == [(1, "AMD Instinct MI300X", "")]
    assert links == (GpuLink(0, 1, LinkKind.XGMI),)


@pytest.mark.parametrize("text", ["", "No AMD GPUs", "{not json"])
def test_other_output_of_rocm_smi_is_refused(text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        parse_rocm_json(text)


def test_stated_values_replace_detected_ones() -> None:
    detected = (L4, GpuDevice(1, "NVIDIA L4", "GPU-1", 24 * 10**9, "8.9", 7424))
    assert apply_overrides(detected, InventoryOverrides()) == detected
    assert [gpu.uuid for gpu in apply_overrides(detected, InventoryOverrides(gpus=1))] == ["GPU-0"]
    more = apply_overrides(detected, InventoryOverrides(gpus=3, gpu="l40s", gpu_memory_bytes=10**9))
    assert [(gpu.index, gpu.name, gpu.uuid, gpu.memory_bytes) for gpu in more] == [
        (0, "l40s", "GPU-0", 10**9), (1, "l40s", "GPU-1", 10**9), (2, "l40s", "", 10**9),
    ]  # fmt: skip


def test_gpus_without_a_driver_need_a_model() -> None:
    overrides = InventoryOverrides(gpus=2, gpu="cpu")
    assert apply_overrides((), overrides) == (GpuDevice(0, "cpu", "", 0), GpuDevice(1, "cpu", "", 0))
    assert overrides.names == ("gpus", "gpu")
    with pytest.raises(ValueError, match="--gpu MODEL"):
        apply_overrides((), InventoryOverrides(gpus=2))
    with pytest.raises(ValueError, match="--gpus"):
        InventoryOverrides(gpus=-1)


def write_interface(classes: Path, name: str, *, speed: str = "", state: str = "up", device: bool = True) -> Path:
    folder = classes / "net" / name
    folder.mkdir(parents=True)
    (folder / "operstate").write_text(f"{state}\n")
    (folder / "speed").write_text(f"{speed}\n")
    if device:
        (folder / "device").mkdir()
    return folder


def test_network_interfaces_that_are_up_are_listed(tmp_path: Path) -> None:
    write_interface(tmp_path, "eth0", speed="25000")
    write_interface(tmp_path, "eth1", speed="-1", state="down")
    write_interface(tmp_path, "eth2", speed="-1")
    write_interface(tmp_path, "docker0", speed="10000", device=False)
    write_interface(tmp_path, "lo", state="unknown")
    found = list_network_interfaces(tmp_path)
    assert found == (NetworkInterface("eth0", 25 * 10**9), NetworkInterface("eth2"))


def test_an_interface_without_hardware_counts_in_a_container(tmp_path: Path) -> None:
    write_interface(tmp_path, "eth0", speed="10000", device=False)
    assert list_network_interfaces(tmp_path) == (NetworkInterface("eth0", 10**10),)
    assert list_network_interfaces(tmp_path / "absent") == ()


def test_a_network_device_behind_an_rdma_port_counts_once(tmp_path: Path) -> None:
    write_interface(tmp_path, "eth0", speed="1000")
    write_interface(tmp_path, "roce0", speed="400000")
    for port, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        folder = tmp_path / "infiniband" / "mlx5_0" / "ports" / port
        folder.mkdir(parents=True)
        (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (folder / "state").write_text(f"{state}\n")
    (tmp_path / "infiniband" / "mlx5_0" / "device" / "net" / "roce0").mkdir(parents=True)
    found = list_network_interfaces(tmp_path)
    assert found == (NetworkInterface("mlx5_0:1", 400 * 10**9), NetworkInterface("eth0", 10**9))


def test_checkpoint_paths_are_tried(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    usable, absent, file = (check_checkpoint_path(path) for path in (tmp_path, tmp_path / "none", tmp_path / "file"))
    assert (usable.exists, usable.writable, usable.free_bytes > 0) == (True, True, True)
    for path in (absent, file):
        assert (path.exists, path.writable, path.free_bytes) == (False, False, 0)
    assert not check_checkpoint_path(Path("/proc/self")).writable


def test_this_machine_has_an_inventory(tmp_path: Path) -> None:
    inventory = detect_inventory(InventoryOverrides(gpus=2, gpu="cpu"), checkpoint_paths=[tmp_path])
    assert inventory.hostname
    assert inventory.cpus >= 1
    assert inventory.memory_bytes > 0
    assert [gpu.name for gpu in inventory.gpus] == ["cpu", "cpu"]
    assert inventory.overrides == ("gpus", "gpu")
    assert not any(address.startswith(("127.", "::1")) for address in inventory.addresses)
    assert [path.writable for path in inventory.checkpoint_paths] == [True]


def test_only_granted_gpus_are_offered_with_their_own_devices_and_links() -> None:
    gpus = [replace(L4, index=index, uuid=f"GPU-{index}", minor=index) for index in range(4)]
    links = [GpuLink(0, 1, LinkKind.NVLINK), GpuLink(1, 3, LinkKind.PCIE_HOST)]
    chosen, between = select_granted_gpus(gpus, links, (1, 3))
    assert [(gpu.index, gpu.uuid, gpu.minor) for gpu in chosen] == [(0, "GPU-1", 1), (1, "GPU-3", 3)]
    assert between == (GpuLink(0, 1, LinkKind.PCIE_HOST),)


def test_hidden_gpus_leave_all_that_the_driver_shows() -> None:
    gpus = (replace(L4, index=0), replace(L4, index=1))
    assert select_granted_gpus(gpus, (), (2, 3))[0] == gpus
    assert select_granted_gpus((), (), (0, 1)) == ((), ())
    with pytest.raises(ValueError, match="no GPU 3"):
        select_granted_gpus(gpus, (), (3,))
