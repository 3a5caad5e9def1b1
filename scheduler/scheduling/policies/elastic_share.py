"""AFS-L: apathetic future shares for jobs of known length (Hwang et al., NSDI'21, section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Reason, ReasonCode
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.allotment import Allotment, Candidate, Speeds, candidates_by_model, linear_speeds
from scheduler.scheduling.policies.settings import PolicySettings


def elastic_shares(
    snapshot: Snapshot, capacity: int, settings: PolicySettings, *, speeds: Speeds = linear_speeds
) -> Allotment:
    """Allot the base of every job that fits, shortest first, then GPU by GPU to the job that wins against all others.

    Of two jobs, the one with less remaining time wins unless the longer one gains more (`_wins`). Two differences to
    the paper: a job's first item is its whole minimum (in the paper it is one GPU), and pairs meet in a tournament,
    because the paper's rule is no total order. Scaling is assumed to be linear; with `speeds=curve_speeds()` it follows
    the curves, without counts that have no plan.
    """
    gpus: dict[str, int] = {}
    waiting: dict[str, Reason] = {}
    for left, contenders in candidates_by_model(snapshot, capacity, speeds):
        based: list[Candidate] = []
        for position, candidate in enumerate(sorted(contenders, key=_shortest_key)):
            if 0 < candidate.smallest_count <= left:
                based.append(candidate)
                left -= candidate.smallest_count
            else:
                waiting[candidate.job.id] = _waiting_reason(candidate, left, position)
        gpus |= zip((candidate.job.id for candidate in based), _distribute_rest(based, left), strict=True)
    return Allotment(gpus, waiting)


@dataclass(frozen=True, slots=True)
class GrowthStep:
    """A job's next step up by `gpus` GPUs.

    From speed p to p', it is worth (p' - p) / p per GPU to the job that ends first, and (p' - p) / p' to one that ends
    later.
    """

    remaining_s: float
    gpus: int
    gain_first: float
    gain_later: float


def _wins(candidate: GrowthStep, other: GrowthStep) -> bool:
    """Return whether `candidate` rather than `other` should get the next GPU.

    Let a be the job of the two that ends first, W / p seconds from now, and b the other. The GPU is worth W / p - W /
    p' to a. By waiting for it, b loses W / p' x (p_b' - p_b) / p_b'. The latter is larger exactly if (p_b' - p_b) /
    p_b' > (p_a' - p_a) / p_a.
    """
    if candidate.remaining_s <= other.remaining_s:
        return candidate.gain_first >= other.gain_later
    return candidate.gain_later > other.gain_first


def _distribute_rest(based: Sequence[Candidate], left: int) -> list[int]:
    """Return the counts of the jobs after `left` GPUs beyond their bases have been distributed."""
    counts, most = [candidate.smallest_count for candidate in based], [int(candidate.counts[-1]) for candidate in based]
    if sum(most) - sum(counts) <= left:
        return most
    ladders = [_list_growth_steps(candidate) for candidate in based]
    steps = [next(ladder, None) for ladder in ladders]
    size = 1 << (len(based) - 1).bit_length()
    winners: list[int | None] = [*[None] * size, *(at if at < len(based) and steps[at] else None for at in range(size))]
    for node in range(size - 1, 0, -1):
        winners[node] = _winner(steps, winners[2 * node], winners[2 * node + 1])
    while (at := winners[1]) is not None:
        step = steps[at]
        assert step is not None, "a job without a next step has left the tournament"
        if step.gpus <= left:
            left -= step.gpus
            counts[at] += step.gpus
            steps[at] = next(ladders[at], None)
        else:
            steps[at] = None
        node = at + size
        winners[node] = at if steps[at] else None
        while node := node // 2:
            winners[node] = _winner(steps, winners[2 * node], winners[2 * node + 1])
    return counts


def _winner(steps: Sequence[GrowthStep | None], first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return second if first is None else first
    candidate, other = steps[first], steps[second]
    return first if candidate and other and _wins(candidate, other) else second


def _list_growth_steps(candidate: Candidate) -> Iterator[GrowthStep]:
    """Yield the job's steps up from its base."""
    counts, speeds = candidate.counts[1:].tolist(), candidate.speeds[1:].tolist()
    for (low, slow), (high, fast) in pairwise(zip(counts, speeds, strict=True)):
        more, gain = high - low, fast - slow
        yield GrowthStep(candidate.steps / slow, more, gain / slow / more, gain / fast / more)


def _shortest_key(candidate: Candidate) -> tuple[float, float, float, str]:
    run_s = candidate.steps / float(candidate.speeds[1]) if candidate.smallest_count else inf
    return (-candidate.job.spec.priority, run_s, candidate.job.submitted_at_s, candidate.job.id)


def _waiting_reason(candidate: Candidate, left: int, position: int) -> Reason:
    if not candidate.smallest_count:
        return candidate.missing_plan_reason()
    need, run_s = candidate.smallest_count, candidate.steps / float(candidate.speeds[1])
    numbers = {"needed_gpus": float(need), "free_gpus": float(left), "position": position + 1.0, "remaining_s": run_s}
    detail = (
        f"{run_s:,.0f} s remaining; needs {gpu_sets.format_gpu_count(need)}, {left} left after {position} shorter jobs"
    )
    return Reason(ReasonCode.INSUFFICIENT_GPUS, detail, numbers)
