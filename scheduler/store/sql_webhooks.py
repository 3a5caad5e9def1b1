"""Webhooks and their deliveries in the database.

Every change of deliveries first writes the webhook's row, so that transactions on one webhook run one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    Index,
    Named,
    String,
    Table,
    TypedColumns,
    and_,
    delete,
    false,
    func,
    insert,
    or_,
    select,
    update,
)

from scheduler.domain.events import Delivery, DeliveryState, Webhook
from scheduler.domain.owner_ids import derive_owner_id
from scheduler.store.api_protocol import AuditEntry, IdempotencyKey
from scheduler.store.database import METADATA, ROW_NUMBER, AnyRow, fetch_rows, make_autocommit_engine, transaction
from scheduler.store.sql_api_tables import insert_audit_entries, insert_idempotency_key
from scheduler.store.sql_history import EVENTS
from scheduler.store.webhooks import ClaimLostError


class WebhookColumns(TypedColumns):
    """`due_at_s` is the time of the next attempt, None if no delivery is pending.

    `holder` has the claim until `claimed_until_s`. After a release, that is the time of the release.
    """

    number: Named[int] = Column(primary_key=True)
    id: Named[str] = Column(String, unique=True, index=True)
    owner: Named[str] = Column(String)
    url: Named[str] = Column(String)
    created_at_s: Named[float] = Column(Double)
    codes: Named[Any] = Column(JSON, nullable=False)
    queue: Named[str] = Column(String)
    subject: Named[str] = Column(String)
    enabled: Named[bool] = Column(Boolean)
    disabled_reason: Named[str] = Column(String)
    cursor: Named[int] = Column(BigInteger)
    dead_in_a_row: Named[int] = Column()
    secret_number: Named[int] = Column()
    old_secret_until_s: Named[float] = Column(Double)
    due_at_s: Named[float | None] = Column(Double)
    holder: Named[str] = Column(String)
    claimed_until_s: Named[float] = Column(Double)
    owner_id: Named[str] = Column(String, server_default="")
    may_veto: Named[bool] = Column(Boolean, server_default=false())


class DeliveryColumns(TypedColumns):
    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    id: Named[str] = Column(String, unique=True, index=True)
    webhook_id: Named[str] = Column(String)
    event_number: Named[int] = Column(BigInteger)
    code: Named[str] = Column(String)
    subject: Named[str] = Column(String)
    created_at_s: Named[float] = Column(Double)
    body: Named[str] = Column(String)
    state: Named[str] = Column(String)
    attempts: Named[int] = Column()
    next_at_s: Named[float] = Column(Double)
    ended_at_s: Named[float | None] = Column(Double, index=True)
    status: Named[int | None] = Column()
    error: Named[str] = Column(String)


WEBHOOKS = Table("webhooks", METADATA, WebhookColumns)
DELIVERIES = Table("webhook_deliveries", METADATA, DeliveryColumns)
Index(None, DELIVERIES.c.webhook_id, DELIVERIES.c.state, DELIVERIES.c.number)


_LAST_EVENT_NUMBER = select(func.coalesce(func.max(EVENTS.c.number), 0)).scalar_subquery()
_PENDING = DELIVERIES.c.state == DeliveryState.PENDING.value


class SqlWebhooks:
    """WebhookStore in SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)

    def create(
        self, webhook: Webhook, key: IdempotencyKey | None = None, *, audit: AuditEntry | None = None
    ) -> Webhook:
        row = {
            **_encode_row(webhook),
            "cursor": _LAST_EVENT_NUMBER,
            "due_at_s": None,
            "holder": "",
            "claimed_until_s": 0.0,
        }
        with transaction(self._engine) as connection:
            if key is not None:
                insert_idempotency_key(connection, key, webhook.id)
            connection.execute(insert(WEBHOOKS).values(row))
            insert_audit_entries(connection, [audit] if audit else [])
        created = self.get_webhook(webhook.id)
        assert created is not None, "no other caller knows its id yet"
        return created

    def get_webhook(self, webhook_id: str) -> Webhook | None:
        rows = fetch_rows(self._read_engine, select(WEBHOOKS).where(WEBHOOKS.c.id == webhook_id))
        return next(map(_decode_webhook_row, rows), None)

    def list_webhooks(self, *, after: int, limit: int, queues: Collection[str] | None = None) -> tuple[Webhook, ...]:
        query = select(WEBHOOKS).where(WEBHOOKS.c.number > after).order_by(WEBHOOKS.c.number).limit(limit)
        if queues is not None:
            query = query.where(WEBHOOKS.c.queue.in_(queues))
        return tuple(map(_decode_webhook_row, fetch_rows(self._read_engine, query)))

    def update_webhook(
        self, webhook_id: str, changes: Mapping[str, Any], *, audit: AuditEntry | None = None
    ) -> Webhook | None:
        changed = update(WEBHOOKS).where(WEBHOOKS.c.id == webhook_id)
        with transaction(self._engine) as connection:
            is_found = connection.execute(changed.values(dict(changes))).rowcount if changes else 0
            insert_audit_entries(connection, [audit] if audit and is_found else [])
        return self.get_webhook(webhook_id)

    def rotate_secret(self, webhook_id: str, *, old_until_s: float, audit: AuditEntry | None = None) -> Webhook | None:
        next_secret = {"secret_number": WEBHOOKS.c.secret_number + 1, "old_secret_until_s": old_until_s}
        return self.update_webhook(webhook_id, next_secret, audit=audit)

    def delete(self, webhook_id: str, *, audit: AuditEntry | None = None) -> None:
        with transaction(self._engine) as connection:
            is_found = connection.execute(delete(WEBHOOKS).where(WEBHOOKS.c.id == webhook_id)).rowcount
            connection.execute(delete(DELIVERIES).where(DELIVERIES.c.webhook_id == webhook_id))
            insert_audit_entries(connection, [audit] if audit and is_found else [])

    def add_delivery(self, delivery: Delivery, *, audit: AuditEntry | None = None) -> Delivery:
        with transaction(self._engine) as connection:
            _lock_webhook(connection, delivery.webhook_id)
            connection.execute(insert(DELIVERIES), _encode_row(delivery))
            _update_due_time(connection, delivery.webhook_id)
            insert_audit_entries(connection, [audit] if audit else [])
        added = self.get_delivery(delivery.webhook_id, delivery.id)
        return delivery if added is None else added

    def get_delivery(self, webhook_id: str, delivery_id: str) -> Delivery | None:
        own = (DELIVERIES.c.webhook_id == webhook_id) & (DELIVERIES.c.id == delivery_id)
        return next(map(_decode_delivery_row, fetch_rows(self._read_engine, select(DELIVERIES).where(own))), None)

    def list_deliveries(
        self, webhook_id: str, *, limit: int, before: int | None = None, state: DeliveryState | None = None
    ) -> tuple[Delivery, ...]:
        query = select(DELIVERIES).where(DELIVERIES.c.webhook_id == webhook_id)
        if before is not None:
            query = query.where(DELIVERIES.c.number < before)
        if state is not None:
            query = query.where(DELIVERIES.c.state == state.value)
        query = query.order_by(DELIVERIES.c.number.desc()).limit(limit)
        return tuple(map(_decode_delivery_row, fetch_rows(self._read_engine, query)))

    def redeliver(
        self, webhook_id: str, delivery_id: str, *, now_s: float, audit: AuditEntry | None = None
    ) -> Delivery | None:
        own = (DELIVERIES.c.webhook_id == webhook_id) & (DELIVERIES.c.id == delivery_id)
        dead = own & (DELIVERIES.c.state == DeliveryState.DEAD.value)
        pending = {"state": DeliveryState.PENDING.value, "attempts": 0, "next_at_s": now_s, "ended_at_s": None}
        with transaction(self._engine) as connection:
            _lock_webhook(connection, webhook_id)
            revived = connection.execute(update(DELIVERIES).where(dead).values(pending)).rowcount
            _update_due_time(connection, webhook_id)
            insert_audit_entries(connection, [audit] if audit and revived else [])
        return self.get_delivery(webhook_id, delivery_id) if revived else None

    def list_due_webhooks(self, now_s: float, *, limit: int) -> tuple[str, ...]:
        unread = and_(WEBHOOKS.c.due_at_s.is_(None), WEBHOOKS.c.cursor < _LAST_EVENT_NUMBER)
        query = (
            select(WEBHOOKS.c.id)
            .where(WEBHOOKS.c.enabled, WEBHOOKS.c.claimed_until_s <= now_s)
            .where(or_(WEBHOOKS.c.due_at_s <= now_s, unread))
            .order_by(WEBHOOKS.c.claimed_until_s, WEBHOOKS.c.number)
            .limit(limit)
        )
        return tuple(row.id for row in fetch_rows(self._read_engine, query))

    def claim(self, webhook_id: str, holder: str, *, now_s: float, until_s: float) -> bool:
        free = (WEBHOOKS.c.id == webhook_id) & (WEBHOOKS.c.claimed_until_s <= now_s) & WEBHOOKS.c.enabled
        with transaction(self._engine) as connection:
            claimed = update(WEBHOOKS).where(free).values(holder=holder, claimed_until_s=until_s)
            return connection.execute(claimed).rowcount == 1

    def release(self, webhook_id: str, holder: str, *, now_s: float) -> None:
        own = (WEBHOOKS.c.id == webhook_id) & (WEBHOOKS.c.holder == holder)
        with transaction(self._engine) as connection:
            connection.execute(update(WEBHOOKS).where(own).values(holder="", claimed_until_s=now_s))

    def get_first_pending(self, webhook_id: str) -> Delivery | None:
        query = select(DELIVERIES).where(DELIVERIES.c.webhook_id == webhook_id, _PENDING)
        return next(
            map(_decode_delivery_row, fetch_rows(self._read_engine, query.order_by(DELIVERIES.c.number).limit(1))), None
        )

    def add_event_deliveries(
        self, webhook_id: str, holder: str, deliveries: Iterable[Delivery], *, cursor: int, until_s: float
    ) -> None:
        rows = [_encode_row(each) for each in deliveries]
        with transaction(self._engine) as connection:
            _update_claimed(connection, webhook_id, holder, {"claimed_until_s": until_s, "cursor": cursor})
            if rows:
                connection.execute(insert(DELIVERIES), rows)
            _update_due_time(connection, webhook_id)

    def record_attempt(self, webhook: Webhook, holder: str, delivery: Delivery, *, until_s: float) -> None:
        changes: dict[str, Any] = {"claimed_until_s": until_s, "dead_in_a_row": webhook.dead_in_a_row}
        if not webhook.enabled:  # never enable it here: its owner may have disabled it during the attempt
            changes |= {"enabled": False, "disabled_reason": webhook.disabled_reason}
        with transaction(self._engine) as connection:
            _update_claimed(connection, webhook.id, holder, changes)
            connection.execute(update(DELIVERIES).where(DELIVERIES.c.id == delivery.id).values(_encode_row(delivery)))
            _update_due_time(connection, webhook.id)

    def get_oldest_pending_at_s(self) -> float | None:
        enabled = select(WEBHOOKS.c.id).where(WEBHOOKS.c.enabled)
        query = select(func.min(DELIVERIES.c.created_at_s)).where(_PENDING, DELIVERIES.c.webhook_id.in_(enabled))
        with transaction(self._read_engine) as connection:
            return connection.execute(query).scalar_one()


