"""Webhooks and their deliveries: create, change, test, redeliver.

For admins, and queue-admins of the webhook's queue.
"""

from __future__ import annotations

import base64
import secrets
from dataclasses import replace
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import Depends, Path, Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from api.http.conditional_requests import IdempotencyKeyHeader, build_creation_key, create_once
from api.http.dependencies import LimitParameter, PrincipalDep, ServiceDep, StoreDep, create_router
from api.http.errors import ProblemError, problem_responses, raise_conflict, raise_invalid_field, raise_not_found
from api.http.paging import CursorParameter, PageOf, decode_number_cursor, encode_cursor
from api.identity.audit import new_audit_entry
from api.identity.authorization import QUEUE_ADMIN, requires
from api.identity.principals import Principal, Role
from api.webhooks.deliverer import build_test_delivery
from api.webhooks.sender import RefusedAddressError, check_host, parse_allowed_hosts
from api.webhooks.signature import derive_webhook_secret
from scheduler.documents.webhook import WebhookChange, WebhookDocument
from scheduler.domain.events import Delivery, DeliveryState, Webhook
from scheduler.store.webhooks import ClaimLostError


class WebhookView(TypedDict):
    """A URL that receives events."""

    id: Annotated[str, Field(description="Unique id that starts with `wh_`.")]
    owner: Annotated[str, Field(description="Display name of the caller that created it.")]
    owner_id: Annotated[str, Field(description="Stable id of that caller, as in `/v1/whoami`.")]
    url: Annotated[str, Field(description="Address to which messages are posted.")]
    codes: Annotated[list[str], Field(description="Event types that are sent. Empty: all.")]
    queue: Annotated[str, Field(description="Queue whose events, and those of its jobs, are sent. Empty: all.")]
    subject: Annotated[str, Field(description="Job id, node, pool or queue whose events are sent. Empty: all.")]
    enabled: Annotated[bool, Field(description="Whether messages are sent. Events are kept for it while false.")]
    disabled_reason: Annotated[
        str, Field(description="Why the service stopped sending. Empty: it did not, or a user stopped it.")
    ]
    dead_in_a_row: Annotated[int, Field(description="Number of deliveries given up since the last success.")]
    created_at_s: Annotated[float, Field(description="Time of creation, in seconds since 1970 (UTC).")]
    may_veto: Annotated[
        bool,
        Field(
            description=(
                "Whether its receiver's response can veto a proposed loan. An admin must create it, and only "
                "admins may change it."
            )
        ),
    ]
    old_secret_until_s: Annotated[
        float | None,
        Field(
            description=(
                "Time until which messages carry the previous signature too, in seconds since 1970 (UTC). "
                "Null: no rotation yet."
            )
        ),
    ]


class WebhookSecretView(WebhookView):
    """A webhook with its signing secret, which no other response contains."""

    secret: Annotated[str, Field(description="Key with which to verify the signature of each message.")]


class DeliveryView(TypedDict):
    """One message to a webhook, with the outcome of its attempts."""

    id: Annotated[str, Field(description="Unique id, the same in every attempt, by which receivers detect duplicates.")]
    webhook_id: Annotated[str, Field(description="Webhook that the message is sent to.")]
    event_number: Annotated[int | None, Field(description="Position of the event in the log. Null: a test message.")]
    code: Annotated[str, Field(description="Event type, or `Test`.")]
    subject: Annotated[str, Field(description="Job id, node, pool or queue that the event is about.")]
    state: Annotated[str, Field(description="`pending`, `delivered`, or `dead` if it was given up.")]
    attempts: Annotated[int, Field(description="Number of requests made so far.")]
    created_at_s: Annotated[float, Field(description="Time at which it was queued, in seconds since 1970 (UTC).")]
    next_at_s: Annotated[
        float | None, Field(description="Time of the next attempt, in seconds since 1970 (UTC). Null: there is none.")
    ]
    ended_at_s: Annotated[
        float | None,
        Field(description="Time of success or of the last attempt, in seconds since 1970 (UTC). Null: pending."),
    ]
    status: Annotated[int | None, Field(description="HTTP status of the last response. Null: no response.")]
    error: Annotated[str, Field(description="What went wrong in the last attempt. Empty: nothing.")]
    body: Annotated[str, Field(description="JSON text that is posted, the same in every attempt.")]


