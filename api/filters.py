"""Query parameters that several lists have."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, TypeVar

from fastapi import Query

from api.errors import refuse
from scheduler.domain.spelling import meant

TEXT = r"^[^\x00]*$"
"""No database takes a NUL in a text."""
Text = Annotated[str, Query(max_length=300, pattern=TEXT)]
States = Annotated[
    str, Query(max_length=300, pattern=TEXT, description="In one of these states, or `live`, `ended`; commas between.")
]
State = TypeVar("State", bound=StrEnum)


def states_in(text: str, kind: type[State], *, live: Iterable[State]) -> frozenset[State] | None:
    """The states that a text with commas names; None for an empty one. `live` and `ended` name several at once."""
    known = {state.value: frozenset((state,)) for state in kind}
    lasting = frozenset(live)
    known |= {"live": lasting, "ended": frozenset(kind) - lasting}
    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        if name not in known:
            refuse("state", name, f"one or more of {', '.join(known)}{meant(name, known)}")
    return frozenset().union(*(known[name] for name in names)) if names else None
