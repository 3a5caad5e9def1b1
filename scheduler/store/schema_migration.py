"""Checks, migrates and restores the schema of a database.

Alembic is imported by the functions that need it: its import takes longer than opening a store.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    MetaData,
    Named,
    String,
    Table,
    TypedColumns,
    delete,
    func,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from scheduler.store.database import (
    CONNECTION_ERRORS,
    METADATA,
    StoreError,
    StoreUnreachableError,
    disable_timeouts,
    open_engine,
    redact_url,
    transaction,
)
from scheduler.store.machines import MACHINES
from scheduler.store.sql_run_log import AGENT_REPORTS, BEGUN_RUNS
from scheduler.store.sql_state import JOBS, LEASE, STATE

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATIONS_FOLDER = Path(__file__).parent / "migrations"
GENERATION_LEAP = 1_000_000
"""Generations and epochs that a restore skips at least."""
GENERATIONS_PER_S_MAX = 20
"""More generations than a controller commits per second."""
OLDEST_COMPATIBLE_REVISION = "0020"
"""The oldest program, by its newest revision, that may use a database of this version.

Raise it only in a release whose migrations remove or change what an older program uses. See decision 23.
"""


class CompatibilityColumns(TypedColumns):
    """The only row names the oldest program that may use the database."""

    id: Named[int] = Column(BigInteger, primary_key=True, autoincrement=False)
    oldest_revision: Named[str] = Column(String)


SCHEMA_COMPATIBILITY = Table("schema_compatibility", METADATA, CompatibilityColumns)
_ALEMBIC_VERSION = Table("alembic_version", MetaData(), Column("version_num", String))
# Alembic keeps the running migration in module globals: two threads would use each other's connection.
_ALEMBIC_LOCK = threading.Lock()


def migrate(url: str) -> None:
    """Create the database or upgrade it to the newest revision, in one transaction.

    Does nothing if a newer version has migrated it in a way that this version can work with.

    Raises:
        StoreError: the URL is malformed, the database cannot be reached, or a newer version created it.
    """
    from alembic import command

    engine = open_engine(url, serialize_writes=True)
    try:
        if reject_newer_revision(engine):
            return
        config = build_alembic_config()
        with _ALEMBIC_LOCK, engine.begin() as connection:
            disable_timeouts(connection)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.execute(delete(SCHEMA_COMPATIBILITY))
            connection.execute(insert(SCHEMA_COMPATIBILITY), {"id": 1, "oldest_revision": OLDEST_COMPATIBLE_REVISION})
    finally:
        engine.dispose()


def build_alembic_config() -> Config:
    """Return the settings of Alembic. No alembic.ini is needed: the scripts are part of this package."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS_FOLDER).replace("%", "%%"))
    config.set_main_option("file_template", "r%%(rev)s_%%(slug)s")
    return config


def adopt_restored_database(url: str, *, now_s: float) -> None:
    """Migrate a database that was restored from a backup, and prepare it for agents that know later generations.

    * Generations and epochs that were issued since the backup are skipped. Without this leap, a leader from before the
      restore could wake up late and find its own epoch valid again, a reader could combine new rows with state that no
      longer exists, and a job could get a generation that its agents know as ended.
    * Runs are marked as restored. Ranks that still run go on; a run that its agents no longer have never starts again.
    * Reports of agents are deleted, and contacts of machines are as recent as they were at the backup.

    Afterwards the lease has no holder.

    Args:
        now_s: the time of the restore.

    Raises:
        StoreError: as `migrate`.
    """
    migrate(url)
    engine = open_engine(url)
    try:
        with transaction(engine) as connection:
            _skip_issued_numbers(connection, _compute_leap(connection, now_s))
            unended = BEGUN_RUNS.c.ended.is_(None)
            connection.execute(update(BEGUN_RUNS).where(unended).values(is_restored=True))
            connection.execute(delete(AGENT_REPORTS))
            _shift_machine_contacts(connection, now_s)
    finally:
        engine.dispose()


