"""What a job has been through, as an answer: its states, what it held, and samples of its work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from typing_extensions import TypedDict

from api.answers.page import AtSeconds
from scheduler.core.story import job_step
from scheduler.domain.event import Event, EventCode, JobStep
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.sample import Sample
from scheduler.domain.snapshot import Snapshot

STEPS_MAX = 500


class StateView(TypedDict):
    """`message`: why it came into this state."""

    at_s: AtSeconds
    state: JobState
    message: str


class AllocationView(TypedDict):
    """What the job was given at `at_s`. `gpus` is 0 where it is to hold none, `lent_gpus` are those among them that
    inference pools lent; every change of them is a new `generation`. `plan` in one line, null where it has none."""

    at_s: AtSeconds
    generation: int
    gpus: int
    lent_gpus: int
    plan: str | None


class SampleView(TypedDict):
    """What its workers reported then; null is what they did not say. `steps` fall where work was lost. `peak_bytes`:
    the most memory that a rank has had."""

    at_s: AtSeconds
    steps: float
    loss: float | None
    samples_per_s: float | None
    peak_bytes: int | None


class JobHistoryView(TypedDict):
    """All oldest first. `states` and `allocations`: the newest 500. `samples`: at most 500, at least 5 s apart, evenly
    further apart the longer it runs, the first and the newest always among them."""

    job_id: str
    states: list[StateView]
    allocations: list[AllocationView]
    samples: list[SampleView]


def job_history_view(
    job: Job, events: Iterable[Event], samples: Iterable[Sample], snapshot: Snapshot
) -> JobHistoryView:
    """`events` of the job, oldest first. Where it has gone on since the last of them (commands wait), or they do not
    tell how it stood (an older version wrote them), its present state and allocation stand at the end."""
    told = [(event, event.job) for event in events if event.job is not None]
    now = job_step(job, snapshot.nodes, snapshot.pools)
    if not told or (told[-1][1] != now and told[-1][0].at_s < job.state_since_s):
        told.append((Event(job.state_since_s, EventCode.JOB_STATE, job.id, f": {job.message}"), now))
    return {
        "job_id": job.id,
        "states": [_state(event, step) for event, step in told][-STEPS_MAX:],
        "allocations": _allocations(told)[-STEPS_MAX:],
        "samples": [_sample(sample) for sample in samples],
    }


def _state(event: Event, step: JobStep) -> StateView:
    """A change of state is told as "before -> after: why"."""
    why = event.message.partition(": ")[2] if event.code is EventCode.JOB_STATE else event.message
    return {"at_s": event.at_s, "state": step.state, "message": why}


def _allocations(told: Sequence[tuple[Event, JobStep]]) -> list[AllocationView]:
    views: list[AllocationView] = [
        {
            "at_s": event.at_s,
            "generation": step.generation,
            "gpus": step.gpus,
            "lent_gpus": step.lent_gpus,
            "plan": step.plan or None,
        }
        for event, step in told
    ]
    changed = [after for before, after in pairwise(views) if after | {"at_s": 0} != before | {"at_s": 0}]
    return [*views[:1], *changed]


def _sample(sample: Sample) -> SampleView:
    return {
        "at_s": sample.at_s,
        "steps": sample.steps,
        "loss": sample.loss,
        "samples_per_s": sample.samples_per_s,
        "peak_bytes": sample.peak_bytes,
    }
