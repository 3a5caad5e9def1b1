"""Concurrent requests that were made against the same state: one succeeds, the others get a problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import pytest

from api.http.conditional_requests import submit_once
from api.http.errors import ProblemError
from api.identity.principals import ANONYMOUS
from api.state import RequestContext, StateReader, load_request_context
from scheduler.domain.commands import Command, ScaleJob
from scheduler.domain.events import EventCode
from scheduler.domain.job_spec import JobSpec
from scheduler.scheduling.preconditions import job_etag
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.protocol import Page
from tests.api.conftest import JOB

if TYPE_CHECKING:
    from tests.api.conftest import ApiService

TOGETHER = 16


def run_concurrently(ask: Callable[[int], httpx.Response]) -> list[httpx.Response]:
    with ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(ask, range(TOGETHER)))


def load_context(service: ApiService) -> RequestContext:
    """Return the state as another process reads it."""
    return load_request_context(StateReader(service.store), service.store, service.clock.now_s(), ANONYMOUS)


def test_one_of_many_conditional_changes_succeeds(fleet: ApiService) -> None:
    path = f"/v1/jobs/{fleet.submit(gpus={'min': 1, 'max': 1})}"
    read = fleet.http.get(path).headers["etag"]

    def scale(at: int) -> httpx.Response:
        return fleet.http.patch(path, json={"gpus": {"max": at + 2}}, headers={"If-Match": read})

    answers = run_concurrently(scale)
    assert Counter(answer.status_code for answer in answers) == {202: 1, 412: TOGETHER - 1}
    (made,) = (at for at, answer in enumerate(answers) if answer.is_success)
    fleet.tick()
    assert fleet.get(path)["gpus"]["max"] == made + 2


def test_concurrent_submissions_respect_the_job_limit_per_user(fleet: ApiService) -> None:
    fleet.made("/v1/queues", {"name": "vision", "limit_gpus": 0, "user_jobs_max": 3})
    document = {**JOB, "queue": "vision", "gpus": {"min": 1, "max": 1}}
    answers = run_concurrently(lambda _: fleet.post("/v1/jobs", document))
    assert Counter(answer.status_code for answer in answers) == {201: 3, 409: TOGETHER - 3}
    fleet.tick()
    assert len(fleet.get("/v1/jobs", queue="vision")["items"]) == 3


@pytest.mark.parametrize("ticks", ["none", "between", "at once"])
def test_a_change_by_another_process_makes_a_conditional_change_fail(
    fleet: ApiService, monkeypatch: pytest.MonkeyPatch, ticks: str
) -> None:
    job_id = fleet.submit()
    fleet.tick()
    first, second = load_context(fleet), load_context(fleet)
    basis = job_etag(first.job(job_id))
    first.send(ScaleJob(job_id, 1, 3), basis=basis)
    if ticks == "between":
        fleet.tick()
    if ticks == "at once":  # the tick consumes the command before its sender checks the inbox again
        monkeypatch.setattr(fleet.store, "send", _send_and_tick(fleet))
    with pytest.raises(ProblemError) as raised:
        second.send(ScaleJob(job_id, 1, 4), basis=basis)
    assert (raised.value.status, raised.value.slug) == (412, "changed")
    assert basis in raised.value.detail
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{job_id}")["gpus"]["max"] == 3
    events = [row.event for row in fleet.store.list_events(Page(limit=100), subject=job_id)]
    assert sum(event.code is EventCode.COMMAND_REFUSED for event in events) == 1


def test_the_key_of_a_refused_job_stays_refused(fleet: ApiService) -> None:
    fleet.made("/v1/queues", {"name": "vision", "limit_gpus": 0, "user_jobs_max": 1})
    spec = JobSpec("train", 1, 1, queue="vision")
    stale_context = load_context(fleet)
    first_job = fleet.submit(queue="vision")
    with pytest.raises(ProblemError) as raised:
        submit_once(stale_context, spec, "k-1", lambda: "slower")
    assert raised.value.status == 409
    fleet.http.delete(f"/v1/jobs/{first_job}")
    for _ in range(3):
        with pytest.raises(ProblemError) as raised:
            submit_once(load_context(fleet), spec, "k-1", lambda: "another")
        assert raised.value.status == 409
        fleet.tick()
    assert submit_once(load_context(fleet), spec, "k-2", lambda: "another")[1] == "another"


def _send_and_tick(service: ApiService) -> Callable[..., bool]:
    """Return the store's `send` followed by a tick."""
    send = service.store.send

    def sent(command: Command, *, audit: AuditEntry | None = None) -> bool:
        is_new = send(command, audit=audit)
        service.tick()
        return is_new

    return sent
