"""Checks, migrates and restores the schema of a database.

Alembic is imported by the functions that need it: its import takes longer than opening a store.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Column, Engine, MetaData, String, Table, inspect, select, update
from sqlalchemy.exc import SQLAlchemyError

from scheduler.store.database import (
    CONNECTION_ERRORS,
    StoreError,
    StoreUnreachableError,
    open_engine,
    redact_url,
    transaction,
)
from scheduler.store.sql_state import LEASE, STATE

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATIONS_FOLDER = Path(__file__).parent / "migrations"
GENERATION_LEAP = 1_000_000
"""More generations and epochs than can have passed since a backup was made: at ten ticks a second, those of a day."""

_ALEMBIC_VERSION = Table("alembic_version", MetaData(), Column("version_num", String))
# Alembic keeps the running migration in module globals: two threads would use each other's connection.
_ALEMBIC_LOCK = threading.Lock()


def migrate(url: str) -> None:
    """Create the database or upgrade it to the newest revision, in one transaction.

    Raises:
        StoreError: the URL is malformed, the database cannot be reached, or a newer version created it.
    """
    from alembic import command

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
    """Return the settings of Alembic. No alembic.ini is needed: the scripts are part of this package."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS_FOLDER).replace("%", "%%"))
    config.set_main_option("file_template", "r%%(rev)s_%%(slug)s")
    return config


def adopt_restored_database(url: str) -> None:
    """Migrate a database that was restored from a backup, and skip the generations and epochs issued since the backup.

    Without the leap, a leader from before the restore could wake up late and find its own epoch valid again, and a
    reader could combine new rows with state that no longer exists. Afterwards the lease has no holder.

    Raises:
        StoreError: as `migrate`.
    """
    migrate(url)
    engine = open_engine(url)
    try:
        with transaction(engine) as connection:
            generation = STATE.c.generation + GENERATION_LEAP
            connection.execute(update(STATE).values(generation=generation, swept_generation=generation))
            connection.execute(update(LEASE).values(holder="", epoch=LEASE.c.epoch + GENERATION_LEAP))
    finally:
        engine.dispose()


def require_current_revision(engine: Engine) -> None:
    """Refuse a database whose schema has another revision than this version of the program.

    Raises:
        StoreError: the database cannot be reached, or must be migrated.
    """
    if (file := _find_missing_file(engine)) is not None:
        raise StoreError(
            f"database {redact_url(engine)}: the file {file} does not exist. Run `ebbtide migrate` to create it"
        )
    found, needed = _read_revisions(engine), {max(_list_known_revisions())}
    if found != needed:
        raise StoreError(
            f"database {redact_url(engine)} is at revision {_format_revisions(found)}, this version needs "
            f"{_format_revisions(needed)}. Run `ebbtide migrate`"
        )


def reject_newer_revision(engine: Engine) -> None:
    """Refuse a database that a newer version of the program has created or migrated.

    Raises:
        StoreError: the database cannot be reached, or has an unknown revision.
    """
    if newer := _read_revisions(engine) - _list_known_revisions():
        raise StoreError(
            f"database {redact_url(engine)} is at revision {_format_revisions(newer)}, which this version does not "
            "know. Use the version of Ebbtide that migrated it, or a newer one"
        )


def _list_known_revisions() -> set[str]:
    """Return the revisions of the migration scripts, whose files are named rNNNN_what_it_does.py."""
    return {path.name[1:].partition("_")[0] for path in (MIGRATIONS_FOLDER / "versions").glob("r*.py")}


def _find_missing_file(engine: Engine) -> Path | None:
    """Return the database file if it does not exist. SQLite would create it, empty, on the first read."""
    file = engine.url.database if engine.dialect.name == "sqlite" else None
    if not file or file == ":memory:" or file.startswith("file:") or Path(file).exists():
        return None
    return Path(file)


def _read_revisions(engine: Engine) -> set[str]:
    try:
        with engine.connect() as connection:
            if not inspect(connection).has_table(_ALEMBIC_VERSION.name):
                return set()
            return set(connection.scalars(select(_ALEMBIC_VERSION.c.version_num)))
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        error_class = StoreUnreachableError if isinstance(error, CONNECTION_ERRORS) else StoreError
        raise error_class(f"database {redact_url(engine)} cannot be opened: {cause}") from None


def _format_revisions(revisions: set[str]) -> str:
    return ", ".join(sorted(revisions)) or "none"
