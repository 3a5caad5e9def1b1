"""Reads fields of a model's `config.json`, whose names differ between model types and versions of their library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.solver.profiles.model_profile import LAYERS_MAX
from scheduler.solver.profiles.profile_document import ProfileError, read_count


@dataclass(frozen=True, slots=True)
class ConfigurationFields:
    """The fields of one configuration; `kind` is its model type. A field whose value is null counts as absent."""

    kind: str
    document: Mapping[str, Any]

    def has(self, field: str) -> bool:
        return self.document.get(field) is not None

    def read(self, field: str, *others: str, default: int | None = None) -> int:
        """Return a count under the first of these names that is there.

        Raises:
            ProfileError: it is not a whole number from 0 on, or there is none and no default.
        """
        for name in (field, *others):
            if self.has(name):
                count = read_count(self.document, name, "", self._owner)
                if count < 0:
                    raise ProfileError(f"{self._owner}: {name} is {count}; it must be 0 or above")
                return count
        if default is None:
            raise ProfileError(f"{self._owner}: field {field!r} is missing; it is required")
        return default

    def read_layers(self, field: str, *others: str) -> int:
        """Return a number of layers; raises ProfileError as `read`, or if there are more than can be planned."""
        layers = self.read(field, *others)
        if layers > LAYERS_MAX:
            raise ProfileError(f"{self._owner}: {field} is {layers}; it must be at most {LAYERS_MAX}")
        return layers

    def is_set(self, field: str, *, default: bool = False) -> bool:
        """Return a flag; raises ProfileError if it is neither true nor false."""
        value = self.document[field] if self.has(field) else default
        if not isinstance(value, bool):
            raise ProfileError(f"{self._owner}: {field} is {value!r}; it must be true or false")
        return value

    def list_numbers(self, field: str) -> list[int]:
        """Return a list of layer numbers; raises ProfileError if it is something else."""
        numbers = self._read_list(field)
        return [read_count({field: number}, field, "", self._owner) for number in numbers]

    def list_words(self, field: str, allowed: Mapping[str, Any], length: int) -> list[str]:
        """Return a list of `length` words, each one of `allowed`; raises ProfileError if it is something else."""
        words = self._read_list(field)
        for word in words:
            if word not in allowed:
                raise ProfileError(f"{self._owner}: {field} contains {word!r}; allowed are {', '.join(allowed)}")
        if len(words) != length:
            raise ProfileError(f"{self._owner}: {field} has {len(words)} entries; it must have {length}, one a layer")
        return words

    def require_equal(self, field: str, expected: int) -> None:
        """Raise ProfileError unless the field is absent or has this value: no other one can be planned."""
        found = self.read(field, default=expected)
        if found != expected:
            raise ProfileError(
                f"{self._owner}: {field} is {found}; only {expected}, as in the other stack, is supported"
            )

    def require_absent(self, field: str) -> None:
        """Raise ProfileError if the field is set: what it describes cannot be planned."""
        if self.document.get(field):
            raise ProfileError(f"{self._owner}: {field} is {self.document[field]!r}; models with it are not supported")

    def any_above_0(self, *fields: str) -> bool:
        return any(isinstance(value := self.document.get(field), int | float) and value > 0 for field in fields)

    def _read_list(self, field: str) -> list[Any]:
        value = self.document[field] if self.has(field) else []
        if not isinstance(value, list):
            raise ProfileError(f"{self._owner}: {field} is {value!r}; it must be a list")
        return value

    @property
    def _owner(self) -> str:
        return f"configuration of a {self.kind} model"
