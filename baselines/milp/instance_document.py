"""Instances as JSON, without loss of precision, so that a solve can be repeated elsewhere.

    {"version": 1, "instances": [{"types": [0, 0, 1], ..., "costs": [{"layouts": [0, 1], "time_s": [[...]], ...}]}]}

Arrays are nested lists in the shapes that `Instance` and `StageCosts` define. Infinity is the text "inf".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from math import inf, isnan
from typing import Any

import numpy as np

from scheduler.solver.instance import Instance, StageCosts
from scheduler.solver.profiles.profile_document import ProfileError, parse_object, require_fields, require_object

VERSION = 1
_INTEGER_FIELDS = {
    "types", "counts", "capacity_bytes", "micro_batches", "interleave", "borders",
    "layouts", "state_bytes", "kept_bytes", "working_bytes", "stage_layers", "host_bytes", "host_kept_bytes",
    "host_capacity_bytes",
}  # fmt: skip
_OPTIONAL_COST_FIELDS = ("host_bytes", "host_kept_bytes")
_COST_FIELDS = tuple(field.name for field in fields(StageCosts) if field.name not in _OPTIONAL_COST_FIELDS)
_OPTIONAL_FIELDS = ("stage_layers", "host_capacity_bytes")
_INSTANCE_FIELDS = tuple(field.name for field in fields(Instance) if field.name not in ("costs", *_OPTIONAL_FIELDS))


def format_instances(instances: Sequence[Instance]) -> str:
    """Return the JSON text of `instances`, with one array per line."""
    listed = [
        {name: _to_plain_json(getattr(instance, name)) for name in _INSTANCE_FIELDS}
        | {"costs": [_format_costs(costs) for costs in instance.costs]}
        | {name: _to_plain_json(getattr(instance, name)) for name in _OPTIONAL_FIELDS if getattr(instance, name)}
        for instance in instances
    ]
    return _format_json({"version": VERSION, "instances": listed}, "") + "\n"


def _format_costs(costs: StageCosts) -> dict[str, Any]:
    optional = (name for name in _OPTIONAL_COST_FIELDS if getattr(costs, name) is not None)
    return {name: _to_plain_json(getattr(costs, name)) for name in (*_COST_FIELDS, *optional)}


def parse_instances(json_text: str, owner: str = "instances") -> list[Instance]:
    """Parse a text that `format_instances` wrote.

    Args:
        owner: name of the text in error messages.

    Raises:
        ProfileError: the text is not JSON, a field is missing or unknown, a shape does not match the others, or a
            number is out of range.
    """
    document = parse_object(json_text, owner)
    require_fields(document, owner, ("version", "instances"))
    if document["version"] != VERSION:
        raise ProfileError(f"{owner}: version is {document['version']!r}; it must be {VERSION}")
    return [
        _parse_instance(value, f"{owner}[{at}]")
        for at, value in enumerate(_require_list(document["instances"], owner, "instances"))
    ]


def _parse_instance(value: Any, owner: str) -> Instance:
    document = require_object(value, owner)
    require_fields(document, owner, (*_INSTANCE_FIELDS, "costs"), _OPTIONAL_FIELDS)
    read = _ArrayReader(document, owner)
    costs = [
        _parse_costs(entry, f"{owner}.costs[{at}]")
        for at, entry in enumerate(_require_list(document["costs"], owner, "costs"))
    ]
    groups = len(costs)
    if not groups:
        raise ProfileError(f"{owner}: costs is []; it must have an entry for each group")
    types = read.read_array("types", None, minimum=0, maximum=min(len(group_costs.time_s) for group_costs in costs) - 1)
    counts = read.read_array("counts", groups, minimum=1)
    interleave = int(read.read_array("interleave", minimum=1, maximum=1 if groups > 1 else inf))
    devices = int(counts.sum())
    links = devices - 1 if interleave == 1 else devices
    return Instance(
        types=types,
        costs=tuple(costs),
        counts=tuple(counts.tolist()),
        capacity_bytes=tuple(read.read_array("capacity_bytes", groups, minimum=0).tolist()),
        in_flight=tuple(read.read_array("in_flight", devices, minimum=0).tolist()),
        hand_over_s=read.read_array("hand_over_s", links, groups, groups, len(types) + 1, minimum=0),
        micro_batches=int(read.read_array("micro_batches", minimum=1)),
        interleave=interleave,
        borders=_parse_borders(read, len(types), devices * interleave),
        stage_layers=_parse_stage_layers(read, len(types), devices),
        host_capacity_bytes=_parse_host_capacity(read, groups),
    )


def _parse_host_capacity(read: _ArrayReader, groups: int) -> tuple[int, ...]:
    if "host_capacity_bytes" not in read.document:
        return ()
    return tuple(read.read_array("host_capacity_bytes", groups, minimum=0).tolist())


def _parse_stage_layers(read: _ArrayReader, layers: int, devices: int) -> int:
    if "stage_layers" not in read.document:
        return 0
    stage_layers = int(read.read_array("stage_layers", minimum=1))
    if stage_layers * devices != layers or read.document["borders"]:
        raise ProfileError(
            f"{read.owner}: stage_layers is {stage_layers}; it must be {layers} layers over {devices} devices, "
            "without borders"
        )
    return stage_layers


def _parse_borders(read: _ArrayReader, layers: int, chunks: int) -> tuple[int, ...]:
    borders = read.read_array("borders", chunks + 1 if read.document["borders"] else 0).tolist()
    if borders and not ((borders[0], borders[-1]) == (0, layers) and all(one < two for one, two in pairwise(borders))):
        raise ProfileError(f"{read.owner}: borders is {borders}; it must rise from 0 to {layers}, or be empty")
    return tuple(borders)


def _parse_costs(value: Any, owner: str) -> StageCosts:
    document = require_object(value, owner)
    require_fields(document, owner, _COST_FIELDS, _OPTIONAL_COST_FIELDS)
    read = _ArrayReader(document, owner)
    time_s = read.read_array("time_s", None, None, minimum=0)
    reshard_s = read.read_array("reshard_s", len(time_s), None, None, minimum=0)
    return StageCosts(
        layouts=read.read_array("layouts", time_s.shape[1], minimum=0, maximum=min(reshard_s.shape[1:]) - 1),
        time_s=time_s,
        state_bytes=read.read_array("state_bytes", *time_s.shape, minimum=0),
        kept_bytes=read.read_array("kept_bytes", *time_s.shape, minimum=0),
        working_bytes=read.read_array("working_bytes", time_s.shape[1], minimum=0),
        reshard_s=reshard_s,
        border_s=read.read_array("border_s", *time_s.shape, minimum=0),
        **{name: read.read_array(name, *time_s.shape, minimum=0) for name in _OPTIONAL_COST_FIELDS if name in document},
    )


class _ArrayReader:
    """Reader of the arrays of one JSON object."""

    def __init__(self, document: Mapping[str, Any], owner: str) -> None:
        self.document = document
        self.owner = owner

    def read_array(
        self, field: str, *shape: int | None, minimum: float = -inf, maximum: float = inf
    ) -> np.ndarray[Any, Any]:
        """Return the field as an array of the given shape, with every number within [minimum, maximum].

        None in the shape means any length above 0.
        """
        whole = field in _INTEGER_FIELDS
        value = self._numbers(self.document[field], field, whole)
        try:
            array = np.array(value, dtype=np.int64 if whole else np.float64)
        except (ValueError, OverflowError):
            raise ProfileError(f"{self.owner}: {field} is ragged or too large; it must be an array") from None
        if 0 in shape and not array.size:
            return array.reshape([length or 0 for length in shape])  # An empty list has no inner lengths.
        wanted = [length or "any" for length in shape]
        known = len(shape) == array.ndim and array.size > 0
        if not known or any(want not in ("any", has) for want, has in zip(wanted, array.shape, strict=True)):
            raise ProfileError(f"{self.owner}: {field} has the shape {list(array.shape)}; it must be {wanted}")
        outside = array[(array < minimum) | (array > maximum)]
        if outside.size:
            raise ProfileError(f"{self.owner}: {field} has {outside[0]}; it must be between {minimum} and {maximum}")
        return array

    def _numbers(self, value: Any, field: str, whole: bool) -> Any:
        if isinstance(value, list):
            return [self._numbers(each, field, whole) for each in value]
        number = inf if value == "inf" else value
        kinds = int if whole else (int, float)
        if isinstance(number, bool) or not isinstance(number, kinds) or isnan(number):
            kind = "a whole number" if whole else 'a number or "inf"'
            raise ProfileError(f"{self.owner}: {field} has {value!r}; it must be {kind}")
        return number


def _require_list(value: Any, owner: str, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"{owner}: {field} is {value!r}; it must be a list")
    return value


def _to_plain_json(value: Any) -> Any:
    """Return numbers and nested lists of them, with infinity as text."""
    if isinstance(value, np.ndarray):
        return _to_plain_json(value.tolist())
    if isinstance(value, list | tuple):
        return [_to_plain_json(each) for each in value]
    return "inf" if value == inf else value


def _format_json(value: Any, margin: str) -> str:
    """Return JSON with one field per line."""
    inner = margin + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(name)}: {_format_json(each, inner)}" for name, each in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + margin + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + ", ".join(_format_json(each, margin) for each in value) + "]"
    return json.dumps(value, allow_nan=False)
