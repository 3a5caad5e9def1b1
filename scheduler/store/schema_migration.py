"""Bringing a database to the form that this version of the program works with.

Taking up a database that was restored from a back-up: its time went back, and its numbers must not.
"""

from __future__ import annotations

import threading

from alembic import command
from alembic.config import Config
from sqlalchemy import update

from scheduler.store.database import MIGRATIONS_FOLDER, open_engine, reject_newer_revision, transaction
from scheduler.store.tables import LEASE, STATE

# Alembic keeps the migration that runs in variables of its modules: two threads would use each other's connection.
_ALEMBIC_LOCK = threading.Lock()


def migrate(url: str) -> None:
    """Create or upgrade the database, in one transaction. Nothing happens to one that is up to date.

    Raises:
        StoreError: the URL is malformed, the database cannot be reached, or was made by a newer version.
    """
    engine = open_engine(url, serialize_writes=True)
    try:
        reject_newer_revision(engine)
        config = build_alembic_config()
        with _ALEMBIC_LOCK, engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()


def build_alembic_config() -> Config:
    """Alembic's settings: the scripts lie in this package, and no alembic.ini is needed."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS_FOLDER).replace("%", "%%"))
    config.set_main_option("file_template", "r%%(rev)s_%%(slug)s")
    return config


GENERATION_LEAP = 1_000_000
"""More generations and epochs than can have passed since the back-up was made: at ten ticks a second, a day's."""


def adopt_restored_database(url: str) -> None:
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
            reached = STATE.c.generation + GENERATION_LEAP
            connection.execute(update(STATE).values(generation=reached, swept_generation=reached))
            connection.execute(update(LEASE).values(holder="", epoch=LEASE.c.epoch + GENERATION_LEAP))
    finally:
        engine.dispose()
