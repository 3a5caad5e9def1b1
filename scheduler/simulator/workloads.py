"""Converts the rows of a jobs trace to submissions: the requests and lengths of jobs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import JobRow
from scheduler.domain.checkpoints import CheckpointSpec
from scheduler.domain.fleet import PoolKind
from scheduler.domain.gpu_sets import GpuShape, canonical_gpu_counts
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.relative_speed import choose_reference_gpu, resolve_prior_speeds
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.solver.profiles.catalog import list_model_names
from scheduler.solver.profiles.gpu_throughput import list_throughputs


class WorkloadError(ValueError):
    """A job does not fit the cluster. The message names line, field, value and accepted values."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that is submitted at `at_s`.

    Args:
        trace_gpus: GPUs of the job in the trace.
        run_time_s_min: run time at the maximum of its range, whether or not the policy set resizes jobs.
        steps_true: true length if it differs from that of the spec (`GroundTruth`).
    """

    at_s: float
    job_id: str
    spec: JobSpec
    trace_gpus: int
    run_time_s_min: float
    steps_true: float | None = None
    user: str = ""


@dataclass(frozen=True, slots=True)
class GpuInventory:
    """GPUs of training pools, GPUs of all pools, and GPUs per node, by GPU model."""

    training: dict[str, int]
    all: dict[str, int]
    per_node: dict[str, int]

    @property
    def most_common(self) -> str:
        """The most common GPU model of training pools, to which speeds refer."""
        return choose_reference_gpu(self.training)


def build_submissions(
    rows: Iterable[JobRow], cluster: ClusterDocument, curves: CurveCache, *, elastic: bool
) -> tuple[Submission, ...]:
    """Return the jobs of the trace in order of time.

    A job without a model has one step per GPU-second of the trace on its reference model, which is the model that it
    requests, or else the most common one. If the trace says that it ran on another model, its GPU-seconds count by the
    relative speed of that model. The length of a job with a model is the number of iterations in the trace or, without
    it, the number of steps that its plan completes in the run time of the trace on the GPUs of the trace.

    Measured curves take precedence over solved ones. They define the model of an `application` and limit the range of a
    job to measured counts, including slow ones, which policies may avoid.

    Args:
        elastic: whether jobs have ranges; otherwise each job has the GPU count of the trace.

    Raises:
        WorkloadError: a job's GPUs do not fit the cluster, or its model, GPU or plan does not exist.
    """
    models = count_gpu_models(cluster)
    return tuple(
        replace(_build_submission(row, cluster, models, curves, elastic=elastic), user=row.user) for row in rows
    )


def _build_submission(
    row: JobRow, cluster: ClusterDocument, models: GpuInventory, curves: CurveCache, *, elastic: bool
) -> Submission:
    gpu, row = _get_gpu_model(row, models), _with_measured_model(row, curves)
    reachable = sum(models.all.values()) if row.model and not row.gpu else models.all[gpu]
    widest = _get_gpu_range(row, cluster, reachable)
    low, high = widest if elastic else (row.gpus, row.gpus)
    _check_gpu_limits(row, cluster, low, f"the training pools' GPUs of model {gpu}", models.training[gpu])
    work_gpu_s = row.duration_s * row.gpus * _get_trace_speed(row, gpu)
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
        steps=max(1, round(work_gpu_s)),
        duration_estimate_s=work_gpu_s / low or None,
        deadline_s=None if row.deadline_s is None else row.deadline_s - row.submit_time_s,
        checkpoint=CheckpointSpec(interval_s=cluster.checkpoint_interval_s),
        on_resize=OnResize.CHECKPOINT,
    )
    if not row.model:
        run_time_s_min = work_gpu_s / widest[1] / compute_fastest_speed(spec, models)
        return Submission(row.submit_time_s, row.job_id, spec, row.gpus, run_time_s_min)
    return _build_submission_with_curve(row, spec, curves, widest=widest, node=(gpu, models.per_node[gpu]))


def _get_trace_speed(row: JobRow, reference: str) -> float:
    """Return the speed of the GPU model that the job ran on in the trace, relative to its reference model."""
    if row.ran_on in ("", reference):
        return 1.0
    throughputs = list_throughputs()
    if row.ran_on not in throughputs or reference not in throughputs:
        allowed = ", ".join(throughputs) if reference in throughputs else f"only {reference}, which has no GPU profile"
        raise _make_workload_error(row, "ran_on", row.ran_on, allowed)
    return throughputs[row.ran_on] / throughputs[reference]


def compute_fastest_speed(spec: JobSpec, models: GpuInventory) -> float:
    """Return the speed, relative to its reference model, of the fastest GPU that a job without a model could use."""
    if spec.gpu:
        return 1.0
    speeds = resolve_prior_speeds(models.most_common, {}, list_throughputs())
    return max((speeds[gpu].value for gpu in models.all if gpu in speeds), default=1.0)


def _check_gpu_limits(row: JobRow, cluster: ClusterDocument, gpus_min: int, description: str, gpus: int) -> None:
    """Refuse a job that could never start because of the size of the pools or a limit of its queue."""
    bounds: list[tuple[int | None, str]] = [(gpus, description)]
    for queue in cluster.queues:
        if queue.name == row.queue:
            bounds.append((queue.limit_gpus, f"the limit of queue {row.queue}"))
            bounds.append((queue.user_limit_gpus, f"the user limit of queue {row.queue}"))
    for most, owner in bounds:
        if most is not None and gpus_min > most:
            raise _make_workload_error(
                row, "min_gpus" if gpus_min == row.min_gpus else "gpus", gpus_min, f"at most {most}, {owner}"
            )


def _with_measured_model(row: JobRow, curves: CurveCache) -> JobRow:
    """Return the row with its application as its model if the application was measured."""
    if row.application and curves.find_measured(row.application, row.global_batch):
        return replace(row, model=row.application)
    if not row.duration_s:
        allowed = f"an application measured at batch {row.global_batch}, because this trace has no run times"
        raise _make_workload_error(row, "application", row.application, allowed)
    return row


def _build_submission_with_curve(
    row: JobRow, spec: JobSpec, curves: CurveCache, *, widest: tuple[int, int], node: tuple[str, int]
) -> Submission:
    """Build a submission with the length of its curve.

    Args:
        widest: range of the job if it is elastic.
        node: GPU model and number of GPUs of a node.
    """
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
    step_s = _compute_trace_step_s(row, spec, curves, node) or times_s.get(row.gpus) or times_s[spec.min_gpus]
    steps = row.iterations or max(1, round(row.duration_s / step_s))
    spec = replace(spec, steps=steps, duration_estimate_s=steps * times_s.get(spec.min_gpus, step_s))
    return Submission(row.submit_time_s, row.job_id, spec, row.gpus, steps * min(times_s.values()))


def _compute_trace_step_s(row: JobRow, spec: JobSpec, curves: CurveCache, node: tuple[str, int]) -> float | None:
    """Return the step time on the GPU model that the job ran on in the trace, or None if that is not another one."""
    if row.ran_on in ("", node[0]):
        return None
    if row.ran_on not in list_throughputs():
        raise _make_workload_error(row, "ran_on", row.ran_on, ", ".join(list_throughputs()))
    point = curves.get_job_point(spec, GpuShape.packed(row.ran_on, row.gpus, node[1]))
    if point.plan is None:
        allowed = f"a GPU on which model {row.model} can run: {point.infeasible}"
        raise _make_workload_error(row, "ran_on", row.ran_on, allowed)
    return point.plan.iteration_time_s


def _get_gpu_range(row: JobRow, cluster: ClusterDocument, gpus_max: int) -> tuple[int, int]:
    """Return the range of the row, or that of the `elastic` block, with its maximum limited to `gpus_max`."""
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
    """Return the requested GPU model, or the most common one of the training pools."""
    if row.gpu and row.gpu not in models.training:
        raise _make_workload_error(row, "gpu", row.gpu, f"a model of the training pools: {', '.join(models.training)}")
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
