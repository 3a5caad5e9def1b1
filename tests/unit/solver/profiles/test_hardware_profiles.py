"""The shipped GPU profiles, and the validation of GPU profiles."""

from __future__ import annotations

import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.solver.profiles.catalog import Dimension, Precision, ProfileError, list_gpu_names, load_gpu, parse_gpu
from scheduler.solver.profiles.hardware_profile import STREAMED_DIMENSIONS
from tools.gpu_presets import TARGET, build_presets, write_presets

DATASHEETS = {
    "t4": (320e9, 16e9),
    "v100-16g": (900e9, 150e9),
    "v100-32g": (900e9, 150e9),
    "a10g": (600e9, 32e9),
    "a100-40g": (1555e9, 300e9),
    "a100-40g-pcie": (1555e9, 32e9),
    "a100-80g": (2039e9, 300e9),
    "a100-80g-pcie": (1935e9, 32e9),
    "a800-80g": (2039e9, 200e9),
    "h100-80g": (3350e9, 450e9),
    "h100-80g-pcie": (2039e9, 64e9),
    "h100-94g-nvl": (3938e9, 64e9),
    "h800-80g": (3350e9, 200e9),
    "h20-96g": (4000e9, 450e9),
    "h200": (4800e9, 450e9),
    "b200": (8000e9, 900e9),
    "gb200": (8000e9, 900e9),
    "l40s": (864e9, 32e9),
    "l4": (300e9, 32e9),
    "rtx-4090": (1008e9, 32e9),
    "mi250x": (1638e9, 100e9),
    "mi300x": (5325e9, 448e9),
    "mi325x": (6000e9, 448e9),
    "ascend-910b": (1600e9, 196e9),
    "gaudi3": (3670e9, 525e9),
}
"""Bandwidth of the memory, and one way between the GPUs of a node, in bytes per second."""
NAMES = {"cpu", *DATASHEETS}
OPTIONS = ("collectives", "estimated", "precisions", "gpus_per_nic")
ENTRY_KEYS = ("value", "unit", "source", "collective", "ranks", "points")
TABLE = {"collective": "all_reduce", "ranks": 8, "points": [[1e6, 1e-4], [1e8, 1e-3]]}


def _document(name: str) -> dict[str, Any]:
    text = files("scheduler.solver.profiles").joinpath("data", "gpus", f"{name}.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def test_shipped_gpus_load_by_name() -> None:
    assert set(list_gpu_names()) == NAMES
    assert all(load_gpu(name).gpu == name for name in list_gpu_names())


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_shipped_figure_has_a_unit_and_a_source(name: str) -> None:
    figures = [entry for field, entry in _document(name).items() if field != "gpu"]
    assert all(set(entry) == {"value", "unit", "source"} and entry["source"] for entry in figures)


def test_no_gpu_reaches_more_than_its_datasheet_says() -> None:
    for name, (memory, link) in DATASHEETS.items():
        gpu = load_gpu(name)
        assert memory / 2 < gpu.memory_bandwidth_bytes_per_s <= memory, name
        assert link / 2 < gpu.intra_bandwidth_bytes_per_s <= link, name
        assert gpu.inter_bandwidth_bytes_per_s < gpu.intra_bandwidth_bytes_per_s, name


def test_gpus_without_bf16_train_in_fp16() -> None:
    assert {name for name in NAMES if load_gpu(name).precision is Precision.FP16} == {"t4", "v100-16g", "v100-32g"}


def test_derived_figures_are_those_of_the_measured_gpus() -> None:
    """EBBTIDE_GOLDEN=write rewrites them, as `python -m tools.gpu_presets` does."""
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        write_presets()
    assert {name: (TARGET / name).read_text(encoding="utf-8") for name in build_presets()} == build_presets()


def test_the_documentation_lists_the_shipped_gpus() -> None:
    text = (Path(__file__).parents[4] / "docs" / "how-to" / "plan-a-model.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^\| `([a-z0-9.-]+)` \| ([\d.]+) \| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE
    )
    profiles = {name: load_gpu(name) for name in DATASHEETS}
    assert listed == [
        (
            name,
            f"{profiles[name].memory_bytes / 1e9:g}",
            profiles[name].precision.value,
            f"{profiles[name].peak_flops_per_s / 1e12:g}",
            f"{memory / 1e9:g}",
            f"{link / 1e9:g}",
        )
        for name, (memory, link) in DATASHEETS.items()
    ]


def test_cpu_supports_everything_but_offload_in_fp32() -> None:
    cpu = load_gpu("cpu")
    assert cpu.dimensions == set(Dimension) - {Dimension.OFFLOAD, *STREAMED_DIMENSIONS}
    assert cpu.precision is Precision.FP32


def test_unknown_gpu_is_rejected_with_the_known_names() -> None:
    with pytest.raises(ProfileError, match=r"gpu is 'b9000'; allowed are a100-40g, a100-40g-pcie, a100-80g, "):
        load_gpu("b9000")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -1.0, 10**400, "fast", True, None])
