"""Backups: a copy of all tables, and of the secrets that belong to them, in one SQLite file.

The file has the schema of its time, so restoring an older one runs the migrations on a copy of it. It can be restored
to SQLite or PostgreSQL, whichever it was made of, and needs no client programs of a database.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, delete, func, insert, select, text

import scheduler.store.sql_store  # noqa: F401  (defines every table of METADATA)
from scheduler.store.database import (
    METADATA,
    StoreError,
    StoreRefusedError,
    disable_timeouts,
    make_snapshot_engine,
    open_engine,
    redact_url,
    transaction,
)
from scheduler.store.schema_migration import (
    SCHEMA_COMPATIBILITY,
    adopt_restored_database,
    find_newest_revision,
    migrate,
    require_current_revision,
    require_known_revision,
)
from scheduler.store.sql_state import LEASE, STATE

FORMAT = "1"
_ROWS_AT_ONCE = 1000
_SEEDED = {STATE.name, LEASE.name, SCHEMA_COMPATIBILITY.name}
"""Tables whose rows migrations create."""


@dataclass(frozen=True, slots=True)
class Backup:
    """Content of a backup besides the tables.

    Args:
        created_at_s: when it was made.
        revision: revision of its schema.
        files: secrets outside the database, by the name of their setting.
    """

    created_at_s: float
    revision: str
    files: Mapping[str, bytes]


def write_backup(url: str, path: Path, *, files: Mapping[str, bytes], now_s: float) -> Backup:
    """Write a consistent copy of a database in use to a new file with mode 0600.

    Raises:
        StoreError: the database cannot be read, or must be migrated.
        OSError: the file cannot be written, or exists.
    """
    if path.exists():
        raise FileExistsError(17, "the file exists", str(path))
    engine = open_engine(url)
    try:
        require_current_revision(engine)
        require_known_revision(engine)
        backup = Backup(now_s, find_newest_revision(), files)
        with _temporary_database(path.parent) as copy:
            _copy_out(engine, copy)
            _write_contents(copy, backup)
            copy.rename(path)
    finally:
        engine.dispose()
    return backup


def read_backup(path: Path) -> Backup:
    """Return what a backup holds besides its tables.

    Raises:
        StoreError: the file is no backup, or of a newer version.
    """
    if not path.is_file():
        raise StoreError(f"{path}: no such file")
    try:
        with closing(sqlite3.connect(f"file:{path.resolve()}?mode=ro", uri=True)) as connection:
            facts = dict(connection.execute("SELECT name, value FROM backup_facts"))
            files = dict(connection.execute("SELECT name, content FROM backup_files"))
            [[revision]] = connection.execute("SELECT version_num FROM alembic_version")
    except (sqlite3.Error, ValueError) as error:
        raise StoreError(f"{path} is not a backup that `ebbtide backup` wrote, or is damaged: {error}") from None
    if facts.get("format") != FORMAT or revision > find_newest_revision():
        raise StoreError(
            f"{path}: a newer version of Ebbtide made this backup (format {facts.get('format')}, revision {revision}). "
            "Restore it with that version, or a newer one"
        )
    return Backup(float(facts["created_at_s"]), revision, files)


def restore_backup(path: Path, url: str, *, now_s: float, is_forced: bool) -> None:
    """Replace the content of a database by that of a backup, migrated to the newest revision, in one transaction.

    Prepares the database for agents that know later generations, see `adopt_restored_database`.

    Args:
        is_forced: also replace a database that holds something.

    Raises:
        StoreRefusedError: the database holds something, and `is_forced` is False.
        StoreError: the file is no backup, or the database cannot be reached.
    """
    read_backup(path)
    migrate(url)
    engine = open_engine(url)
    try:
        require_known_revision(engine)
        if not is_forced and (table := _find_content(engine)) is not None:
            raise StoreRefusedError(
                f"database {redact_url(engine)} is not empty: its table {table} has rows. Restore to an empty "
                "database, or add --force to delete everything in it"
            )
        with _temporary_database(_find_roomy_folder(engine)) as copy:
            shutil.copyfile(path, copy)
            _drop_contents(copy)
            adopt_restored_database(f"sqlite:///{copy}", now_s=now_s)
            _copy_in(copy, engine)
    finally:
        engine.dispose()


@contextmanager
def _temporary_database(folder: Path) -> Iterator[Path]:
    """Yield an empty file with mode 0600 in a new folder inside `folder`, which is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix=".ebbtide-backup-", dir=folder) as private:
        file = Path(private) / "copy.sqlite"
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield file


