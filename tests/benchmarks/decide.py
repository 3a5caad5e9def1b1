"""Time of the parts of one tick on contended fleets of 1,000, 10,000 and 100,000 GPUs.

Nodes have 8 GPUs. Four of five nodes belong to training, the others are lent. Demand recalls a tenth of all nodes and
50 jobs arrive, while as many jobs are pending as running. Half of the jobs have a model with a solved curve. Each
measurement uses a freshly updated snapshot, as in a tick: only data that changed since the last tick is uncached.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from scheduler.domain.commands import Command, SubmitJob
from scheduler.domain.fleet import DemandReading, Forecast
from scheduler.domain.gpu_sets import GpuShape, canonical_gpu_counts
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_account import JobAccount, OnResize
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import Allocation, JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.observation import NodeFacts, Observation, Run, RunPhase
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import ScalingCurve, build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickResult
from scheduler.scheduling.desired_state import apply_decisions
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.snapshot_update import update_snapshot
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit, Store
from scheduler.store.schema_migration import migrate
from scheduler.store.sql_store import SqlStore
from tests.builders import GPU, a_fleet, a_loan

RUNS = 40
NODE_GPUS, ARRIVALS = 8, 50
NOW_S = 100_000.0
MODEL = "llama-2-7b"
RANGES = ((1, 4), (2, 8), (2, 16), (4, 4), (4, 8), (8, 16))


@dataclass(frozen=True, slots=True)
class Size:
    """A fleet and its load. `decides` measurements are taken over several random fleets.

    If `settled`, running jobs hold their minimum, as in a crowded fleet after some minutes. Otherwise each holds
    more than
    its minimum and all of the surplus is reclaimed in one tick.
    """

    gpus: int
    running: int
    bar: str
    decides: int
    settled: bool = False

    @property
    def nodes(self) -> int:
        return self.gpus // NODE_GPUS


SIZES = (
    Size(1_000, 200, "< 20 ms (median)", 120),
    Size(10_000, 2_000, "p99 < 100 ms", 120, settled=True),
    Size(10_000, 2_000, "p99 < 100 ms", 120),
    Size(100_000, 20_000, "p99 < 1.5 s", 20, settled=True),
    Size(100_000, 20_000, "p99 < 1.5 s", 20),
)


def rows() -> list[tuple[str, str, str]]:
    """Return (name, target, measured)."""
    return [row for size in SIZES for row in _rows(size)]


def _rows(size: Size) -> list[tuple[str, str, str]]:
    policies = load_policy_set("ebbtide")
    decide_s, absorb_s, apply_s, result = list[float](), list[float](), list[float](), TickResult()
    fleets = max(1, min(8, size.decides // 10))
    for number in range(fleets):
        snapshot, observation = build_contended_fleet(size, number)
        for _ in range(size.decides // fleets):
            gc.collect()
            begin_s = process_time()
            absorbed = update_snapshot(snapshot, observation, _arrivals()).snapshot
            absorb_s.append(process_time() - begin_s)
            begin_s = process_time()
            result = decide(absorbed, policies)
            decide_s.append(process_time() - begin_s)
            assert result.decisions, "only decides that decide something count"
            begin_s = process_time()
            after = apply_decisions(absorbed, result.decisions)
            apply_s.append(process_time() - begin_s)
    crowd = "settled" if size.settled else "suddenly"
    name = f"{size.gpus:,} GPUs, {size.running:,} running, {size.running + ARRIVALS:,} waiting, {crowd}"
    rows = [
        (f"decide, {name}: {_told(result)}", size.bar, _spread_ms(decide_s)),
        (f"absorb, {name}", "", _spread_ms(absorb_s)),
        (f"apply, {name}", "", _spread_ms(apply_s)),
    ]
    if size.gpus <= 10_000 and not size.settled:
        rows += _commit_rows(name, snapshot, after, result)
    return rows


def _arrivals() -> tuple[Command, ...]:
    return tuple(Command(f"c{at}", NOW_S, SubmitJob(f"new-{at:03d}", _spec(at))) for at in range(ARRIVALS))


def build_contended_fleet(size: Size, seed: int = 7) -> tuple[Snapshot, Observation]:
    """Return the fleet just after demand has risen, and the executor's observation of it."""
    random = Random(seed)
    lent = size.nodes // 5
    pools, nodes = a_fleet(
        training=size.nodes - lent, inference=lent, gpus_per_node=NODE_GPUS, lending=LendingPolicy(headroom=0.0)
    )
    slots = [(name, index) for name in nodes for index in range(NODE_GPUS)][::-1]
    jobs = [_running(f"run-{at:05d}", random, slots, settled=size.settled) for at in range(size.running)]
    jobs += [_job(f"wait-{at:05d}", _spec(random.randrange(1_000)), JobState.QUEUED) for at in range(size.running)]
    needed = float(size.nodes // 10 * NODE_GPUS)
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
    assert snapshot.index.capacity("inference") == lent * NODE_GPUS
    runs = (Run(job.id, 1, RunPhase.RUNNING, job.allocation.target, 500.0, 400.0) for job in jobs[: size.running])
    return snapshot, Observation(NOW_S, 7, tuple(runs), dict.fromkeys(nodes, NodeFacts()))


def _spec(at: int) -> JobSpec:
    least, most = RANGES[at % len(RANGES)]
    model = MODEL if at % 2 else ""
    batch, steps = 64 if model else 0, 1_000 + 97 * (at % 50)
    return JobSpec(
        f"job-{at}", least, most, model=model, global_batch=batch, steps=steps, on_resize=OnResize.CHECKPOINT
    )


def _job(job_id: str, spec: JobSpec, state: JobState) -> Job:
    since_s = NOW_S - 3_600.0
    progress = Progress(NOW_S - 60.0, checkpoint_at_s=NOW_S - 60.0)
    return Job(job_id, spec, state, since_s, since_s, progress, JobAccount(settled_at_s=since_s))


def _running(job_id: str, random: Random, slots: list[tuple[str, int]], *, settled: bool) -> Job:
    """Place a job of random width on the next free GPUs. About one in twenty GPUs stays free.

    In a settled fleet, minimum demand covers nearly all GPUs.
    """
    job = _job(job_id, _spec(random.randrange(1_000)), JobState.RUNNING)
    if settled:
        base = random.choice((4, 4, 4, 6, 6))
        job = replace(job, spec=replace(job.spec, min_gpus=base, max_gpus=2 * base))
        count = base
    else:
        count = max(job.spec.min_gpus, min(random.randint(job.spec.min_gpus, job.spec.max_gpus), 5))
    taken = [slots.pop() for _ in range(count)]
    target: dict[str, tuple[int, ...]] = {}
    for name, index in taken:
        target[name] = (*target.get(name, ()), index)
    return replace(
        job,
        allocation=Allocation(
            1, target, {}, _plan(count) if job.spec.model else build_data_parallel_plan(GPU, count), None, 6
        ),
    )


def _plan(gpus: int) -> ParallelPlan:
    """Return a speed with diminishing returns per GPU."""
    return replace(build_data_parallel_plan(GPU, gpus), iteration_time_s=10.0 / gpus**0.7)


def _curve() -> ScalingCurve:
    """Return the canonical shapes and the shapes of two unequal nodes, as solved in a running service."""
    counts = canonical_gpu_counts(1, 64, NODE_GPUS)
    pairs = [GpuShape.from_node_counts([(GPU, a), (GPU, b)]) for a in range(1, 9) for b in range(1, a + 1)]
    shapes = [GpuShape.packed(GPU, count, NODE_GPUS) for count in counts] + pairs
    return ScalingCurve({shape: _plan(shape.gpus) for shape in shapes})


def _commit_rows(name: str, before: Snapshot, after: Snapshot, result: TickResult) -> list[tuple[str, str, str]]:
    with TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'bench.db'}"
        migrate(url)
        sql = SqlStore(url)
        try:
            return [
                (f"commit to memory, {name}", "", _commit_ms(lambda: MemoryStore(), before, after, result)),
                (f"commit to SQLite, {name} (wall time)", "", _commit_ms(lambda: sql, before, after, result)),
            ]
        finally:
            sql.close()


def _commit_ms(open_store: Callable[[], Store], before: Snapshot, after: Snapshot, result: TickResult) -> str:
    """Alternate between two states, so that each commit writes the same rows."""
    store = open_store()
    lease = store.acquire_lease("bench", now_s=0.0, ttl_s=1e9)
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


def _spread_ms(taken_s: list[float]) -> str:
    """Return CPU time, which is least sensitive to other work on the machine."""
    p99_s = quantiles(taken_s, n=100, method="inclusive")[98]
    return f"{median(taken_s) * 1e3:.1f} ms, p99 {p99_s * 1e3:.1f} ms"


def _told(result: TickResult) -> str:
    kinds = Counter(type(decision).__name__ for decision in result.decisions)
    return ", ".join(f"{count} {name}" for name, count in sorted(kinds.items())) or "no decisions"


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
