"""Webhooks: who is told of events, and what has become of each message. For admins, and queue-admins of its queue."""

from __future__ import annotations

import base64
import secrets
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import Depends, Query, Response

from api.answers.page import PageOf
from api.answers.webhooks import (
    DeliveryView,
    WebhookSecretView,
    WebhookView,
    delivery_view,
    secret_view,
    webhook_view,
)
from api.dependencies import Limit, PrincipalDep, ServiceDep
from api.errors import ProblemError, conflict, not_found, refuse
from api.idempotency import IdempotencyKey, creation_key, make_once
from api.identity.principal import Principal, Role
from api.kept import SqlStoreDep
from api.paging import Cursor, cursor_of, number_in
from api.problems import problems
from api.routing import noun_router
from api.webhooks.addresses import RefusedAddressError, allowed_hosts, check_literal
from api.webhooks.message import asked_delivery
from api.webhooks.signature import webhook_secret
from scheduler.documents.webhook import WebhookChange, WebhookDocument
from scheduler.domain.webhook import DeliveryState, Webhook
from scheduler.store.sql_webhooks import ClaimLostError

router = noun_router("webhooks", prefix="/v1/webhooks")

OLD_SECRET_S = 86_400.0
"""How long a secret that was rotated is signed with beside the new one."""


def _webhook(webhook_id: str, store: SqlStoreDep, principal: PrincipalDep) -> Webhook:
    found = store.webhooks.webhook(webhook_id)
    if found is None or not principal.may(Role.QUEUE_ADMIN, found.queue):
        not_found("webhook", webhook_id)
    return found


WebhookDep = Annotated[Webhook, Depends(_webhook)]


@router.post("", status_code=201, responses=problems(409))
def create_webhook(
    document: WebhookDocument,
    service: ServiceDep,
    store: SqlStoreDep,
    principal: PrincipalDep,
    response: Response,
    *,
    key: IdempotencyKey = "",
) -> WebhookSecretView:
    """Have the events from now on sent to a URL. The secret that messages are signed with is shown this once, and to
    whoever asks again with the same `Idempotency-Key`."""
    queue = document.queue or ""
    if not principal.may(Role.QUEUE_ADMIN, queue):
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
    kept = creation_key(key, principal, "webhook", document)
    made = make_once(store, kept, lambda: store.webhooks.create(new, kept), store.webhooks.webhook)
    response.headers["Location"] = f"/v1/webhooks/{made.id}"
    return secret_view(made, webhook_secret(service.token_secret, made.id, made.secret_number))


@router.get("")
def list_webhooks(
    store: SqlStoreDep, principal: PrincipalDep, limit: Limit = 100, cursor: Cursor = ""
) -> PageOf[WebhookView]:
    """Webhooks that one may see, oldest first. `next` is the cursor of the following page."""
    after = number_in(cursor, "webhooks") or 0
    found = store.webhooks.webhooks(after=after, limit=limit + 1, queues=_queues(principal))
    following = cursor_of("webhooks", found[limit - 1].number) if len(found) > limit else None
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
    return webhook_view(store.webhooks.change(webhook.id, **given) or not_found("webhook", webhook.id))


@router.delete("/{webhook_id}", status_code=204)
def delete_webhook(webhook: WebhookDep, store: SqlStoreDep) -> None:
    """Nothing more is sent, and what was delivered is forgotten. An attempt that is on its way now may still arrive."""
    store.webhooks.delete(webhook.id)


@router.post("/{webhook_id}:rotate-secret")
def rotate_webhook_secret(webhook: WebhookDep, service: ServiceDep, store: SqlStoreDep) -> WebhookSecretView:
    """A new secret, shown this once. For a day messages bear a signature by the old one as well."""
    until_s = service.clock.now_s() + OLD_SECRET_S
    rotated = store.webhooks.rotate(webhook.id, old_until_s=until_s) or not_found("webhook", webhook.id)
    return secret_view(rotated, webhook_secret(service.token_secret, rotated.id, rotated.secret_number))


@router.post("/{webhook_id}:test", status_code=202, responses=problems(409))
def test_webhook(webhook: WebhookDep, service: ServiceDep, store: SqlStoreDep, principal: PrincipalDep) -> DeliveryView:
    """Send a message of code Test, behind all that waits. What became of it stands among the deliveries."""
    if not webhook.enabled:
        conflict(f"webhook {webhook.id} is disabled: enable it first")
    new = asked_delivery(webhook, asked_by=principal.name, now_s=service.clock.now_s())
    try:
        return delivery_view(store.webhooks.add(new))
    except ClaimLostError:
        not_found("webhook", webhook.id)


@router.get("/{webhook_id}/deliveries")
def list_deliveries(
    webhook: WebhookDep,
    store: SqlStoreDep,
    state: Annotated[Literal["", "pending", "delivered", "dead"], Query(description="Only these.")] = "",
    limit: Limit = 100,
    cursor: Cursor = "",
) -> PageOf[DeliveryView]:
    """What was and is to be delivered, newest first; for a week after it ended."""
    wanted = DeliveryState(state) if state else None
    before = number_in(cursor, "deliveries")
    found = store.webhooks.deliveries(webhook.id, before=before, limit=limit + 1, state=wanted)
    following = cursor_of("deliveries", found[limit - 1].number) if len(found) > limit else None
    return {"items": [delivery_view(each) for each in found[:limit]], "next": following}


@router.post("/{webhook_id}/deliveries/{delivery_id}:redeliver", status_code=202, responses=problems(409))
def redeliver_message(delivery_id: str, webhook: WebhookDep, service: ServiceDep, store: SqlStoreDep) -> DeliveryView:
    """Try a dead delivery again, before all that came later."""
    found = store.webhooks.delivery(webhook.id, delivery_id) or not_found("delivery", delivery_id)
    try:
        revived = store.webhooks.redeliver(webhook.id, delivery_id, now_s=service.clock.now_s())
    except ClaimLostError:
        not_found("webhook", webhook.id)
    if revived is None:
        conflict(f"delivery {delivery_id} is {found.state}: only a dead one is delivered again")
    return delivery_view(revived)


def _queues(principal: Principal) -> frozenset[str] | None:
    """The queues whose webhooks one may see; None: all webhooks."""
    queues = frozenset(grant.queue for grant in principal.grants if grant.role >= Role.QUEUE_ADMIN)
    return None if "" in queues else queues


def _check_url(url: str, hosts: str) -> None:
    try:
        check_literal(urlsplit(url).hostname or "", allowed_hosts(hosts))
    except RefusedAddressError as refused:
        refuse("url", url, f"a public host: {refused}")
