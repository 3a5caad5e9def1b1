"""Lists: pages, cursors, and the query parameters and value types that several lists share.

Paging is by key: a cursor holds the sort key of the last item on its page, and sort keys never change. A client that
follows the cursors sees every item that exists throughout exactly once. Jobs, loans and recalls are sorted by creation
time, newest first; events, decisions and audit entries by number; everything else by name.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Generic, Protocol, TypeVar

from fastapi import Query
from pydantic import Field
from typing_extensions import TypedDict

from api.http.errors import ProblemError, raise_invalid_field
from scheduler.domain import gpu_sets
from scheduler.domain.fleet import Loan
from scheduler.domain.job import Job
from scheduler.domain.recall_receipts import RecallReceipt
from scheduler.domain.suggestions import suggest
from scheduler.store.api_protocol import (
    ApiStore,
    LoanQuery,
    SortKey,
    get_job_sort_key,
    get_loan_sort_key,
    take_page,
)
from scheduler.store.job_query import JobQuery
from scheduler.store.lending_history import ReceiptQuery, get_receipt_sort_key
from scheduler.store.newest_history import NewestRows
from scheduler.store.protocol import Page

PageItem = TypeVar("PageItem")
GpusByNode = Annotated[dict[str, list[int]], Field(description="GPU indices by node.")]
JobId = Annotated[str, Field(description="Job that this is about, as the id that its submission returned.")]


class PageOf(TypedDict, Generic[PageItem]):
    """One page of a list."""

    items: Annotated[
        list[PageItem], Field(description="Entries of this page, in the order of the list. Empty: no entry matches.")
    ]
    next: Annotated[
        str | None, Field(description="Value of `cursor` for the following page. Null: this is the last page.")
    ]


def encode_gpus(gpus: gpu_sets.Gpus) -> GpusByNode:
    return {node: list(indices) for node, indices in sorted(gpus.items())}


_NUMBER_MAX = 2**63 - 1
TEXT_PATTERN = r"^[^\x00]*$"
"""Databases reject NUL characters in texts."""
PoolParameter = Annotated[
    str, Query(max_length=300, pattern=TEXT_PATTERN, description="Only those whose home is this pool. Empty: all.")
]
StatesParameter = Annotated[
    str,
    Query(
        max_length=300,
        pattern=TEXT_PATTERN,
        description="Only items in one of these states, or `live` or `ended`, separated by commas. Empty: all.",
    ),
]
State = TypeVar("State", bound=StrEnum)


def parse_states(text: str, state_type: type[State], *, live: Iterable[State]) -> frozenset[State] | None:
    """Return the states that a comma-separated list names, or None if it is empty.

    `live` and `ended` stand for several.
    """
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
ROWS_SCANNED_PER_ITEM = 2
"""Whole rows that are read for each item of a page, because some are hidden from the caller."""
READS_PER_PAGE_MAX = 4
"""Reads for one page that begins with the newest row, of which each skips rows that are hidden from the caller."""
KEYS_SCANNED_PER_ITEM = 5
"""The same for keys, which are cheaper. A page of a caller with few rights costs at most twice that of an admin."""


class _HasNumber(Protocol):
    @property
    def number(self) -> int: ...


Numbered = TypeVar("Numbered", bound=_HasNumber)

CursorParameter = Annotated[
    str, Query(max_length=2000, description="`next` of an earlier response to the same query. Empty: the first page.")
]


def encode_cursor(noun: str, *position: float | str) -> str:
    return base64.urlsafe_b64encode(json.dumps([noun, *position]).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, noun: str, *kinds: type) -> list[Any] | None:
    """Return the values that `encode_cursor` was given, or None for an empty cursor.

    Raises:
        InvalidDocumentError: the cursor does not come from a list of `noun`.
    """
    if not cursor:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        found, *position = json.loads(text)
        if found == noun and [type(part) for part in position] == list(kinds) and all(map(_is_comparable, position)):
            return list(position)
    except (binascii.Error, ValueError, TypeError, RecursionError):
        pass  # rejected below, like a cursor of another list
    return raise_invalid_field("cursor", cursor, f"the value of `next` in an earlier list of {noun}")


def decode_number_cursor(cursor: str, noun: str) -> int | None:
    """Return the number in the cursor of a list that is sorted by number."""
    position = decode_cursor(cursor, noun, int)
    return None if position is None else int(position[0])


def _is_comparable(part: Any) -> bool:
    """Return whether every database can compare the value."""
    return part.isprintable() if isinstance(part, str) else abs(part) <= _NUMBER_MAX


def page_by_name(
    noun: str, rows: Mapping[str, Row], view: Callable[[Row], Item], *, cursor: str, limit: int
) -> PageOf[Item]:
    """Return one page of the rows, sorted by name."""
    position = decode_cursor(cursor, noun, str)
    names = sorted(name for name in rows if position is None or name > position[0])
    next_cursor = encode_cursor(noun, names[limit - 1]) if len(names) > limit else None
    return {"items": [view(rows[name]) for name in names[:limit]], "next": next_cursor}


def page_by_number(
    noun: str,
    read: Callable[[Page], Sequence[Numbered]],
    is_visible: Callable[[Numbered], bool],
    *,
    get_retention_mark: Callable[[], int],
    after: int,
    cursor: str,
    limit: int,
) -> PageOf[Numbered]:
    """Return one page of the visible rows after the number `after`, or after the cursor's.

    Reads few hidden rows, so a page may be short or empty although more follow. `get_retention_mark` returns the number
    up to which retention has deleted rows.

    Raises:
        ProblemError: 410 if rows between the cursor and the first remaining row were deleted.
    """
    at = _start_number(noun, cursor, after, get_retention_mark)
    found: list[Numbered] = []
    reach = at + ROWS_SCANNED_PER_ITEM * limit
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


def page_newest_first(
    noun: str, read: Callable[[int, int], Sequence[Numbered]], *, cursor: str, limit: int
) -> PageOf[Numbered]:
    """Return one page of rows in descending number. `read` takes a number that rows are below, and a limit.

    Retention deletes the end of such a list, so it makes no cursor invalid.
    """
    position = decode_number_cursor(cursor, noun)
    rows = read(_NUMBER_MAX if position is None else position, limit + 1)
    items = list(rows[:limit])
    return {"items": items, "next": encode_cursor(noun, items[-1].number) if len(rows) > limit else None}


def page_newest_visible(
    noun: str,
    read: Callable[[int, int], NewestRows[Numbered]],
    is_visible: Callable[[Numbered], bool],
    *,
    cursor: str,
    limit: int,
) -> PageOf[Numbered]:
    """Return one page of visible rows in descending number. `read` takes a number that rows are below, and a limit.

    Reads a limited number of rows, so a page may be short or empty although more follow.
    """
    position = decode_number_cursor(cursor, noun)
    before, found = _NUMBER_MAX if position is None else position, list[Numbered]()
    for _ in range(READS_PER_PAGE_MAX):
        newest = read(before, limit - len(found))
        found += filter(is_visible, newest.rows)
        before = newest.older_below
        if not before or len(found) == limit:
            break
    return {"items": found, "next": encode_cursor(noun, before) if before else None}


def page_by_key(
    noun: str,
    read_keys: Callable[[Page], Sequence[tuple[int, str]]],
    select_visible: Callable[[Collection[str]], Collection[str]],
    read_rows: Callable[[Collection[int]], Sequence[Numbered]],
    *,
    get_retention_mark: Callable[[], int],
    after: int,
    cursor: str,
    limit: int,
) -> PageOf[Numbered]:
    """Return one page as `page_by_number` does, but read whole rows only of what is visible.

    A key is the number and the subject of a row. `select_visible` returns the visible ones among the subjects.

    Raises:
        ProblemError: as `page_by_number`.
    """
    at = _start_number(noun, cursor, after, get_retention_mark)
    scanned_max = KEYS_SCANNED_PER_ITEM * limit
    keys = read_keys(Page(at, scanned_max + 1))
    visible_subjects = select_visible({subject for _, subject in keys})
    visible = [number for number, subject in keys[:scanned_max] if subject in visible_subjects]
    end = visible[limit - 1] if len(visible) >= limit else keys[:scanned_max][-1][0] if keys else at
    next_cursor = encode_cursor(noun, end) if keys and keys[-1][0] > end else None
    return {"items": list(read_rows(visible[:limit])), "next": next_cursor}


def _start_number(noun: str, cursor: str, after: int, get_retention_mark: Callable[[], int]) -> int:
    position = decode_number_cursor(cursor, noun)
    at = after if position is None else position
    if 0 < at < (deleted := get_retention_mark()):
        detail = f"{noun} up to number {deleted} were deleted by retention. Start again without a cursor"
        raise ProblemError(410, "swept", detail)
    return at


def page_of_jobs(live: Iterable[Job], store: ApiStore, query: JobQuery, *, cursor: str, limit: int) -> PageOf[Job]:
    after = _decode_sort_key(cursor, "jobs")
    # A job that has ended stays among the live ones until its GPUs are free.
    found = {job.id: job for job in live if query.matches(job)}
    if query.includes_ended:
        # A job that has ended since `live` was read is in both; the ended one is current.
        found |= {job.id: job for job in store.find_ended_jobs(query, after=after, limit=limit + 1)}
    rows = take_page(list(found.values()), get_job_sort_key, after=after, limit=limit + 1)
    return _page_of_rows("jobs", rows, get_job_sort_key, limit)


def page_of_loans(live: Iterable[Loan], store: ApiStore, query: LoanQuery, *, cursor: str, limit: int) -> PageOf[Loan]:
    after = _decode_sort_key(cursor, "loans")
    found = {loan.id: loan for loan in live if query.matches(loan)}
    if query.includes_ended:
        found |= {loan.id: loan for loan in store.find_ended_loans(query, after=after, limit=limit + 1)}
    rows = take_page(list(found.values()), get_loan_sort_key, after=after, limit=limit + 1)
    return _page_of_rows("loans", rows, get_loan_sort_key, limit)


def page_of_receipts(
    live: Iterable[RecallReceipt], store: ApiStore, query: ReceiptQuery, *, cursor: str, limit: int
) -> PageOf[RecallReceipt]:
    after = _decode_sort_key(cursor, "recalls")
    found = {receipt.id: receipt for receipt in live if query.matches(receipt)}
    found |= {receipt.id: receipt for receipt in store.lending.find_receipts(query, after=after, limit=limit + 1)}
    rows = take_page(list(found.values()), get_receipt_sort_key, after=after, limit=limit + 1)
    return _page_of_rows("recalls", rows, get_receipt_sort_key, limit)


def _decode_sort_key(cursor: str, noun: str) -> SortKey | None:
    position = decode_cursor(cursor, noun, float, str)
    return None if position is None else SortKey(*position)


def _page_of_rows(noun: str, rows: tuple[Row, ...], get_sort_key: Callable[[Row], SortKey], limit: int) -> PageOf[Row]:
    """Return the page. `rows` has one row more than fits if there is a following page."""
    next_cursor = encode_cursor(noun, *get_sort_key(rows[limit - 1])) if len(rows) > limit else None
    return {"items": list(rows[:limit]), "next": next_cursor}
