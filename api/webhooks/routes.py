"""What the API tells of webhooks and of what is delivered to them.

Webhooks: who is told of events, and what has become of each message. For admins, and queue-admins of its queue.
"""

from __future__ import annotations

import base64
import secrets
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import Depends, Query, Response
from typing_extensions import TypedDict

from api.http.conditional_requests import IdempotencyKeyHeader, build_creation_key, create_once
from api.http.dependencies import LimitParameter, PrincipalDep, ServiceDep, SqlStoreDep, create_router
from api.http.errors import ProblemError, problem_responses, raise_conflict, raise_invalid_field, raise_not_found
from api.http.paging import CursorParameter, PageOf, decode_number_cursor, encode_cursor
from api.identity.principals import Principal, Role
from api.webhooks.deliverer import build_test_delivery
from api.webhooks.sender import RefusedAddressError, check_host, parse_allowed_hosts
from api.webhooks.signature import derive_webhook_secret
from scheduler.documents.webhook import WebhookChange, WebhookDocument
from scheduler.domain.events import Delivery, DeliveryState, Webhook
from scheduler.store.sql_webhooks import ClaimLostError


class WebhookView(TypedDict):
    """Empty `codes`, `queue` or `subject` let all events pass. `disabled_reason` is empty where a person did."""

    id: str
    owner: str
    url: str
    codes: list[str]
    queue: str
    subject: str
    enabled: bool
    disabled_reason: str
    dead_in_a_row: int
    created_at_s: float
    old_secret_until_s: float | None


class WebhookSecretView(WebhookView):
    """`secret` is shown this once."""

    secret: str


class DeliveryView(TypedDict):
    """`status` is that of the last answer, `next_at_s` when it is tried next; both None where there is none."""

    id: str
    webhook_id: str
    event_number: int | None
    code: str
    subject: str
    state: str
    attempts: int
    created_at_s: float
    next_at_s: float | None
    ended_at_s: float | None
    status: int | None
    error: str
    body: str


