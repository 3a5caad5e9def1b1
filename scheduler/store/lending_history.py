"""History of lending: complete receipts of recalls, and the ended loans of a pool over a time span."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from scheduler.domain.fleet import Loan
from scheduler.domain.recall_receipts import RecallReceipt
from scheduler.store.api_protocol import SortKey


@dataclass(frozen=True, slots=True)
class ReceiptQuery:
    """Filter for lists of receipts. The empty string matches every pool.

    `since_s` is the first second of the recall that matches, `until_s` the first that no longer does.
    """

    pool: str = ""
    since_s: float = -math.inf
    until_s: float = math.inf

    def matches(self, receipt: RecallReceipt) -> bool:
        return self.pool in ("", receipt.pool) and self.since_s <= receipt.asked_at_s < self.until_s


def get_receipt_sort_key(receipt: RecallReceipt) -> SortKey:
    return SortKey(receipt.asked_at_s, receipt.id)


class LendingHistory(Protocol):
    """Every method may raise UnavailableError."""

    def find_receipts(self, query: ReceiptQuery, *, after: SortKey | None, limit: int) -> tuple[RecallReceipt, ...]:
        """Return up to `limit` complete receipts that follow the key `after` (None: from the start), newest first."""

    def find_loan_receipts(self, loan_ids: Collection[str]) -> Mapping[str, RecallReceipt]:
        """Return the newest complete receipt of each of these loans that has one, by loan id."""

    def list_pool_loans(self, pool: str, *, ended_since_s: float, offered_before_s: float) -> tuple[Loan, ...]:
        """Return the ended loans of a pool that overlap the time span, by offer and id."""
