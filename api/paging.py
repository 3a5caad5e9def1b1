"""Keyset paging: a cursor is the place of the last item in its list, and places never change.

So whoever goes from page to page meets everything that was there all the while once, whatever is added and ends
meanwhile: jobs and loans stand in the order of their beginning, newest first, live and ended ones alike; other nouns by
name; the record by number.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Query

from api.answers.page import PageOf
from api.errors import ProblemError, refuse
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan
from scheduler.store.front import FrontStore
from scheduler.store.protocol import Page
from scheduler.store.queries import JobQuery, LoanQuery, Place, first_after, place_of_job, place_of_loan

Row = TypeVar("Row")
Item = TypeVar("Item")
LOOKED_AT_MAX = 10_000


class _HasNumber(Protocol):
    @property
    def number(self) -> int: ...


Numbered = TypeVar("Numbered", bound=_HasNumber)

Cursor = Annotated[
    str, Query(max_length=2000, description="`next` of an earlier answer to the same question; empty: the first page.")
]


def cursor_of(noun: str, *place: float | str) -> str:
    return base64.urlsafe_b64encode(json.dumps([noun, *place]).encode()).decode().rstrip("=")


def place_in(cursor: str, noun: str, *kinds: type) -> list[Any] | None:
    """What `cursor_of` was given; None for an empty cursor, a 422 problem for one that no list of `noun` ever gave."""
    if not cursor:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        found, *place = json.loads(text)
        if found == noun and [type(part) for part in place] == list(kinds) and all(map(_is_plain, place)):
            return list(place)
    except (binascii.Error, ValueError, TypeError, RecursionError):
        pass  # refused below, like a text that decodes to something else
    return refuse("cursor", cursor, f"the value of `next` in an earlier list of {noun}")


def number_in(cursor: str, noun: str) -> int | None:
    """The place of a list by number."""
    place = place_in(cursor, noun, int)
    return None if place is None else int(place[0])


def _is_plain(part: Any) -> bool:
    """Every database can compare it."""
    return part.isprintable() if isinstance(part, str) else abs(part) < 2**63


def page_by_name(
    noun: str, rows: Mapping[str, Row], view: Callable[[Row], Item], *, cursor: str, limit: int
) -> PageOf[Item]:
    """Rows by name."""
    place = place_in(cursor, noun, str)
    names = sorted(name for name in rows if place is None or name > place[0])
    following = cursor_of(noun, names[limit - 1]) if len(names) > limit else None
    return {"items": [view(rows[name]) for name in names[:limit]], "next": following}


def page_by_number(
    noun: str,
    read: Callable[[Page], Sequence[Numbered]],
    sees: Callable[[Numbered], bool],
    *,
    swept: Callable[[], int],
    after: int,
    cursor: str,
    limit: int,
) -> PageOf[Numbered]:
    """Rows that may be seen, after the number `after` or the cursor's. Looks at LOOKED_AT_MAX rows at most, so that a
    page may be short, or empty, and not the last. `swept`: up to which number rows are kept no more; who goes on from
    one of them gets a 410 problem, who asks from the start gets what is kept."""
    place = number_in(cursor, noun)
    at = after if place is None else place
    if 0 < at < (gone := swept()):
        detail = (
            f"{noun} up to number {gone} are kept no more, {at} among them: ask from the start, which begins behind"
        )
        raise ProblemError(410, "swept", detail)
    found: list[Numbered] = []
    reach = at + LOOKED_AT_MAX
    while True:
        rows = read(Page(at, limit + 1))
        for row in rows[:limit]:
            if len(found) == limit:
                return {"items": found, "next": cursor_of(noun, at)}
            at = row.number
            if sees(row):
                found.append(row)
        if len(rows) <= limit:
            return {"items": found, "next": None}
        if len(found) == limit or at >= reach:
            return {"items": found, "next": cursor_of(noun, at)}


def page_of_jobs(live: Iterable[Job], store: FrontStore, wanted: JobQuery, *, cursor: str, limit: int) -> PageOf[Job]:
    after = _place(cursor, "jobs")
    found = {job.id: job for job in live if not job.is_ended and wanted.matches(job)}
    if wanted.wants_ended:
        # One that has ended since `live` was read is in both, and is what it has become.
        found |= {job.id: job for job in store.find_ended_jobs(wanted, after=after, limit=limit + 1)}
    rows = first_after(list(found.values()), place_of_job, after=after, limit=limit + 1)
    return _page("jobs", rows, place_of_job, limit)


def page_of_loans(
    live: Iterable[Loan], store: FrontStore, wanted: LoanQuery, *, cursor: str, limit: int
) -> PageOf[Loan]:
    after = _place(cursor, "loans")
    found = {loan.id: loan for loan in live if wanted.matches(loan)}
    if wanted.wants_ended:
        found |= {loan.id: loan for loan in store.find_ended_loans(wanted, after=after, limit=limit + 1)}
    rows = first_after(list(found.values()), place_of_loan, after=after, limit=limit + 1)
    return _page("loans", rows, place_of_loan, limit)


def _place(cursor: str, noun: str) -> Place | None:
    place = place_in(cursor, noun, float, str)
    return None if place is None else Place(*place)


def _page(noun: str, rows: tuple[Row, ...], place_of: Callable[[Row], Place], limit: int) -> PageOf[Row]:
    """`rows` are one more than fit on the page, where there are more."""
    following = cursor_of(noun, *place_of(rows[limit - 1])) if len(rows) > limit else None
    return {"items": list(rows[:limit]), "next": following}
