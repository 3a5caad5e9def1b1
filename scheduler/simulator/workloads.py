"""From the rows of a jobs trace to submissions: what each job asks for, and how long it is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import JobRow
from scheduler.domain.fleet import PoolKind
from scheduler.domain.gpu_sets import GpuShape, canonical_gpu_counts
from scheduler.domain.job import CheckpointSpec, JobSpec
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.solver.profiles.catalog import list_model_names


class WorkloadError(ValueError):
    """A job that does not fit the cluster; the message names the line, the field, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job to be submitted at `at_s`. `trace_gpus` is what it ran on in the trace, `run_time_s_min` its run time at
    the maximum of its range, whether or not the policy set scales. `steps_true` is its length where its spec does not
    tell the truth (`Truth`)."""

    at_s: float
    job_id: str
    spec: JobSpec
    trace_gpus: int
    run_time_s_min: float
    steps_true: float | None = None
    user: str = ""


@dataclass(frozen=True, slots=True)
class GpuInventory:
    """GPUs of training pools and of all pools, and the size of a node, by GPU model."""

    training: dict[str, int]
    all: dict[str, int]
    per_node: dict[str, int]

    @property
    def most_common(self) -> str:
        """The model that training has most of."""
        return max(self.training, key=lambda gpu: self.training[gpu])


def build_submissions(
    rows: Iterable[JobRow], cluster: ClusterDocument, curves: CurveCache, *, elastic: bool
) -> tuple[Submission, ...]:
    """The trace's jobs in order of time. Where `elastic` is false every job keeps to the GPUs of the trace.

    A job without a model has one step for every GPU-second that it ran in the trace. The length of a job with one is
    the trace's iterations, else the number of steps that the curve's plan does in the trace's time on the trace's
    GPUs. Measured curves go before solved ones, give an `application` its model, and narrow a job's range to counts
    that were measured, slower ones too: it is for the policies to leave those.

    Raises:
        WorkloadError: a job's GPUs do not fit the cluster, or its model, GPU or plan does not exist.
    """
    models = count_gpu_models(cluster)
    made = ((row, _build_submission(row, cluster, models, curves, elastic=elastic)) for row in rows)
    return tuple(replace(submission, user=row.user) for row, submission in made)


def _build_submission(
    row: JobRow, cluster: ClusterDocument, models: GpuInventory, curves: CurveCache, *, elastic: bool
) -> Submission:
    gpu, row = _get_gpu_model(row, models), _with_measured_model(row, curves)
    widest = _get_gpu_range(row, cluster, models.all[gpu])
    low, high = widest if elastic else (row.gpus, row.gpus)
    _check_gpu_limits(row, cluster, low, f"the training pools' GPUs of model {gpu}", models.training[gpu])
    spec = JobSpec(
        name=row.job_id,
        min_gpus=low,
        max_gpus=high,
        queue=row.queue,
        priority=row.priority,
        gpu=row.gpu,
        model=row.model,
        global_batch=row.global_batch,
        sequence_length=row.sequence_length,
        steps=max(1, round(row.duration_s * row.gpus)),
        duration_estimate_s=row.duration_s * row.gpus / low or None,
        deadline_s=None if row.deadline_s is None else row.deadline_s - row.submit_time_s,
        checkpoint=CheckpointSpec(interval_s=cluster.checkpoint_interval_s),
    )
    if not row.model:
        return Submission(row.submit_time_s, row.job_id, spec, row.gpus, row.duration_s * row.gpus / widest[1])
    return _build_submission_with_curve(row, spec, curves, widest=widest, node=(gpu, models.per_node[gpu]))


def _check_gpu_limits(row: JobRow, cluster: ClusterDocument, gpus_min: int, description: str, gpus: int) -> None:
    """A job that could never start, for want of GPUs or under a limit of its queue."""
    bounds: list[tuple[int | None, str]] = [(gpus, description)]
    for queue in cluster.queues:
        if queue.name == row.queue:
            bounds.append((queue.limit_gpus, f"the limit of queue {row.queue}"))
            bounds.append((queue.user_limit_gpus, f"the user limit of queue {row.queue}"))
    for most, whose in bounds:
        if most is not None and gpus_min > most:
            raise _make_workload_error(
                row, "min_gpus" if gpus_min == row.min_gpus else "gpus", gpus_min, f"at most {most}, {whose}"
            )


def _with_measured_model(row: JobRow, curves: CurveCache) -> JobRow:
    """The row with its application as its model, where that was measured."""
    if row.application and curves.find_measured(row.application, row.global_batch):
        return replace(row, model=row.application)
    if not row.duration_s:
        allowed = f"one that a measured profile has at batch {row.global_batch}: this trace gives no run times"
        raise _make_workload_error(row, "application", row.application, allowed)
    return row


def _build_submission_with_curve(
    row: JobRow, spec: JobSpec, curves: CurveCache, *, widest: tuple[int, int], node: tuple[str, int]
) -> Submission:
    """`widest` is the range of a policy set that scales, `node` a node's GPU model and number of GPUs."""
    measured = curves.find_measured(row.model, row.global_batch)
    if not measured and row.model not in list_model_names():
        raise _make_workload_error(row, "model", row.model, ", ".join(list_model_names()))
    counts = canonical_gpu_counts(*widest, node[1]) if measured else (widest[1],)
    at_trace, *points = (curves.get_job_point(spec, GpuShape.packed(node[0], n, node[1])) for n in (row.gpus, *counts))
    solved = zip((row.gpus, *counts), (at_trace, *points), strict=True)
    times_s = {count: point.plan.iteration_time_s for count, point in solved if point.plan}
    allowed = [count for count in times_s if spec.min_gpus <= count <= spec.max_gpus]
    if at_trace.plan is None and not (measured and allowed and row.iterations):
        raise _make_workload_error(
            row, "gpus", row.gpus, f"a count that model {row.model} can run on: {at_trace.infeasible}"
        )
    if measured:
        spec = replace(spec, min_gpus=min(allowed), max_gpus=max(allowed))
    step_s = times_s.get(row.gpus) or times_s[spec.min_gpus]
    steps = row.iterations or max(1, round(row.duration_s / step_s))
    spec = replace(spec, steps=steps, duration_estimate_s=steps * times_s.get(spec.min_gpus, step_s))
    return Submission(row.submit_time_s, row.job_id, spec, row.gpus, steps * min(times_s.values()))


