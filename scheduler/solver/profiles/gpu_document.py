"""The JSON form of a GPU profile.

A quantity is either a bare number or `{"value": ..., "unit": ..., "source": ...}`. The unit is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.solver.profiles.hardware_profile import (
    Collective,
    CollectiveTable,
    Dimension,
    HardwareProfile,
    Precision,
    require_plausible,
)
from scheduler.solver.profiles.profile_document import (
    ProfileError,
    parse_object,
    read_count,
    read_flag,
    read_name,
    read_number,
    require_fields,
    require_object,
    unwrap_value,
)

_GPU_FIELD_UNITS = {
    "memory_bytes": "bytes",
    "reserve_bytes": "bytes",
    "peak_flops_per_s": "flop/s",
    "efficiency": "ratio",
    "memory_bandwidth_bytes_per_s": "bytes/s",
    "intra_bandwidth_bytes_per_s": "bytes/s",
    "intra_latency_s": "s",
    "inter_bandwidth_bytes_per_s": "bytes/s",
    "inter_latency_s": "s",
    "overlap_coefficient": "ratio",
}
_GPU_OPTIONAL_UNITS = {
    "reserve_ratio": "ratio",
    "attention_efficiency": "ratio",
    "attention_generation": "generation",
    "unaligned_slowdown": "ratio",
    "launch_s": "s",
    "iteration_overhead_s": "s",
    "intra_hop_s": "s",
    "inter_hop_s": "s",
    "gradient_overlap": "ratio",
    "gpus_per_nic": "ratio",
    "expert_imbalance": "ratio",
    "host_bandwidth_bytes_per_s": "bytes/s",
    "host_optimizer_s_per_parameter": "s/parameter",
    "host_memory_bytes": "bytes",
    "fp8_speedup": "ratio",
    "prediction_error": "ratio",
}


GPU_UNITS = {**_GPU_FIELD_UNITS, **_GPU_OPTIONAL_UNITS}
"""Units of the quantities in a GPU profile, by field."""
GPU_REQUIRED_FIELDS = ("gpu", "precision", "dimensions", *_GPU_FIELD_UNITS)
GPU_FIELDS = (*GPU_REQUIRED_FIELDS, *_GPU_OPTIONAL_UNITS, "expert_priority", "estimated", "collectives", "precisions")


def parse_gpu(json_text: str) -> HardwareProfile:
    """A hardware profile from its JSON form.

    Raises:
        ProfileError: malformed JSON, a missing or unknown field, or a value that is out of range; the message names it.
    """
    document, owner = parse_object(json_text, "GPU profile"), "GPU profile"
    require_fields(document, owner, GPU_REQUIRED_FIELDS, GPU_FIELDS)
    values: dict[str, Any] = {
        field: (read_count if unit == "bytes" else read_number)(document, field, unit, owner)
        for field, unit in GPU_UNITS.items()
        if field in document
    }
    profile = HardwareProfile(
        gpu=read_name(document, "gpu", owner),
        precision=_parse_precision(document),
        precisions=_parse_precisions(document),
        dimensions=_parse_dimensions(document),
        expert_priority=read_flag(document, "expert_priority", owner),
        estimated=read_flag(document, "estimated", owner),
        collectives=_parse_collectives(unwrap_value(document.get("collectives", []))),
        **values,
    )
    require_plausible(profile)
    return profile


def _parse_precision(document: Mapping[str, Any]) -> Precision:
    value = unwrap_value(document["precision"])
    if value not in list(Precision):
        raise ProfileError(f"GPU profile: precision is {value!r}; allowed are {', '.join(Precision)}")
    return Precision(value)


def _parse_precisions(document: Mapping[str, Any]) -> frozenset[Precision]:
    value = unwrap_value(document.get("precisions", []))
    if not isinstance(value, list) or any(item not in list(Precision) for item in value):
        raise ProfileError(f"GPU profile: precisions is {value!r}; allowed is a list of {', '.join(Precision)}")
    return frozenset(Precision(item) for item in value)


def _parse_dimensions(document: Mapping[str, Any]) -> frozenset[Dimension]:
    value = unwrap_value(document["dimensions"])
    if not isinstance(value, list) or any(item not in list(Dimension) for item in value):
        raise ProfileError(f"GPU profile: dimensions is {value!r}; allowed is a list of {', '.join(Dimension)}")
    return frozenset(Dimension(item) for item in value)


def _parse_collectives(tables: Any) -> tuple[CollectiveTable, ...]:
    """From `[{"collective": "all_reduce", "ranks": 8, "points": [[bytes, seconds], ...]}, ...]`."""
    owner = "GPU profile: collectives"
    if not isinstance(tables, list):
        raise ProfileError(f"{owner} is {tables!r}; it must be a list of measured tables")
    found = []
    for table in tables:
        given = require_object(table, owner)
        require_fields(given, owner, {"collective", "ranks", "points"})
        points = given["points"]
        if given["collective"] not in list(Collective):
            raise ProfileError(f"{owner}: collective is {given['collective']!r}; allowed are {', '.join(Collective)}")
        if not isinstance(points, list) or any(not isinstance(point, list) or len(point) != 2 for point in points):
            raise ProfileError(f"{owner}: points is {points!r}; it must be a list of [bytes, seconds]")
        pairs = tuple((_parse_number(size, owner), _parse_number(seconds, owner)) for size, seconds in points)
        found.append(
            CollectiveTable(Collective(given["collective"]), read_count(given, "ranks", "ranks", owner), pairs)
        )
    return tuple(found)


def _parse_number(value: Any, owner: str) -> float:
    return read_number({"points": value}, "points", "", owner)