def _compute_leap(connection: Connection, now_s: float) -> int:
    """Return more than the generations and epochs that can have been issued since the backup."""
    state_at_s = connection.execute(select(STATE.c.now_s)).scalar_one()
    elapsed_s = max(0.0, now_s - state_at_s) if state_at_s else 0.0
    return GENERATION_LEAP + round(GENERATIONS_PER_S_MAX * elapsed_s)


def _skip_issued_numbers(connection: Connection, leap: int) -> None:
    """Skip generations of the snapshot, of each job, and epochs.

    A target that has not begun gets a new generation at once: its agents may have begun the old one after the backup.
    """
    generation = STATE.c.generation + leap
    connection.execute(update(STATE).values(generation=generation, swept_generation=generation))
    connection.execute(update(LEASE).values(holder="", epoch=LEASE.c.epoch + leap))
    begun = {tuple(row) for row in connection.execute(select(BEGUN_RUNS.c.job_id, BEGUN_RUNS.c.generation))}
    for row in connection.execute(select(JOBS).where(JOBS.c.body.is_not(None))).all():
        allocation = row.body["allocation"]
        current = allocation["generation"]
        skipped = max(current, allocation.get("skipped_generation", 0)) + leap
        numbers = {"generation": current if (row.key, current) in begun else skipped, "skipped_generation": skipped}
        connection.execute(
            update(JOBS).where(JOBS.c.key == row.key).values(body=row.body | {"allocation": allocation | numbers})
        )


def _shift_machine_contacts(connection: Connection, now_s: float) -> None:
    """Make the last contacts as recent as they were at the backup, so that no machine counts as lost at once."""
    latest_s = connection.execute(select(func.max(MACHINES.c.seen_at_s))).scalar_one()
    if latest_s is not None:
        connection.execute(update(MACHINES).values(seen_at_s=MACHINES.c.seen_at_s + (now_s - latest_s)))


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
    if found != needed and not reject_newer_revision(engine):
        raise StoreError(
            f"database {redact_url(engine)} is at revision {_format_revisions(found)}, this version needs "
            f"{_format_revisions(needed)}. Run `ebbtide migrate`"
        )


def reject_newer_revision(engine: Engine) -> bool:
    """Refuse a database of a newer version of the program, unless this version can work with it.

    Returns:
        whether a newer version has migrated the database.

    Raises:
        StoreError: the database cannot be reached, or a newer version has changed what this version uses.
    """
    known = _list_known_revisions()
    newer = _read_revisions(engine) - known
    if not newer:
        return False
    oldest = _read_oldest_program(engine)
    if oldest is not None and oldest <= max(known):
        return True
    raise StoreError(
        f"database {redact_url(engine)} is at revision {_format_revisions(newer)}, which this version does not "
        "know. Use the version of Ebbtide that migrated it, or a newer one"
    )


def read_revision(engine: Engine) -> str:
    """Return the revision of the database, empty for one without tables. Raises StoreError."""
    return max(_read_revisions(engine), default="")


def require_known_revision(engine: Engine) -> None:
    """Refuse a database of a newer version also if this version can work with it: it does not know all its columns.

    Raises:
        StoreError: the database cannot be reached, or is of a newer version.
    """
    if read_revision(engine) > find_newest_revision():
        raise StoreError(
            f"database {redact_url(engine)} is at revision {read_revision(engine)}, newer than this version of "
            "Ebbtide. Run this command with the newer version"
        )


def find_newest_revision() -> str:
    """Return the newest revision that this version of the program knows."""
    return max(_list_known_revisions())


def _read_oldest_program(engine: Engine) -> str | None:
    """Return the oldest revision of a program that may use the database, None if the database does not say."""
    with transaction(engine) as connection:
        if not inspect(connection).has_table(SCHEMA_COMPATIBILITY.name):
            return None
        return connection.execute(select(SCHEMA_COMPATIBILITY.c.oldest_revision)).scalar()


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