def _get_gpu_range(row: JobRow, cluster: ClusterDocument, gpus_max: int) -> tuple[int, int]:
    """The row's own range, else the one that the cluster's `elastic` block gives; its top capped to the cluster."""
    elastic = cluster.elastic
    if row.min_gpus is not None or row.max_gpus is not None:
        low, high = row.min_gpus or row.gpus, row.max_gpus or row.gpus
    elif elastic is not None and row.gpus >= elastic.from_gpus:
        low = max(1, math.ceil(row.gpus * elastic.min_ratio))
        high = math.floor(row.gpus * elastic.max_ratio)
    else:
        low = high = row.gpus
    return low, max(low, min(high, gpus_max))


def _get_gpu_model(row: JobRow, models: GpuInventory) -> str:
    """The GPU model that the row asks for, else the one that training has most of."""
    if row.gpu and row.gpu not in models.training:
        raise _make_workload_error(
            row, "gpu", row.gpu, f"a model that the training pools have: {', '.join(models.training)}"
        )
    return row.gpu or models.most_common


def count_gpu_models(cluster: ClusterDocument) -> GpuInventory:
    training: defaultdict[str, int] = defaultdict(int)
    everywhere: defaultdict[str, int] = defaultdict(int)
    per_node: dict[str, int] = {}
    for pool in cluster.pools:
        everywhere[pool.gpu] += pool.gpus
        if pool.kind is PoolKind.TRAINING:
            training[pool.gpu] += pool.gpus
            per_node[pool.gpu] = max(per_node.get(pool.gpu, 0), pool.gpus_per_node)
    return GpuInventory(dict(training), dict(everywhere), per_node)


def _make_workload_error(row: JobRow, field: str, value: object, allowed: str) -> WorkloadError:
    return WorkloadError(f"{row.path} line {row.line}: {field}: got {value!r}; allowed: {allowed}")
