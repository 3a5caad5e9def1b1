"""CPU time of lists, filters and the commit of a tick with 1,000,000 ended jobs, against the same with 1,000."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from scheduler.store.schema_migration import migrate
from tests.ended_jobs import add_ended_jobs, measure
from tests.postgres_server import PostgresServer

FEW, MANY = 1_000, 1_000_000
REPETITIONS = 6


def rows() -> Iterator[tuple[str, str, str]]:
    server = PostgresServer()
    try:
        server.start()
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("sqlite", "postgresql"):
                few, many = (_fill(kind, count, server, Path(folder)) for count in (FEW, MANY))
                counted = server if kind == "postgresql" else None
                for name, (few_s, many_s) in measure(few, many, repetitions=REPETITIONS, server=counted).items():
                    told = f"{1e3 * many_s:.2f} ms, {1e3 * few_s:.2f} ms, {many_s / few_s:.2f}"
                    yield f"{kind}: {name}, with {MANY:,} and {FEW:,} ended jobs, ratio", "2.0", told
    finally:
        server.close()


def _fill(kind: str, count: int, server: PostgresServer, folder: Path) -> str:
    """Return the URL of a new database with `count` ended jobs."""
    url = server.new_database() if kind == "postgresql" else f"sqlite:///{folder / f'{count}.sqlite'}"
    migrate(url)
    add_ended_jobs(url, count)
    return url
