"""What the API tells of webhooks and of what is delivered to them."""

from __future__ import annotations

from typing_extensions import TypedDict

from scheduler.domain.webhook import Delivery, Webhook


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
