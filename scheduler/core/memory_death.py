"""A job that died of memory: what it needs is corrected, and it is planned anew after a pause, a few times at most."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.apply import released
from scheduler.core.intake import Intake
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.memory_record import MEMORY_TRIES_MAX, MemoryDeath, MemoryRecord
from scheduler.domain.observation import Run


def plan_anew(intake: Intake, job: Job, run: Run) -> Job:
    """Give up a run that died of memory. The job pauses in PLANNING, from where nothing can start it, until a plan is
    solved that fits by what is known now; after `MEMORY_TRIES_MAX` such deaths it has failed. No retry is used up.

    It goes over to the curve that counts on all its frozen layers at once: under another correction none is solved, so
    that the old one has nothing left to wait by.
    """
    memory = job.memory.after(_death(intake, job, run), intake.now_s)
    state = JobState.FAILED if memory.is_spent else JobState.PLANNING
    now_s, generation = intake.now_s, intake.next_generation
    why = _why(memory, now_s) if not memory.is_spent else _why_failed(memory)
    why = f"{why}; {run.reason}" if run.reason else why
    left = released(job, state, now_s, generation=generation, leave_by_s=now_s, message=why)
    return intake.put_moved(job, replace(left, memory=memory, freezing=left.freezing.on_curve()))


def _death(intake: Intake, job: Job, run: Run) -> MemoryDeath:
    plan, target = job.allocation.plan, job.allocation.target
    assert plan is not None, "a run has a plan"
    told = [used for used in (run.peak_bytes, job.progress.peak_bytes) if used is not None]
    return MemoryDeath(
        plan=plan.summary(),
        gpus=job.allocation.target_gpus,
        gpu_memory_bytes=min(intake.nodes[name].gpu_memory_bytes for name in target),
        predicted_bytes=plan.peak_bytes_per_gpu,
        measured_bytes=max(told, default=None),
    )


def _why(memory: MemoryRecord, now_s: float) -> str:
    tried, pause_s = len(memory.deaths), (memory.retry_at_s or now_s) - now_s
    taken = f"its peaks are taken as {memory.factor:.2f} times the predicted ones, and " if memory.percent > 100 else ""
    return (
        f"out of memory, try {tried} of {MEMORY_TRIES_MAX}: {memory.deaths[-1]}; {taken}it pauses for {pause_s:.0f} s"
    )


def _why_failed(memory: MemoryRecord) -> str:
    tried = "; ".join(f"{number}. {death}" for number, death in enumerate(memory.deaths, 1))
    return f"out of memory {len(memory.deaths)} times: {tried}"
