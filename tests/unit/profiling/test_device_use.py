"""Busy devices are refused by name."""

from __future__ import annotations

import os

import pytest

from scheduler.profiling import device_use
from scheduler.profiling.device_use import BusyDeviceError, DeviceUse, parse_npu_use, parse_rocm_use

ROCM = """{"card0": {"GPU use (%)": "87", "PCI Bus": "0"}, "card1": {"GPU use (%)": "0"},
 "system": {"PID4711": "python, 1, 4096, 0, 0"}}"""
NPU = """
    NPU ID                         : 0
    Aicore Usage Rate(%)           : 42
    HBM Usage Rate(%)              : 3
"""


@pytest.mark.parametrize(
    ("use", "is_busy"),
    [
        (DeviceUse("GPU 0", (), 0.0), False),
        (DeviceUse("GPU 0", (os.getpid(),), 0.1), False),
        (DeviceUse("GPU 0", (os.getppid(),), 0.0), True),
        (DeviceUse("GPU 0", (), 0.3), True),
    ],
)
def test_a_busy_device_is_refused(monkeypatch: pytest.MonkeyPatch, use: DeviceUse, is_busy: bool) -> None:
    monkeypatch.setattr(device_use, "read_device_use", lambda kind, ranks: [use])
    if not is_busy:
        device_use.reject_busy_devices("cuda", 1, utilisation_max=0.2)
        return
    with pytest.raises(BusyDeviceError, match="GPU 0"):
        device_use.reject_busy_devices("cuda", 1, utilisation_max=0.2)


def test_tools_of_other_vendors_are_read() -> None:
    assert parse_rocm_use(ROCM, 2) == [DeviceUse("GPU 0", (4711,), 0.87), DeviceUse("GPU 1", (4711,), 0.0)]
    assert parse_rocm_use(ROCM, 1)[0].utilisation == 0.87
    assert (parse_npu_use(NPU), parse_npu_use("")) == (0.42, 0.0)


def test_the_load_of_a_cpu_is_a_share() -> None:
    (use,) = device_use.read_device_use("cpu", 4)
    assert 0 <= use.utilisation <= 1
    assert use.processes == ()
