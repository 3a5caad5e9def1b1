"""One turn of a release on a database that releases share: migrate it, run a job to its end, and list all jobs.

A process runs it in the environment of the next release: `python -m tests.release_turn URL JOB`.
"""

from __future__ import annotations

import json
import sys

from scheduler.domain.commands import AddNode, Command, CommandBody, CreatePool, SubmitJob
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.job_spec import JobSpec
from scheduler.executors.simulated_executor import SimulatedExecutor
from scheduler.simulator.campaign.checks import CaseChecks
from scheduler.store.database import open_engine
from scheduler.store.schema_migration import migrate, require_current_revision
from scheduler.store.sql_store import SqlStore
from tests.builders import a_node
from tests.simulated_host import start_host

NODE = a_node("t0", gpus=2)
STEPS_MAX = 300
GAP_S = 100.0
"""Time between two turns, in which the lease of the last one ends."""


def take_turn(url: str, name: str) -> dict[str, str]:
    """Run a job, and start one that needs more GPUs than there are. Return the states of all jobs by name."""
    migrate(url)
    engine = open_engine(url)
    require_current_revision(engine)
    engine.dispose()
    store = SqlStore(url)
    now_s, checks = store.load().snapshot.now_s + GAP_S, CaseChecks()
    world = SimulatedExecutor([NODE], now_s=now_s)
    host = start_host(store, world, checks)
    big = SubmitJob(f"{name}-big", JobSpec(f"{name}-big", 64, 64, steps=1))
    bodies: list[CommandBody] = [CreatePool(Pool("training", PoolKind.TRAINING)), AddNode(NODE), big]
    for number, body in enumerate([*bodies, SubmitJob(name, JobSpec(name, 1, 1, steps=60))]):
        store.send(Command(f"{name}-{number}", now_s, body))
    for _ in range(STEPS_MAX):
        host.step()
        if name in {job.id for job in store.list_ended_jobs(limit=100)}:
            break
        world.advance_to(world.now_s + 5.0)
    jobs = (*store.list_ended_jobs(limit=100), *store.load().snapshot.jobs.values())
    store.close()
    assert checks.violations == ()
    return {job.id: job.state.value for job in jobs}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(take_turn(*sys.argv[1:])))
