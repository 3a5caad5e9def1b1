"""What the codec reads from the type hints of a dataclass."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from functools import reduce
from operator import or_
from types import NoneType
from typing import Any, get_args, get_type_hints


def without_none(hint: Any) -> Any:
    rest = tuple(member for member in get_args(hint) if member is not NoneType)
    return reduce(or_, rest)


def members_of(hint: Any) -> dict[str, Any]:
    """The dataclasses of a union of several, by name; empty for any other hint."""
    members = [member for member in get_args(hint) if is_dataclass(member)]
    return {member.__name__: member for member in members if isinstance(member, type)} if len(members) > 1 else {}


def hints_of(kind: Any) -> dict[str, Any]:
    """Type hints of the fields, without those that only hold what follows from the others."""
    derived = {f.name for f in fields(kind) if f.metadata.get("derived")}
    return {name: hint for name, hint in get_type_hints(kind).items() if name not in derived}


def required_of(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
