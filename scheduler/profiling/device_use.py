"""Whether other programs use the device, so that a measurement would show their share of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

_TIMEOUT_S = 30.0
_SAMPLE_S = 1.0
_NPU_COMMAND = ("npu-smi", "info", "-t", "usages", "-i")
_ROCM_COMMAND = ("rocm-smi", "--json", "--showuse", "--showpids")


class BusyDeviceError(RuntimeError):
    """Another program uses the device. The message names it and what to do."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Use of one device by others: processes by id, and its utilisation from 0 to 1."""

    device: str
    processes: tuple[int, ...]
    utilisation: float


def reject_busy_devices(kind: str, ranks: int, *, utilisation_max: float) -> None:
    """Check that no other program uses the first `ranks` devices.

    Raises:
        BusyDeviceError: a process runs on one of them, or it is busier than `utilisation_max`.
    """
    for use in read_device_use(kind, ranks):
        others = [each for each in use.processes if each != os.getpid()]
        if others:
            named = ", ".join(map(_describe_process, others))
            raise BusyDeviceError(
                f"{use.device} is used by {named}. Measurements would show only a share of it. "
                "Wait for the process to end, or measure another device with CUDA_VISIBLE_DEVICES or --device."
            )
        if use.utilisation > utilisation_max:
            raise BusyDeviceError(
                f"{use.device} is {use.utilisation:.0%} busy; at most {utilisation_max:.0%} is accepted. "
                "Wait until it is idle, or set --utilisation-max to measure anyway."
            )


def read_device_use(kind: str, ranks: int) -> Sequence[DeviceUse]:
    """Return the use of the first `ranks` devices, as drivers tell. Without the driver's tool nothing is known."""
    if kind == "cuda":
        return _read_nvidia_use(ranks)
    if kind == "rocm":
        return _read_rocm_use(ranks)
    if kind == "npu":
        return _read_npu_use(ranks)
    return [DeviceUse("the CPU", (), psutil.cpu_percent(_SAMPLE_S) / 100)]


def _read_nvidia_use(ranks: int) -> list[DeviceUse]:
    import pynvml

    pynvml.nvmlInit()
    try:
        found = []
        for index in _list_visible(ranks):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            processes = tuple(each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
            found.append(DeviceUse(f"GPU {index}", processes, pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100))
        return found
    finally:
        pynvml.nvmlShutdown()


def _list_visible(ranks: int) -> list[int]:
    """Return the driver's indices of the devices that torch numbers from 0; those by UUID are not translated."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(word.strip().isdecimal() for word in words):
        return [int(word) for word in words][:ranks]
    return list(range(ranks))


def _read_rocm_use(ranks: int) -> list[DeviceUse]:
    text = _run(_ROCM_COMMAND)
    return parse_rocm_use(text, ranks) if text else []


def parse_rocm_use(text: str, ranks: int) -> list[DeviceUse]:
    """Return the use of the first `ranks` cards from the JSON of `rocm-smi --showuse --showpids`."""
    document = json.loads(text)
    processes = tuple(int(key.removeprefix("PID")) for key in document.get("system", {}) if key.startswith("PID"))
    return [
        DeviceUse(f"GPU {number}", processes, float(document[card].get("GPU use (%)", 0)) / 100)
        for number, card in enumerate(sorted(name for name in document if name.startswith("card"))[:ranks])
    ]


def _read_npu_use(ranks: int) -> list[DeviceUse]:
    return [
        DeviceUse(f"NPU {number}", (), parse_npu_use(text))
        for number in range(ranks)
        if (text := _run((*_NPU_COMMAND, str(number))))
    ]


def parse_npu_use(text: str) -> float:
    """Return the utilisation of the AI cores from the lines of `npu-smi info -t usages`."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower().startswith("aicore usage rate") and value.strip().isdecimal():
            return int(value) / 100
    return 0.0


def _run(command: Sequence[str]) -> str:
    """Return the output of a driver's tool, or an empty text if there is none."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _describe_process(pid: int) -> str:
    try:
        return f"process {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"process {pid}"