@pytest.mark.parametrize(
    "field", ["peak_flops_per_s", "intra_bandwidth_bytes_per_s", "inter_latency_s", "memory_bytes"]
)
def test_invalid_gpu_figure_is_rejected_by_name(field: str, value: object) -> None:
    with pytest.raises(ProfileError, match=field):
        parse_gpu(json.dumps(_document("a100-80g") | {field: value}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak_flops_per_s": {"value": 312, "unit": "Tflop/s"}}, "peak_flops_per_s is in 'Tflop/s'; it must be in"),
        ({"efficiency": 1.5}, "efficiency is 1.5; it must be at most 1"),
        ({"gpu": ""}, "gpu is ''; it must be text that is not empty"),
        ({"gpu": None}, "gpu is None; it must be text that is not empty"),
        ({"memory_bytes": 80}, "memory_bytes is 80; it must be from 1e\\+08 to 1e\\+13 bytes"),
        ({"memory_bytes": 8.5e10 + 0.5}, "memory_bytes is 85000000000.5; it must be a whole number"),
        ({"reserve_bytes": 80_000_000_000}, "reserve_bytes is 80000000000; it must be less than memory_bytes"),
        ({"peak_flops_per_s": 312}, "peak_flops_per_s is 312; it must be from 1e\\+06 to 1e\\+18 flop/s"),
        (
            {"intra_bandwidth_bytes_per_s": 300},
            "intra_bandwidth_bytes_per_s is 300; it must be from 1000 to 1e\\+14 bytes/s",
        ),
        ({"inter_latency_s": 99.4}, "inter_latency_s is 99.4; it must be from 0 to 60 s"),
        ({"inter_latency_s": -1e-4}, "inter_latency_s is -0.0001; it must be a finite number above 0"),
        ({"efficiency": {"value": 0.5, "units": "ratio"}}, "efficiency: field 'units' is unknown"),
        ({"efficiency": {"unit": "ratio"}}, "efficiency: field 'value' is missing"),
        ({"gradient_overlap": 1.5}, "gradient_overlap is 1.5; it must be at most 1"),
        ({"overlap_coefficient": 0.9}, "overlap_coefficient is 0.9; it must be at least 1"),
        ({"unaligned_slowdown": 0.9}, "unaligned_slowdown is 0.9; it must be at least 1"),
        ({"gpus_per_nic": 0.5}, "gpus_per_nic is 0.5; it must be at least 1"),
        ({"launch_s": -1}, "launch_s is -1; it must be a finite number, 0 or above"),
        ({"host_bandwidth_bytes_per_s": 0}, "host_bandwidth_bytes_per_s is 0; it must be a finite number above 0"),
        ({"precision": "fp8"}, "precision is 'fp8'; allowed are bf16, fp16, fp32"),
        (
            {"precisions": ["fp16", "fp32"]},
            "precision is 'bf16', which the GPU does not support; allowed are fp16, fp32",
        ),
        ({"precisions": "bf16"}, "precisions is 'bf16'; allowed is a list of bf16, fp16, fp32"),
        ({"dimensions": ["data", "magic"]}, "dimensions is"),
        ({"dimensions": ["fsdp"]}, "dimensions must contain 'data'"),
        ({"expert_priority": 1}, "expert_priority is 1; it must be true or false"),
        ({"color": "green"}, "field 'color' is unknown"),
        ({"collectives": {}}, "collectives is {}; it must be a list of measured tables"),
        ({"collectives": [TABLE | {"collective": "gossip"}]}, "collective is 'gossip'; allowed are all_reduce"),
        ({"collectives": [TABLE | {"points": [[1, 2]]}]}, "points has 1 entries; at least 2 are needed"),
        ({"collectives": [TABLE | {"points": [[1, 2], [2, 1]]}]}, r"points must rise from \(1, 2\) to \(2, 1\)"),
        ({"collectives": [TABLE | {"points": [[1, 2], [2, float("nan")]]}]}, "points is nan; it must be a finite"),
        ({"collectives": [TABLE | {"points": [1, 2]}]}, "points is"),
        ({"collectives": [TABLE | {"ranks": 1}]}, "ranks is 1; it must be at least 2"),
        ({"collectives": [TABLE, TABLE]}, "more than one all_reduce over 8 ranks; keep one"),
    ],
)
def test_inconsistent_gpu_profile_is_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_gpu(json.dumps(_document("a100-80g") | change))


@pytest.mark.parametrize("text", ["{", "[]", '{"gpu": ' + "9" * 5000 + "}", "[" * 100_000])
def test_text_that_is_no_json_object_is_rejected(text: str) -> None:
    with pytest.raises(ProfileError, match="GPU profile"):
        parse_gpu(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ENTRY_KEYS), inner, max_size=3),
    max_leaves=6,
)


@given(field=st.sampled_from([*sorted(_document("a100-80g")), *OPTIONS, "colour"]), value=JSON)
def test_any_figure_is_accepted_or_rejected_with_the_name_of_its_field(field: str, value: object) -> None:
    """An accepted profile is one of a possible device, so that no cost overflows or divides by zero."""
    gpu, refusal = None, ""
    try:
        gpu = parse_gpu(json.dumps(_document("a100-80g") | {field: value}))
    except ProfileError as error:
        refusal = str(error)
    if gpu is None:
        assert field in refusal
        return
    assert gpu.plannable_bytes(gpu.memory_bytes) > 0
    assert 0 < gpu.efficiency <= 1
    assert min(gpu.memory_bandwidth_bytes_per_s, gpu.network_bandwidth_bytes_per_s(8)) > 0
    assert min(gpu.intra_latency_s, gpu.inter_latency_s, gpu.launch_s, gpu.iteration_overhead_s) >= 0


def test_measured_tables_are_parsed() -> None:
    gpu = parse_gpu(json.dumps(_document("a100-80g") | {"collectives": [TABLE]}))
    assert gpu.collectives[0].ranks == 8
    assert gpu.collectives[0].points == ((1e6, 1e-4), (1e8, 1e-3))


def test_plannable_and_occupied_bytes_are_inverse() -> None:
    gpu = load_gpu("a100-80g")
    plannable = gpu.plannable_bytes(gpu.memory_bytes)
    assert gpu.occupied_bytes(plannable) <= gpu.memory_bytes < gpu.occupied_bytes(plannable + 2)
