"""Find what a recorded document has and the present one lacks. Additions are no difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def find_differences(recorded: Any, present: Any) -> list[str]:
    """Return the paths at which `present` lacks or changes something of `recorded`.

    An object may have more keys. A list of names, such as an enum or the required fields, may have more entries, and a
    custom resource more validation rules: those of new fields. A raised `maxItems` accepts more, too. A metric
    may have more labels, over which queries sum.
    """
    return list(_Comparison({}, {}, {}).compare("", recorded, present))


def find_openapi_differences(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Do the same for two OpenAPI documents as `openapi_shape` returns them.

    Schemas are compared where operations refer to them, because an added operation renumbers them.
    """
    comparison = _Comparison(recorded["schemas"], present["schemas"], {})
    return list(comparison.compare("", recorded["operations"], present["operations"]))


class _Comparison:
    def __init__(self, recorded: Mapping[str, Any], present: Mapping[str, Any], pairs: dict[str, str]) -> None:
        self._recorded = recorded
        self._present = present
        self._pairs = pairs

    def compare(self, path: str, recorded: Any, present: Any) -> Iterator[str]:
        if isinstance(recorded, dict) and isinstance(present, dict):
            if isinstance(number := recorded.get("schema"), str) and number in self._recorded:
                yield from self._compare_schemas(path, number, str(present.get("schema")))
                return
            for key, value in recorded.items():
                if key in present:
                    yield from self.compare(f"{path}/{key}", value, present[key])
                else:
                    yield f"{path}/{key}: missing"
        elif isinstance(recorded, list) and isinstance(present, list):
            yield from self._compare_lists(path, recorded, present)
        elif recorded != present and not (path.endswith("/maxItems") and present > recorded):
            yield f"{path}: {recorded!r} became {present!r}"

    def _compare_lists(self, path: str, recorded: list[Any], present: list[Any]) -> Iterator[str]:
        if path.endswith("/labels"):
            yield from (f"{path}: {item!r} missing" for item in recorded if not _has_labels(present, item))
            return
        if recorded and all(isinstance(item, str) for item in [*recorded, *present]):
            yield from (f"{path}: {item!r} missing" for item in recorded if item not in present)
            return
        for key in ("name", "rule"):
            if all(isinstance(item, dict) and key in item for item in [*recorded, *present]):
                by_key = [{item[key]: item for item in items} for items in (recorded, present)]
                yield from self.compare(path, *by_key)
                return
        if all(isinstance(item, dict) and "rule" in item for item in [*recorded, *present]):
            yield from (f"{path}: {item['rule']!r} changed" for item in recorded if item not in present)
            return
        if len(recorded) != len(present):
            yield f"{path}: {len(recorded)} entries became {len(present)}"
        for at, (item, now) in enumerate(zip(recorded, present, strict=False)):
            yield from self.compare(f"{path}/{at}", item, now)

    def _compare_schemas(self, path: str, number: str, present_number: str) -> Iterator[str]:
        if number in self._pairs:
            if self._pairs[number] != present_number:
                yield f"{path}: refers to another schema"
            return
        self._pairs[number] = present_number
        yield from self.compare(path, self._recorded[number], self._present.get(present_number))


def _has_labels(label_sets: list[Any], recorded: str) -> bool:
    """Return whether one of the comma-separated label sets has all recorded labels."""
    return any(set(recorded.split(",")) <= set(labels.split(",")) for labels in label_sets)
