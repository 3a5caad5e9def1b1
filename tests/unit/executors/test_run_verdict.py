"""How a run is judged by its ranks' words and exit codes."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from scheduler.domain.job_records import LoadTraffic
from scheduler.domain.observation import FailureCause, RankPhase, RankStatus, RunPhase
from scheduler.executors.run_outcome import (
    RankView,
    RunOutcome,
    classify_outcome,
    describe_fault,
    find_failure_cause,
    find_faulty_ranks,
    find_live_phase,
    find_longest_phases_s,
    find_peak_bytes,
    sum_traffic,
)

KILLED = -signal.SIGKILL
TERMINATED = -signal.SIGTERM


def said(phase: RankPhase, *, rank: int = 0, code: int | None = None, at_ns: int = 0, reason: str = "") -> RankView:
    return RankView(rank, RankStatus(phase, reason=reason, written_at_ns=at_ns), code)


def judged(*ranks: RankView, terminated: bool = False, killed_because: str = "") -> RunOutcome:
    blamed = find_faulty_ranks(ranks, terminated=terminated)
    fault = describe_fault(blamed[0], "") if blamed and not killed_because else ""
    return classify_outcome(ranks, fault=fault, killed_because=killed_because, terminated=terminated)


@pytest.mark.parametrize(
    ("ranks", "asked", "patient", "phase"),
    [
        ([RankView(0), RankView(1)], False, True, RunPhase.STARTING),
        ([RankView(0), RankView(1)], False, False, RunPhase.RUNNING),
        ([said(RankPhase.STARTING), RankView(1)], False, False, RunPhase.STARTING),
        ([RankView(0), said(RankPhase.RUNNING, rank=1)], False, False, RunPhase.STARTING),
        ([said(RankPhase.RUNNING), RankView(1)], False, True, RunPhase.RUNNING),
        ([said(RankPhase.SAVING)], False, True, RunPhase.RUNNING),
        ([said(RankPhase.SAVING)], True, True, RunPhase.LEAVING),
    ],
)
def test_the_phase_of_a_living_run_is_rank_0s(
    ranks: list[RankView], asked: bool, patient: bool, phase: RunPhase
) -> None:
    assert find_live_phase(ranks, is_leaving=asked, within_first_status_timeout=patient) is phase


@pytest.mark.parametrize("code", [0, 1, -signal.SIGABRT, KILLED])
def test_rank_0s_good_word_counts_whatever_the_exit_codes_are(code: int) -> None:
    other = RankView(1, None, code)
    assert judged(said(RankPhase.SUCCEEDED, code=code), other).phase is RunPhase.SUCCEEDED
    assert judged(said(RankPhase.LEFT, code=code), other, killed_because="late").phase is RunPhase.LEFT


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (said(RankPhase.FAILED, reason="OutOfMemory"), "rank 0: OutOfMemory"),
        (said(RankPhase.FAILED, code=1), "rank 0: it failed and gave no reason"),
        (said(RankPhase.RUNNING, code=0), "rank 0 ended without a result"),
        (said(RankPhase.SAVING, code=KILLED), "rank 0 was ended by SIGKILL"),
        (RankView(0, None, 2), "rank 0 ended with exit code 2"),
    ],
)
def test_a_rank_that_ends_otherwise_fails_the_run(view: RankView, text: str) -> None:
    assert judged(view) == RunOutcome(RunPhase.FAILED, text)


def test_the_log_explains_an_exit_code() -> None:
    assert describe_fault(RankView(1, None, 2), "usage: train") == "rank 1 ended with exit code 2: usage: train"


@pytest.mark.parametrize(("code", "end"), [(KILLED, "SIGKILL"), (-35, "signal 35"), (-200, "signal 200")])
def test_a_signal_ends_a_rank_also_where_python_has_no_name_for_it(code: int, end: str) -> None:
    assert describe_fault(RankView(0, None, code), "") == f"rank 0 was ended by {end}"


def test_the_rank_that_died_is_blamed_before_those_that_missed_it() -> None:
    ranks = [
        said(RankPhase.FAILED, rank=0, at_ns=30, reason="connection closed by peer"),
        said(RankPhase.FAILED, rank=1, at_ns=20, reason="connection reset"),
        said(RankPhase.RUNNING, rank=2, code=KILLED),
    ]
    assert [view.rank for view in find_faulty_ranks(ranks, terminated=False)] == [2, 1, 0]


def test_what_was_killed_is_lost_not_failed() -> None:
    ranks = (said(RankPhase.SAVING, code=KILLED), RankView(1, None, KILLED))
    assert judged(*ranks, killed_because="it was killed at its deadline") == RunOutcome(
        RunPhase.LOST, "it was killed at its deadline"
    )


@pytest.mark.parametrize(
    ("codes", "terminated", "phase"),
    [
        ((0, 0), False, RunPhase.SUCCEEDED),
        ((0, 1), False, RunPhase.FAILED),
        ((0, TERMINATED), False, RunPhase.FAILED),
        ((0, 0), True, RunPhase.LEFT),
        ((0, TERMINATED), True, RunPhase.LOST),
        ((0, 143), True, RunPhase.LOST),
        ((0, 1), True, RunPhase.FAILED),
    ],
)
def test_a_mute_script_is_judged_by_its_exit_codes(codes: tuple[int, int], terminated: bool, phase: RunPhase) -> None:
    ranks = [RankView(rank, None, code) for rank, code in enumerate(codes)]
    assert judged(*ranks, terminated=terminated).phase is phase


def test_a_rank_without_a_word_fails_a_run_whose_other_ranks_speak() -> None:
    ranks = (said(RankPhase.RUNNING), RankView(1, None, 0))
    assert [view.rank for view in find_faulty_ranks(ranks, terminated=False)] == [1]


EVENTS = "/sys/fs/cgroup/worker/memory.events"
RAN_OUT = FailureCause.OUT_OF_MEMORY


def ran_out(rank: int, *, at_ns: int = 0) -> RankView:
    status = RankStatus(RankPhase.FAILED, reason="OutOfMemoryError", written_at_ns=at_ns, cause=RAN_OUT)
    return RankView(rank, status, 1)


def running(rank: int, code: int | None, *, oom_kills: int | None = 3) -> RankView:
    return RankView(rank, RankStatus(RankPhase.RUNNING, memory_events=EVENTS, oom_kills=oom_kills), code)


def test_the_rank_that_ran_out_of_memory_is_blamed_before_those_that_died_of_it() -> None:
    ranks = [running(0, -signal.SIGABRT), said(RankPhase.FAILED, rank=1, at_ns=10), ran_out(2, at_ns=20)]
    assert [view.rank for view in find_faulty_ranks(ranks, terminated=False)] == [2, 0, 1]
    assert find_failure_cause(ranks, oom_kills=lambda view: None) is RAN_OUT


@pytest.mark.parametrize("code", [KILLED, 137])
@pytest.mark.parametrize(("kills", "proven"), [(4, True), (3, False), (None, False)])
def test_a_kill_is_the_kernels_for_memory_only_where_its_count_has_risen(
    code: int, kills: int | None, proven: bool
) -> None:
    asked: list[int] = []

    def oom_kills(view: RankView) -> int | None:
        asked.append(view.rank)
        return kills

    ranks = [running(0, code), said(RankPhase.FAILED, rank=1, reason="connection closed by peer")]
    assert find_failure_cause(ranks, oom_kills=oom_kills) is (RAN_OUT if proven else None)
    assert asked == [0]


@pytest.mark.parametrize(
    "ranks",
    [
        [running(0, KILLED), running(1, -signal.SIGSEGV)],
        [running(0, KILLED, oom_kills=None)],
        [running(0, 1)],
        [running(0, None)],
        [RankView(0, None, KILLED)],
        [said(RankPhase.FAILED, code=KILLED, reason="ValueError")],
    ],
)
def test_nothing_is_guessed_where_a_rank_died_in_another_way_or_nobody_counted(ranks: list[RankView]) -> None:
    assert find_failure_cause(ranks, oom_kills=lambda view: 99) is None


def test_of_the_ranks_the_highest_memory_and_the_longest_times_count() -> None:
    status = RankStatus(RankPhase.LEFT, peak_bytes=5, phases_s={"save": 2.0, "notice": 0.5})
    others = [replace(status, peak_bytes=9, phases_s={"save": 1.0, "teardown": 3.0}), RankStatus(RankPhase.LEFT)]
    assert find_peak_bytes([status, *others]) == 9
    assert find_longest_phases_s([status, *others]) == {"save": 2.0, "notice": 0.5, "teardown": 3.0}
    assert (find_peak_bytes([]), find_longest_phases_s([])) == (None, {})


def test_what_the_ranks_have_read_is_summed_and_unknown_where_none_says_so() -> None:
    quiet = RankStatus(RankPhase.RUNNING)
    first, second = (replace(quiet, traffic=LoadTraffic(100, 110, moved)) for moved in (110, 0))
    assert sum_traffic([first, quiet, second]) == LoadTraffic(200, 220, 110)
    assert sum_traffic([quiet]) is None
