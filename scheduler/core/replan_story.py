"""How long each phase of a re-plan took, told once the next generation has made its first step."""

from __future__ import annotations

from dataclasses import asdict, replace

from scheduler.core.intake import Intake
from scheduler.domain.event import EventCode
from scheduler.domain.job import Job
from scheduler.domain.observation import Run
from scheduler.domain.replan import COMING_PHASES, LEAVING_PHASES, Replan, ReplanPhase


def note_leaving(intake: Intake, job: Job, run: Run) -> Job:
    """Keep what the workers of an ended generation took to leave until the next one runs."""
    left_s = {phase.value: run.phases_s[phase] for phase in LEAVING_PHASES if phase in run.phases_s}
    if not left_s or run.generation < job.replan.generation or left_s == job.replan.left_s:
        return job
    intake.jobs[job.id] = noted = replace(job, replan=Replan(job.replan.generation, left_s))
    return noted


def note_first_step(intake: Intake, job: Job, run: Run) -> Job:
    """Tell a generation's first step, once. A start that follows no notice is no re-plan and only counted off."""
    if ReplanPhase.FIRST_STEP not in run.phases_s or run.generation <= job.replan.generation:
        return job
    if job.replan.left_s:
        came_s = {phase.value: run.phases_s[phase] for phase in COMING_PHASES if phase in run.phases_s}
        phases_s = {**job.replan.left_s, **came_s}
        parts = ", ".join(f"{phase.replace('_', ' ')} {seconds:.1f} s" for phase, seconds in phases_s.items())
        message = f"the re-plan took its workers {sum(phases_s.values()):.1f} s: {parts}"
        numbers = {f"{phase}_s": seconds for phase, seconds in phases_s.items()}
        if run.traffic is not None:
            read_mb, moved_mb = run.traffic.read_bytes / 1e6, run.traffic.moved_bytes / 1e6
            message += f"; they read {read_mb:.1f} MB, of which other nodes had written {moved_mb:.1f} MB"
            numbers |= {name: float(count) for name, count in asdict(run.traffic).items()}
        intake.tell(EventCode.JOB_REPLANNED, job.id, message, numbers)
    intake.jobs[job.id] = noted = replace(job, replan=Replan(run.generation))
    return noted
