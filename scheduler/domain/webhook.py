"""Webhook: a URL that is told of events; Delivery: one message to it, from its first attempt to its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

TEST_CODE = "Test"
"""The code of a message that somebody asked for, to see whether it arrives; it is of no event."""


class DeliveryState(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Webhook:
    """Told of the events after `cursor` that `codes`, `queue` and `subject` let pass; each of them empty lets all.

    `number` ascends with creation. Its secret is derived from the service's own by `secret_number`; that of the number
    before is signed with as well until `old_secret_until_s`. `dead_in_a_row` deliveries have died since one arrived.
    """

    id: str
    owner: str
    url: str
    created_at_s: float
    codes: tuple[str, ...] = ()
    queue: str = ""
    subject: str = ""
    enabled: bool = True
    disabled_reason: str = ""
    cursor: int = 0
    dead_in_a_row: int = 0
    secret_number: int = 1
    old_secret_until_s: float = 0.0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """`body` is the JSON text that is sent, the same at every attempt. `status` is the last answer's, None where none
    came, and `error` says what was wrong with it. `event_number` is 0 for a message that somebody asked for."""

    id: str
    webhook_id: str
    event_number: int
    code: str
    subject: str
    created_at_s: float
    body: str
    state: DeliveryState = DeliveryState.PENDING
    attempts: int = 0
    next_at_s: float = 0.0
    ended_at_s: float | None = None
    status: int | None = None
    error: str = ""
    number: int = 0
