"""PageOf: what every list answers, and the plain values that several nouns share.

Query parameters that several lists have.

Keyset paging: a cursor is the place of the last item in its list, and places never change.

So whoever goes from page to page meets everything that was there all the while once, whatever is added and ends
meanwhile: jobs and loans stand in the order of their beginning, newest first, live and ended ones alike; other nouns by
name; the record by number.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Generic, Protocol, TypeVar

from fastapi import Query
from pydantic import Field
from typing_extensions import TypedDict

from api.http.errors import ProblemError, raise_invalid_field
from scheduler.domain import gpu_sets
from scheduler.domain.fleet import Loan
from scheduler.domain.job import Job
from scheduler.domain.suggestions import suggest
from scheduler.store.api_protocol import (
    ApiStore,
    JobQuery,
    LoanQuery,
    SortKey,
    get_job_sort_key,
    get_loan_sort_key,
    take_page,
)
from scheduler.store.protocol import Page

PageItem = TypeVar("PageItem")
GpusByNode = Annotated[dict[str, list[int]], Field(description="Indices of GPUs, by node.")]
AtSeconds = Annotated[float, Field(description="Seconds since 1970 (UTC).")]


class PageOf(TypedDict, Generic[PageItem]):
    """One page of a list. `next` is the `cursor` that asks for the following page; null on the last one."""

    items: list[PageItem]
    next: str | None


def encode_gpus(gpus: gpu_sets.Gpus) -> GpusByNode:
    return {node: list(indices) for node, indices in sorted(gpus.items())}


TEXT_PATTERN = r"^[^\x00]*$"
"""No database takes a NUL in a text."""
TextParameter = Annotated[str, Query(max_length=300, pattern=TEXT_PATTERN)]
StatesParameter = Annotated[
    str,
    Query(
        max_length=300, pattern=TEXT_PATTERN, description="In one of these states, or `live`, `ended`; commas between."
    ),
]
State = TypeVar("State", bound=StrEnum)


def parse_states(text: str, state_type: type[State], *, live: Iterable[State]) -> frozenset[State] | None:
    """The states that a text with commas names; None for an empty one. `live` and `ended` name several at once."""
    known = {state.value: frozenset((state,)) for state in state_type}
    lasting = frozenset(live)
    known |= {"live": lasting, "ended": frozenset(state_type) - lasting}
    names = [name.strip() for name in text.split(",")] if text else []
    for name in names:
        if name not in known:
            raise_invalid_field("state", name, f"one or more of {', '.join(known)}{suggest(name, known)}")
    return frozenset().union(*(known[name] for name in names)) if names else None


Row = TypeVar("Row")
Item = TypeVar("Item")
ROWS_SCANNED_MAX = 10_000


class _HasNumber(Protocol):
    @property
    def number(self) -> int: ...


Numbered = TypeVar("Numbered", bound=_HasNumber)

CursorParameter = Annotated[
    str, Query(max_length=2000, description="`next` of an earlier answer to the same question; empty: the first page.")
]


def encode_cursor(noun: str, *position: float | str) -> str:
    return base64.urlsafe_b64encode(json.dumps([noun, *position]).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, noun: str, *kinds: type) -> list[Any] | None:
    """What `cursor_of` was given; None for an empty cursor, a 422 problem for one that no list of `noun` ever gave."""
    if not cursor:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        found, *place = json.loads(text)
        if found == noun and [type(part) for part in place] == list(kinds) and all(map(_is_comparable, place)):
            return list(place)
    except (binascii.Error, ValueError, TypeError, RecursionError):
        pass  # refused below, like a text that decodes to something else
    return raise_invalid_field("cursor", cursor, f"the value of `next` in an earlier list of {noun}")


def decode_number_cursor(cursor: str, noun: str) -> int | None:
    """The place of a list by number."""
    place = decode_cursor(cursor, noun, int)
    return None if place is None else int(place[0])


def _is_comparable(part: Any) -> bool:
    """Every database can compare it."""
    return part.isprintable() if isinstance(part, str) else abs(part) < 2**63


def page_by_name(
    noun: str, rows: Mapping[str, Row], view: Callable[[Row], Item], *, cursor: str, limit: int
) -> PageOf[Item]:
    """Rows by name."""
    place = decode_cursor(cursor, noun, str)
    names = sorted(name for name in rows if place is None or name > place[0])
    following = encode_cursor(noun, names[limit - 1]) if len(names) > limit else None
    return {"items": [view(rows[name]) for name in names[:limit]], "next": following}


def page_by_number(
    noun: str,
    read: Callable[[Page], Sequence[Numbered]],
    is_visible: Callable[[Numbered], bool],
    *,
    swept: Callable[[], int],
    after: int,
    cursor: str,
    limit: int,
) -> PageOf[Numbered]:
    """Rows that may be seen, after the number `after` or the cursor's. Looks at LOOKED_AT_MAX rows at most, so that a
    page may be short, or empty, and not the last. `swept`: up to which number rows are kept no more; who goes on from
    one of them gets a 410 problem, who asks from the start gets what is kept."""
    place = decode_number_cursor(cursor, noun)
    at = after if place is None else place
    if 0 < at < (gone := swept()):
        detail = (
            f"{noun} up to number {gone} are kept no more, {at} among them: ask from the start, which begins behind"
        )
        raise ProblemError(410, "swept", detail)
    found: list[Numbered] = []
    reach = at + ROWS_SCANNED_MAX
    while True:
        rows = read(Page(at, limit + 1))
        for row in rows[:limit]:
            if len(found) == limit:
                return {"items": found, "next": encode_cursor(noun, at)}
            at = row.number
            if is_visible(row):
                found.append(row)
        if len(rows) <= limit:
            return {"items": found, "next": None}
        if len(found) == limit or at >= reach:
            return {"items": found, "next": encode_cursor(noun, at)}


def page_of_jobs(live: Iterable[Job], store: ApiStore, query: JobQuery, *, cursor: str, limit: int) -> PageOf[Job]:
    after = _decode_place(cursor, "jobs")
    found = {job.id: job for job in live if not job.is_ended and query.matches(job)}
    if query.includes_ended:
        # One that has ended since `live` was read is in both, and is what it has become.
        found |= {job.id: job for job in store.find_ended_jobs(query, after=after, limit=limit + 1)}
    rows = take_page(list(found.values()), get_job_sort_key, after=after, limit=limit + 1)
    return _page_of_rows("jobs", rows, get_job_sort_key, limit)


def page_of_loans(live: Iterable[Loan], store: ApiStore, query: LoanQuery, *, cursor: str, limit: int) -> PageOf[Loan]:
    after = _decode_place(cursor, "loans")
    found = {loan.id: loan for loan in live if query.matches(loan)}
    if query.includes_ended:
        found |= {loan.id: loan for loan in store.find_ended_loans(query, after=after, limit=limit + 1)}
    rows = take_page(list(found.values()), get_loan_sort_key, after=after, limit=limit + 1)
    return _page_of_rows("loans", rows, get_loan_sort_key, limit)


def _decode_place(cursor: str, noun: str) -> SortKey | None:
    place = decode_cursor(cursor, noun, float, str)
    return None if place is None else SortKey(*place)


def _page_of_rows(noun: str, rows: tuple[Row, ...], place_of: Callable[[Row], SortKey], limit: int) -> PageOf[Row]:
    """`rows` are one more than fit on the page, where there are more."""
    following = encode_cursor(noun, *place_of(rows[limit - 1])) if len(rows) > limit else None
    return {"items": list(rows[:limit]), "next": following}
