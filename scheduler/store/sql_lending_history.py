"""History of lending in the database."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ColumnElement,
    Double,
    Engine,
    Index,
    Named,
    String,
    Table,
    TypedColumns,
    select,
)

from scheduler.domain.codec import decode_stored, encode
from scheduler.domain.fleet import Loan
from scheduler.domain.recall_receipts import RecallReceipt
from scheduler.store.api_protocol import SortKey
from scheduler.store.database import CODE_POINT_ORDERED, METADATA, ROW_NUMBER, StateSince, fetch_rows
from scheduler.store.lending_history import ReceiptQuery
from scheduler.store.protocol import Commit
from scheduler.store.sql_history import ENDED_LOANS, order_and_limit

_IDS_PER_QUERY = 500


class RecallReceiptColumns(TypedColumns):
    """Lists of receipts are sorted and filtered by the columns other than `body`."""

    number: Named[int] = Column(ROW_NUMBER, primary_key=True)
    id: Named[str] = Column(CODE_POINT_ORDERED)
    generation: Named[int] = Column(BigInteger)
    body: Named[Any] = Column(JSON, nullable=False)
    asked_at_s: Named[float] = Column(Double)
    closed_at_s: Named[float] = Column(Double)
    pool: Named[str] = Column(String)
    loan_id: Named[str] = Column(String)


RECALL_RECEIPTS = Table("recall_receipts", METADATA, RecallReceiptColumns)
_ROW = RECALL_RECEIPTS.c
Index("ix_recall_receipts_list", _ROW.asked_at_s, _ROW.id, _ROW.pool)
Index("ix_recall_receipts_pool_list", _ROW.pool, _ROW.asked_at_s, _ROW.id)
Index("ix_recall_receipts_loan_id", _ROW.loan_id)


def build_receipt_rows(commit: Commit) -> tuple[Table[Any], list[dict[str, Any]]]:
    """Return the rows that a commit appends to the receipts."""
    return RECALL_RECEIPTS, [
        {
            "id": receipt.id,
            "generation": commit.snapshot.generation,
            "body": encode(receipt),
            "asked_at_s": receipt.asked_at_s,
            "closed_at_s": receipt.closed_at_s,
            "pool": receipt.pool,
            "loan_id": receipt.loan_id,
        }
        for receipt in commit.receipts
    ]


class SqlLendingHistory:
    """LendingHistory in SQL.

    Args:
        engine: an engine whose statements each are a transaction.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find_receipts(self, query: ReceiptQuery, *, after: SortKey | None, limit: int) -> tuple[RecallReceipt, ...]:
        conditions: list[ColumnElement[bool]] = [_ROW.pool == query.pool] if query.pool else []
        if query.since_s > -math.inf:
            conditions.append(_ROW.asked_at_s >= query.since_s)
        if query.until_s < math.inf:
            conditions.append(_ROW.asked_at_s < query.until_s)
        found = select(RECALL_RECEIPTS).where(*conditions)
        rows = fetch_rows(self._engine, order_and_limit(found, _ROW.asked_at_s, _ROW.id, after, limit=limit))
        return tuple(decode_stored(RecallReceipt, row.body) for row in rows)

    def find_loan_receipts(self, loan_ids: Collection[str]) -> Mapping[str, RecallReceipt]:
        ids, newest = sorted(loan_ids), dict[str, Any]()
        for start in range(0, len(ids), _IDS_PER_QUERY):
            found = select(RECALL_RECEIPTS).where(_ROW.loan_id.in_(ids[start : start + _IDS_PER_QUERY]))
            newest |= {row.loan_id: row.body for row in fetch_rows(self._engine, found.order_by(_ROW.number))}
        return {loan_id: decode_stored(RecallReceipt, body) for loan_id, body in newest.items()}

    def list_pool_loans(self, pool: str, *, ended_since_s: float, offered_before_s: float) -> tuple[Loan, ...]:
        loan = ENDED_LOANS.c
        overlapping = (loan.offered_at_s < offered_before_s, StateSince(loan.body) >= ended_since_s)
        found = select(ENDED_LOANS).where(loan.pool == pool, *overlapping).order_by(loan.offered_at_s, loan.id)
        return tuple(decode_stored(Loan, row.body) for row in fetch_rows(self._engine, found))
