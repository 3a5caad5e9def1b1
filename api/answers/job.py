"""Jobs as answers."""

from __future__ import annotations

from typing import Any, NotRequired, cast

from typing_extensions import TypedDict

from api.answers.page import AtSeconds, GpusByNode, encode_gpus
from scheduler.documents.job import job_document
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.codec import encode
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState


class GpuRangeView(TypedDict):
    min: int
    max: int


class JobGpusView(GpuRangeView):
    """`target`: how many it has or is to have. `releasing`: how many it has yet to leave."""

    target: int
    releasing: int


class ProgressView(TypedDict):
    """`remaining_s` is what is left at the present speed; null where that or the length is unknown. `samples_per_s` and
    `peak_bytes`, the most memory of a rank, are as measured, null before that; only what runs has a speed."""

    steps: float
    steps_total: int | None
    fraction: float | None
    checkpoint_steps: float
    loss: float | None
    frozen_layers: int
    step_time_s: float | None
    samples_per_s: float | None
    peak_bytes: int | None
    remaining_s: float | None
    as_of_s: AtSeconds


class AccountView(TypedDict):
    """What the job has had and cost up to `settled_at_s`."""

    waited_s: float
    gpu_s: float
    lost_gpu_s: float
    failures: int
    preemptions: int
    resizes: int
    first_started_at_s: AtSeconds | None
    settled_at_s: AtSeconds


class MemoryDeathView(TypedDict):
    plan: str
    gpus: int
    gpu_memory_bytes: int
    predicted_bytes: int
    measured_bytes: int | None


class MemoryView(TypedDict):
    """`factor`: the job's peaks over those that its plans predict. `deaths`: runs that died of memory, oldest first."""

    factor: float
    deaths: list[MemoryDeathView]
    retry_at_s: AtSeconds | None


class ClaimView(TypedDict):
    claimName: str


class VolumeView(TypedDict):
    persistentVolumeClaim: ClaimView
    subPath: NotRequired[str]


class CheckpointView(TypedDict):
    dir: str
    interval: float
    keep: int
    volume: NotRequired[VolumeView]


class JobSpecView(TypedDict):
    """The job document, with what its owner left out filled in. Durations are seconds."""

    name: str
    gpus: GpuRangeView
    queue: str
    priority: int
    gpu: NotRequired[str]
    model: NotRequired[str]
    profile: NotRequired[dict[str, Any]]
    globalBatch: NotRequired[int]
    sequenceLength: NotRequired[int]
    steps: NotRequired[int]
    durationEstimate: NotRequired[float]
    deadline: NotRequired[float]
    maxRunTime: NotRequired[float]
    retries: int
    command: list[str]
    image: NotRequired[str]
    env: dict[str, str]
    checkpoint: CheckpointView
    fungible: bool
    namespace: NotRequired[str]
    template: NotRequired[dict[str, Any]]


class JobView(TypedDict):
    """`intent` is what was asked for last, `message` why it is in its state. `releasing_nodes` it has yet to leave, by
    `leave_by_s`. `generation` counts the changes of its GPUs."""

    id: str
    name: str
    queue: str
    owner: str
    priority: int
    state: JobState
    state_since_s: AtSeconds
    intent: Intent
    message: str
    submitted_at_s: AtSeconds
    gpus: JobGpusView
    nodes: GpusByNode
    releasing_nodes: GpusByNode
    generation: int
    leave_by_s: AtSeconds | None
    plan: str | None
    progress: ProgressView
    account: AccountView
    memory: MemoryView
    spec: JobSpecView


def job_view(job: Job, now_s: float) -> JobView:
    allocation, spec = job.allocation, job.spec
    return {
        "id": job.id,
        "name": spec.name,
        "queue": spec.queue,
        "owner": job.owner,
        "priority": spec.priority,
        "state": job.state,
        "state_since_s": job.state_since_s,
        "intent": job.intent,
        "message": job.message,
        "submitted_at_s": job.submitted_at_s,
        "gpus": {
            "min": spec.min_gpus,
            "max": spec.max_gpus,
            "target": allocation.target_gpus,
            "releasing": gpu_sets.count(allocation.releasing),
        },
        "nodes": encode_gpus(allocation.target),
        "releasing_nodes": encode_gpus(allocation.releasing),
        "generation": allocation.generation,
        "leave_by_s": allocation.leave_by_s,
        "plan": allocation.plan.summary() if allocation.plan else None,
        "progress": progress_view(job, now_s),
        "account": encode(job.account),
        "memory": memory_view(job),
        "spec": cast("JobSpecView", job_document(spec)),
    }


def progress_view(job: Job, now_s: float) -> ProgressView:
    steps, remaining = job.steps_at(now_s), job.remaining_steps(now_s)
    step_time_s = job.step_time_s()
    runs = step_time_s < float("inf")
    return {
        "steps": steps,
        "steps_total": job.spec.steps or None,
        "fraction": steps / job.spec.steps if job.spec.steps else None,
        "checkpoint_steps": job.progress.checkpoint_steps,
        "loss": job.progress.loss,
        "frozen_layers": job.freezing.layers,
        "step_time_s": step_time_s if runs else None,
        "samples_per_s": job.progress.samples_per_s if runs else None,
        "peak_bytes": job.progress.peak_bytes,
        "remaining_s": remaining * step_time_s if runs and remaining is not None else None,
        "as_of_s": job.progress.at_s,
    }


def memory_view(job: Job) -> MemoryView:
    memory = job.memory
    deaths = [encode(death) for death in memory.deaths]
    return {"factor": memory.factor, "deaths": deaths, "retry_at_s": memory.retry_at_s}
