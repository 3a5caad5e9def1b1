"""Entry: a value of a JSON document that knows its name, so that a complaint names field, value and what is allowed."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from scheduler.solver.profiles.profile_error import ProfileError

_T = TypeVar("_T")
_LARGEST = 1e15
_LARGEST_COUNT = 2**31 - 1
_DEGREE = re.compile(r"[1-9]\d{0,8}", re.ASCII)


class ByDegree(dict[int, _T]):
    """A profiled table by group size, which says what was profiled when it is asked for something else."""

    def __init__(self, name: str, members: Iterable[tuple[int, _T]]) -> None:
        super().__init__(members)
        self.name = name

    def __missing__(self, degree: int) -> _T:
        raise ProfileError(f"{self.name}: degree {degree} is not profiled; profiled are {sorted(self)}")


@dataclass(frozen=True, slots=True)
class Entry:
    """`name` is dotted and begins with the file. Every reading method raises ProfileError."""

    name: str
    value: Any

    @classmethod
    def of_file(cls, path: Path) -> Entry:
        try:
            return cls(path.name, json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ProfileError(f"{path.name}: {error.strerror}; it must be a readable file in {path.parent}") from error
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"{path.name}: not JSON: {error}") from error

    def refuse(self, allowed: str) -> NoReturn:
        raise ProfileError(f"{self.name} is {reprlib.repr(self.value)}; it must be {allowed}")

    def members(self) -> dict[str, Entry]:
        if not isinstance(self.value, dict):
            self.refuse("a JSON object")
        return {key: Entry(f"{self.name}.{key}", value) for key, value in self.value.items()}

    def items(self) -> list[Entry]:
        if not isinstance(self.value, list):
            self.refuse("a list")
        return [Entry(f"{self.name}[{number}]", value) for number, value in enumerate(self.value)]

    def __getitem__(self, key: str) -> Entry:
        found = self.members().get(key)
        if found is None:
            raise ProfileError(f"{self.name}: field {key!r} is missing")
        return found

    def get(self, key: str, default: Any = None) -> Entry:
        return self.members().get(key, Entry(f"{self.name}.{key}", default))

    def number(self, least: float = 1 / _LARGEST) -> float:
        """A number that stays finite in every formula of the cost model."""
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not (is_number and least <= self.value <= _LARGEST):
            self.refuse(f"a number from {least:g} to {_LARGEST:g}")
        return float(self.value)

    def whole(self, most: int = _LARGEST_COUNT) -> int:
        if type(self.value) is not int or not 1 <= self.value <= most:
            self.refuse(f"a whole number from 1 to {most}")
        return self.value

    def among(self, *allowed: str) -> str:
        if self.value not in allowed:
            self.refuse(" or ".join(map(repr, allowed)))
        return str(self.value)

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.refuse("a string")
        return self.value

    def degrees(self) -> list[int]:
        return [int(key) for key in self.members() if _DEGREE.fullmatch(key)]

    def by_degree(self) -> ByDegree[float]:
        """The members named 1, 2, 4, ..., as positive numbers."""
        return ByDegree(self.name, [(degree, self[str(degree)].number()) for degree in self.degrees()])
