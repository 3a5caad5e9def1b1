"""GPUs as ranks select and open them, for the makers' drivers as their documentation describes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.agent.gpu_selection import MachineGpus, find_vendor
from scheduler.agent.rank_environment import GpuVendor
from scheduler.domain.machine import GpuDevice

A100 = GpuDevice(0, "NVIDIA A100-SXM4-80GB", "GPU-a", 80, "8.0", minor=4)
MIG = GpuDevice(0, "NVIDIA A100 MIG 1g.10gb", "MIG-a", 10, "8.0", minor=4, capability_minors=(12, 13))
MI300 = GpuDevice(0, "AMD Instinct MI300X", "GPU-b", 192, "gfx942", minor=129)
ASCEND = GpuDevice(0, "ascend-910b", "", 64)


def with_index(gpu: GpuDevice, index: int, uuid: str, minor: int | None = None) -> GpuDevice:
    return GpuDevice(index, gpu.name, uuid, gpu.memory_bytes, gpu.architecture, minor=minor)


@pytest.mark.parametrize(
    ("gpu", "vendor"),
    [
        (A100, GpuVendor.NVIDIA),
        (MIG, GpuVendor.NVIDIA),
        (GpuDevice(0, "Tesla K80", "GPU-k", 12), GpuVendor.NVIDIA),
        (MI300, GpuVendor.AMD),
        (GpuDevice(0, "AMD GPU", "GPU-b", 1), GpuVendor.AMD),
        (GpuDevice(0, "stated", "", 1, "gfx90a"), GpuVendor.AMD),
        (ASCEND, GpuVendor.ASCEND),
        (GpuDevice(0, "cpu", "", 0), None),
        (GpuDevice(0, "l4", "", 0), None),
    ],
)
def test_vendor_follows_from_what_the_driver_reports(gpu: GpuDevice, vendor: GpuVendor | None) -> None:
    assert find_vendor(gpu) is vendor


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    names = ["nvidiactl", "kfd", "davinci_manager", "davinci0", "davinci1", "dri/renderD128", "dri/renderD129"]
    names += [*(f"nvidia{at}" for at in range(6)), *(f"nvidia-caps/nvidia-cap{at}" for at in (12, 13, 21))]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def list_names(gpus: MachineGpus, chosen: set[int], dev: Path) -> list[str]:
    return [str(path.relative_to(dev)) for path in gpus.list_devices(chosen, dev=dev)]


def test_device_nodes_have_the_drivers_numbers(dev: Path) -> None:
    gpus = MachineGpus([A100, with_index(A100, 1, "GPU-b", 2), with_index(A100, 2, "GPU-c")])
    assert gpus.ids == {0: "GPU-a", 1: "GPU-b", 2: "GPU-c"}
    assert list_names(gpus, {0}, dev) == ["nvidiactl", "nvidia4"]
    assert list_names(gpus, {1, 2}, dev) == ["nvidiactl", "nvidia2"]  # the unknown number is 2
    amd = MachineGpus([MI300, with_index(MI300, 1, "GPU-c", 128)])
    assert amd.ids == {0: "GPU-b", 1: "GPU-c"}
    assert list_names(amd, {1}, dev) == ["kfd", "dri/renderD128"]


def test_mig_instance_needs_the_nodes_of_its_gpu_and_its_capabilities(dev: Path) -> None:
    gpus = MachineGpus([MIG])
    assert gpus.ids == {0: "MIG-a"}
    assert list_names(gpus, {0}, dev) == [
        *("nvidiactl", "nvidia4", "nvidia-caps/nvidia-cap12", "nvidia-caps/nvidia-cap13"),
    ]


def test_gpus_without_identifiers_are_selected_by_index_among_all(dev: Path) -> None:
    ascend = MachineGpus([ASCEND, with_index(ASCEND, 1, "")])
    assert ascend.ids == {0: "0", 1: "1"}
    assert list_names(ascend, {1}, dev) == ["davinci_manager", "davinci0", "davinci1"]
    amd = MachineGpus([MI300, with_index(MI300, 1, "")])
    assert amd.ids == {0: "0", 1: "1"}
    assert list_names(amd, {0}, dev) == ["kfd", "dri/renderD129"]  # the unknown number is 129


def test_gpus_that_no_driver_has_need_no_nodes(dev: Path) -> None:
    slots = MachineGpus([GpuDevice(0, "cpu", "", 0)])
    assert (slots.vendor, slots.ids, list_names(slots, {0}, dev)) == (None, {}, [])
    assert MachineGpus([]).vendor is None
    stated = MachineGpus([A100, with_index(A100, 1, "")])
    assert stated.ids == {0: "GPU-a"}
    assert list_names(stated, {0}, dev) == ["nvidiactl", "nvidia4"]
