"""Which form a database has, and which one this version of the program needs. Alembic, which changes it, is not asked:
it takes longer to import than a store to open."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Engine, MetaData, String, Table, inspect, select
from sqlalchemy.exc import SQLAlchemyError

from scheduler.store.engine import NO_ANSWER, StoreError, UnreachableError, name_of

MIGRATIONS = Path(__file__).parent / "migrations"
_KEPT_BY_ALEMBIC = Table("alembic_version", MetaData(), Column("version_num", String))


def require_head(engine: Engine) -> None:
    """Refuse a database of another form than this version's.

    Raises:
        StoreError: it cannot be reached, or has to be migrated.
    """
    if (file := _missing_file(engine)) is not None:
        raise StoreError(f"database {name_of(engine)}: there is no file {file}; `ebbtide migrate` makes one")
    found, needed = _revisions(engine), {max(_known_revisions())}
    if found != needed:
        raise StoreError(
            f"database {name_of(engine)} is at revision {_text(found)}, this version needs {_text(needed)}: "
            "run `ebbtide migrate`"
        )


def refuse_newer(engine: Engine) -> None:
    """Refuse a database that this version cannot bring to its own form.

    Raises:
        StoreError: it cannot be reached, or was made by a newer version.
    """
    if newer := _revisions(engine) - _known_revisions():
        raise StoreError(f"database {name_of(engine)} is at {_text(newer)}, which only a newer version knows")


def _known_revisions() -> set[str]:
    """By the names of their scripts: rNNNN_what_it_does.py, one after the other."""
    return {path.name[1:].partition("_")[0] for path in (MIGRATIONS / "versions").glob("r*.py")}


def _missing_file(engine: Engine) -> Path | None:
    """The file that SQLite would make, empty, at the first look at a database that is not there."""
    file = engine.url.database if engine.dialect.name == "sqlite" else None
    if not file or file == ":memory:" or file.startswith("file:") or Path(file).exists():
        return None
    return Path(file)


def _revisions(engine: Engine) -> set[str]:
    try:
        with engine.connect() as connection:
            if not inspect(connection).has_table(_KEPT_BY_ALEMBIC.name):
                return set()
            return set(connection.scalars(select(_KEPT_BY_ALEMBIC.c.version_num)))
    except SQLAlchemyError as failed:
        cause = getattr(failed, "orig", None) or failed
        kind = UnreachableError if isinstance(failed, NO_ANSWER) else StoreError
        raise kind(f"database {name_of(engine)} cannot be opened: {cause}") from None


def _text(revisions: set[str]) -> str:
    return ", ".join(sorted(revisions)) or "none"
