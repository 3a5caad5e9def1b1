"""Instances as JSON: lossless, with errors that name the field."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from baselines.milp.instance_document import format_instances, parse_instances
from scheduler.solver.instance import Instance
from scheduler.solver.profiles.profile_document import ProfileError
from tests.builders_loop import a_loop
from tests.builders_solver import a_tiny_instance


def _same(one: object, two: object) -> bool:
    """Compare for equality to the bit, including array and number types."""
    if isinstance(one, np.ndarray) and isinstance(two, np.ndarray):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(map(_same, one, two))
    if hasattr(one, "__dataclass_fields__"):
        return all(_same(getattr(one, field.name), getattr(two, field.name)) for field in fields(one))  # type: ignore[arg-type]  # a dataclass
    return type(one) is type(two) and one == two


@pytest.mark.parametrize("seed", range(30))
def test_instances_round_trip(seed: int) -> None:
    rng = random.Random(f"document {seed}")
    drawn = [
        a_tiny_instance(rng),
        a_tiny_instance(rng, groups=2),
        a_tiny_instance(rng, interleave=2, pinned=True),
        *a_loop(rng, layers=6, kinds=3, gpus=4, batch=4),
    ]
    again = parse_instances(format_instances(drawn))
    assert len(again) == len(drawn)
    assert all(map(_same, drawn, again))


def test_text_is_strict_and_stable_json() -> None:
    text = format_instances([a_tiny_instance(random.Random(1))])
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert format_instances(parse_instances(text)) == text
    assert parse_instances(format_instances([])) == []


def _document() -> dict[str, Any]:
    instance: Instance = next(
        one for seed in range(99) if (one := a_tiny_instance(random.Random(seed))).devices == 2 and one.layers == 4
    )
    return json.loads(format_instances([instance]))  # type: ignore[no-any-return]  # JSON


def _set(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda one: one.__setitem__(field, value)


def _set_cost(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda one: one["costs"][0].__setitem__(field, value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda one: one.pop("counts"), r"\[0\]: field 'counts' is missing"),
        (_set("color", 1), r"\[0\]: field 'color' is unknown"),
        (_set("types", [0, 0, 0, 99]), "types has 99; it must be between 0 and"),
        (_set("types", [0, 0.5, 0, 0]), "types has 0.5; it must be a whole number"),
        (_set("types", []), r"types has the shape \[0\]; it must be \['any'\]"),
        (_set("costs", []), r"costs is \[\]; it must have an entry"),
        (_set("costs", {}), "costs is {}; it must be a list"),
        (_set("counts", [0]), "counts has 0; it must be between 1"),
        (_set("counts", [3]), "in_flight has the shape"),
        (_set("capacity_bytes", [-1]), "capacity_bytes has -1; it must be between 0"),
        (_set("capacity_bytes", [10**30]), "capacity_bytes is ragged or too large"),
        (_set("in_flight", [1.0]), r"in_flight has the shape \[1\]; it must be \[2\]"),
        (_set("in_flight", ["many", 1.0]), "in_flight has 'many'; it must be a number"),
        (_set("micro_batches", 0), "micro_batches has 0; it must be between 1"),
        (_set("micro_batches", True), "micro_batches has True; it must be a whole number"),
        (_set("micro_batches", [4]), "micro_batches has the shape"),
        (_set("borders", [0, 3, 2]), r"borders is \[0, 3, 2\]; it must rise from 0 to 4"),
        (_set("borders", [0, 4]), r"borders has the shape \[2\]; it must be \[3\]"),
        (_set("hand_over_s", [[[[1.0]]]]), r"hand_over_s has the shape \[1, 1, 1, 1\]; it must be \[1, 1, 1, 5\]"),
        (_set_cost("time_s", [[1.0], [1.0, 2.0]]), r"costs\[0\]: time_s is ragged"),
        (_set_cost("time_s", float("nan")), r"costs\[0\]: time_s has nan"),
        (_set_cost("working_bytes", ["inf"]), r"costs\[0\]: working_bytes has 'inf'; it must be a whole number"),
        (_set_cost("layouts", [7]), r"costs\[0\]: layouts has"),
    ],
)
def test_invalid_field_is_rejected_by_name(spoil: Callable[[Any], None], message: str) -> None:
    document = _document()
    spoil(document["instances"][0])
    with pytest.raises(ProfileError, match=message):
        parse_instances(json.dumps(document))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "instances: not JSON"),
        ("[]", "it must be a JSON object"),
        ('{"version": 2, "instances": []}', "version is 2; it must be 1"),
        ('{"version": 1, "instances": {}}', "instances is {}; it must be a list"),
        ('{"version": 1, "instances": [3]}', r"instances\[0\] is 3"),
    ],
)
def test_invalid_document_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_instances(text)
