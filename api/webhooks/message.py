"""Which events a webhook is told of, and the JSON that tells of one."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable

from api.identity.principal import Grant, Principal, Role
from api.identity.sight import Sight
from scheduler.domain.event import Event, EventCode
from scheduler.domain.job import Job
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.webhook import TEST_CODE, Delivery, Webhook
from scheduler.store.protocol import StoredEvent

FindJob = Callable[[str], Job | None]


def sight_of(webhook: Webhook, snapshot: Snapshot, ended_job: FindJob) -> Sight:
    """A webhook of a queue sees what a queue-admin of that queue sees, whoever made it and whatever became of him."""
    return Sight(Principal(webhook.owner, (Grant(Role.QUEUE_ADMIN, webhook.queue),)), snapshot, ended_job)


def delivery_of(webhook: Webhook, stored: StoredEvent, sight: Sight, *, now_s: float) -> Delivery | None:
    """What is to be delivered of an event; None where the webhook is not told of it. Jobs are looked up, and names of
    those that it may not see taken out, only for events that the codes and the subject let pass."""
    event = stored.event
    if webhook.codes and event.code.value not in webhook.codes:
        return None
    if webhook.subject not in ("", event.subject):
        return None
    job = sight.snapshot.jobs.get(event.subject) or sight.ended_job(event.subject)
    if webhook.queue and not _is_of_queue(webhook.queue, event, job):
        return None
    return _delivery(webhook, event.code.value, sight.redacted(_body(event, stored.number, job)), stored.number, now_s)


def asked_delivery(webhook: Webhook, *, asked_by: str, now_s: float) -> Delivery:
    said = f"{asked_by} asked whether this webhook works"
    body = {"code": TEST_CODE, "subject": webhook.id, "message": said, "at_s": now_s, "numbers": {}, "job": None}
    return _delivery(webhook, TEST_CODE, {"event_number": None, **body}, 0, now_s)


def _is_of_queue(queue: str, event: Event, job: Job | None) -> bool:
    if event.code is EventCode.QUEUE_CHANGED:
        return event.subject == queue
    return job is not None and job.spec.queue == queue


def _body(event: Event, number: int, job: Job | None) -> dict[str, object]:
    return {
        "event_number": number,
        "code": event.code.value,
        "subject": event.subject,
        "message": event.message,
        "at_s": event.at_s,
        "numbers": dict(event.numbers),
        "job": None if job is None else _summary(job),
    }


def _summary(job: Job) -> dict[str, object]:
    """As the job stands when the message is made, which may be a little after the event."""
    return {
        "id": job.id,
        "name": job.spec.name,
        "queue": job.spec.queue,
        "owner": job.owner,
        "state": job.state.value,
        "gpus": {"min": job.spec.min_gpus, "max": job.spec.max_gpus, "target": job.allocation.target_gpus},
    }


def _delivery(webhook: Webhook, code: str, body: dict[str, object], event_number: int, now_s: float) -> Delivery:
    """An event has one id a webhook, however often it is read or sent."""
    delivery_id = f"msg_{webhook.id}_{event_number or secrets.token_hex(6)}"
    text = json.dumps({"id": delivery_id, **body}, separators=(",", ":"))
    return Delivery(delivery_id, webhook.id, event_number, code, str(body["subject"]), now_s, text, next_at_s=now_s)