def webhook_view(webhook: Webhook) -> WebhookView:
    return {
        "id": webhook.id,
        "owner": webhook.owner,
        "url": webhook.url,
        "codes": list(webhook.codes),
        "queue": webhook.queue,
        "subject": webhook.subject,
        "enabled": webhook.enabled,
        "disabled_reason": webhook.disabled_reason,
        "dead_in_a_row": webhook.dead_in_a_row,
        "created_at_s": webhook.created_at_s,
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
"""How long a secret that was rotated is signed with beside the new one."""


def _visible_webhook(webhook_id: str, store: SqlStoreDep, principal: PrincipalDep) -> Webhook:
    found = store.webhooks.get_webhook(webhook_id)
    if found is None or not principal.has_role(Role.QUEUE_ADMIN, found.queue):
        raise_not_found("webhook", webhook_id)
    return found


WebhookDep = Annotated[Webhook, Depends(_visible_webhook)]


@router.post("", status_code=201, responses=problem_responses(409))
def create_webhook(
    document: WebhookDocument,
    service: ServiceDep,
    store: SqlStoreDep,
    principal: PrincipalDep,
    response: Response,
    *,
    key: IdempotencyKeyHeader = "",
) -> WebhookSecretView:
    """Have the events from now on sent to a URL. The secret that messages are signed with is shown this once, and to
    whoever asks again with the same `Idempotency-Key`."""
    queue = document.queue or ""
    if not principal.has_role(Role.QUEUE_ADMIN, queue):
        needed = f"queue-admin of queue {queue}" if queue else "admin, or queue-admin of the `queue` that it names"
        raise ProblemError(403, "forbidden", f"a webhook needs the role {needed}")
    _check_url(document.url, service.settings.webhook_hosts)
    new = Webhook(
        id=f"wh_{base64.b32encode(secrets.token_bytes(10)).decode().lower()}",
        owner=principal.name,
        url=document.url,
        created_at_s=service.clock.now_s(),
        codes=tuple(dict.fromkeys(document.codes)),
        queue=queue,
        subject=document.subject or "",
    )
    kept = build_creation_key(key, principal, "webhook", document)
    made = create_once(store, kept, lambda: store.webhooks.create(new, kept), store.webhooks.get_webhook)
    response.headers["Location"] = f"/v1/webhooks/{made.id}"
    return secret_view(made, derive_webhook_secret(service.token_secret, made.id, made.secret_number))


@router.get("")
def list_webhooks(
    store: SqlStoreDep, principal: PrincipalDep, limit: LimitParameter = 100, cursor: CursorParameter = ""
) -> PageOf[WebhookView]:
    """Webhooks that one may see, oldest first. `next` is the cursor of the following page."""
    after = decode_number_cursor(cursor, "webhooks") or 0
    found = store.webhooks.list_webhooks(after=after, limit=limit + 1, queues=_administered_queues(principal))
    following = encode_cursor("webhooks", found[limit - 1].number) if len(found) > limit else None
    return {"items": [webhook_view(each) for each in found[:limit]], "next": following}


@router.get("/{webhook_id}")
def get_webhook(webhook: WebhookDep) -> WebhookView:
    """A webhook, without its secret."""
    return webhook_view(webhook)


@router.patch("/{webhook_id}")
def change_webhook(change: WebhookChange, webhook: WebhookDep, service: ServiceDep, store: SqlStoreDep) -> WebhookView:
    """Change what is given. One that is enabled again is told of all that happened meanwhile."""
    given = {name: value for name, value in change.model_dump(exclude_unset=True).items() if value is not None}
    if change.url is not None:
        _check_url(change.url, service.settings.webhook_hosts)
    if change.enabled is not None:
        given |= {"disabled_reason": "", "dead_in_a_row": 0}
    return webhook_view(store.webhooks.update_webhook(webhook.id, **given) or raise_not_found("webhook", webhook.id))


@router.delete("/{webhook_id}", status_code=204)
def delete_webhook(webhook: WebhookDep, store: SqlStoreDep) -> None:
    """Nothing more is sent, and what was delivered is forgotten. An attempt that is on its way now may still arrive."""
    store.webhooks.delete(webhook.id)


@router.post("/{webhook_id}:rotate-secret")
def rotate_webhook_secret(webhook: WebhookDep, service: ServiceDep, store: SqlStoreDep) -> WebhookSecretView:
    """A new secret, shown this once. For a day messages bear a signature by the old one as well."""
    until_s = service.clock.now_s() + OLD_SECRET_GRACE_S
    rotated = store.webhooks.rotate_secret(webhook.id, old_until_s=until_s) or raise_not_found("webhook", webhook.id)
    return secret_view(rotated, derive_webhook_secret(service.token_secret, rotated.id, rotated.secret_number))


@router.post("/{webhook_id}:test", status_code=202, responses=problem_responses(409))
def test_webhook(webhook: WebhookDep, service: ServiceDep, store: SqlStoreDep, principal: PrincipalDep) -> DeliveryView:
    """Send a message of code Test, behind all that waits. What became of it stands among the deliveries."""
    if not webhook.enabled:
        raise_conflict(f"webhook {webhook.id} is disabled: enable it first")
    new = build_test_delivery(webhook, requested_by=principal.name, now_s=service.clock.now_s())
    try:
        return delivery_view(store.webhooks.add_delivery(new))
    except ClaimLostError:
        raise_not_found("webhook", webhook.id)


@router.get("/{webhook_id}/deliveries")
def list_deliveries(
    webhook: WebhookDep,
    store: SqlStoreDep,
    state: Annotated[Literal["", "pending", "delivered", "dead"], Query(description="Only these.")] = "",
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[DeliveryView]:
    """What was and is to be delivered, newest first; for a week after it ended."""
    wanted = DeliveryState(state) if state else None
    before = decode_number_cursor(cursor, "deliveries")
    found = store.webhooks.list_deliveries(webhook.id, before=before, limit=limit + 1, state=wanted)
    following = encode_cursor("deliveries", found[limit - 1].number) if len(found) > limit else None
    return {"items": [delivery_view(each) for each in found[:limit]], "next": following}


@router.post("/{webhook_id}/deliveries/{delivery_id}:redeliver", status_code=202, responses=problem_responses(409))
def redeliver_message(delivery_id: str, webhook: WebhookDep, service: ServiceDep, store: SqlStoreDep) -> DeliveryView:
    """Try a dead delivery again, before all that came later."""
    found = store.webhooks.get_delivery(webhook.id, delivery_id) or raise_not_found("delivery", delivery_id)
    try:
        revived = store.webhooks.redeliver(webhook.id, delivery_id, now_s=service.clock.now_s())
    except ClaimLostError:
        raise_not_found("webhook", webhook.id)
    if revived is None:
        raise_conflict(f"delivery {delivery_id} is {found.state}: only a dead one is delivered again")
    return delivery_view(revived)


def _administered_queues(principal: Principal) -> frozenset[str] | None:
    """The queues whose webhooks one may see; None: all webhooks."""
    queues = frozenset(grant.queue for grant in principal.grants if grant.role >= Role.QUEUE_ADMIN)
    return None if "" in queues else queues


def _check_url(url: str, hosts: str) -> None:
    try:
        check_host(urlsplit(url).hostname or "", parse_allowed_hosts(hosts))
    except RefusedAddressError as refused:
        raise_invalid_field("url", url, f"a public host: {refused}")
