"""Exclusive use of a database whose service is stopped, for repairs that a running service would undo or not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import inspect, select

from scheduler.store.database import StoreRefusedError, open_engine, redact_url, transaction
from scheduler.store.sql_state import LEASE
from scheduler.store.sqlite_lock import hold_api_lock

_LEASE_S_MAX = 3600.0
"""A lease that ends later than this was written by a wrong clock, and says nothing about its holder."""


@contextmanager
def hold_stopped_database(url: str, *, now_s: float) -> Iterator[None]:
    """Check that no controller leads, and with SQLite keep API processes off the database during the block.

    API processes on PostgreSQL cannot be found.

    Raises:
        StoreRefusedError: an API process uses the SQLite database, or a controller holds the lease.
        StoreError: the database cannot be opened.
    """
    with hold_api_lock(url):
        _require_free_lease(url, now_s=now_s)
        yield


def _require_free_lease(url: str, *, now_s: float) -> None:
    engine = open_engine(url)
    try:
        with transaction(engine) as connection:
            has_lease = inspect(connection).has_table(LEASE.name)
            lease = connection.execute(select(LEASE.c.holder, LEASE.c.expires_at_s)).first() if has_lease else None
        if lease is not None and lease.holder and now_s < lease.expires_at_s <= now_s + _LEASE_S_MAX:
            raise StoreRefusedError(
                f"the controller {lease.holder} uses database {redact_url(engine)}. Stop the service first; if it was "
                f"killed, wait {lease.expires_at_s - now_s:.0f} s for its lease to end"
            )
    finally:
        engine.dispose()
