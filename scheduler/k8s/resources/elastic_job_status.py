"""The status of an ElasticJob: where its job stands, in words for columns and in figures for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from scheduler.domain import gpus as gpu_sets
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import ENDED, JobState
from scheduler.domain.parallel_plan import plan_to_json
from scheduler.domain.reason import Reason
from scheduler.domain.snapshot import Snapshot
from scheduler.k8s.kinds import JOB_LABEL
from scheduler.k8s.resources.checkpoint_place import checkpoints_shared
from scheduler.k8s.resources.conditions import (
    ACCEPTED,
    COMPLETE,
    FAILED,
    SCHEDULED,
    SUSPENDED,
    Claim,
    claimed_before,
    conditions,
)
from scheduler.k8s.resources.metadata import Metadata, time_text

REFUSED = "Refused"
_END_PHASES = frozenset(state.capitalize() for state in ENDED)
_TAKEN = Claim(ACCEPTED, True, "Accepted", "")


def has_ended(status: Mapping[str, Any]) -> bool:
    """Whether the status tells how the job ended. It may hold anything."""
    phase = status.get("phase")
    return isinstance(phase, str) and phase in _END_PHASES


def job_status(
    job: Job, waiting: Reason | None, snapshot: Snapshot, *, before: Mapping[str, Any], accepted: Iterable[Claim]
) -> dict[str, Any]:
    """The status, but for what `stamped` adds. `before` is the present one, which may hold anything; `accepted` is what
    was claimed of the resource's spec when it was read just now."""
    allocation, account = job.allocation, job.account
    claims = tuple(accepted) or claimed_before(before.get("conditions"), ACCEPTED) or (_TAKEN,)
    refusal = next((claim for claim in claims if not claim.holds), None)
    reason, message = (refusal.reason, refusal.message) if refusal else _reason(job, waiting)
    status = {
        "jobId": job.id,
        "phase": job.state.capitalize(),
        "reason": reason,
        "message": message,
        "gpus": f"{allocation.held_gpus}/{job.spec.max_gpus}",
        "planSummary": allocation.plan.summary() if allocation.plan else None,
        "selector": f"{JOB_LABEL}={job.id}",
        "submittedAt": time_text(job.submitted_at_s),
        "startedAt": None if account.first_started_at_s is None else time_text(account.first_started_at_s),
        "endedAt": time_text(job.state_since_s) if job.is_ended else None,
        "allocation": _allocation(job, snapshot),
        "plan": json.loads(json.dumps(plan_to_json(allocation.plan))) if allocation.plan else None,
        "progress": _progress(job, snapshot.now_s),
        "conditions": (*claims, *_claims(job, waiting)),
    }
    return {name: value for name, value in status.items() if value not in (None, "")}


def refused_status(claims: Iterable[Claim]) -> dict[str, Any]:
    """The status of a resource that is no job."""
    claims = tuple(claims)
    wrong = next(claim for claim in claims if not claim.holds)
    return {"phase": REFUSED, "reason": wrong.reason, "message": wrong.message, "conditions": claims}


def stamped(
    status: dict[str, Any], meta: Metadata, *, before: Mapping[str, Any], observed: int, now_s: float
) -> dict[str, Any]:
    """The status with its claims as conditions, the generation that was taken in, and the time."""
    claims = status["conditions"]
    dated = conditions(claims, before.get("conditions"), now_s=now_s, generation=max(observed, 0))
    seen = {"observedGeneration": observed} if observed >= 0 else {}
    return {**status, **seen, "conditions": dated, "asOf": time_text(now_s)}


def _allocation(job: Job, snapshot: Snapshot) -> dict[str, Any]:
    nodes = [
        {"name": name, "gpus": len(indices), "lent": name in snapshot.nodes and snapshot.is_lent(snapshot.nodes[name])}
        for name, indices in sorted(job.allocation.target.items())
    ]
    return {"gpus": job.allocation.target_gpus, "generation": job.allocation.generation, "nodes": nodes}


def _progress(job: Job, now_s: float) -> dict[str, Any]:
    """What is left is told at the present speed; figures that are no numbers, such as a loss that overflowed, are
    left out."""
    steps, length = job.steps_at(now_s), job.spec.steps
    remaining, step_time_s = job.remaining_steps(now_s), job.step_time_s()
    runs = step_time_s < math.inf
    figures = {
        "percentage": min(100, int(100 * steps / length)) if length else None,
        "step": int(steps),
        "steps": length or None,
        "loss": job.progress.loss,
        "samplesPerSecond": job.progress.samples_per_s if runs else None,
        "estimatedRemainingSeconds": math.ceil(remaining * step_time_s) if runs and remaining is not None else None,
    }
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def _reason(job: Job, waiting: Reason | None) -> tuple[str, str]:
    if job.intent is Intent.CANCEL and not job.is_ended:
        return "Cancelling", job.message
    if waiting is not None and not job.is_placed and not job.is_ended:
        return waiting.code.value, waiting.detail
    return "", job.message


def _claims(job: Job, waiting: Reason | None) -> Iterable[Claim]:
    if job.is_placed:
        yield Claim(SCHEDULED, True, "Placed", f"{gpu_sets.counted(job.allocation.target_gpus)} on {_nodes(job)}")
    else:
        reason, message = _reason(job, waiting)
        yield Claim(SCHEDULED, False, reason or job.state.capitalize(), message)
    suspended = job.intent is Intent.SUSPEND
    yield Claim(SUSPENDED, suspended, "OwnerAsked" if suspended else "NotAsked")
    yield checkpoints_shared(job.spec)
    if job.state is JobState.SUCCEEDED:
        yield Claim(COMPLETE, True, "Succeeded", job.message)
    elif job.is_ended:
        yield Claim(FAILED, True, job.state.capitalize(), job.message)


def _nodes(job: Job) -> str:
    names = sorted(job.allocation.target)
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
