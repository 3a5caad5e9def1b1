"""The tables of webhooks and of what is delivered to them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, Column, Double, Index, Named, String, Table, TypedColumns

from scheduler.store.tables import METADATA, ROW_NUMBER


class WebhookColumns(TypedColumns):
    """`due_at_s`: when the first of its pending deliveries is to be tried; None where none is pending. `holder` works
    on it until `claimed_until_s`; once released that is when it was last worked on."""

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
