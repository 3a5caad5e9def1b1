"""Names and types of the fields of a Kubernetes pod template.

A misspelled field is refused when the job is read. Else the API server would ignore it, or reject the pods long after
the submission. `tools.pod_template_schema` writes `data/pod_fields.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from scheduler.documents.document import invalid_field
from scheduler.domain.suggestions import suggest

_SCALARS: Mapping[str, tuple[type, str]] = {
    "string": (str, "a string"),
    "integer": (int, "an integer"),
    "boolean": (bool, "true or false"),
}
_QUANTITIES = frozenset({"limits", "requests", "overhead", "sizeLimit", "divisor", "storage"})
"""Fields with quantities, which may be numbers although the client declares strings."""


def check_pod_fields(template: Mapping[str, Any]) -> None:
    """Check that every field of a pod template exists in Kubernetes and has a value of its type.

    Raises:
        PydanticCustomError: a field is unknown or has another type; the error has its path.
    """
    _check("", template, "PodTemplateSpec", is_quantity=False)


def _check(path: str, value: object, kind: str, *, is_quantity: bool) -> None:
    if kind == "any":
        return
    if kind[0] in "[{":
        _check_container(path, value, kind, is_quantity=is_quantity)
    elif kind in _SCALARS:
        _check_scalar(path, value, kind, is_quantity=is_quantity)
    else:
        _check_object(path, value, _read_objects()[kind])


def _check_object(path: str, value: object, fields: Mapping[str, str]) -> None:
    if not isinstance(value, Mapping):
        raise invalid_field(path, value, "an object")
    for name, each in value.items():
        place = f"{path}.{name}" if path else str(name)
        if name not in fields:
            allowed = f"nothing; Kubernetes {_read_data()['kubernetes']} has no such field{suggest(str(name), fields)}"
            raise invalid_field(place, each, allowed)
        _check(place, each, fields[name], is_quantity=name in _QUANTITIES)


def _check_container(path: str, value: object, kind: str, *, is_quantity: bool) -> None:
    element = kind[1:-1]
    if kind[0] == "[":
        if not isinstance(value, list):
            raise invalid_field(path, value, f"a list of {'strings' if element == 'string' else 'objects'}")
        for number, each in enumerate(value):
            _check(f"{path}[{number}]", each, element, is_quantity=False)
        return
    if not isinstance(value, Mapping):
        raise invalid_field(path, value, "an object")
    for name, each in value.items():
        _check(f"{path}[{name}]", each, element, is_quantity=is_quantity)


def _check_scalar(path: str, value: object, kind: str, *, is_quantity: bool) -> None:
    expected, allowed = _SCALARS[kind]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_quantity and is_number:
        return
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise invalid_field(path, value, allowed)


def _read_objects() -> Mapping[str, Mapping[str, str]]:
    objects: Mapping[str, Mapping[str, str]] = _read_data()["objects"]
    return objects


@cache
def _read_data() -> Mapping[str, Any]:
    text = files("scheduler.documents").joinpath("data", "pod_fields.json").read_text(encoding="utf-8")
    data: Mapping[str, Any] = json.loads(text)
    return data
