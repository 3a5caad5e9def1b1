"""GPU models and sharing of nodes by the labels of GPU feature discovery."""

from __future__ import annotations

import pytest

from scheduler.kubernetes.gpu_labels import GpuSharing, NodeGpus, find_gpu_model, parse_node_gpus
from scheduler.solver.profiles.catalog import parse_gpu

PRODUCTS = {
    "Tesla-T4": "t4",
    "Tesla-V100-SXM2-32GB": "v100-32g",
    "NVIDIA-A100-SXM4-80GB": "a100-80g",
    "NVIDIA-A100-80GB-PCIe": "a100-80g-pcie",
    "NVIDIA-A10G": "a10g",
    "NVIDIA-H100-NVL": "h100-94g-nvl",
    "NVIDIA-H20": "h20-96g",
    "NVIDIA-B200": "b200",
    "Tesla-V100-SXM2-16GB": "v100-16g",
    "AMD-Instinct-MI300X": "mi300x",
    "NVIDIA-H100-80GB-HBM3": "h100-80g",
    "NVIDIA-H200": "h200",
    "NVIDIA-L40S": "l40s",
}
ESTIMATED = {
    "NVIDIA-GH200-480GB": ("gh200-480gb", 989e12),
    "NVIDIA-A30": ("a30-24g", 165e12),
    "NVIDIA-A40": ("a40-45g", 149.7e12),
    "NVIDIA-L40": ("l40-45g", 362e12),
    "NVIDIA-RTX-A6000": ("rtx-a6000-48g", 154.8e12),
    "NVIDIA-RTX-6000-Ada-Generation": ("rtx-6000-ada-generation-48g", 364e12),
    "Quadro-RTX-8000": ("quadro-rtx-8000-47g", 130.5e12),
}
"""Name of the estimated profile, and the datasheet's dense fp16 or bf16 peak in operations per second."""


def labels(product: str, **more: str) -> dict[str, str]:
    return {"nvidia.com/gpu.product": product} | {f"nvidia.com/gpu.{name}": text for name, text in more.items()}


@pytest.mark.parametrize(("product", "profile"), PRODUCTS.items())
def test_a_product_with_a_profile_is_known(product: str, profile: str) -> None:
    model = find_gpu_model(parse_node_gpus(labels(product)))
    assert model is not None
    assert (model.name, model.estimate) == (profile, "")


@pytest.mark.parametrize(("product", "expected"), ESTIMATED.items())
def test_a_common_product_without_a_profile_is_estimated_from_its_datasheet(
    product: str, expected: tuple[str, float]
) -> None:
    model = find_gpu_model(parse_node_gpus(labels(product)))
    assert model is not None
    profile = parse_gpu(model.estimate)
    assert (model.name, profile.gpu, profile.estimated) == (expected[0], expected[0], True)
    assert profile.peak_flops_per_s == pytest.approx(expected[1], rel=0.2)


def test_an_unknown_product_is_estimated_from_memory_and_compute_capability() -> None:
    gpus = parse_node_gpus(labels("NVIDIA-Z900", memory="81920", **{"compute.major": "8", "compute.minor": "0"}))
    model = find_gpu_model(gpus)
    assert model is not None
    assert (model.name, model.memory_bytes) == ("z900-80g", 80 * 2**30)
    assert parse_gpu(model.estimate).peak_flops_per_s == pytest.approx(312e12, rel=0.01)


def test_without_a_product_nothing_is_estimated() -> None:
    assert find_gpu_model(parse_node_gpus(labels("", memory="81920"))) is None


@pytest.mark.parametrize(
    ("product", "name", "gibibytes"),
    [
        ("NVIDIA-B300-SXM6-AC", "b300-sxm6-ac-262g", 262),
        ("NVIDIA-GB300", "gb300-262g", 262),
        ("NVIDIA-L20", "l20-44g", 44),
        ("NVIDIA-A16", "a16-15g", 15),
        ("NVIDIA-RTX-A5000", "rtx-a5000-23g", 23),
        ("NVIDIA-GB10", "gb10-96g", 96),
        ("Tesla-K80", "k80-11g", 11),
        ("NVIDIA-X100-96GB-HBM4", "x100-96gb-hbm4", 91.2),
        ("NVIDIA-Z900", "z900-8g", 8),
    ],
)
def test_memory_without_a_label_is_assumed_by_the_product(product: str, name: str, gibibytes: float) -> None:
    model = find_gpu_model(parse_node_gpus(labels(product)))
    assert model is not None
    assert (model.name, round(model.memory_bytes / 2**30, 1)) == (name, gibibytes)
    assert parse_gpu(model.estimate).estimated


def test_a_named_profile_overrides_the_product_and_must_exist() -> None:
    gpus = parse_node_gpus(labels("NVIDIA-B200") | {"ebbtide.dev/gpu": "t4"})
    for pool_gpu, name in (("", "t4"), ("l4", "l4")):
        model = find_gpu_model(gpus, pool_gpu=pool_gpu)
        assert model is not None
        assert model.name == name
    assert find_gpu_model(gpus, pool_gpu="b200x") is None


@pytest.mark.parametrize(
    ("found", "sharing"),
    [
        (labels("NVIDIA-H100-80GB-HBM3"), GpuSharing.WHOLE),
        (labels("NVIDIA-H100-80GB-HBM3", replicas="1", **{"sharing-strategy": "none"}), GpuSharing.WHOLE),
        (labels("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", memory="9856"), GpuSharing.MIG),
        (labels("NVIDIA-H100-80GB-HBM3-SHARED", replicas="4"), GpuSharing.TIME_SLICED),
        (labels("NVIDIA-H100-80GB-HBM3", replicas="4", **{"sharing-strategy": "time-slicing"}), GpuSharing.TIME_SLICED),
        (labels("NVIDIA-H100-80GB-HBM3", replicas="4", **{"sharing-strategy": "mps"}), GpuSharing.MPS),
        (labels("NVIDIA-H100-80GB-HBM3", replicas="x" * 99), GpuSharing.WHOLE),
    ],
)
def test_partitioned_and_shared_gpus_are_recognised(found: dict[str, str], sharing: GpuSharing) -> None:
    gpus = parse_node_gpus(found)
    assert gpus == NodeGpus(product="NVIDIA-H100-80GB-HBM3", sharing=sharing)
