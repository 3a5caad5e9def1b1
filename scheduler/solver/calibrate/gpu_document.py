"""The JSON form of a hardware profile, written: what `parse_gpu` reads, every figure with unit and source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from scheduler.solver.calibrate.constants import unit_of
from scheduler.solver.profiles.hardware_profile import HardwareProfile

_NOT_RATIOS = {"precision": "number format", "dimensions": "names", "expert_priority": "true or false"}


def gpu_document(hardware: HardwareProfile, *, source: str, sources: Mapping[str, str]) -> str:
    """`hardware` as JSON text; `sources` names that of a figure by field, `source` that of all others."""
    document: dict[str, Any] = {"gpu": hardware.gpu}
    for field in (each.name for each in fields(HardwareProfile) if each.name not in ("gpu", "collectives")):
        value = getattr(hardware, field)
        document[field] = {
            "value": sorted(value) if isinstance(value, frozenset) else value,
            "unit": _NOT_RATIOS.get(field) or unit_of(field),
            "source": sources.get(field, source),
        }
    if hardware.collectives:
        tables = [
            {"collective": table.collective, "ranks": table.ranks, "points": [list(point) for point in table.points]}
            for table in hardware.collectives
        ]
        document["collectives"] = {"value": tables, "unit": "[bytes, s]", "source": source}
    return json.dumps(document, indent=2) + "\n"
