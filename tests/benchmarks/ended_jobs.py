"""CPU time of lists, filters and the commit of a tick with 1,000,000 ended jobs, against the same with 1,000."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from scheduler.store.schema_migration import migrate
from tests.ended_jobs import add_ended_jobs, measure
from tests.postgres_server import PostgresServer

FEW, MANY = 1_000, 1_000_000
REPETITIONS = 30


def rows() -> Iterator[tuple[str, str, str]]:
    server = PostgresServer()
    try:
        server.start()
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("sqlite", "postgresql"):
                few_s, many_s = (_measure(kind, count, server, Path(folder)) for count in (FEW, MANY))
                for name, seconds in many_s.items():
                    told = f"{1e3 * seconds:.2f} ms, {1e3 * few_s[name]:.2f} ms, {seconds / few_s[name]:.2f}"
                    yield f"{kind}: {name}, with {MANY:,} and {FEW:,} ended jobs, ratio", "2.0", told
    finally:
        server.close()


def _measure(kind: str, count: int, server: PostgresServer, folder: Path) -> dict[str, float]:
    url = server.new_database() if kind == "postgresql" else f"sqlite:///{folder / f'{count}.sqlite'}"
    migrate(url)
    add_ended_jobs(url, count)
    return measure(url, repetitions=REPETITIONS, server=server if kind == "postgresql" else None)
