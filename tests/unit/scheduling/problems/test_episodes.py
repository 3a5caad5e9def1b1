"""Episodes of problems: begin, end, return, escalation, and the sentence that says what ended them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain.fleet import LoanState
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.problems import (
    Problem,
    ProblemCode,
    ProblemEpisode,
    ProblemKey,
    Severity,
    SubjectKind,
    get_problem_key,
)
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.problems.episodes import (
    SETTLE_S,
    build_controller_gap,
    describe_ending,
    find_pool_of,
    update_episodes,
)
from scheduler.scheduling.problems.evidence import Evidence
from tests.builders import a_fleet, a_job, a_loan, a_snapshot

DOWN = Problem(ProblemCode.NODE_DOWN, Severity.WARNING, SubjectKind.NODE, "t0", "Node t0 is down.", "Repair it.")
FLEET = a_snapshot(a_fleet(training=1, inference=1), [a_job("w", 2)])


class Log:
    """Episodes as a store keeps them."""

    def __init__(self) -> None:
        self.stored: dict[str, ProblemEpisode] = {}

    def record(self, now_s: float, *problems: Problem) -> tuple[ProblemEpisode, ...]:
        unclosed = {get_problem_key(each): each for each in self.stored.values() if not each.is_closed}
        changed = update_episodes(
            unclosed,
            problems,
            now_s,
            find_pool=lambda problem: "p",
            find_last_end=self.find_last_end,
            describe=lambda episode, begun: f"ended, {len(begun)} begun",
        )
        self.stored.update((each.id, each) for each in changed)
        return changed

    def find_last_end(self, problem: Problem) -> float:
        alike = [each for each in self.stored.values() if get_problem_key(each) == get_problem_key(problem)]
        return max((each.end_s for each in alike if each.end_s is not None), default=float("-inf"))


def test_problem_begins_when_the_state_says_and_ends_when_it_is_gone() -> None:
    log = Log()
    [begun] = log.record(100.0, replace(DOWN, since_s=40.0))
    assert (begun.begin_s, begun.end_s, begun.pool, begun.cause) == (40.0, None, "p", DOWN.cause)
    assert log.record(150.0, replace(DOWN, since_s=40.0)) == ()
    [ended] = log.record(200.0)
    assert ended == replace(begun, end_s=200.0, ending="ended, 0 begun")
    assert log.record(200.0 + SETTLE_S - 1.0) == ()
    assert log.record(200.0 + SETTLE_S) == (replace(ended, is_closed=True),)
    assert log.record(900.0) == ()


def test_problem_that_returns_soon_is_one_episode_with_a_count() -> None:
    log = Log()
    for at in range(5):
        log.record(100.0 * at, DOWN)
        log.record(100.0 * at + 50.0)
    [episode] = log.stored.values()
    assert (episode.begin_s, episode.end_s, episode.times) == (0.0, 450.0, 5)
    log.record(450.0 + SETTLE_S, DOWN)
    assert sorted((each.begin_s, each.times) for each in log.stored.values()) == [(0.0, 5), (450.0 + SETTLE_S, 1)]


def test_worst_severity_and_its_cause_stay() -> None:
    log = Log()
    log.record(1.0, DOWN)
    [worse] = log.record(2.0, replace(DOWN, severity=Severity.CRITICAL, cause="worse"))
    assert (worse.severity, worse.cause) == (Severity.CRITICAL, "worse")
    assert log.record(3.0, DOWN) == ()


@given(st.lists(st.tuples(st.floats(1.0, 400.0), st.sets(st.sampled_from("abc")), st.floats(0.0, 900.0))))
def test_episodes_of_a_problem_never_overlap(steps: list[tuple[float, set[str], float]]) -> None:
    log, now_s = Log(), 1000.0
    for gap_s, present, age_s in steps:
        now_s += gap_s
        log.record(now_s, *(replace(DOWN, subject=each, since_s=now_s - age_s) for each in sorted(present)))
    for subject in "abc":
        mine = sorted((each for each in log.stored.values() if each.subject == subject), key=lambda each: each.begin_s)
        assert all(each.end_s is not None for each in mine[:-1])
        for before, after in pairwise(mine):
            assert before.is_closed
            assert before.end_s is not None
            assert before.end_s <= after.begin_s
        was_present = [subject in present for _, present, _ in steps]
        begins = sum(new and not old for old, new in pairwise([False, *was_present]))
        assert sum(each.times for each in mine) == begins
        assert any(each.end_s is None for each in mine) == bool(was_present and was_present[-1])


def ending(
    code: ProblemCode,
    kind: SubjectKind,
    subject: str,
    *,
    snapshot: Snapshot = FLEET,
    job: Job | None = None,
    begun: Iterable[ProblemKey] = (),
) -> str:
    episode = ProblemEpisode("id", code, Severity.WARNING, kind, subject, "cause", "", "", 1.0)
    return describe_ending(episode, snapshot, Evidence(10.0), job, set(begun))


def test_endings_follow_from_the_state() -> None:
    node, pool = SubjectKind.NODE, SubjectKind.POOL
    up = ending(ProblemCode.NODE_DOWN, node, "t0")
    quarantined = (ProblemCode.NODE_QUARANTINED, node, "t0")
    recalled = replace(FLEET, loans={"i0": a_loan("i0", LoanState.RECALLED)})
    lent = replace(FLEET, loans={"i0": a_loan("i0", LoanState.ACTIVE)})
    ended = replace(a_job("j"), state=JobState.SUCCEEDED)
    job = (ProblemCode.JOB_THRASHING, SubjectKind.JOB, "j")
    sentences = {
        up,
        ending(ProblemCode.NODE_DOWN, node, "gone"),
        ending(ProblemCode.NODE_SLOW, node, "t0", begun=[quarantined]),
        ending(ProblemCode.DEMAND_STALE, pool, "gone"),
        ending(ProblemCode.DEMAND_STALE, pool, "inference", begun=[(ProblemCode.DEMAND_LOST, pool, "inference")]),
        *(ending(ProblemCode.RECALL_LATE, node, "i0", snapshot=each) for each in (FLEET, recalled, lent)),
        ending(*job, job=ended),
        ending(*job, job=a_job("j")),
        ending(*job),
        ending(ProblemCode.LENDING_STOPPED, SubjectKind.SERVICE, "", snapshot=replace(FLEET, lending_set_by="ann")),
    }
    assert len(sentences) == 12, "each state has a sentence of its own"
    other = (ProblemCode.NODE_DOWN, node, "i0")
    assert ending(ProblemCode.NODE_DOWN, node, "t0", begun=[other]) == up


@pytest.mark.parametrize("code", ProblemCode)
def test_every_code_has_an_ending(code: ProblemCode) -> None:
    assert ending(code, SubjectKind.SERVICE, "").endswith(".")


def test_pools_of_problems() -> None:
    assert find_pool_of(DOWN, FLEET, ()) == "training"
    assert find_pool_of(replace(DOWN, subject="gone"), FLEET, ()) == ""
    assert find_pool_of(replace(DOWN, kind=SubjectKind.POOL, subject="inference"), FLEET, ()) == "inference"
    assert find_pool_of(replace(DOWN, kind=SubjectKind.JOB, subject="w"), FLEET, ()) == ""


def test_gap_between_controllers_is_closed() -> None:
    gap = build_controller_gap(10.0, 90.0)
    assert (gap.begin_s, gap.end_s, gap.is_closed, gap.severity) == (10.0, 90.0, True, Severity.CRITICAL)