def webhook_view(webhook: Webhook) -> WebhookView:
    return {
        "id": webhook.id,
        "owner": webhook.owner,
        "owner_id": webhook.owner_id,
        "url": webhook.url,
        "codes": list(webhook.codes),
        "queue": webhook.queue,
        "subject": webhook.subject,
        "enabled": webhook.enabled,
        "disabled_reason": webhook.disabled_reason,
        "dead_in_a_row": webhook.dead_in_a_row,
        "created_at_s": webhook.created_at_s,
        "may_veto": webhook.may_veto,
        "old_secret_until_s": webhook.old_secret_until_s or None,
    }


def secret_view(webhook: Webhook, secret: str) -> WebhookSecretView:
    return {**webhook_view(webhook), "secret": secret}


def delivery_view(delivery: Delivery) -> DeliveryView:
    return {
        "id": delivery.id,
        "webhook_id": delivery.webhook_id,
        "event_number": delivery.event_number or None,
        "code": delivery.code,
        "subject": delivery.subject,
        "state": delivery.state.value,
        "attempts": delivery.attempts,
        "created_at_s": delivery.created_at_s,
        "next_at_s": delivery.next_at_s if delivery.ended_at_s is None else None,
        "ended_at_s": delivery.ended_at_s,
        "status": delivery.status,
        "error": delivery.error,
        "body": delivery.body,
    }


router = create_router("webhooks", prefix="/v1/webhooks")

OLD_SECRET_GRACE_S = 86_400.0
"""How long messages are also signed with the previous secret after a rotation."""


WebhookIdPath = Annotated[str, Path(description="Unique id from the response to its creation.")]
DeliveryIdPath = Annotated[str, Path(description="Unique id of a dead message, from the list of deliveries.")]


def _visible_webhook(webhook_id: WebhookIdPath, store: StoreDep, principal: PrincipalDep) -> Webhook:
    found = store.webhooks.get_webhook(webhook_id)
    if found is None or not principal.has_role(Role.QUEUE_ADMIN, found.queue):
        raise_not_found("webhook", webhook_id)
    return found


WebhookDep = Annotated[Webhook, Depends(_visible_webhook)]


@router.post("", status_code=201, responses=problem_responses(409))
@requires(QUEUE_ADMIN)
def create_webhook(
    document: WebhookDocument,
    service: ServiceDep,
    store: StoreDep,
    principal: PrincipalDep,
    response: Response,
    *,
    key: IdempotencyKeyHeader = "",
) -> WebhookSecretView:
    """Send future events to a URL. Only this response contains the signing secret; a retry with the same
    `Idempotency-Key` returns it again."""
    queue = document.queue or ""
    if not principal.has_role(Role.QUEUE_ADMIN, queue):
        needed = f"queue-admin of queue {queue}" if queue else "admin, or queue-admin of its `queue`"
        raise ProblemError(403, "forbidden", f"a webhook needs the role {needed}")
    _check_url(document.url, service.settings.webhook_hosts)
    new = Webhook(
        id=f"wh_{base64.b32encode(secrets.token_bytes(10)).decode().lower()}",
        owner=principal.name,
        owner_id=principal.subject,
        url=document.url,
        created_at_s=service.clock.now_s(),
        codes=tuple(dict.fromkeys(document.codes)),
        queue=queue,
        subject=document.subject or "",
        may_veto=principal.has_role(Role.ADMIN),
    )
    creation_key = build_creation_key(key, principal, "webhook", document)
    audit = new_audit_entry(principal, new.created_at_s, "CreateWebhook", new.id, after=_audited_fields(new))
    created = create_once(
        store, creation_key, lambda: store.webhooks.create(new, creation_key, audit=audit), store.webhooks.get_webhook
    )
    response.headers["Location"] = f"/v1/webhooks/{created.id}"
    return secret_view(created, derive_webhook_secret(service.token_secret, created.id, created.secret_number))


