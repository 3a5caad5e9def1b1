"""Re-plans of jobs with frozen layers: none costs the job time unless another job gains more from its GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.decisions import ReasonCode, ResizeJob
from scheduler.domain.gpu_sets import Gpus, GpuShape, count
from scheduler.domain.job import Job
from scheduler.domain.job_records import FrozenLayers
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.scaling import remaining_work
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_curve, a_fleet, a_job, a_snapshot

NODE_GPUS = 8
NOW_S = 10_000.0
SHAPES = [GpuShape.packed(GPU, gpus, NODE_GPUS) for gpus in range(1, 2 * NODE_GPUS + 1)]
TIMES_S = st.lists(st.floats(0.05, 1.0), min_size=len(SHAPES), max_size=len(SHAPES))


def _curve(times_s: Sequence[float]) -> ScalingCurve:
    return a_curve(dict(zip(SHAPES, times_s, strict=True)))


def _on(first: int, gpus: int) -> Gpus:
    """Return GPUs `first` and following of two nodes, numbered through."""
    numbers = [divmod(number, NODE_GPUS) for number in range(first, first + gpus)]
    return {
        f"t{node}": tuple(index for at, index in numbers if at == node) for node in sorted({at for at, _ in numbers})
    }


def _running(job_id: str, on: Gpus, step_s: float, steps: int) -> Job:
    job = a_job(job_id, 1, 2 * NODE_GPUS, state=JobState.RUNNING, on=on, model=job_id, global_batch=16, steps=steps)
    assert job.allocation.plan is not None
    # ZeRO, so that no plan of the curve is the same.
    stages = tuple(
        replace(stage, strategies=(LayerStrategy(layers=1, dp=stage.gpus, zero=3, shard_group=stage.gpus),))
        for stage in job.allocation.plan.stages
    )
    plan = replace(job.allocation.plan, stages=stages, iteration_time_s=step_s)
    return replace(job, allocation=replace(job.allocation, plan=plan), progress=replace(job.progress, at_s=NOW_S))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """A job with 7 frozen layers whose curve is solved, another elastic job, and the rest of two nodes free."""
    held, others = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    frozen_s, other_s = draw(TIMES_S), draw(TIMES_S)
    train = _running("train", _on(0, held), draw(st.floats(0.05, 1.5)), draw(st.integers(100, 40_000)))
    train = replace(train, freezing=FrozenLayers(7, 7, NOW_S - 100.0, 1.0))
    other = _running("other", _on(NODE_GPUS, others), other_s[others - 1], draw(st.integers(100, 40_000)))
    curves = {train.curve_key: _curve(frozen_s), other.curve_key: _curve(other_s)}
    return a_snapshot(
        a_fleet(training=2, inference=0), [train, other], curves=curves, now_s=NOW_S, full_pass_at_s=NOW_S
    )


@settings(max_examples=300, deadline=None)
@given(snapshots())
def test_no_replan_costs_time_unless_another_job_gains_more(snapshot: Snapshot) -> None:
    for decision in decide(snapshot, load_policy_set("ebbtide")).decisions:
        if not isinstance(decision, ResizeJob) or decision.reason.code is not ReasonCode.LAYERS_FROZE:
            continue
        job, price_s = snapshot.jobs[decision.job_id], PolicySettings().reconfiguration_s
        work = remaining_work(snapshot, job)
        before_s = work * job.step_time_s()
        after_s = work * decision.plan.iteration_time_s + price_s
        freed = job.allocation.target_gpus - count(decision.gpus)
        assert after_s < before_s or freed > 0
        if after_s >= before_s:
            loss = _rate(before_s) - _rate(after_s)
            assert _best_gain(snapshot, "other", freed, price_s) > loss


def _best_gain(snapshot: Snapshot, job_id: str, freed: int, price_s: float) -> float:
    """Return the most that the job's completion rate rises with the freed GPUs and those that are free already."""
    job = snapshot.jobs[job_id]
    work, held = remaining_work(snapshot, job), job.allocation.target_gpus
    most = min(held + freed + snapshot.index.free_gpu_total, job.spec.max_gpus)
    plans = snapshot.profile_curve(job).packed_plans(GPU, NODE_GPUS)
    times_s = [work * plans[gpus].iteration_time_s + price_s for gpus in range(held + 1, most + 1)]
    now = _rate(work * job.step_time_s())
    return max((_rate(time_s) - now for time_s in times_s), default=0.0)


def _rate(remaining_s: float) -> float:
    """Return the completion rate of a job without a deadline, the value of the scaling policy."""
    return 1.0 / (1.0 + remaining_s)
