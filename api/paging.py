"""Keyset paging of jobs: those that have not ended first, newest first; then the ended ones, last ended first."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from api.errors import refuse
from scheduler.domain.job import Job
from scheduler.store.protocol import Store

JobFilter = Callable[[Job], bool]


@dataclass(frozen=True, slots=True)
class JobCursor:
    """The last job of a page. `at_s` is when it was submitted or, once `ended`, when it ended."""

    ended: bool
    at_s: float
    job_id: str

    def __str__(self) -> str:
        text = f"{'ended' if self.ended else 'live'}:{self.at_s!r}:{self.job_id}"
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def cursor_of(job: Job) -> JobCursor:
    return JobCursor(job.is_ended, job.state_since_s if job.is_ended else job.submitted_at_s, job.id)


def parse_cursor(text: str) -> JobCursor | None:
    """None for an empty text; a 422 problem for one that no answer ever held."""
    if not text:
        return None
    try:
        padded = text + "=" * (-len(text) % 4)
        part, at_s, job_id = base64.b64decode(padded, altchars=b"-_", validate=True).decode().split(":", 2)
        if part in ("live", "ended"):
            return JobCursor(part == "ended", float(at_s), job_id)
    except (binascii.Error, ValueError):
        pass  # refused below, like a text that decodes to something else
    return refuse("cursor", text, "the value of `next` in an earlier answer")


def page_of_jobs(
    live: Iterable[Job], store: Store, *, wanted: JobFilter, cursor: JobCursor | None, limit: int
) -> tuple[tuple[Job, ...], JobCursor | None]:
    """Up to `limit` jobs after `cursor`, and the cursor of the next page (None at the end)."""
    found: list[Job] = []
    if cursor is None or not cursor.ended:
        ordered = sorted((job for job in live if not job.is_ended and wanted(job)), key=_place, reverse=True)
        found += [job for job in ordered if cursor is None or _place(job) < (cursor.at_s, cursor.job_id)]
    if len(found) <= limit:
        found += _ended_jobs(store, wanted, cursor if cursor and cursor.ended else None, limit + 1 - len(found))
    page = tuple(found[:limit])
    return page, cursor_of(page[-1]) if len(found) > limit else None


def _place(job: Job) -> tuple[float, str]:
    cursor = cursor_of(job)
    return cursor.at_s, cursor.job_id


def _ended_jobs(store: Store, wanted: JobFilter, cursor: JobCursor | None, count: int) -> list[Job]:
    """Reads ever further back until `count` are found: the history knows only "the last so many"."""
    reach = 2 * count
    while True:
        jobs = store.ended_jobs(limit=reach)
        complete = len(jobs) < reach
        # The oldest moment that was read may hold more jobs than were read, so it counts only at the end.
        sure = [job for job in jobs if complete or job.state_since_s > jobs[-1].state_since_s]
        ordered = sorted((job for job in sure if wanted(job)), key=_place, reverse=True)
        after = [job for job in ordered if cursor is None or _place(job) < (cursor.at_s, cursor.job_id)]
        if complete or len(after) >= count:
            return after[:count]
        reach *= 2
