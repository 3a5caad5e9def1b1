"""Problems that tests plant in a small fleet: five kinds, of which the failed jobs are many."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import DemandReading, IncidentKind, LoanState, NodeIncident, NodeState
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.store.protocol import Commit
from tests.builders import a_job, a_loan
from tests.console.console_site import ConsoleSite

FAILED_JOBS = 7
PLANTED_CODES = ("RecallLate", "NodeDown", "NodeQuarantined", "JobLosesWork", "JobFailed")


def plant_problems(site: ConsoleSite) -> None:
    """Commit a late recall, a node that is down, one in quarantine, a job that loses work, and failed jobs."""
    now_s, before = site.clock.now_s(), site.store.load().snapshot
    incident = NodeIncident(IncidentKind.LOSS, "gone", "ann", now_s - 900, 1)
    nodes = {
        **before.nodes,
        "t5": replace(before.nodes["t5"], state=NodeState.DOWN),
        "i8": replace(before.nodes["i8"], cordoned=True, draining=True, quarantine="3 jobs", incidents=(incident,)),
    }
    late = replace(a_loan("i0", LoanState.RECALLED, return_by_s=now_s - 40), state_since_s=now_s - 340)
    losing = before.jobs[site.jobs["reward-model"]]
    account = replace(losing.account, gpu_s=150_000.0, lost_gpu_s=60_000.0, resizes=7, preemptions=2)
    after = replace(
        before,
        generation=before.generation + 1,
        nodes=nodes,
        jobs={**before.jobs, losing.id: replace(losing, account=account)},
        loans={**before.loans, "i0": late},
        demand={"inference": DemandReading(now_s, 40.0, 40.0)},
    )
    went_down = Event(now_s - 1800, EventCode.NODE_CHANGED, "t5", "node t5 is down", cause=NodeState.DOWN.value)
    ended = tuple(_failed_job(number, now_s) for number in range(FAILED_JOBS))
    site.store.commit(Commit(before, after, site.lead().epoch, events=(went_down,), ended_jobs=ended))


def clear_problems(site: ConsoleSite) -> None:
    """Commit the recall's end and the repair of the nodes. The failed jobs stay."""
    before = site.store.load().snapshot
    nodes = dict(before.nodes)
    for name in ("t5", "i8"):
        nodes[name] = replace(
            nodes[name], state=NodeState.UP, cordoned=False, draining=False, quarantine="", incidents=()
        )
    loans = {name: loan for name, loan in before.loans.items() if name != "i0"}
    after = replace(before, generation=before.generation + 1, nodes=nodes, loans=loans)
    event = Event(site.clock.now_s(), EventCode.NODE_CHANGED, "t5", "node t5 is up", cause=NodeState.UP.value)
    site.store.commit(Commit(before, after, site.lead().epoch, events=(event,)))


def _failed_job(number: int, now_s: float) -> Job:
    job = a_job(f"failed-{number}", 8, state=JobState.FAILED, queue="research", now_s=now_s - 600 * (number + 1))
    account = replace(job.account, lost_gpu_s=9000.0, failures=4)
    return replace(job, message="rank 3 exited with code 1: RuntimeError: CUDA error", account=account)
