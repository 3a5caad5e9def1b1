"""What the API tells of each noun, as plain JSON values. Units are in the names, times are seconds since 1970 (UTC)."""

from __future__ import annotations

from typing import Any

from scheduler.documents.job import job_document
from scheduler.domain import gpus as gpu_sets
from scheduler.domain.codec import encode
from scheduler.domain.decision import subject
from scheduler.domain.fleet import DemandReading, Node, Pool, PoolKind
from scheduler.domain.forecast import Forecast
from scheduler.domain.job import Job
from scheduler.domain.loan import Loan
from scheduler.domain.reason import Reason
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.quota import QueueUse
from scheduler.store.protocol import StoredDecision, StoredEvent

View = dict[str, Any]


def job_view(job: Job, now_s: float) -> View:
    allocation, spec = job.allocation, job.spec
    return {
        "id": job.id,
        "name": spec.name,
        "queue": spec.queue,
        "owner": job.owner,
        "priority": spec.priority,
        "state": job.state.value,
        "state_since_s": job.state_since_s,
        "intent": job.intent.value,
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
        "spec": job_document(spec),
    }


def progress_view(job: Job, now_s: float) -> View:
    """`remaining_s` is what is left at the present speed; None where that or the length is unknown. `samples_per_s` and
    `peak_bytes`, the most memory of a rank, are as measured, None before that; only what runs has a speed."""
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


def memory_view(job: Job) -> View:
    """`factor`: the job's peaks over those that its plans predict. `deaths`: runs that died of memory, oldest first."""
    memory = job.memory
    deaths = [encode(death) for death in memory.deaths]
    return {"factor": memory.factor, "deaths": deaths, "retry_at_s": memory.retry_at_s}


def encode_gpus(gpus: gpu_sets.Gpus) -> View:
    return {node: list(indices) for node, indices in sorted(gpus.items())}


def pool_view(pool: Pool, snapshot: Snapshot) -> View:
    nodes = [node for node in snapshot.nodes.values() if node.pool == pool.name]
    view: View = {
        "name": pool.name,
        "kind": pool.kind.value,
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "capacity_gpus": snapshot.capacity(pool.name),
    }
    if pool.kind is PoolKind.INFERENCE:
        reading = snapshot.demand.get(pool.name)
        view["lending"] = encode(pool.lending)
        view["lent_nodes"] = sum(1 for node in nodes if snapshot.is_lent(node))
        view["demand"] = demand_view(reading) if reading else None
    return view


def queue_view(use: QueueUse) -> View:
    """`own_gpus` and `borrowed_gpus` are parts of `used_gpus`; `waiting_gpus` are minimums."""
    return {
        **encode(use.queue),
        "declared": use.is_declared,
        "used_gpus": use.used_gpus,
        "own_gpus": use.own_gpus,
        "borrowed_gpus": use.borrowed_gpus,
        "running_jobs": use.running_jobs,
        "waiting_jobs": use.waiting_jobs,
        "waiting_gpus": use.waiting_gpus,
    }


def demand_view(reading: DemandReading) -> View:
    return {**encode(reading), "clamped": reading.asked_gpus > reading.gpus}


def forecast_view(forecast: Forecast) -> View:
    view: View = encode(forecast)
    return view


def node_view(node: Node, snapshot: Snapshot) -> View:
    """`jobs` are the GPUs in use by job id, those being left included."""
    loan = snapshot.loans.get(node.name)
    held = {job.id: job.allocation.held.get(node.name) for job in snapshot.jobs.values()}
    return {
        **encode(node),
        "serves_training": snapshot.serves_training(node),
        "loan": loan_view(loan) if loan else None,
        "jobs": {job_id: list(indices) for job_id, indices in held.items() if indices},
    }


def loan_view(loan: Loan) -> View:
    return {**encode(loan), "is_live": loan.is_live}


def reason_view(reason: Reason) -> View:
    view: View = encode(reason)
    return view


def event_view(stored: StoredEvent) -> View:
    return {"number": stored.number, "generation": stored.generation, **encode(stored.event)}


def decision_view(stored: StoredDecision) -> View:
    return {
        "number": stored.number,
        "generation": stored.generation,
        "at_s": stored.at_s,
        "kind": type(stored.decision).__name__,
        "subject": subject(stored.decision),
        "decision": encode(stored.decision),
    }