@router.get("")
@requires(QUEUE_ADMIN)
def list_webhooks(
    store: StoreDep, principal: PrincipalDep, limit: LimitParameter = 100, cursor: CursorParameter = ""
) -> PageOf[WebhookView]:
    """List the webhooks that the caller may see, oldest first. `next` is the cursor of the following page."""
    after = decode_number_cursor(cursor, "webhooks") or 0
    found = store.webhooks.list_webhooks(after=after, limit=limit + 1, queues=_list_administered_queues(principal))
    next_cursor = encode_cursor("webhooks", found[limit - 1].number) if len(found) > limit else None
    return {"items": [webhook_view(webhook) for webhook in found[:limit]], "next": next_cursor}


@router.get("/{webhook_id}")
@requires(QUEUE_ADMIN)
def get_webhook(webhook: WebhookDep) -> WebhookView:
    """Return a webhook without its secret."""
    return webhook_view(webhook)


@router.patch("/{webhook_id}")
@requires(QUEUE_ADMIN)
def change_webhook(
    change: WebhookChange, webhook: WebhookDep, service: ServiceDep, store: StoreDep, principal: PrincipalDep
) -> WebhookView:
    """Change the given fields. A webhook that is enabled again gets all events that happened in between."""
    changes = {name: value for name, value in change.model_dump(exclude_unset=True).items() if value is not None}
    if change.url is not None:
        _check_url(change.url, service.settings.webhook_hosts)
    if change.enabled is not None:
        changes |= {"disabled_reason": "", "dead_in_a_row": 0}
    if not principal.has_role(Role.ADMIN):
        changes["may_veto"] = False  # another receiver may answer now
    before, after = _audited_fields(webhook), _audited_fields(replace(webhook, **changes))
    names = [name for name in before if name in changes]
    audit = new_audit_entry(
        principal,
        service.clock.now_s(),
        "ChangeWebhook",
        webhook.id,
        before={name: before[name] for name in names},
        after={name: after[name] for name in names},
    )
    changed = store.webhooks.update_webhook(webhook.id, changes, audit=audit)
    return webhook_view(changed or raise_not_found("webhook", webhook.id))


@router.delete("/{webhook_id}", status_code=204)
@requires(QUEUE_ADMIN)
def delete_webhook(webhook: WebhookDep, service: ServiceDep, store: StoreDep, principal: PrincipalDep) -> None:
    """Delete the webhook and its deliveries. An attempt in progress may still arrive."""
    now_s, before = service.clock.now_s(), _audited_fields(webhook)
    audit = new_audit_entry(principal, now_s, "DeleteWebhook", webhook.id, before=before)
    store.webhooks.delete(webhook.id, audit=audit)


@router.post("/{webhook_id}:rotate-secret")
@requires(QUEUE_ADMIN)
def rotate_webhook_secret(
    webhook: WebhookDep, service: ServiceDep, store: StoreDep, principal: PrincipalDep
) -> WebhookSecretView:
    """Create a new secret, which only this response contains. For a day, messages are also signed with the old one."""
    now_s = service.clock.now_s()
    after = {"old_secret_until_s": now_s + OLD_SECRET_GRACE_S}
    audit = new_audit_entry(principal, now_s, "RotateWebhookSecret", webhook.id, after=after)
    rotated = store.webhooks.rotate_secret(webhook.id, old_until_s=after["old_secret_until_s"], audit=audit)
    if rotated is None:
        raise_not_found("webhook", webhook.id)
    return secret_view(rotated, derive_webhook_secret(service.token_secret, rotated.id, rotated.secret_number))


