"""A record of the GPUs that jobs held, written by triggers in PostgreSQL in the transaction of each change.

Usage is recomputed from it without the code of the usage accounts.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from sqlalchemy import Connection, text

from scheduler.domain.codec import decode
from scheduler.domain.job import Job

_KEEPING = (
    "CREATE TABLE kept_jobs (key text, generation bigint, body json)",
    "CREATE TABLE kept_ticks (generation bigint PRIMARY KEY, now_s double precision)",
    """CREATE FUNCTION keep_job() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO kept_jobs VALUES (NEW.key, NEW.generation, NEW.body); RETURN NULL; END'""",
    """CREATE FUNCTION keep_tick() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO kept_ticks VALUES (NEW.generation, NEW.now_s); RETURN NULL; END'""",
    "CREATE TRIGGER keep_job AFTER INSERT OR UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION keep_job()",
    """CREATE TRIGGER keep_tick AFTER UPDATE ON state FOR EACH ROW
    WHEN (OLD.generation <> NEW.generation) EXECUTE FUNCTION keep_tick()""",
)


def keep_record(connection: Connection) -> None:
    """Start recording."""
    for statement in _KEEPING:
        connection.execute(text(statement))


def held_gpu_s(connection: Connection, *, lent: frozenset[str]) -> dict[str, tuple[float, float]]:
    """Return GPU-seconds by queue, on owned and on `lent` nodes, from the times between states of each job."""
    at_s = {row.generation: row.now_s for row in connection.execute(text("SELECT * FROM kept_ticks"))}
    states: defaultdict[str, list[tuple[float, Job | None]]] = defaultdict(list)
    for row in connection.execute(text("SELECT * FROM kept_jobs ORDER BY generation")):
        job = None if row.body is None else decode(Job, row.body)
        states[row.key].append((at_s[row.generation], job))
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for history in states.values():
        for (since_s, job), (until_s, _) in pairwise(history):
            assert job is not None, "a deleted job has come back"
            for gpus in (job.allocation.target, job.allocation.releasing):
                for node, indices in gpus.items():
                    sums[job.spec.queue][node in lent] += len(indices) * (until_s - since_s)
    return {queue: (own, lent_) for queue, (own, lent_) in sums.items()}