def _lock_webhook(connection: Connection, webhook_id: str) -> None:
    unchanged = update(WEBHOOKS).where(WEBHOOKS.c.id == webhook_id).values(holder=WEBHOOKS.c.holder)
    if not connection.execute(unchanged).rowcount:
        raise ClaimLostError(f"webhook {webhook_id} does not exist")


def _update_claimed(connection: Connection, webhook_id: str, holder: str, values: dict[str, Any]) -> None:
    own = (WEBHOOKS.c.id == webhook_id) & (WEBHOOKS.c.holder == holder)
    if not connection.execute(update(WEBHOOKS).where(own).values(values)).rowcount:
        raise ClaimLostError(f"{holder} no longer has the claim on webhook {webhook_id}")


def _update_due_time(connection: Connection, webhook_id: str) -> None:
    pending = select(DELIVERIES.c.next_at_s).where(DELIVERIES.c.webhook_id == webhook_id, _PENDING)
    due_at_s = pending.order_by(DELIVERIES.c.number).limit(1).scalar_subquery()
    connection.execute(update(WEBHOOKS).where(WEBHOOKS.c.id == webhook_id).values(due_at_s=due_at_s))


def _encode_row(value: Webhook | Delivery) -> dict[str, Any]:
    """Encode all fields but the number, which the database assigns."""
    row = asdict(value)
    del row["number"]
    if isinstance(value, Webhook):
        return row | {"codes": list(value.codes)}
    return row | {"state": value.state.value}


def _decode_webhook_row(row: AnyRow) -> Webhook:
    webhook = Webhook(**{field.name: getattr(row, field.name) for field in fields(Webhook)})
    owner_id = webhook.owner_id or derive_owner_id(webhook.owner)  # an older API process writes none
    return replace(webhook, codes=tuple(webhook.codes), owner_id=owner_id)


def _decode_delivery_row(row: AnyRow) -> Delivery:
    delivery = Delivery(**{field.name: getattr(row, field.name) for field in fields(Delivery)})
    return replace(delivery, state=DeliveryState(delivery.state))
