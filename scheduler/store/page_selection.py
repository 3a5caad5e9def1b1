"""Selection of one page of rows in memory."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from typing import TypeVar

from scheduler.store.api_protocol import SortKey

Row = TypeVar("Row")


def take_page(
    rows: list[Row], get_sort_key: Callable[[Row], SortKey], *, after: SortKey | None, limit: int
) -> tuple[Row, ...]:
    """Return up to `limit` rows that follow the key `after`, in list order."""
    following = rows if after is None else [row for row in rows if get_sort_key(row) < after]
    return tuple(nlargest(limit, following, key=get_sort_key))
