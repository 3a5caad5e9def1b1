"""State beside the snapshot, which a SqlStore alone keeps; and the cursors of lists of it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

from api.dependencies import ServiceDep
from api.errors import refuse
from scheduler.store.sql import SqlStore


def sql_store(service: ServiceDep) -> SqlStore:
    assert isinstance(service.store, SqlStore), "a service runs on a SqlStore; only tests of other nouns do without"
    return service.store


SqlStoreDep = Annotated[SqlStore, Depends(sql_store)]


def number_of(cursor: str) -> int | None:
    """The row number in a cursor, None for an empty one; a 422 problem for what no answer ever held."""
    if not cursor:
        return None
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        refuse("cursor", cursor, "the value of `next` in an earlier answer")
    return int(cursor)
