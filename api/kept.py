"""State beside the snapshot, which a SqlStore alone keeps."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

from api.dependencies import ServiceDep
from scheduler.store.sql import SqlStore


def sql_store(service: ServiceDep) -> SqlStore:
    assert isinstance(service.store, SqlStore), "a service runs on a SqlStore; only tests of other nouns do without"
    return service.store


SqlStoreDep = Annotated[SqlStore, Depends(sql_store)]
