"""Episodes of problems: when each began and ended. A problem that comes and goes is one episode with a count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace

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

SETTLE_S = 300.0
"""A problem that returns within five minutes, the time of a restart, had not ended: its episode goes on."""

DescribeEnding = Callable[[ProblemEpisode, Set[ProblemKey]], str]


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
