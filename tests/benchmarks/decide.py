"""Time of one tick's parts on a contended fleet of 1,000 GPUs.

125 nodes of 8 GPUs: 100 are training's own, 25 are lent. 200 jobs run and 200 wait when demand takes back 13 nodes
and 50 more jobs arrive. Half of the jobs have a model, with a solved curve.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from scheduler.core.absorb import absorb
from scheduler.core.apply import apply
from scheduler.core.decide import decide
from scheduler.domain.allocation import Allocation
from scheduler.domain.command import Command, SubmitJob
from scheduler.domain.fleet import DemandReading, LendingPolicy
from scheduler.domain.forecast import Forecast
from scheduler.domain.gpu_shape import GpuShape, canonical_counts
from scheduler.domain.job import Job, JobAccount, JobSpec, Progress
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import NodeFacts, Observation, Run, RunPhase
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import ScalingCurve, data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult
from scheduler.policies.policy_set import policy_set
from scheduler.store.memory import MemoryStore
from scheduler.store.migrate import migrate
from scheduler.store.protocol import Commit, Store
from scheduler.store.sql import SqlStore
from tests.builders import GPU, a_fleet, a_loan

RUNS = 40
NODE_GPUS, TRAINING_NODES, LENT_NODES, RECALLED_NODES = 8, 100, 25, 13
RUNNING, QUEUED, ARRIVALS = 200, 200, 50
NOW_S = 100_000.0
MODEL = "llama-2-7b"
SIZES = ((1, 4), (2, 8), (2, 16), (4, 4), (4, 8), (8, 16))


def rows() -> list[tuple[str, str, str]]:
    """(name, bar, measured median)."""
    snapshot, observation = contended()
    arrivals = tuple(Command(f"c{at}", NOW_S, SubmitJob(f"new-{at:03d}", _spec(at))) for at in range(ARRIVALS))
    policies = policy_set("ebbtide")
    absorbed = absorb(snapshot, observation, arrivals).snapshot
    contended_result = decide(absorbed, policies)
    calm = replace(absorbed, jobs={id_: job for id_, job in absorbed.jobs.items() if job.is_placed})
    calm = replace(calm, forecasts={}, demand={"inference": DemandReading(NOW_S, 0.0, 0.0)})
    calm_result = decide(calm, policies)
    return [
        (f"decide, contended: {_told(contended_result)}", "< 20 ms", _cpu_ms(lambda: decide(absorbed, policies))),
        (f"decide, full pass without a queue: {_told(calm_result)}", "", _cpu_ms(lambda: decide(calm, policies))),
        ("absorb, 200 runs and 50 arrivals", "", _cpu_ms(lambda: absorb(snapshot, observation, arrivals))),
        ("apply", "", _cpu_ms(lambda: apply(absorbed, contended_result.decisions))),
        *_commit_rows(snapshot, apply(absorbed, contended_result.decisions), contended_result),
    ]


def contended() -> tuple[Snapshot, Observation]:
    """The fleet as it stands when demand has just risen, and what an executor sees of it."""
    random = Random(7)
    pools, nodes = a_fleet(
        training=TRAINING_NODES, inference=LENT_NODES, gpus_per_node=NODE_GPUS, lending=LendingPolicy(headroom=0.0)
    )
    slots = [(name, index) for name in nodes for index in range(NODE_GPUS)]
    jobs = [_running(f"run-{at:03d}", random, slots) for at in range(RUNNING)]
    jobs += [_job(f"wait-{at:03d}", _spec(random.randrange(1_000)), JobState.QUEUED) for at in range(QUEUED)]
    needed = float(RECALLED_NODES * NODE_GPUS)
    snapshot = Snapshot(
        generation=7,
        now_s=NOW_S,
        pools=pools,
        nodes=nodes,
        jobs={job.id: job for job in jobs},
        loans={name: a_loan(name) for name, node in nodes.items() if node.pool == "inference"},
        curves={_spec(1).curve_key: _curve()},
        demand={"inference": DemandReading(NOW_S, needed, needed)},
        forecasts={"inference": Forecast(NOW_S, 600.0, (0.999,), (needed,), "scripted")},
    )
    runs = (Run(job.id, 1, RunPhase.RUNNING, job.allocation.target, 500.0, 400.0) for job in jobs[:RUNNING])
    return snapshot, Observation(NOW_S, 7, tuple(runs), dict.fromkeys(nodes, NodeFacts()))


def _spec(at: int) -> JobSpec:
    least, most = SIZES[at % len(SIZES)]
    model = MODEL if at % 2 else ""
    return JobSpec(f"job-{at}", least, most, model=model, global_batch=64 if model else 0, steps=1_000 + 97 * (at % 50))


def _job(job_id: str, spec: JobSpec, state: JobState) -> Job:
    since_s = NOW_S - 3_600.0
    progress = Progress(NOW_S - 60.0, checkpoint_at_s=NOW_S - 60.0)
    return Job(job_id, spec, state, since_s, since_s, progress, JobAccount(settled_at_s=since_s))


def _running(job_id: str, random: Random, slots: list[tuple[str, int]]) -> Job:
    """A job on the next free slots, as wide as chance has it; about one in twenty GPUs stays free."""
    job = _job(job_id, _spec(random.randrange(1_000)), JobState.RUNNING)
    count = max(job.spec.min_gpus, min(random.randint(job.spec.min_gpus, job.spec.max_gpus), 5))
    taken, slots[:count] = slots[:count], []
    target: dict[str, tuple[int, ...]] = {}
    for name, index in taken:
        target[name] = (*target.get(name, ()), index)
    return replace(
        job,
        allocation=Allocation(
            1, target, {}, _plan(count) if job.spec.model else data_parallel_plan(GPU, count), None, 6
        ),
    )


def _plan(gpus: int) -> ParallelPlan:
    """Speed grows more slowly than the GPUs, so that a GPU gains less the more there are."""
    return replace(data_parallel_plan(GPU, gpus), iteration_time_s=10.0 / gpus**0.7)


def _curve() -> ScalingCurve:
    """The canonical shapes; shapes of two unequal nodes are solved too, as they would be after a while."""
    counts = canonical_counts(1, 64, NODE_GPUS)
    pairs = [GpuShape.of_counts([(GPU, a), (GPU, b)]) for a in range(1, 9) for b in range(1, a + 1)]
    shapes = [GpuShape.packed(GPU, count, NODE_GPUS) for count in counts] + pairs
    return ScalingCurve({shape: _plan(shape.gpus) for shape in shapes})


def _commit_rows(before: Snapshot, after: Snapshot, result: TickResult) -> list[tuple[str, str, str]]:
    with TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'bench.db'}"
        migrate(url)
        sql = SqlStore(url)
        try:
            return [
                ("commit, MemoryStore", "", _commit_ms(lambda: MemoryStore(), before, after, result)),
                ("commit, SqlStore on SQLite (wall time)", "", _commit_ms(lambda: sql, before, after, result)),
            ]
        finally:
            sql.close()


def _commit_ms(open_store: Callable[[], Store], before: Snapshot, after: Snapshot, result: TickResult) -> str:
    """Back and forth between the two states, so that each commit writes the same rows."""
    store = open_store()
    lease = store.acquire("bench", now_s=0.0, ttl_s=1e9)
    assert lease is not None
    store.commit(Commit(Snapshot(), replace(before, generation=1), lease.epoch))
    previous, taken_s = replace(before, generation=1), []
    for at in range(RUNS):
        state = replace(after if at % 2 == 0 else before, generation=previous.generation + 1)
        begin_s = perf_counter()
        store.commit(Commit(previous, state, lease.epoch, decisions=result.decisions))
        taken_s.append(perf_counter() - begin_s)
        previous = state
    return f"{median(taken_s) * 1e3:.2f} ms"


def _cpu_ms(work: Callable[[], object]) -> str:
    """Median CPU time, which other work on the machine disturbs least."""
    work()
    gc.collect()
    taken_s = []
    for _ in range(RUNS):
        begin_s = process_time()
        work()
        taken_s.append(process_time() - begin_s)
    return f"{median(taken_s) * 1e3:.2f} ms"


def _told(result: TickResult) -> str:
    kinds = Counter(type(decision).__name__ for decision in result.decisions)
    return ", ".join(f"{count} {name}" for name, count in sorted(kinds.items())) or "no decisions"


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
