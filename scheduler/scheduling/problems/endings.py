"""The sentence that says what ended a problem, derived from the state in which it is gone."""

from __future__ import annotations

from collections.abc import Mapping, Set

from scheduler.domain.fleet import LoanState
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.problems import ProblemCode, ProblemEpisode, ProblemKey, SubjectKind
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.problems.evidence import Evidence

_SENTENCES: Mapping[ProblemCode, str] = {
    ProblemCode.CONTROLLER_MISSING: "A controller leads again.",
    ProblemCode.INFERENCE_SHORT: "The pool has the GPUs that inference needs.",
    ProblemCode.RECALL_LATE: "Jobs have left the node.",
    ProblemCode.RECALL_AT_RISK: "Jobs have left the node.",
    ProblemCode.DEMAND_LOST: "Demand was reported again.",
    ProblemCode.DEMAND_STALE: "Demand was reported again.",
    ProblemCode.DEMAND_MISSING: "Demand was reported, or the pool no longer lends.",
    ProblemCode.FORECAST_MISSING: "The pool has a current forecast.",
    ProblemCode.NODE_DOWN: "The node is up again.",
    ProblemCode.NODE_QUARANTINED: "The node was released from quarantine.",
    ProblemCode.NODE_SLOW: "The node no longer slows a running job.",
    ProblemCode.AGENT_SILENT: "The agent reports again.",
    ProblemCode.GOODPUT_LOW: "The lost work is no longer a large share of the recent GPU time.",
    ProblemCode.GUARANTEE_UNSERVED: "No job of the queue has waited long for guaranteed GPUs.",
    ProblemCode.QUEUE_STUCK: "No job of the queue waits although enough GPUs are free.",
    ProblemCode.JOB_OUT_OF_MEMORY: "The job has run for a while without running out of memory.",
    ProblemCode.JOB_THRASHING: "The job was disturbed less often in the last hour.",
    ProblemCode.JOB_LOSES_WORK: "Lost work is no longer a large share of the job's GPU time.",
    ProblemCode.JOB_FAILED: "A day has passed since the job failed.",
    ProblemCode.WEBHOOK_FAILING: "The receiver accepts messages, or the webhook was changed.",
    ProblemCode.LENDING_STOPPED: "Lending was resumed.",
}
_NOUNS = {
    SubjectKind.POOL: "pool", SubjectKind.NODE: "node", SubjectKind.QUEUE: "queue", SubjectKind.MACHINE: "machine",
    SubjectKind.WEBHOOK: "webhook",
}  # fmt: skip
_JOB_ENDINGS = {
    JobState.SUCCEEDED: "The job succeeded.", JobState.FAILED: "The job failed.",
    JobState.CANCELLED: "The job was cancelled.",
}  # fmt: skip
_INTENT_ENDINGS = {Intent.SUSPEND: "The job was suspended.", Intent.CANCEL: "The job was cancelled."}
_RECALL_CODES = {ProblemCode.RECALL_LATE, ProblemCode.RECALL_AT_RISK}


def describe_ending(
    episode: ProblemEpisode, snapshot: Snapshot, evidence: Evidence, job: Job | None, begun: Set[ProblemKey]
) -> str:
    """Return what ended a problem.

    Args:
        job: the subject, if it is a live job, or an ended one whose record is retained.
        begun: problems that began when this one ended. One of the same subject has replaced it.
    """
    if episode.kind is SubjectKind.JOB:
        return _describe_job(episode, job)
    if _is_removed(episode, snapshot, evidence):
        return f"The {_NOUNS[episode.kind]} was removed."
    successors = [code for code, kind, subject in begun if (kind, subject) == (episode.kind, episode.subject)]
    if successors and episode.kind is not SubjectKind.SERVICE:
        return f"{min(successors)} of the same {_NOUNS[episode.kind]} has replaced it."
    if episode.code in _RECALL_CODES:
        return _describe_recall(episode.subject, snapshot)
    if episode.code is ProblemCode.LENDING_STOPPED and snapshot.lending_set_by:
        return f"Lending was resumed by {snapshot.lending_set_by}."
    return _SENTENCES[episode.code]


def _describe_job(episode: ProblemEpisode, job: Job | None) -> str:
    if job is None:
        return "The record of the job was deleted."
    if episode.code is not ProblemCode.JOB_FAILED:
        if job.is_ended:
            return _JOB_ENDINGS[job.state]
        if job.intent is not Intent.RUN:
            return _INTENT_ENDINGS[job.intent]
    return _SENTENCES[episode.code]


def _is_removed(episode: ProblemEpisode, snapshot: Snapshot, evidence: Evidence) -> bool:
    match episode.kind:
        case SubjectKind.POOL:
            return episode.subject not in snapshot.pools
        case SubjectKind.NODE:
            return episode.subject not in snapshot.nodes
        case SubjectKind.MACHINE:
            return not any(each.is_live and each.name == episode.subject for each in evidence.machines)
        case SubjectKind.WEBHOOK:
            return not any(each.id == episode.subject for each in evidence.webhooks)
        case _:
            return False


def _describe_recall(node: str, snapshot: Snapshot) -> str:
    loan = snapshot.loans.get(node)
    if loan is None or loan.state is LoanState.RETURNED:
        return "The node was returned."
    return "The recall was cancelled." if loan.state is LoanState.ACTIVE else _SENTENCES[ProblemCode.RECALL_LATE]
