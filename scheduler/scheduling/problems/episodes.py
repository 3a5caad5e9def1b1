"""Episodes of problems: when each began, when it ended, and what ended it.

A problem that comes and goes is one episode with a count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace

from scheduler.domain.fleet import LoanState
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.machine import Machine
from scheduler.domain.problems import (
    Problem,
    ProblemCode,
    ProblemEpisode,
    ProblemKey,
    Severity,
    SubjectKind,
    get_problem_key,
    is_worse,
)
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.problems.evidence import Evidence

SETTLE_S = 300.0
"""A problem that returns within five minutes, the time of a restart, had not ended: its episode goes on."""

DescribeEnding = Callable[[ProblemEpisode, Set[ProblemKey]], str]
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


def update_episodes(
    episodes: Mapping[ProblemKey, ProblemEpisode],
    problems: Iterable[Problem],
    now_s: float,
    *,
    find_pool: Callable[[Problem], str],
    find_last_end: Callable[[Problem], float],
    describe: DescribeEnding,
) -> tuple[ProblemEpisode, ...]:
    """Return the episodes that begin, change, end or close at a time.

    Args:
        episodes: all episodes that are not closed.
        problems: those that are present.
        find_pool: returns the pool whose GPUs a problem concerns.
        find_last_end: returns when the last closed episode of a problem ended; minus infinity if there was none.
        describe: returns what ended an episode, given the problems that began at the same time.
    """
    present = {get_problem_key(problem): problem for problem in problems}
    settled = {key: each for key, each in episodes.items() if _is_settled(each, now_s)}
    unsettled = {key: each for key, each in episodes.items() if key not in settled}
    begun = present.keys() - unsettled.keys()
    changed = [replace(each, is_closed=True) for each in settled.values()]
    for key in sorted(begun):
        last = settled.get(key)
        last_end_s = find_last_end(present[key]) if last is None or last.end_s is None else last.end_s
        changed.append(_begin(present[key], now_s, find_pool(present[key]), last_end_s))
    for key, episode in unsettled.items():
        problem = present.get(key)
        if problem is not None:
            changed.append(_continue(episode, problem))
        elif episode.end_s is None:
            ending = describe(episode, begun)
            changed.append(replace(episode, end_s=max(now_s, episode.begin_s), ending=ending))
    return tuple(each for each in changed if each is not episodes.get(get_problem_key(each)))


def build_controller_gap(from_s: float, to_s: float) -> ProblemEpisode:
    """Return the episode in which no controller led, as the next leader records it."""
    return ProblemEpisode(
        f"{ProblemCode.CONTROLLER_MISSING}//{from_s:.3f}",
        ProblemCode.CONTROLLER_MISSING,
        Severity.CRITICAL,
        SubjectKind.SERVICE,
        subject="",
        cause="No controller led: nothing was started, lent or recalled, and requests waited.",
        queue="",
        pool="",
        begin_s=from_s,
        end_s=to_s,
        ending="A controller leads again.",
        is_closed=True,
    )


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


def find_pool_of(problem: Problem, snapshot: Snapshot, machines: Iterable[Machine]) -> str:
    """Return the pool whose GPUs a problem concerns; empty for problems of jobs, queues, webhooks and the service."""
    if problem.kind is SubjectKind.POOL:
        return problem.subject
    if problem.kind is SubjectKind.NODE:
        node = snapshot.nodes.get(problem.subject)
        return "" if node is None else node.pool
    if problem.kind is SubjectKind.MACHINE:
        return next((each.pool for each in machines if each.name == problem.subject), "")
    return ""


def _is_settled(episode: ProblemEpisode, now_s: float) -> bool:
    """Tell whether an episode has ended for good. It has, too, if the clock was set back since."""
    return episode.end_s is not None and not episode.end_s <= now_s < episode.end_s + SETTLE_S


def _begin(problem: Problem, now_s: float, pool: str, last_end_s: float) -> ProblemEpisode:
    since_s = now_s if problem.since_s is None else min(problem.since_s, now_s)
    begin_s = max(since_s, min(last_end_s, now_s))
    return ProblemEpisode(
        f"{problem.code}/{problem.subject}/{begin_s:.3f}",
        problem.code,
        problem.severity,
        problem.kind,
        problem.subject,
        problem.cause,
        problem.queue,
        pool,
        begin_s,
    )


def _continue(episode: ProblemEpisode, problem: Problem) -> ProblemEpisode:
    """Return the episode of a problem that is present: the same object, unless it has returned or is worse."""
    if episode.end_s is not None:
        episode = replace(episode, times=episode.times + 1, end_s=None, ending="")
    if is_worse(problem.severity, episode.severity):
        episode = replace(episode, severity=problem.severity, cause=problem.cause)
    return episode


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
