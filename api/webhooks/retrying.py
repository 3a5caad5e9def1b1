"""What an attempt means for a delivery and its webhook: done, again after a pause, or given up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from api.webhooks.sender import GONE, Outcome
from scheduler.domain.webhook import Delivery, DeliveryState, Webhook

DEAD_IN_A_ROW_MAX = 5
"""A webhook that so many deliveries have died of, one after the other, is disabled."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pause before the second attempt, which grows by `factor` before each later one up to `pause_s_max`. Up to
    `jitter` of it is added at random. What a receiver asks for with Retry-After counts where it is longer, up to
    `retry_after_s_max`. These ten attempts take 3.5 to 4.4 hours."""

    attempts: int = 10
    pause_s: float = 5.0
    factor: float = 3.0
    pause_s_max: float = 3600.0
    jitter: float = 0.25
    retry_after_s_max: float = 6 * 3600.0

    def pause_after_s(self, attempts: int, *, drawn: float, asked_s: float = 0.0) -> float:
        """`drawn` is even in [0, 1)."""
        pause_s = min(self.pause_s * self.factor ** (attempts - 1), self.pause_s_max)
        return max(pause_s * (1.0 + self.jitter * drawn), min(asked_s, self.retry_after_s_max))


def after_attempt(
    webhook: Webhook, delivery: Delivery, outcome: Outcome, backoff: Backoff, *, now_s: float, drawn: float
) -> tuple[Webhook, Delivery]:
    """Both as the attempt leaves them."""
    tried = replace(delivery, attempts=delivery.attempts + 1, status=outcome.status, error=outcome.error)
    if outcome.is_delivered:
        return replace(webhook, dead_in_a_row=0), replace(tried, state=DeliveryState.DELIVERED, ended_at_s=now_s)
    gone = outcome.status == GONE
    if tried.attempts < backoff.attempts and not gone:
        pause_s = backoff.pause_after_s(tried.attempts, drawn=drawn, asked_s=outcome.retry_after_s)
        return webhook, replace(tried, next_at_s=now_s + pause_s)
    dead = replace(tried, state=DeliveryState.DEAD, ended_at_s=now_s)
    failing = replace(webhook, dead_in_a_row=webhook.dead_in_a_row + 1)
    if gone:
        return replace(failing, enabled=False, disabled_reason="the receiver answered 410 Gone"), dead
    if failing.dead_in_a_row >= DEAD_IN_A_ROW_MAX:
        reason = f"{failing.dead_in_a_row} deliveries in a row have died; the last attempt: {outcome.error}"
        return replace(failing, enabled=False, disabled_reason=reason), dead
    return failing, dead