@router.post("/{webhook_id}:test", status_code=202, responses=problem_responses(409))
@requires(QUEUE_ADMIN)
def test_webhook(webhook: WebhookDep, service: ServiceDep, store: StoreDep, principal: PrincipalDep) -> DeliveryView:
    """Send a message with code Test after all pending ones. Find its outcome among the deliveries."""
    if not webhook.enabled:
        raise_conflict(f"webhook {webhook.id} is disabled. Enable it first")
    now_s = service.clock.now_s()
    new = build_test_delivery(webhook, requested_by=principal.name, now_s=now_s)
    audit = new_audit_entry(principal, now_s, "TestWebhook", webhook.id, after={"delivery": new.id})
    try:
        return delivery_view(store.webhooks.add_delivery(new, audit=audit))
    except ClaimLostError:
        raise_not_found("webhook", webhook.id)


@router.get("/{webhook_id}/deliveries")
@requires(QUEUE_ADMIN)
def list_deliveries(
    webhook: WebhookDep,
    store: StoreDep,
    state: Annotated[
        Literal["", "pending", "delivered", "dead"],
        Query(description="Only messages that are pending, delivered or given up. Empty: all."),
    ] = "",
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[DeliveryView]:
    """List pending and ended deliveries, newest first. Ended ones are kept for a week."""
    wanted = DeliveryState(state) if state else None
    before = decode_number_cursor(cursor, "deliveries")
    found = store.webhooks.list_deliveries(webhook.id, before=before, limit=limit + 1, state=wanted)
    next_cursor = encode_cursor("deliveries", found[limit - 1].number) if len(found) > limit else None
    return {"items": [delivery_view(delivery) for delivery in found[:limit]], "next": next_cursor}


@router.post("/{webhook_id}/deliveries/{delivery_id}:redeliver", status_code=202, responses=problem_responses(409))
@requires(QUEUE_ADMIN)
def redeliver_message(
    delivery_id: DeliveryIdPath, webhook: WebhookDep, service: ServiceDep, store: StoreDep, principal: PrincipalDep
) -> DeliveryView:
    """Try a dead delivery again, before all later ones."""
    found = store.webhooks.get_delivery(webhook.id, delivery_id) or raise_not_found("delivery", delivery_id)
    now_s = service.clock.now_s()
    audit = new_audit_entry(principal, now_s, "RedeliverMessage", webhook.id, after={"delivery": delivery_id})
    try:
        revived = store.webhooks.redeliver(webhook.id, delivery_id, now_s=now_s, audit=audit)
    except ClaimLostError:
        raise_not_found("webhook", webhook.id)
    if revived is None:
        raise_conflict(f"delivery {delivery_id} is {found.state}. Only a dead delivery can be redelivered")
    return delivery_view(revived)


def _audited_fields(webhook: Webhook) -> dict[str, Any]:
    """Return the fields that the audit log shows. Of the URL it shows the host: the rest is often a password."""
    return {
        "url": urlsplit(webhook.url).hostname or "",
        "codes": list(webhook.codes),
        "queue": webhook.queue,
        "subject": webhook.subject,
        "enabled": webhook.enabled,
    }


def _list_administered_queues(principal: Principal) -> frozenset[str] | None:
    """Return the queues whose webhooks the principal may see; None means all."""
    queues = frozenset(grant.queue for grant in principal.grants if grant.role >= Role.QUEUE_ADMIN)
    return None if "" in queues else queues


def _check_url(url: str, hosts: str) -> None:
    try:
        check_host(urlsplit(url).hostname or "", parse_allowed_hosts(hosts))
    except RefusedAddressError as error:
        raise_invalid_field("url", url, f"a URL with a public host: {error}")
