"""The shape of those parts of a pod template that Ebbtide adds to: what it could not add to is refused when it is read,
because one template that breaks the renderer would stop all jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.documents.refusal import refused_field

_TERMS = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")


def check_shape(template: Mapping[str, Any]) -> None:
    """`template` with a `spec` that has `containers`. What is null counts as absent, as at the API server.

    Raises:
        PydanticCustomError: a part that is none of what the API server takes there.
    """
    meta, spec = _object("metadata", template.get("metadata")), template["spec"]
    for name in ("labels", "annotations"):
        for key, text in _object(f"metadata.{name}", meta.get(name)).items():
            if text is not None and not isinstance(text, str):
                raise refused_field(f"metadata.{name}[{key}]", text, "text")
    for name in ("volumes", "tolerations"):
        _objects(f"spec.{name}", spec.get(name))
    for name in ("containers", "initContainers"):
        for place, container in _objects(f"spec.{name}", spec.get(name)):
            _check_container(place, container)
    _check_affinity(spec)


def without_nulls(value: Any) -> Any:
    """A copy of the JSON value without the fields that are null."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _check_container(place: str, container: Mapping[str, Any]) -> None:
    _objects(f"{place}.volumeMounts", container.get("volumeMounts"))
    for env_place, variable in _objects(f"{place}.env", container.get("env")):
        if not isinstance(variable.get("name"), str):
            raise refused_field(f"{env_place}.name", variable.get("name"), "the name of a variable")
    resources = _object(f"{place}.resources", container.get("resources"))
    for kind in ("requests", "limits"):
        _object(f"{place}.resources.{kind}", resources.get(kind))


def _check_affinity(spec: Mapping[str, Any]) -> None:
    place, part = "spec", spec
    for name in _TERMS:
        place = f"{place}.{name}"
        part = _object(place, part.get(name))
    for term_place, term in _objects(f"{place}.nodeSelectorTerms", part.get("nodeSelectorTerms")):
        _objects(f"{term_place}.matchFields", term.get("matchFields"))


def _object(place: str, value: object) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise refused_field(place, value, "an object")
    return value or {}


def _objects(place: str, value: object) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """The objects of a list, each with its place."""
    if value is not None and not isinstance(value, list):
        raise refused_field(place, value, "a list of objects")
    for number, each in enumerate(value or ()):
        if not isinstance(each, Mapping):
            raise refused_field(f"{place}[{number}]", each, "an object")
    return tuple((f"{place}[{number}]", each) for number, each in enumerate(value or ()))
