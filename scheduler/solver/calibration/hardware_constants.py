"""The constants of a HardwareProfile that measured runs can determine, and the JSON text of a fitted profile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from scheduler.solver.instance import Floats
from scheduler.solver.profiles.hardware_profile import HardwareProfile
from scheduler.solver.profiles.profile_document import ProfileError

_UNITS = {
    "_flops_per_s": "flop/s",
    "_bytes_per_s": "bytes/s",
    "_bytes": "bytes",
    "_s_per_parameter": "s/parameter",
    "_s": "s",
}
_SPECIAL_UNITS = {
    "attention_generation": "generation",
    "precision": "number format",
    "precisions": "number formats",
    "dimensions": "names",
    "expert_priority": "true or false",
}


@dataclass(frozen=True, slots=True)
class FittableConstant:
    """A constant with its prior and its limits.

    `prior_sd` is the standard deviation of the logarithm of the true value around that of the given profile. The widths
    are judgment: rates of computation and of links within a node are known to about a third, network rates and the
    cost of unaligned columns to a half, and start-up times depend most on the software.
    """

    name: str
    prior_sd: float
    upper: float = np.inf
    lower: float = 0.0


CONSTANTS = {
    constant.name: constant
    for constant in (
        FittableConstant("efficiency", 0.3, upper=1.0),
        FittableConstant("attention_efficiency", 0.5, upper=1.0),
        FittableConstant("memory_bandwidth_bytes_per_s", 0.3),
        FittableConstant("launch_s", 0.7),
        FittableConstant("intra_bandwidth_bytes_per_s", 0.3),
        FittableConstant("intra_latency_s", 1.0),
        FittableConstant("inter_bandwidth_bytes_per_s", 0.5),
        FittableConstant("inter_latency_s", 0.5),
        FittableConstant("iteration_overhead_s", 1.0),
        FittableConstant("unaligned_slowdown", 0.5, lower=1.0),
        FittableConstant("overlap_coefficient", 0.2, lower=1.0),
        FittableConstant("gradient_overlap", 1.0, upper=1.0),
        FittableConstant("host_bandwidth_bytes_per_s", 0.5),
        FittableConstant("host_optimizer_s_per_parameter", 0.5),
    )
}
DEFAULT_CONSTANTS = tuple(CONSTANTS)[:10]
"""The constants that every training run depends on; they are fitted unless the caller names others."""


def get_unit(name: str) -> str:
    """Return the unit of a profile field, which follows from the end of its name."""
    return next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "ratio")


@dataclass(frozen=True, slots=True, eq=False)
class ConstantSpace:
    """Logarithms of some constants around those of a profile: arrays [C], in the order of `names`."""

    names: tuple[str, ...]
    center: Floats
    prior_sd: Floats
    lower: Floats
    upper: Floats

    @classmethod
    def from_profile(cls, hardware: HardwareProfile, names: tuple[str, ...] = ()) -> ConstantSpace:
        """Return the space of the constants `names`, or of the default ones that are not 0 in `hardware`.

        Raises:
            ProfileError: a name is unknown or given twice, or its value is 0 in `hardware`.
        """
        for name in names:
            if name not in CONSTANTS:
                raise ProfileError(f"constant {name!r} is unknown; allowed are {', '.join(CONSTANTS)}")
            if names.count(name) > 1:
                raise ProfileError(f"constant {name} is given {names.count(name)} times; give it once")
            if not getattr(hardware, name):
                raise ProfileError(f"{name} is 0 in the profile of {hardware.gpu}; it must be above 0 to be fitted")
        chosen = [CONSTANTS[name] for name in names or DEFAULT_CONSTANTS if getattr(hardware, name)]
        with np.errstate(divide="ignore"):
            least = np.log([constant.lower for constant in chosen])
        return cls(
            names=tuple(constant.name for constant in chosen),
            center=np.log([getattr(hardware, constant.name) for constant in chosen]),
            prior_sd=np.array([constant.prior_sd for constant in chosen]),
            lower=least,
            upper=np.log([constant.upper for constant in chosen]),
        )

    def apply(self, hardware: HardwareProfile, point: Floats) -> HardwareProfile:
        """Return `hardware` with the constants at `point`, limited against rounding errors."""
        limited: dict[str, Any] = {}
        for name, value in zip(self.names, np.exp(point).tolist(), strict=True):
            limited[name] = min(max(value, CONSTANTS[name].lower), CONSTANTS[name].upper)
        return replace(hardware, **limited)


_WRITTEN_APART = ("gpu", "collectives", "kept_bytes")
"""Fields without an entry like the others: the name, tables, and memory that sleeping replicas keep in a fleet."""


def format_gpu_document(hardware: HardwareProfile, *, source: str, sources: Mapping[str, str]) -> str:
    """Return `hardware` as JSON text that `parse_gpu` reads, with unit and source of every value.

    Args:
        source: of all values that are not in `sources`.
        sources: source by field name.
    """
    document: dict[str, Any] = {"gpu": hardware.gpu}
    for field in (each.name for each in fields(HardwareProfile) if each.name not in _WRITTEN_APART):
        value = getattr(hardware, field)
        document[field] = {
            "value": sorted(value) if isinstance(value, frozenset) else value,
            "unit": _SPECIAL_UNITS.get(field) or get_unit(field),
            "source": sources.get(field, source),
        }
    if hardware.collectives:
        tables = [
            {"collective": table.collective, "ranks": table.ranks, "points": [list(point) for point in table.points]}
            for table in hardware.collectives
        ]
        document["collectives"] = {"value": tables, "unit": "[bytes, s]", "source": source}
    return json.dumps(document, indent=2) + "\n"
