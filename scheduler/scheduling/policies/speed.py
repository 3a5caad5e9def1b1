"""Speed of a job on a number of GPUs, read from its scaling curve at canonical shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import inf

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_queue import find_limiting_queue
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.relative_speed import RelativeSpeed
from scheduler.domain.scaling_curve import LinearCurve, ScalingCurve
from scheduler.domain.snapshot import Snapshot

EFFICIENCY_MIN = 0.75
"""Least work per GPU-second, as a share of its best, at which a job starts."""

NO_PLANS: Mapping[int, ParallelPlan] = {}

packed = lru_cache(maxsize=65536)(GpuShape.packed)


def node_sizes(snapshot: Snapshot) -> Mapping[str, int]:
    """Return the GPUs of the most common node of each GPU model; canonical shapes are packed into these."""
    return snapshot.typical_node_sizes


def gpu_model(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> str | None:
    """Return the GPU model that a job's speed refers to.

    It is the model that the job holds, else the model that it requests, else the most common one in training pools,
    else the fleet's first by name. Of several models that it holds, it is one on nodes that training owns, if there are
    any, and of these the fastest.
    """
    plan = job.allocation.plan
    if plan is not None and plan.is_mixed:
        return _home_model(snapshot, job, sizes)
    for node in job.allocation.target:
        if node in snapshot.nodes:
            return snapshot.nodes[node].gpu
    if job.spec.gpu:
        return job.spec.gpu if job.spec.gpu in sizes else None
    return snapshot.reference_gpu or min(sizes, default=None)


def _home_model(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> str | None:
    curve, lent = snapshot.profile_curve(job), dict[str, bool]()
    for name in job.allocation.target:
        if node := snapshot.nodes.get(name):
            lent[node.gpu] = lent.get(node.gpu, True) and snapshot.is_lent(node)
    work_gpu_s = {gpu: curve.least_step_gpu_s(gpu, sizes[gpu]) for gpu in lent}
    return min(lent, key=lambda gpu: (lent[gpu], work_gpu_s[gpu] or inf, gpu), default=None)


def step_time_s(
    snapshot: Snapshot, job: Job, gpus: int, sizes: Mapping[str, int], model: str | None = None
) -> float | None:
    """Return seconds per step on `gpus` packed GPUs of `model`, or None if the curve has no plan.

    By default, `model` is the job's GPU model.

    The time is corrected by measurements.
    """
    return step_times_s(snapshot, job, sizes, model)(gpus)


def step_times_s(
    snapshot: Snapshot, job: Job, sizes: Mapping[str, int], model: str | None = None
) -> Callable[[int], float | None]:
    """Return `step_time_s` as a function of the count, for callers that need many counts of one job."""
    curve, correction = snapshot.curve(job), job.curve_correction
    if isinstance(curve, LinearCurve):
        return _data_parallel_step_times(job, curve, model or reference_model(snapshot, job))
    gpu = model or gpu_model(snapshot, job, sizes)
    plans = curve.packed_plans(gpu, sizes[gpu]) if gpu else NO_PLANS

    def on_curve(gpus: int) -> float | None:
        plan = plans.get(gpus)
        return plan.iteration_time_s * correction if plan else None

    return on_curve


def reference_model(snapshot: Snapshot, job: Job) -> str:
    """Return the GPU model that the speed of a job without a model refers to by default.

    It is the model of its plan, else the model that it requests, else the most common one in training pools.
    """
    plan = job.allocation.plan
    return plan.stages[0].gpu if plan is not None else job.spec.gpu or snapshot.reference_gpu


def relative_speeds(snapshot: Snapshot, job: Job) -> Mapping[str, RelativeSpeed]:
    """Return the known speeds of the fleet's GPU models for a job without a model, relative to its reference model.

    Empty for a job with a model, or if nothing is known.
    """
    curve = snapshot.curve(job)
    if not isinstance(curve, LinearCurve) or not curve.speeds:
        return {}
    base = curve.speed_on(job.spec.gpu or snapshot.reference_gpu).value
    known = ((gpu, curve.speeds[gpu]) for gpu in sorted(node_sizes(snapshot)) if gpu in curve.speeds)
    return {gpu: RelativeSpeed(speed.value / base, speed.source) for gpu, speed in known}


def describe_speeds(snapshot: Snapshot, job: Job) -> str:
    """Return the speeds of GPU models and their sources, such as `t4 0.32 (profile), v100-32g 1 (profile)`.

    Empty for a job with a model, in a fleet of one GPU model, or if nothing is known.
    """
    speeds = relative_speeds(snapshot, job)
    return ", ".join(f"{gpu} {speed.value:.2g} ({speed.source})" for gpu, speed in speeds.items())


def _data_parallel_step_times(job: Job, curve: LinearCurve, model: str) -> Callable[[int], float]:
    """Return step times of a job without a model on GPUs of `model`, fitted to its measurements on that model.

    They have a part that GPUs share and a part that they do not, such as the exchange of gradients (Amdahl, AFIPS'67).
    Scaling is assumed to be linear until the job has run on two different numbers of these GPUs, or if more GPUs were
    no less efficient.
    """
    gpu_s = job.progress.correction / curve.speed_on(model).value
    measured = job.progress.measured_gpu_s(model)
    if not measured:
        return lambda gpus: gpu_s / gpus
    known = dict(measured)
    if job.state is JobState.RUNNING and job.allocated_gpu == model:
        known[job.allocation.target_gpus] = gpu_s
    if len(known) < 2 or max(known.values()) == min(known.values()):
        return lambda gpus: gpu_s / gpus
    mean_gpus, mean = sum(known) / len(known), sum(known.values()) / len(known)
    spread = sum((gpus - mean_gpus) ** 2 for gpus in known)
    fixed_s = sum((gpus - mean_gpus) * (each_s - mean) for gpus, each_s in known.items()) / spread
    if fixed_s <= 0.0:
        return lambda gpus: gpu_s / gpus
    shared_s = max(0.0, mean - fixed_s * mean_gpus)
    return lambda gpus: shared_s / gpus + fixed_s


def linear_step_times_s(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> Callable[[int], float | None]:
    """Return step times under linear scaling, whatever the job's curve says.

    They start from its current speed if it runs, else from that on its fewest GPUs; None if that is unknown.
    """
    base, step_s = job.allocation.target_gpus, job.step_time_s()
    if not base or step_s == float("inf"):
        base = min_feasible_gpus(snapshot, job, sizes)
        step_s = step_time_s(snapshot, job, base, sizes) or float("inf")
    return lambda gpus: base * step_s / gpus if step_s < float("inf") else None


def remaining_s(snapshot: Snapshot, job: Job, gpus: int, sizes: Mapping[str, int]) -> float:
    """Return the remaining run time on `gpus` GPUs, in seconds.

    A job of unknown length is expected to need as much service again as it has had: least attained service first
    (Tiresias, NSDI'19, section 3).
    """
    steps = job.remaining_steps(snapshot.now_s)
    if steps is None:
        return job.account.gpu_s / gpus
    step_s = step_time_s(snapshot, job, gpus, sizes)
    if step_s is not None:
        return steps * step_s
    return job.spec.duration_estimate_s or float(job.spec.steps)


def remaining_on_fastest_model_s(snapshot: Snapshot, job: Job, gpus: int, sizes: Mapping[str, int]) -> float:
    """Return the remaining run time on `gpus` GPUs of the fastest model that the job can use, wherever it runs now.

    `remaining_s` refers to the model that a job holds, so a job that starts on slow GPUs would become longer by that.
    """
    steps = job.remaining_steps(snapshot.now_s)
    models = [job.spec.gpu] if job.spec.gpu else sizes
    times_s = [step_time_s(snapshot, job, gpus, sizes, gpu) for gpu in models if gpu in sizes]
    known_s = [step_s for step_s in times_s if step_s is not None]
    return steps * min(known_s) if steps is not None and known_s else remaining_s(snapshot, job, gpus, sizes)


def fastest_remaining_s(snapshot: Snapshot, job: Job, sizes: Mapping[str, int]) -> float:
    """Return the least remaining run time on any number of GPUs of one model that the job could have if it were alone.

    Infinite if the job's length is undeclared or no plan is known.
    """
    steps, least_s = job.remaining_steps(snapshot.now_s), inf
    for gpu in [job.spec.gpu] if job.spec.gpu else sizes:
        if steps is None or gpu not in sizes:
            continue
        max_gpus = min(job.spec.max_gpus, _reachable_gpus(snapshot, job, gpu))
        known = snapshot.profile_curve(job).packed_plans(gpu, sizes[gpu]) if job.spec.has_profile else (max_gpus,)
        step_time = step_times_s(snapshot, job, sizes, gpu)
        counts = (count for count in known if job.spec.min_gpus <= count <= max_gpus)
        least_s = min([least_s, *(steps * step_s for count in counts if (step_s := step_time(count)) is not None)])
    return least_s


def min_feasible_gpus(snapshot: Snapshot, job: Job, sizes: Mapping[str, int], model: str | None = None) -> int:
    """Return the fewest GPUs that the job can start on: its minimum, or more if no plan fits on that few.

    A placed job that is not resizable needs all that it holds. Plans are those for GPUs of `model`, by default of the
    job's model.
    """
    spec = job.spec
    if job.is_fixed:
        return job.allocation.target_gpus
    if not spec.has_profile:
        return spec.min_gpus
    return _min_feasible_on(snapshot.profile_curve(job), spec, model or gpu_model(snapshot, job, sizes), sizes)


def can_run_on(snapshot: Snapshot, job: Job, gpu: str, sizes: Mapping[str, int]) -> bool:
    """Return whether the job could run on GPUs of one model: a plan is solved, or its minimum is not solved yet."""
    if not job.spec.has_profile:
        return True
    curve = snapshot.profile_curve(job)
    shape = packed(gpu, job.spec.min_gpus, sizes[gpu])
    return bool(curve.packed_plans(gpu, sizes[gpu])) or shape not in curve.infeasible


def accepts_model(snapshot: Snapshot, job: Job, gpu: str) -> bool:
    """Return whether a pending job should start on a GPU model rather than wait for a faster one.

    A start lasts, because jobs do not move to another model. So a job waits for a faster model as long as it would lose
    by the slower one. Whatever comes, it loses at most twice as much as with foresight (ski rental; Karlin et al.,
    Algorithmica 3, 1988).
    """
    return snapshot.now_s - job.submitted_at_s >= start_loss_s(snapshot, job, gpu)


def start_loss_s(snapshot: Snapshot, job: Job, gpu: str) -> float:
    """Return by how many seconds the job would end later on a GPU model than on the fastest that training has.

    On each model it runs on the fewest feasible GPUs. The loss is 0 if the job's length or its speed is unknown.
    """
    sizes, serving, steps = node_sizes(snapshot), snapshot.training_gpus, job.remaining_steps(snapshot.now_s)
    models = [job.spec.gpu] if job.spec.gpu else sizes
    usable = {model: serving.get((model, False), 0) + serving.get((model, True), 0) for model in models}
    if steps is None or job.spec.gpu == gpu:
        return 0.0
    counts = {model: min_feasible_gpus(snapshot, job, sizes, model) for model in {*models, gpu}}
    times_s = {model: step_time_s(snapshot, job, gpus, sizes, model) for model, gpus in counts.items()}
    known = [
        time_s for model, time_s in times_s.items() if time_s is not None and usable.get(model, 0) >= counts[model]
    ]
    step_s = times_s[gpu]
    return 0.0 if step_s is None or not known else max(0.0, steps * (step_s - min(known)))


def _min_feasible_on(curve: ScalingCurve, spec: JobSpec, gpu: str | None, sizes: Mapping[str, int]) -> int:
    min_gpus = spec.min_gpus
    if gpu is None or gpu not in sizes:  # no usable node has it any more
        return min_gpus
    if not curve.infeasible or packed(gpu, min_gpus, sizes[gpu]) not in curve.infeasible:
        return min_gpus
    return min(
        (gpus for gpus in curve.packed_plans(gpu, sizes[gpu]) if min_gpus <= gpus <= spec.max_gpus), default=min_gpus
    )


def efficient_gpus(snapshot: Snapshot, job: Job, sizes: Mapping[str, int], model: str | None = None) -> int:
    """Return the minimum feasible number of GPUs on which the job is efficient.

    Unlike `min_feasible_gpus`, this excludes counts on which a step takes more than 1 / `EFFICIENCY_MIN` times its
    least GPU-seconds.

    A large model on few GPUs spends most of its time on moving its state, and a pending job would make better use of
    those GPUs. Counts that a queue's limit or the cluster rules out are not considered.
    """
    spec = job.spec
    if job.is_fixed:
        return job.allocation.target_gpus
    if not spec.has_profile:
        return spec.min_gpus
    curve, gpu = snapshot.profile_curve(job), model or gpu_model(snapshot, job, sizes)
    min_gpus = _min_feasible_on(curve, spec, gpu, sizes)
    if gpu is None:
        return min_gpus
    max_gpus = min(spec.max_gpus, _reachable_gpus(snapshot, job, gpu))
    return curve.min_efficient_gpus(gpu, sizes[gpu], min_gpus, max_gpus, EFFICIENCY_MIN) or min_gpus


def _reachable_gpus(snapshot: Snapshot, job: Job, gpu: str) -> int:
    """Return the GPUs of a model that the job could have if it were alone."""
    serving, queue = snapshot.training_gpus, snapshot.queues.get(find_limiting_queue(job.spec.queue, snapshot.queues))
    usable = serving.get((gpu, False), 0) + (serving.get((gpu, True), 0) if job.accepts_lent_nodes else 0)
    limits = (queue.limit_gpus, queue.user_limit_gpus) if queue else ()
    return min((usable, *(limit for limit in limits if limit is not None)))
