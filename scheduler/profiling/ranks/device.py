"""The device of a rank: CPU, NVIDIA or AMD GPU, or Ascend NPU, under one interface."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import platform
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import ModuleType

import psutil
import torch
import torch.distributed as dist

_BATCH_S = 0.03
"""Calls are timed in batches at least this long, so that neither the clock nor synchronization matters."""

_CALLS_MAX = 512
_TIMEOUT_S = 120.0
_KILO = 1024


class Device:
    """One device. `torch_name` is such as `cuda:0`; ROCm devices have CUDA's names in torch.

    Attributes:
        kind: `cpu`, `cuda`, `rocm` or `npu`.
        backend: of collectives on this device.
        compute_dtype: of matrix products.
    """

    def __init__(self, kind: str, index: int) -> None:
        """Select the device.

        Raises:
            ValueError: torch has no such device.
        """
        self.kind, self.index = kind, index
        self._accelerator: ModuleType | None = None
        if kind == "npu":
            self._accelerator = importlib.import_module("torch_npu").npu  # Huawei's extension of torch
        elif kind in ("cuda", "rocm"):
            self._accelerator = torch.cuda
        self.backend = {"cpu": "gloo", "npu": "hccl"}.get(kind, "nccl")
        self.type = {"rocm": "cuda"}.get(kind, kind)
        self.torch_name = kind if kind == "cpu" else f"{self.type}:{index}"
        if self._accelerator is not None:
            found = self._accelerator.device_count()
            if index >= found:
                raise ValueError(f"--ranks needs device {index}, but torch finds {found} devices of kind {kind}.")
            self._accelerator.set_device(index)
        else:
            torch.set_num_threads(1)  # as the reference trainer
        self.compute_dtype = self._choose_dtype()

    def _choose_dtype(self) -> torch.dtype:
        if self._accelerator is None:
            return torch.float32
        has_bf16 = self.kind != "cuda" or torch.cuda.get_device_capability(self.index) >= (8, 0)
        return torch.bfloat16 if has_bf16 else torch.float16

    @property
    def precision(self) -> str:
        return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.compute_dtype]

    @property
    def name(self) -> str:
        """The product, as the driver or the operating system calls it."""
        if self._accelerator is not None:
            return str(self._accelerator.get_device_name(self.index))
        with suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()

    @property
    def memory_bytes(self) -> int:
        """Memory of the device; of a CPU rank, its share of the machine's."""
        if self._accelerator is not None:
            return int(self._accelerator.mem_get_info()[1])
        return psutil.virtual_memory().total // int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def software(self) -> str:
        toolkit = {"cuda": torch.version.cuda, "rocm": torch.version.hip}.get(self.kind)
        return f"torch {torch.__version__}" + (f", {self.kind} {toolkit}" if toolkit else "")

    def synchronize(self) -> None:
        if self._accelerator is not None:
            self._accelerator.synchronize()

    def release_memory(self) -> None:
        """Return all memory that no tensor holds to the device or the operating system."""
        gc.collect()
        if self._accelerator is not None:
            self._accelerator.empty_cache()
            return
        with suppress(OSError, AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)

    def reset_peak(self) -> None:
        """Reset the peak of memory, where the operating system can."""
        if self._accelerator is not None:
            self._accelerator.reset_peak_memory_stats()
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def measure_peaks(self) -> dict[str, float]:
        """Return the peak of the process: what torch reserved and allocated on the device, or resident memory."""
        if self._accelerator is not None:
            return {
                "peak_bytes": float(self._accelerator.max_memory_reserved()),
                "allocated_bytes": float(self._accelerator.max_memory_allocated()),
            }
        return {"peak_bytes": float(_read_peak_resident_bytes())}

    def measure_context_bytes(self) -> int:
        """Return what the process takes of the device's memory beside torch's tensors and its allocator's cache."""
        if self._accelerator is None:
            return psutil.Process().memory_info().rss
        free, total = self._accelerator.mem_get_info()
        return int(total - free - self._accelerator.memory_reserved())

    def time_calls(self, call: Callable[[], object], *, batches: int = 5) -> dict[str, float]:
        """Return the median seconds of a call, and the spread of the middle half of the batches as a share of it."""
        call()
        self.synchronize()
        started_s = time.perf_counter()
        call()
        self.synchronize()
        once_s = max(time.perf_counter() - started_s, 1e-7)
        calls = max(1, min(_CALLS_MAX, round(_BATCH_S / once_s)))
        batch_count = batches if calls > 1 or once_s < _BATCH_S * 10 else max(2, batches // 2)
        times_s = sorted(self._time_batch(call, calls) for _ in range(batch_count))
        middle_s = median(times_s)
        quarter = len(times_s) // 4
        return {"time_s": middle_s, "spread": (times_s[-1 - quarter] - times_s[quarter]) / middle_s}

    def _time_batch(self, call: Callable[[], object], calls: int) -> float:
        started_s = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        return (time.perf_counter() - started_s) / calls


def join_ranks(device: Device, *, store: Path, rank: int, world_size: int) -> None:
    """Make the default process group of all ranks of this machine, over a store in a file."""
    if device.backend == "gloo" and platform.system() == "Linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        device.backend,
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
        device_id=torch.device(device.torch_name) if device.backend == "nccl" else None,
    )


def _read_peak_resident_bytes() -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * _KILO
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else _KILO)
