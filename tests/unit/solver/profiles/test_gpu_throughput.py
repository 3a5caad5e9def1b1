"""Throughput of GPU models by the roofline of their profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.solver.profiles.catalog import list_gpu_names, load_gpu
from scheduler.solver.profiles.gpu_throughput import BYTES_PER_FLOP, compute_throughput, list_throughputs

FACTORS = st.floats(0.01, 100.0)


def test_shipped_models_have_the_order_of_their_generations() -> None:
    ordered = ["cpu", "t4", "l4", "v100-32g", "l40s", "a100-40g", "a100-80g", "h100-80g", "h200", "b200", "gb200"]
    throughputs = list_throughputs()
    assert sorted(ordered, key=throughputs.__getitem__) == ordered
    assert throughputs.keys() == set(list_gpu_names())


def test_matrix_products_take_61_percent_of_a_step_on_v100() -> None:
    """The share in BERT-large (arXiv 2007.00072, table 1), from which the traffic of all other kernels follows."""
    gpu = load_gpu("v100-32g")
    assert compute_throughput(gpu) / (gpu.peak_flops_per_s * gpu.efficiency) == pytest.approx(0.61, abs=0.005)


@given(compute=FACTORS, bandwidth=FACTORS)
def test_throughput_lies_between_the_ratios_of_compute_and_bandwidth(compute: float, bandwidth: float) -> None:
    gpu = load_gpu("v100-32g")
    other = replace(
        gpu,
        peak_flops_per_s=gpu.peak_flops_per_s * compute,
        memory_bandwidth_bytes_per_s=gpu.memory_bandwidth_bytes_per_s * bandwidth,
    )
    ratio = compute_throughput(other) / compute_throughput(gpu)
    assert min(compute, bandwidth) * (1 - 1e-9) <= ratio <= max(compute, bandwidth) * (1 + 1e-9)
    assert compute_throughput(other) <= other.memory_bandwidth_bytes_per_s / BYTES_PER_FLOP
