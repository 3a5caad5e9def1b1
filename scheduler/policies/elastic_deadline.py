"""Policies for jobs with deadlines: earliest deadline first, and ElasticFlow's minimum satisfactory shares.

Sources: ElasticFlow, ASPLOS'23, sections 4.1 (admission) and 4.2 (allocation); its simulator, pkusys/ElasticFlow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from scheduler.domain import gpus as gpu_sets
from scheduler.domain.reason import Reason, ReasonCode
from scheduler.domain.snapshot import Snapshot
from scheduler.policies.allotment import Allotment
from scheduler.policies.contenders import Contender, by_curve, contenders_by_model
from scheduler.policies.deadline_admission import asked_first, minimum_shares
from scheduler.policies.settings import PolicySettings


def edf_first(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """Earliest deadline first within priority, jobs without a deadline last; each takes the largest count that is left.

    The largest, even where the job is slower on it: so does the EDF that ElasticFlow is measured against (its
    simulator, `edf_sim_allocation`), and so it meets few deadlines. An inelastic job takes its count or nothing.
    """
    gpus: dict[str, int] = {}
    waiting: dict[str, Reason] = {}
    for left, contenders in contenders_by_model(snapshot, capacity, by_curve(thrifty=False)):
        for position, one in enumerate(sorted(contenders, key=_deadline_first)):
            if count := int(one.counts[one.counts.searchsorted(left, side="right") - 1]):
                gpus[one.job.id] = count
                left -= count
            else:
                waiting[one.job.id] = _behind(one, left, position)
    return Allotment(gpus, waiting)


def elastic_deadline_shares(snapshot: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
    """ElasticFlow: each admitted job its minimum satisfactory share, the rest by marginal return.

    A job is admitted if it and all admitted before it meet their deadlines by progressive filling, earliest deadline
    first (`deadline_admission`). Those that have GPUs are asked first, then those that wait, in order of submission.
    What is left goes step by step to the job whose GPU-time to the end grows least for each GPU more; a job
    without any comes first. Counts at which a job is no faster than on fewer are never used.

    The paper admits a job once, when it is submitted, and drops those that it does not admit. Here nothing is
    remembered and nobody dropped: all are asked again at each tick, so a job may be admitted when room has come up,
    runs as best effort on what is left until then, and a promise may break where others' progress shifts it.
    """
    gpus: dict[str, int] = {}
    waiting: dict[str, Reason] = {}
    for of_model, contenders in contenders_by_model(snapshot, capacity, by_curve()):
        admitted = minimum_shares(contenders, of_model, snapshot.now_s)
        by_id = {one.job.id: one for one in contenders}
        others = sorted((one for one in contenders if one.job.id not in admitted), key=asked_first)
        order = [*map(by_id.__getitem__, admitted), *others]
        counts = _deal_rest(order, admitted, of_model)
        gpus |= {one.job.id: counts[one.job.id] for one in order if counts[one.job.id]}
        left = of_model - sum(counts.values())
        for position, one in enumerate(order):
            if not counts[one.job.id]:
                promised = one.job.id in admitted
                reason = _behind(one, left, position) if promised else _unreachable(one, left, position, snapshot.now_s)
                waiting[one.job.id] = reason
    return Allotment(gpus, waiting)


def _deadline_first(one: Contender) -> tuple[float, float, float, str]:
    job = one.job
    return (-job.spec.priority, job.deadline_at_s, job.submitted_at_s, job.id)


def _deal_rest(order: Sequence[Contender], shares: Mapping[str, int], gpus: int) -> dict[str, int]:
    """Everybody's count, once what the shares leave of `gpus` has been dealt by marginal return."""
    counts = {one.job.id: shares.get(one.job.id, 0) for one in order}
    left = gpus - sum(counts.values())
    steps = [step for rank, one in enumerate(order) if (step := _next_step(one, counts[one.job.id], rank))]
    heapify(steps)
    while steps and left > 0:
        _, rank, wanted = heappop(steps)
        job_id = order[rank].job.id
        if wanted - counts[job_id] <= left:
            left -= wanted - counts[job_id]
            counts[job_id] = wanted
            if step := _next_step(order[rank], wanted, rank):
                heappush(steps, step)
    return counts


def _next_step(one: Contender, count: int, rank: int) -> tuple[float, int, int] | None:
    """(GPU-seconds that the job takes more for each GPU more, rank, the next larger count); None at its largest."""
    at = int(one.counts.searchsorted(count, side="right"))
    if at == len(one.counts):
        return None
    wanted = int(one.counts[at])
    if not count:
        return -inf, rank, wanted
    dearer_gpu_s = one.steps * (wanted / one.speeds[at] - count / one.speeds[at - 1])
    return float(dearer_gpu_s) / (wanted - count), rank, wanted


def _behind(one: Contender, left: int, position: int) -> Reason:
    if not one.base:
        return one.waits_for_plan()
    before = "nobody" if not position else "1 job" if position == 1 else f"{position} jobs"
    detail = f"needs {gpu_sets.counted(one.base)}, {left} left with {before} before it"
    numbers = {"needed_gpus": float(one.base), "free_gpus": float(left), "position": position + 1.0}
    return Reason(ReasonCode.INSUFFICIENT_GPUS, detail, numbers)


def _unreachable(one: Contender, left: int, position: int, now_s: float) -> Reason:
    """Why a job that was not admitted waits: its deadline, unless it has none, no plan, or no length to judge it by."""
    behind, left_s = _behind(one, left, position), one.job.deadline_at_s - now_s
    if left_s == inf or not one.base or not one.job.spec.steps:
        return behind
    least_s = one.steps / float(one.speeds[-1])
    numbers = {**behind.numbers, "deadline_in_s": left_s, "least_run_time_s": least_s}
    fastest = f"{least_s:,.0f} s on {gpu_sets.counted(int(one.counts[-1]))}, its fastest"
    when = f"its deadline is in {left_s:,.0f} s" if left_s > 0 else f"its deadline passed {-left_s:,.0f} s ago"
    alone = left_s > least_s
    why = "what others were promised leaves too little before it" if alone else "it cannot be met any more"
    detail = f"{when} and {why} ({fastest}); waits for what is left: {behind.detail}"
    return Reason(ReasonCode.DEADLINE_UNREACHABLE, detail, numbers)
