"""The lock that keeps a second API process off an SQLite database."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.engine import make_url

from scheduler.store.database import StoreError, StoreRefusedError

_SUFFIX = ".api-lock"


@contextmanager
def hold_api_lock(url: str) -> Iterator[None]:
    """Hold the lock of API processes during the block, if the database is an SQLite file.

    The kernel releases it when the process ends, in whatever way. PostgreSQL needs none.

    Raises:
        StoreRefusedError: another API process holds it.
        StoreError: the lock file cannot be written.
    """
    database = make_url(url).database if url.startswith("sqlite") else None
    if not database or database == ":memory:":
        yield
        return
    path = Path(f"{database}{_SUFFIX}")
    try:
        file = path.open("ab")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreRefusedError(
                f"another API process uses the database {database}. SQLite serves one process of this kind: stop the "
                "other one, or use PostgreSQL"
            ) from None
        yield
