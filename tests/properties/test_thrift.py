"""On random curves, jobs never take GPUs that slow them down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import ReasonCode, ResizeJob, StartJob
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Intent, Job
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.domain.tick_report import TickResult
from scheduler.scheduling.policies.scaling import flexible_counts
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policies.speed import node_sizes, packed
from scheduler.scheduling.policy_sets import list_policy_sets, load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_curve
from tests.properties.worlds import CURVE, a_world

SEEDS = st.integers(min_value=0, max_value=10**9)
WORLDS = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
FOR_EACH_SET = settings(WORLDS, max_examples=40)


def a_jagged_curve(random: Random, gpus_per_node: int) -> ScalingCurve:
    """Return a curve over every shape of up to three nodes, most of them solved, with step times in random order and
    some equal."""
    times_s, infeasible = dict[GpuShape, float](), dict[GpuShape, str]()
    for shares in combinations_with_replacement(range(gpus_per_node + 1), 3):
        shape, dice = GpuShape.from_node_counts((GPU, share) for share in shares if share), random.random()
        if shape.groups and dice < 0.6:
            times_s[shape] = random.choice((1, 2, 3, 5, 8, 13)) / random.choice((8.0, 8.0 * shape.gpus))
        elif shape.groups and dice < 0.7:
            infeasible[shape] = "needs 94.1 GB of 80.0 GB per GPU"
    return ScalingCurve(a_curve(times_s).plans, infeasible)


def a_jagged_world(seed: int) -> Snapshot:
    """Return a snapshot with few jobs, so that some can grow. All jobs have the model, and running ones the plans of
    the curve."""
    snapshot, random = a_world(seed).snapshot, Random(seed)
    curve = a_jagged_curve(random, next(iter(snapshot.nodes.values())).gpus)

    def modelled(job: Job) -> Job:
        spec = replace(job.spec, model="llama-2-7b", steps=50_000, max_gpus=4 * job.spec.min_gpus)
        plan = curve.plan_for(snapshot.shape_of(job.allocation.target)) or job.allocation.plan
        return replace(job, spec=spec, intent=Intent.RUN, allocation=replace(job.allocation, plan=plan))

    jobs = {job_id: modelled(snapshot.jobs[job_id]) for job_id in list(snapshot.jobs)[: random.randint(1, 5)]}
    return replace(snapshot, jobs=jobs, curves={CURVE: curve}, switches=Switches(), full_pass_at_s=float("-inf"))


def taken(snapshot: Snapshot, result: TickResult) -> Iterator[tuple[Job, StartJob | ResizeJob]]:
    """Return the jobs with their new targets."""
    for decision in result.decisions:
        if isinstance(decision, StartJob | ResizeJob):
            yield snapshot.jobs[decision.job_id], decision


@pytest.mark.parametrize("policy", [name for name in list_policy_sets() if load_policy_set(name).requires_speedup])
@FOR_EACH_SET
@given(seed=SEEDS)
def test_targets_contain_no_equally_fast_part(policy: str, seed: int) -> None:
    snapshot = a_jagged_world(seed)
    for job, decision in taken(snapshot, decide(snapshot, load_policy_set(policy))):
        shape = snapshot.shape_of(decision.gpus)
        assert snapshot.curves[CURVE].plan_for(shape) == decision.plan, "a plan for exactly this shape"
        assert snapshot.curves[CURVE].faster_subset(shape, job.spec.min_gpus) is None


@WORLDS
@given(seed=SEEDS)
def test_jobs_grow_only_if_faster(seed: int) -> None:
    snapshot = a_jagged_world(seed)
    for job, decision in taken(snapshot, decide(snapshot, load_policy_set("ebbtide"))):
        before = job.allocation
        if isinstance(decision, ResizeJob) and decision.reason.code is ReasonCode.GAIN_EXCEEDS_COST and before.plan:
            grows = gpu_sets.count(decision.gpus) > before.target_gpus
            assert not grows or decision.plan.iteration_time_s < before.plan.iteration_time_s


@WORLDS
@given(seed=SEEDS)
def test_knapsack_gives_no_count_that_a_smaller_one_beats(seed: int) -> None:
    """The knapsack counts packed GPUs, except those that a job already has; the tests above cover the actual
    placement."""
    snapshot = a_jagged_world(seed)
    size, curve = node_sizes(snapshot)[GPU], snapshot.curves[CURVE]
    starting = [job.id for job in snapshot.jobs.values() if not job.allocation.target]
    for job_id, count in flexible_counts(snapshot, starting, 16, PolicySettings()).items():
        job = snapshot.jobs[job_id]
        present, least = job.allocation.target_gpus, job.spec.min_gpus
        part = curve.faster_subset(packed(GPU, count, size), least) if count not in (present, least) else None
        assert part is None or part.gpus == present or part != packed(GPU, part.gpus, size)


def test_random_curves_cover_starts_growth_and_shrinking() -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        snapshot = a_jagged_world(seed)
        for job, decision in taken(snapshot, decide(snapshot, load_policy_set("ebbtide"))):
            change = gpu_sets.count(decision.gpus) - job.allocation.target_gpus
            seen["started" if isinstance(decision, StartJob) else "grown" if change > 0 else "shrunk"] += 1
    print(f"\n{dict(seen)}")
    assert min(seen["started"], seen["grown"], seen["shrunk"]) >= 15
