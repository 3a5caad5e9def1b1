"""Generated worlds: legal snapshots with jobs and loans in every state, and observations of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from scheduler.domain import gpu_sets
from scheduler.domain.fleet import DemandReading, Forecast, Loan, LoanState, Node, NodeState
from scheduler.domain.gpu_sets import Gpus, GpuShape, canonical_gpu_counts
from scheduler.domain.job import Intent, Job, Progress
from scheduler.domain.job_account import JobAccount, OnResize
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import ENDED_STATES, Allocation, JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.observation import FailureCause, NodeFacts, Observation, Run, RunPhase
from scheduler.domain.scaling_curve import ScalingCurve, build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot, Switches
from tests.builders import GPU, a_fleet

NOW_S = 10_000.0
CURVE = "llama-2-7b/batch-8/seq-0"
LOAN_STATES = (LoanState.OFFERED, LoanState.ACTIVE, LoanState.RECALLED)
HOLDING = (JobState.STARTING, JobState.RUNNING, JobState.RESIZING)
LEAVING = (JobState.PREEMPTED, JobState.SUSPENDED, JobState.QUEUED, *ENDED_STATES)


@dataclass(frozen=True)
class World:
    snapshot: Snapshot
    observation: Observation

    @property
    def is_contended(self) -> bool:
        """Whether pending jobs need more GPUs than are free."""
        held = sum(job.allocation.held_gpus for job in self.snapshot.jobs.values())
        waiting = sum(job.spec.min_gpus for job in self.snapshot.jobs.values() if job.state is JobState.QUEUED)
        return waiting > sum(node.gpus for node in self.snapshot.nodes.values()) - held


_RESIZE_MODES = (OnResize.CHECKPOINT, OnResize.CHECKPOINT, OnResize.RESTART, OnResize.NEVER, None)


def a_world(seed: int) -> World:
    """Return the world of a seed. No GPU is held twice, and jobs are on nodes of training only, present or earlier."""
    random = Random(seed)
    per_node = random.choice((1, 2, 4, 8))
    lending = LendingPolicy(headroom=random.choice((0.0, 0.1)), kept_nodes_min=random.choice((0, 0, 1)))
    fleet = a_fleet(
        training=random.randint(1, 4), inference=random.randint(0, 4), gpus_per_node=per_node, lending=lending
    )
    pools, nodes = fleet
    nodes = {name: _node(random, node) for name, node in nodes.items()}
    loans = _loans(random, nodes)
    free = {name: list(range(node.gpus)) for name, node in nodes.items() if _usable(node, loans)}
    jobs = [_job(random, f"j{at:02d}", free) for at in range(random.randint(0, 14))]
    resizing = Random(seed + 1)
    jobs = [replace(job, spec=replace(job.spec, on_resize=resizing.choice(_RESIZE_MODES))) for job in jobs]
    capacity = sum(n.gpus for n in nodes.values() if n.pool == "inference" and n.state is NodeState.UP)
    demand = random.uniform(0, 1.2 * max(capacity, 1))
    snapshot = Snapshot(
        generation=7,
        now_s=NOW_S,
        pools=pools,
        nodes=nodes,
        jobs={job.id: job for job in jobs},
        loans=loans,
        curves={CURVE: _curve(random, per_node)},
        demand={"inference": DemandReading(NOW_S - random.choice((0, 100, 5000)), min(demand, capacity), demand)},
        forecasts={"inference": Forecast(NOW_S, 600.0, (0.5, 0.999), (demand, demand * 1.1), "scripted")},
        switches=Switches(random.random() < 0.1, random.random() < 0.1, random.random() < 0.1),
        full_pass_at_s=random.choice((float("-inf"), NOW_S - 10, NOW_S - 400)),
    )
    return World(snapshot, observe(random, snapshot))


def _node(random: Random, node: Node) -> Node:
    state = NodeState.DOWN if random.random() < 0.08 else NodeState.UP
    draining = random.random() < 0.08
    return replace(node, state=state, cordoned=draining or random.random() < 0.08, draining=draining)


def _loans(random: Random, nodes: dict[str, Node]) -> dict[str, Loan]:
    loans = {}
    for node in nodes.values():
        if node.pool == "inference" and random.random() < 0.7:
            state = random.choice(LOAN_STATES)
            return_by_s = NOW_S + random.uniform(-50, 300) if state is LoanState.RECALLED else None
            loans[node.name] = Loan(f"{node.name}-3", node.name, node.pool, state, 9000.0, 9500.0, return_by_s)
    return loans


def _usable(node: Node, loans: dict[str, Loan]) -> bool:
    """Return whether jobs may hold GPUs of the node, perhaps from before a drain, a failure or a recall."""
    loan = loans.get(node.name)
    return node.pool == "training" or (loan is not None and loan.state in (LoanState.ACTIVE, LoanState.RECALLED))


def _grab(random: Random, free: dict[str, list[int]], count: int) -> Gpus | None:
    slots = [(name, index) for name, indices in free.items() for index in indices]
    if len(slots) < count:
        return None
    start = random.randrange(len(slots) - count + 1)
    taken: dict[str, tuple[int, ...]] = {}
    for name, index in slots[start : start + count]:
        taken[name] = (*taken.get(name, ()), index)
        free[name].remove(index)
    return taken


def _job(random: Random, job_id: str, free: dict[str, list[int]]) -> Job:
    state = random.choice([*JobState, JobState.QUEUED, JobState.QUEUED, JobState.RUNNING, JobState.RUNNING])
    least = random.choice((1, 1, 2, 4))
    spec = JobSpec(
        name=job_id,
        min_gpus=least,
        max_gpus=least * random.choice((1, 2, 4)),
        priority=random.choice((0, 0, 5)),
        steps=random.choice((0, 1_000, 50_000)),
        model=random.choice(("", "", "llama-2-7b")),
        global_batch=8,
        run_time_s_max=random.choice((None, None, 500.0)),
        fungible=random.random() < 0.8,
        gpu=random.choice(("", "", GPU)),
    )
    allocation = Allocation(generation=random.randint(0, 3))
    if state in HOLDING:
        target = _grab(random, free, random.randint(least, spec.max_gpus))
        if target is None:
            state = JobState.QUEUED
        else:
            plan = build_data_parallel_plan(GPU, gpu_sets.count(target))
            allocation = Allocation(2, target, {}, plan, NOW_S + 20, 7)
    if state in (*LEAVING, JobState.RESIZING) and random.random() < 0.6:
        releasing = _grab(random, free, 1)
        asked = random.choice((6, 7))
        allocation = replace(
            allocation, generation=2, releasing=releasing or {}, leave_by_s=NOW_S + 20, asked_at_generation=asked
        )
    since_s = NOW_S - random.choice((0.0, 5.0, 950.0))
    return Job(
        id=job_id,
        spec=spec,
        state=state,
        submitted_at_s=5_000.0,
        state_since_s=since_s,
        progress=Progress(at_s=since_s, steps=random.choice((0.0, 100.0)), checkpoint_at_s=since_s),
        account=JobAccount(settled_at_s=since_s, first_started_at_s=random.choice((None, 9_000.0))),
        allocation=allocation,
        intent=random.choice((Intent.RUN, Intent.RUN, Intent.RUN, Intent.SUSPEND, Intent.CANCEL)),
    )


def _curve(random: Random, per_node: int) -> ScalingCurve:
    """Return a curve with feasible, infeasible and unsolved shapes."""
    curve = ScalingCurve()
    for count in canonical_gpu_counts(1, 16, per_node):
        shape, dice = GpuShape.packed(GPU, count, per_node), random.random()
        if dice < 0.5:
            curve = curve.with_plan(shape, build_data_parallel_plan(GPU, count))
        elif dice < 0.7:
            curve = curve.with_infeasible(shape, "needs 94.1 GB of 80.0 GB per GPU")
    return curve


def observe(random: Random, snapshot: Snapshot) -> Observation:
    """Return an observation, fresh or stale, with runs in any phase on GPUs that their jobs hold."""
    runs: list[Run] = []
    for job in snapshot.jobs.values():
        generation = job.allocation.generation
        if job.allocation.releasing and random.random() < 0.5:
            phase = random.choice(
                (RunPhase.LEAVING, RunPhase.LEAVING, RunPhase.LOST, RunPhase.LEFT, RunPhase.SUCCEEDED)
            )
            held = job.allocation.releasing if phase is RunPhase.LEAVING else {}
            runs.append(Run(job.id, generation - 1, phase, held, 150.0, 120.0))
        elif job.allocation.target and random.random() < 0.8:
            phase = random.choice([*RunPhase])
            gone = phase in (RunPhase.LEFT, RunPhase.LOST, RunPhase.FAILED, RunPhase.SUCCEEDED)
            run = Run(job.id, generation, phase, {} if gone else job.allocation.target, 150.0, 120.0)
            of_memory = phase is RunPhase.FAILED and len(runs) % 2
            runs.append(replace(run, cause=FailureCause.OUT_OF_MEMORY) if of_memory else run)
    facts = {
        node.name: NodeFacts(random.random() > 0.05, random.choice((0, 0, node.gpus)))
        for node in snapshot.nodes.values()
    }
    return Observation(NOW_S, random.choice((6, 7)), tuple(runs), facts if random.random() < 0.7 else {})
