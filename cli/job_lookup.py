"""Jobs that a command line names: by id, by name, or by the beginning of either."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from cli.exit_codes import InputError

if TYPE_CHECKING:
    from ebbtide.client import Client
    from ebbtide.client.views import JobView

CANDIDATES_MAX = 200
SHOWN_MAX = 8
TERMINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


def find_job_id(client: Client, reference: str) -> str:
    """Return the id of the job with this id or name, or else of the only one whose id or name starts with it.

    A live job is preferred to ended ones, and a whole name to the beginning of one.

    Raises:
        InputError: several jobs match; the message lists them.
        ProblemError: no job matches.
    """
    from ebbtide.client import ProblemError

    try:
        return client.job(reference)["id"]
    except ProblemError as problem:
        candidates = _find_candidates(client, reference) if problem.status == 404 else []
        if not candidates:
            raise
        return _require_one(reference, candidates)["id"]


def _find_candidates(client: Client, reference: str) -> list[JobView]:
    """Return the jobs that match best."""
    found = {job["id"]: job for job in _list_matching(client, reference)}
    named = [job for job in found.values() if job["name"] == reference]
    jobs = named or list(found.values())
    return [job for job in jobs if job["state"] not in TERMINAL_STATES] or jobs


def _list_matching(client: Client, reference: str) -> Iterator[JobView]:
    """Yield jobs whose id or name starts with the text. The ids of most jobs start with their name, but not of all.

    Live jobs are listed apart, because any number of ended ones may be newer.
    """
    for state in ("live", "ended"):
        yield from islice(client.jobs(job_id=reference, state=state, limit=CANDIDATES_MAX), CANDIDATES_MAX)
        yield from islice(client.jobs(name=reference, state=state, limit=CANDIDATES_MAX), CANDIDATES_MAX)


def _require_one(reference: str, jobs: list[JobView]) -> JobView:
    if len(jobs) == 1:
        return jobs[0]
    listed = ", ".join(f"{job['id']} ({job['state']})" for job in jobs[:SHOWN_MAX])
    more = f" and {len(jobs) - SHOWN_MAX} more" if len(jobs) > SHOWN_MAX else ""
    raise InputError(f"job: {reference!r} matches {len(jobs)} jobs: {listed}{more}. Use one of these ids.")
