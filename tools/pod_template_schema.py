"""Fields of a Kubernetes pod template, taken from the Kubernetes client.

`python -m tools.pod_template_schema` writes the file that `scheduler.documents.pod_fields` reads. Run it after an
update of the client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from kubernetes import client

TARGET = Path(__file__).resolve().parents[1] / "scheduler" / "documents" / "data" / "pod_fields.json"
_ROOT = "V1PodTemplateSpec"
_CONTAINER = re.compile(r"(?:List\[|Dict\[str, )(\w+)\]")
_SCALARS = {"str": "string", "int": "integer", "bool": "boolean", "datetime": "string", "object": "any"}


def build_schema() -> str:
    """Return the fields of each object that a template can contain, as JSON text.

    A type is a scalar, `any`, or the name of an object; `[type]` is a list and `{type}` maps names to it.
    """
    objects: dict[str, Mapping[str, str]] = {}
    waiting = [_ROOT]
    while waiting:
        model = getattr(client, name := waiting.pop())
        if _short(name) in objects:
            continue
        objects[_short(name)] = {
            model.attribute_map[attribute]: _to_type(kind) for attribute, kind in sorted(model.openapi_types.items())
        }
        waiting += [_element(kind) for kind in model.openapi_types.values() if _element(kind) not in _SCALARS]
    # The major number of the client is the minor number of Kubernetes.
    document = {"kubernetes": f"1.{version('kubernetes').split('.')[0]}", "objects": dict(sorted(objects.items()))}
    return json.dumps(document, indent=1) + "\n"


def _element(kind: str) -> str:
    container = _CONTAINER.fullmatch(kind)
    return container[1] if container else kind


def _to_type(kind: str) -> str:
    element = _element(kind)
    name = _SCALARS.get(element) or _short(element)
    if element == kind:
        return name
    return f"[{name}]" if kind.startswith("List") else f"{{{name}}}"


def _short(name: str) -> str:
    return re.sub(r"V1(?=[A-Z])", "", name, count=1)


if __name__ == "__main__":
    TARGET.write_text(build_schema(), encoding="utf-8")
