"""Throughput of a GPU model on training of an unknown model, by a roofline of its profile."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from scheduler.solver.profiles.catalog import list_estimated_gpus, list_gpu_names, load_gpu
from scheduler.solver.profiles.fleet_hardware import get_fleet_hardware
from scheduler.solver.profiles.hardware_profile import HardwareProfile

BYTES_PER_FLOP = 0.005
"""Memory traffic of a training step besides that of matrix products, in bytes per floating-point operation.

In BERT-large on V100, matrix products take 61% of the time; normalisation and element-wise operations, which are bound
by memory, take 39% with 0.2% of the operations (Ivanov et al., "Data Movement Is All You Need", MLSys 2021, arXiv
2007.00072, table 1). With the 100.75 TFLOP/s and 785 GB/s of the profile v100-32g, that is 0.39 / 0.61 x 785e9 /
100.75e12 = 0.005 bytes per operation."""


def compute_throughput(gpu: HardwareProfile) -> float:
    """Return the floating-point operations per second of a training step whose model is unknown.

    An operation takes 1 / compute + BYTES_PER_FLOP / bandwidth: kernels bound by compute and kernels bound by memory
    run one after the other (roofline model, Williams et al., CACM 52(4), 2009, for each kind of kernel). Communication
    is left out, because it depends on the number of GPUs. Only ratios of two models are meaningful.
    """
    compute_flops_per_s = gpu.peak_flops_per_s * gpu.efficiency
    return 1.0 / (1.0 / compute_flops_per_s + BYTES_PER_FLOP / gpu.memory_bandwidth_bytes_per_s)


def list_throughputs() -> Mapping[str, float]:
    """Return the throughput of each GPU model that has a profile, by name, in FLOP/s.

    Profiles are read once, and again when an estimated one is added or one is set on the service.

    Raises:
        ProfileError: a profile of your own is invalid.
    """
    return _compute_throughputs(tuple(list_estimated_gpus()), get_fleet_hardware().digest)


@cache
def _compute_throughputs(_estimated: tuple[str, ...], _fleet: str) -> Mapping[str, float]:
    return {gpu: compute_throughput(load_gpu(gpu)) for gpu in list_gpu_names()}
