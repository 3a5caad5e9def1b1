"""Requests at the same time that were made for the same state: one of them has its way, the others are told."""

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
from scheduler.domain.job import JobSpec
from scheduler.scheduling.preconditions import job_etag
from scheduler.store.api_protocol import AuditEntry
from scheduler.store.protocol import Page

if TYPE_CHECKING:
    from tests.api.conftest import ApiService

TOGETHER = 16


def at_once(ask: Callable[[int], httpx.Response]) -> list[httpx.Response]:
    with ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(ask, range(TOGETHER)))


def world(service: ApiService) -> RequestContext:
    """As another process sees it."""
    return load_request_context(StateReader(service.store), service.store, service.clock.now_s(), ANONYMOUS)


def test_of_many_changes_of_what_was_read_one_is_made(fleet: ApiService) -> None:
    path = f"/v1/jobs/{fleet.submit(gpus={'min': 1, 'max': 1})}"
    read = fleet.http.get(path).headers["etag"]

    def scale(at: int) -> httpx.Response:
        return fleet.http.patch(path, json={"gpus": {"max": at + 2}}, headers={"If-Match": read})

    answers = at_once(scale)
    assert Counter(answer.status_code for answer in answers) == {202: 1, 412: TOGETHER - 1}
    (made,) = (at for at, answer in enumerate(answers) if answer.is_success)
    fleet.tick()
    assert fleet.get(path)["gpus"]["max"] == made + 2


def test_of_many_jobs_a_queue_takes_as_many_of_one_user_as_it_allows(fleet: ApiService) -> None:
    fleet.made("/v1/queues", {"name": "vision", "limit_gpus": 0, "user_jobs_max": 3})
    document = {"name": "train", "queue": "vision", "gpus": {"min": 1, "max": 1}}
    answers = at_once(lambda _: fleet.post("/v1/jobs", document))
    assert Counter(answer.status_code for answer in answers) == {201: 3, 409: TOGETHER - 3}
    fleet.tick()
    assert len(fleet.get("/v1/jobs", queue="vision")["items"]) == 3


@pytest.mark.parametrize("ticks", ["none", "between", "at once"])
def test_who_saw_what_another_process_changed_meanwhile_is_told(
    fleet: ApiService, monkeypatch: pytest.MonkeyPatch, ticks: str
) -> None:
    job_id = fleet.submit()
    fleet.tick()
    first, second = world(fleet), world(fleet)
    basis = job_etag(first.job(job_id))
    first.send(ScaleJob(job_id, 1, 3), basis=basis)
    if ticks == "between":
        fleet.tick()
    if ticks == "at once":  # the tick takes the command in before whoever sent it has looked again
        monkeypatch.setattr(fleet.store, "send", _ticking(fleet))
    with pytest.raises(ProblemError) as told:
        second.send(ScaleJob(job_id, 1, 4), basis=basis)
    assert (told.value.status, told.value.slug) == (412, "changed")
    assert f"{job_id} has changed since it was read: its ETag was {basis}" in told.value.detail
    fleet.tick()
    assert fleet.get(f"/v1/jobs/{job_id}")["gpus"]["max"] == 3
    events = [row.event for row in fleet.store.list_events(Page(limit=100), subject=job_id)]
    assert sum(event.code is EventCode.COMMAND_REFUSED for event in events) == 1


def test_a_key_whose_job_was_refused_for_one_that_was_faster_stays_refused(fleet: ApiService) -> None:
    fleet.made("/v1/queues", {"name": "vision", "limit_gpus": 0, "user_jobs_max": 1})
    spec = JobSpec("train", 1, 1, queue="vision")
    late = world(fleet)
    faster = fleet.submit(queue="vision")
    with pytest.raises(ProblemError, match="somebody was faster: use a new key") as told:
        submit_once(late, spec, "k-1", lambda: "slower")
    assert told.value.status == 409
    fleet.http.delete(f"/v1/jobs/{faster}")
    for _ in range(3):
        with pytest.raises(ProblemError, match="somebody was faster: use a new key"):
            submit_once(world(fleet), spec, "k-1", lambda: "another")
        fleet.tick()
    assert submit_once(world(fleet), spec, "k-2", lambda: "another")[1] == "another"


def _ticking(service: ApiService) -> Callable[..., bool]:
    """The store's `send`, and a tick behind it."""
    send = service.store.send

    def sent(command: Command, *, audit: AuditEntry | None = None) -> bool:
        is_new = send(command, audit=audit)
        service.tick()
        return is_new

    return sent
