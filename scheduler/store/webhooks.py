"""Store interface of webhooks and their deliveries."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from scheduler.domain.events import Delivery, DeliveryState, Webhook

if TYPE_CHECKING:
    from scheduler.store.api_protocol import AuditEntry, IdempotencyKey


class ClaimLostError(Exception):
    """The webhook was deleted, or its claim expired and may belong to another process. Nothing was written."""


class WebhookStore(Protocol):
    """Webhooks and their deliveries. Every method may raise UnavailableError.

    Several processes deliver. The holder of a webhook's claim delivers alone until the claim expires. `audit` is
    written in the transaction of the change, unless nothing changes.
    """

    def create(
        self, webhook: Webhook, key: IdempotencyKey | None = None, *, audit: AuditEntry | None = None
    ) -> Webhook:
        """Store a webhook that receives events from now on. Raises IdempotencyKeyUsedError."""

    def get_webhook(self, webhook_id: str) -> Webhook | None: ...

    def list_webhooks(self, *, after: int, limit: int, queues: Collection[str] | None = None) -> tuple[Webhook, ...]:
        """Return webhooks with a number above `after`, oldest first; only those of `queues` unless it is None."""

    def update_webhook(
        self, webhook_id: str, changes: Mapping[str, Any], *, audit: AuditEntry | None = None
    ) -> Webhook | None:
        """Return the webhook with the given fields changed; None if it does not exist."""

    def rotate_secret(self, webhook_id: str, *, old_until_s: float, audit: AuditEntry | None = None) -> Webhook | None:
        """Switch to the next secret. Messages are signed with the previous one too until `old_until_s`."""

    def delete(self, webhook_id: str, *, audit: AuditEntry | None = None) -> None: ...

    def add_delivery(self, delivery: Delivery, *, audit: AuditEntry | None = None) -> Delivery:
        """Append a pending delivery. Raises ClaimLostError if the webhook does not exist."""

    def get_delivery(self, webhook_id: str, delivery_id: str) -> Delivery | None: ...

    def list_deliveries(
        self, webhook_id: str, *, limit: int, before: int | None = None, state: DeliveryState | None = None
    ) -> tuple[Delivery, ...]:
        """Return deliveries with a number below `before`, newest first."""

    def redeliver(
        self, webhook_id: str, delivery_id: str, *, now_s: float, audit: AuditEntry | None = None
    ) -> Delivery | None:
        """Make a dead delivery pending again, ahead of all later ones; None if it is not dead."""

    def list_due_webhooks(self, now_s: float, *, limit: int) -> tuple[str, ...]:
        """Return ids of unclaimed webhooks with a due delivery or unread events, longest waiting first."""

    def claim(self, webhook_id: str, holder: str, *, now_s: float, until_s: float) -> bool:
        """Claim the webhook until `until_s`. False if another process holds it."""

    def release(self, webhook_id: str, holder: str, *, now_s: float) -> None: ...

    def get_first_pending(self, webhook_id: str) -> Delivery | None: ...

    def add_event_deliveries(
        self, webhook_id: str, holder: str, deliveries: Iterable[Delivery], *, cursor: int, until_s: float
    ) -> None:
        """Append the deliveries of all events up to `cursor`, and extend the claim. Raises ClaimLostError."""

    def record_attempt(self, webhook: Webhook, holder: str, delivery: Delivery, *, until_s: float) -> None:
        """Store delivery and webhook after an attempt, and extend the claim. Raises ClaimLostError."""

    def get_oldest_pending_at_s(self) -> float | None:
        """Return the creation time of the oldest pending delivery of all enabled webhooks."""
