"""Bringing a database to the form that this version of the program works with."""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from scheduler.store.engine import NO_ANSWER, StoreError, UnreachableError, name_of, open_engine

# Alembic keeps the migration that runs in variables of its modules: two threads would use each other's connection.
_ONE_AT_A_TIME = threading.Lock()


def migrate(url: str) -> None:
    """Create or upgrade the database, in one transaction. Nothing happens to one that is up to date.

    Raises:
        StoreError: the URL is malformed, the database cannot be reached, or was made by a newer version.
    """
    engine = open_engine(url, writes_at_once=True)
    try:
        found = _revisions(engine)
        if newer := found - _known_revisions():
            raise StoreError(f"database {name_of(engine)} is at {_text(newer)}, which only a newer version knows")
        config = script_config()
        with _ONE_AT_A_TIME, engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()


def require_head(engine: Engine) -> None:
    """Refuse a database of another form than this version's.

    Raises:
        StoreError: it cannot be reached, or has to be migrated.
    """
    if (file := _missing_file(engine)) is not None:
        raise StoreError(f"database {name_of(engine)}: there is no file {file}; `ebbtide migrate` makes one")
    found, needed = _revisions(engine), frozenset(_scripts().get_heads())
    if found != needed:
        raise StoreError(
            f"database {name_of(engine)} is at revision {_text(found)}, this version needs {_text(needed)}: "
            "run `ebbtide migrate`"
        )


def script_config() -> Config:
    """Alembic's settings: the scripts lie in this package, and no alembic.ini is needed."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("file_template", "r%%(rev)s_%%(slug)s")
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(script_config())


def _known_revisions() -> frozenset[str]:
    return frozenset(script.revision for script in _scripts().walk_revisions())


def _missing_file(engine: Engine) -> Path | None:
    """The file that SQLite would make, empty, at the first look at a database that is not there."""
    file = engine.url.database if engine.dialect.name == "sqlite" else None
    if not file or file == ":memory:" or file.startswith("file:") or Path(file).exists():
        return None
    return Path(file)


def _revisions(engine: Engine) -> frozenset[str]:
    try:
        with engine.connect() as connection:
            return frozenset(MigrationContext.configure(connection).get_current_heads())
    except SQLAlchemyError as failed:
        cause = getattr(failed, "orig", None) or failed
        kind = UnreachableError if isinstance(failed, NO_ANSWER) else StoreError
        raise kind(f"database {name_of(engine)} cannot be opened: {cause}") from None


def _text(revisions: frozenset[str]) -> str:
    return ", ".join(sorted(revisions)) or "none"
