"""Builders for tests: a fleet, jobs and snapshots with few arguments and defaults for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from scheduler.domain.fleet import Loan, LoanState, Node, Pool, PoolKind
from scheduler.domain.gpu_sets import Gpus, GpuShape
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_account import JobAccount, OnResize
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import Allocation, JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.scaling_curve import ScalingCurve, build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot

GPU = "a100-80g"
GPU_BYTES = 80 * 1024**3


def a_node(name: str, pool: str = "training", *, gpus: int = 8, gpu: str = GPU, **more: Any) -> Node:
    return Node(name=name, pool=pool, gpu=gpu, gpus=gpus, gpu_memory_bytes=GPU_BYTES, **more)


def a_fleet(
    *, training: int, inference: int, gpus_per_node: int = 8, lending: LendingPolicy | None = None
) -> tuple[dict[str, Pool], dict[str, Node]]:
    """Return pools `training` (nodes t0, t1, ...) and `inference` (nodes i0, i1, ...)."""
    pools = {
        "training": Pool("training", PoolKind.TRAINING),
        "inference": Pool("inference", PoolKind.INFERENCE, lending or LendingPolicy()),
    }
    owned = [a_node(f"t{at}", "training", gpus=gpus_per_node) for at in range(training)]
    other = [a_node(f"i{at}", "inference", gpus=gpus_per_node) for at in range(inference)]
    return pools, {node.name: node for node in (*owned, *other)}


def a_spec(min_gpus: int = 1, max_gpus: int | None = None, *, name: str = "job", **more: Any) -> JobSpec:
    return JobSpec(
        name=name,
        min_gpus=min_gpus,
        max_gpus=max_gpus or min_gpus,
        **{"steps": 3600, "on_resize": OnResize.CHECKPOINT, **more},
    )


def a_job(
    job_id: str,
    min_gpus: int = 1,
    max_gpus: int | None = None,
    *,
    state: JobState = JobState.QUEUED,
    on: Gpus | None = None,
    releasing: Gpus | None = None,
    now_s: float = 0.0,
    **more: Any,
) -> Job:
    """Return a job in `state`. `on` is its target, with a data-parallel plan of that size."""
    gpu_count = sum(len(indices) for indices in (on or {}).values())
    allocation = Allocation(
        generation=1 if on or releasing else 0,
        target=on or {},
        releasing=releasing or {},
        plan=build_data_parallel_plan(GPU, gpu_count) if gpu_count else None,
        leave_by_s=now_s if releasing else None,
    )
    return Job(
        id=job_id,
        spec=a_spec(min_gpus, max_gpus, name=job_id, **more),
        state=state,
        submitted_at_s=now_s,
        state_since_s=now_s,
        progress=Progress(at_s=now_s, checkpoint_at_s=now_s),
        account=JobAccount(settled_at_s=now_s),
        allocation=allocation,
    )


def a_loan(node: str, state: LoanState = LoanState.ACTIVE, *, return_by_s: float | None = None) -> Loan:
    return Loan(f"{node}-1", node, "inference", state, 0.0, 0.0, return_by_s)


def a_curve(times_s: Mapping[GpuShape, float]) -> ScalingCurve:
    """Return a curve with these step times and data-parallel plans."""
    plans = {shape: build_data_parallel_plan(shape.groups[0].gpu, shape.gpus) for shape in times_s}
    return ScalingCurve({shape: replace(plans[shape], iteration_time_s=time_s) for shape, time_s in times_s.items()})


def a_snapshot(
    fleet: tuple[Mapping[str, Pool], Mapping[str, Node]],
    jobs: Iterable[Job] = (),
    loans: Iterable[Loan] = (),
    **more: Any,
) -> Snapshot:
    pools, nodes = fleet
    return Snapshot(
        pools=pools,
        nodes=nodes,
        jobs={job.id: job for job in jobs},
        loans={loan.node: loan for loan in loans},
        **more,
    )