def _find_roomy_folder(engine: Engine) -> Path:
    """Return the folder of the database file, where a copy of it finds room, else that of temporary files."""
    is_file = engine.dialect.name == "sqlite" and engine.url.database
    return Path(str(engine.url.database)).resolve().parent if is_file else Path(tempfile.gettempdir())


def _copy_out(engine: Engine, copy: Path) -> None:
    """Copy all tables from one snapshot of the database."""
    if engine.dialect.name == "sqlite":
        with closing(sqlite3.connect(str(engine.url.database))) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        return
    migrate(f"sqlite:///{copy}")
    target_engine = open_engine(f"sqlite:///{copy}")
    try:
        with transaction(make_snapshot_engine(engine)) as source, transaction(target_engine) as target:
            disable_timeouts(source)
            _copy_tables(source, target)
    finally:
        target_engine.dispose()


def _copy_in(copy: Path, engine: Engine) -> None:
    """Replace all tables of the database by those of the copy."""
    if engine.dialect.name == "sqlite":
        engine.dispose()
        with closing(sqlite3.connect(copy)) as source, closing(sqlite3.connect(str(engine.url.database))) as target:
            source.backup(target)
        return
    source_engine = open_engine(f"sqlite:///{copy}")
    try:
        with transaction(source_engine) as source, transaction(engine) as target:
            disable_timeouts(target)
            for table in METADATA.sorted_tables:  # triggers protect the audit log
                target.execute(text(f'ALTER TABLE "{table.name}" DISABLE TRIGGER USER'))
            names = ", ".join(f'"{table.name}"' for table in METADATA.sorted_tables)
            target.execute(text(f"TRUNCATE {names}"))
            _copy_tables(source, target)
            for table in METADATA.sorted_tables:
                target.execute(text(f'ALTER TABLE "{table.name}" ENABLE TRIGGER USER'))
                _advance_sequence(target, table)
    finally:
        source_engine.dispose()


def _copy_tables(source: Connection, target: Connection) -> None:
    for table in METADATA.sorted_tables:
        if table.name in _SEEDED:
            target.execute(delete(table))
        for rows in source.execution_options(yield_per=_ROWS_AT_ONCE).execute(select(table)).mappings().partitions():
            target.execute(insert(table), [dict(row) for row in rows])


def _advance_sequence(connection: Connection, table: Table[Any]) -> None:
    """Let PostgreSQL number new rows after the copied ones."""
    column = table.autoincrement_column
    sequence = None
    if column is not None:
        find = text("SELECT pg_get_serial_sequence(:name, :column)")
        sequence = connection.execute(find, {"name": f'"{table.name}"', "column": column.name}).scalar()
    if column is not None and sequence is not None:
        highest = connection.execute(select(func.max(column))).scalar()
        connection.execute(
            text("SELECT setval(CAST(:name AS regclass), :value, :is_used)"),
            {"name": sequence, "value": highest or 1, "is_used": highest is not None},
        )


def _find_content(engine: Engine) -> str | None:
    """Return the name of a table that has rows besides those that migrations create."""
    with transaction(engine) as connection:
        for table in METADATA.sorted_tables:
            if table.name not in _SEEDED and connection.execute(select(table).limit(1)).first() is not None:
                return table.name
        return STATE.name if connection.execute(select(STATE.c.generation)).scalar_one() else None


def _write_contents(copy: Path, backup: Backup) -> None:
    facts = {"format": FORMAT, "created_at_s": repr(backup.created_at_s)}
    with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")  # everything in one file
        connection.execute("CREATE TABLE backup_facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        connection.execute("CREATE TABLE backup_files (name TEXT PRIMARY KEY, content BLOB NOT NULL)")
        connection.executemany("INSERT INTO backup_facts VALUES (?, ?)", facts.items())
        connection.executemany("INSERT INTO backup_files VALUES (?, ?)", backup.files.items())


def _drop_contents(copy: Path) -> None:
    with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
        connection.execute("DROP TABLE backup_facts")
        connection.execute("DROP TABLE backup_files")
