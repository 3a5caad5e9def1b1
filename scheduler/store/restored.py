"""Taking up a database that was restored from a back-up: its time went back, and its numbers must not."""

from __future__ import annotations

from sqlalchemy import update

from scheduler.store.engine import open_engine, transaction
from scheduler.store.migrate import migrate
from scheduler.store.tables import LEASE, STATE

LEAP = 1_000_000
"""More generations and epochs than can have passed since the back-up was made: at ten ticks a second, a day's."""


def take_up(url: str) -> None:
    """Migrate it, and leap over the generations and epochs that were handed out after the back-up.

    A leader from before that wakes up late would find its own epoch otherwise, once the new leaders have come as far. A
    reader from before would add what is new to what is no more: it reads everything again. Nobody leads afterwards.

    Raises:
        StoreError: as `migrate`.
    """
    migrate(url)
    engine = open_engine(url)
    try:
        with transaction(engine) as connection:
            reached = STATE.c.generation + LEAP
            connection.execute(update(STATE).values(generation=reached, swept_generation=reached))
            connection.execute(update(LEASE).values(holder="", epoch=LEASE.c.epoch + LEAP))
    finally:
        engine.dispose()
