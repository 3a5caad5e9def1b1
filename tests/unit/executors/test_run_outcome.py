"""Outcomes of runs from rank statuses and exit codes."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from scheduler.domain.job_account import PermanentFault
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
    find_permanent_fault,
    sum_traffic,
)

KILLED = -signal.SIGKILL
TERMINATED = -signal.SIGTERM


def build_rank(
    phase: RankPhase, *, rank: int = 0, code: int | None = None, at_ns: int = 0, reason: str = ""
) -> RankView:
    return RankView(rank, RankStatus(phase, reason=reason, written_at_ns=at_ns), code)


def classify(*ranks: RankView, terminated: bool = False, killed_because: str = "") -> RunOutcome:
    blamed = find_faulty_ranks(ranks, terminated=terminated)
    fault = describe_fault(blamed[0], "") if blamed and not killed_because else ""
    return classify_outcome(ranks, fault=fault, killed_because=killed_because, terminated=terminated)


@pytest.mark.parametrize(
    ("ranks", "asked", "patient", "phase"),
    [
        ([RankView(0), RankView(1)], False, True, RunPhase.STARTING),
        ([RankView(0), RankView(1)], False, False, RunPhase.RUNNING),
        ([build_rank(RankPhase.STARTING), RankView(1)], False, False, RunPhase.STARTING),
        ([RankView(0), build_rank(RankPhase.RUNNING, rank=1)], False, False, RunPhase.STARTING),
        ([build_rank(RankPhase.RUNNING), RankView(1)], False, True, RunPhase.RUNNING),
        ([build_rank(RankPhase.SAVING)], False, True, RunPhase.RUNNING),
        ([build_rank(RankPhase.SAVING)], True, True, RunPhase.LEAVING),
    ],
)
def test_live_phase_is_from_rank_0(ranks: list[RankView], asked: bool, patient: bool, phase: RunPhase) -> None:
    assert find_live_phase(ranks, is_leaving=asked, within_first_status_timeout=patient) is phase


@pytest.mark.parametrize("code", [0, 1, -signal.SIGABRT, KILLED])
def test_final_status_of_rank_0_overrides_exit_codes(code: int) -> None:
    other = RankView(1, None, code)
    assert classify(build_rank(RankPhase.SUCCEEDED, code=code), other).phase is RunPhase.SUCCEEDED
    assert classify(build_rank(RankPhase.LEFT, code=code), other, killed_because="late").phase is RunPhase.LEFT


@pytest.mark.parametrize(
    ("code", "phase"),
    [
        (None, RunPhase.SUCCEEDED),
        (0, RunPhase.SUCCEEDED),
        (-signal.SIGABRT, RunPhase.SUCCEEDED),
        (128 + signal.SIGKILL, RunPhase.SUCCEEDED),
        (1, RunPhase.FAILED),
        (128, RunPhase.FAILED),
    ],
)
def test_an_announced_exit_code_can_make_success_a_failure(code: int | None, phase: RunPhase) -> None:
    status = RankStatus(RankPhase.SUCCEEDED, awaits_exit_code=True)
    outcome = classify(RankView(0, status, code), build_rank(RankPhase.SUCCEEDED, rank=1, code=0))
    assert outcome.phase is phase
    assert not outcome.reason or f"code {code}" in outcome.reason


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (build_rank(RankPhase.FAILED, reason="OutOfMemory"), "rank 0: OutOfMemory"),
        (build_rank(RankPhase.FAILED, code=1), "rank 0: it failed without a reason"),
        (build_rank(RankPhase.RUNNING, code=0), "rank 0 exited without a final status"),
        (build_rank(RankPhase.SAVING, code=KILLED), "rank 0 was killed by SIGKILL"),
        (RankView(0, None, 2), "rank 0 exited with code 2"),
    ],
)
def test_other_rank_ends_fail_the_run(view: RankView, text: str) -> None:
    assert classify(view) == RunOutcome(RunPhase.FAILED, text)


def test_fault_includes_the_log_tail() -> None:
    assert describe_fault(RankView(1, None, 2), "usage: train") == "rank 1 exited with code 2: usage: train"


@pytest.mark.parametrize(("code", "end"), [(KILLED, "SIGKILL"), (-35, "signal 35"), (-200, "signal 200")])
def test_unnamed_signals_are_described_by_number(code: int, end: str) -> None:
    assert describe_fault(RankView(0, None, code), "") == f"rank 0 was killed by {end}"


def test_dead_rank_is_blamed_first() -> None:
    ranks = [
        build_rank(RankPhase.FAILED, rank=0, at_ns=30, reason="connection closed by peer"),
        build_rank(RankPhase.FAILED, rank=1, at_ns=20, reason="connection reset"),
        build_rank(RankPhase.RUNNING, rank=2, code=KILLED),
    ]
    assert [view.rank for view in find_faulty_ranks(ranks, terminated=False)] == [2, 1, 0]


def test_killed_run_is_lost() -> None:
    ranks = (build_rank(RankPhase.SAVING, code=KILLED), RankView(1, None, KILLED))
    assert classify(*ranks, killed_because="it was killed at its deadline") == RunOutcome(
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
def test_silent_script_is_judged_by_exit_codes(codes: tuple[int, int], terminated: bool, phase: RunPhase) -> None:
    ranks = [RankView(rank, None, code) for rank, code in enumerate(codes)]
    assert classify(*ranks, terminated=terminated).phase is phase


def test_rank_without_status_fails_the_run() -> None:
    ranks = (build_rank(RankPhase.RUNNING), RankView(1, None, 0))
    assert [view.rank for view in find_faulty_ranks(ranks, terminated=False)] == [1]


EVENTS = "/sys/fs/cgroup/worker/memory.events"
RAN_OUT = FailureCause.OUT_OF_MEMORY


def build_oom_rank(rank: int, *, at_ns: int = 0) -> RankView:
    status = RankStatus(RankPhase.FAILED, reason="OutOfMemoryError", written_at_ns=at_ns, cause=RAN_OUT)
    return RankView(rank, status, 1)


def running(rank: int, code: int | None, *, oom_kills: int | None = 3) -> RankView:
    return RankView(rank, RankStatus(RankPhase.RUNNING, memory_events=EVENTS, oom_kills=oom_kills), code)


def test_rank_out_of_memory_is_blamed_first() -> None:
    ranks = [running(0, -signal.SIGABRT), build_rank(RankPhase.FAILED, rank=1, at_ns=10), build_oom_rank(2, at_ns=20)]
    assert [view.rank for view in find_faulty_ranks(ranks, terminated=False)] == [2, 0, 1]
    assert find_failure_cause(ranks, oom_kills=lambda view: None) is RAN_OUT


@pytest.mark.parametrize("code", [KILLED, 137])
@pytest.mark.parametrize(("kills", "proven"), [(4, True), (3, False), (None, False)])
def test_sigkill_is_oom_only_if_the_count_has_grown(code: int, kills: int | None, proven: bool) -> None:
    asked: list[int] = []

    def oom_kills(view: RankView) -> int | None:
        asked.append(view.rank)
        return kills

    ranks = [running(0, code), build_rank(RankPhase.FAILED, rank=1, reason="connection closed by peer")]
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
        [build_rank(RankPhase.FAILED, code=KILLED, reason="ValueError")],
    ],
)
def test_cause_is_unknown_without_proof(ranks: list[RankView]) -> None:
    assert find_failure_cause(ranks, oom_kills=lambda view: 99) is None


def test_memory_and_durations_are_maxima() -> None:
    status = RankStatus(RankPhase.LEFT, peak_bytes=5, phases_s={"save": 2.0, "notice": 0.5})
    others = [replace(status, peak_bytes=9, phases_s={"save": 1.0, "teardown": 3.0}), RankStatus(RankPhase.LEFT)]
    assert find_peak_bytes([status, *others]) == 9
    assert find_longest_phases_s([status, *others]) == {"save": 2.0, "notice": 0.5, "teardown": 3.0}
    assert (find_peak_bytes([]), find_longest_phases_s([])) == (None, {})


def test_traffic_is_summed() -> None:
    quiet = RankStatus(RankPhase.RUNNING)
    first, second = (replace(quiet, traffic=LoadTraffic(100, 110, moved)) for moved in (110, 0))
    assert sum_traffic([first, quiet, second]) == LoadTraffic(200, 220, 110)
    assert sum_traffic([quiet]) is None


_TRACEBACK = 'Traceback (most recent call last): | File "train.py", line 1, in <module> | import torchx'


@pytest.mark.parametrize(
    ("code", "log_tail", "fault"),
    [
        (2, "python: can't open file '/w/train.py': [Errno 2] No such file", PermanentFault.FILE_NOT_FOUND),
        (2, "usage: train.py [--lr LR] | train.py: error: unrecognized arguments", None),
        (127, "bash: line 1: trian: command not found", PermanentFault.COMMAND_NOT_FOUND),
        (126, "bash: ./train.sh: Permission denied", PermanentFault.COMMAND_NOT_FOUND),
        (1, f"{_TRACEBACK} | ModuleNotFoundError: No module named 'torchx'", PermanentFault.IMPORT_ERROR),
        (1, "line 3\n    x = (\nSyntaxError: '(' was never closed", PermanentFault.SYNTAX_ERROR),
        (1, "ImportError: cannot import name 'x' from 'y' | cleaning up", PermanentFault.IMPORT_ERROR),
        (1, "ImportError: no apex, going on without | RuntimeError: NCCL timeout", None),
        (1, "torch.cuda.OutOfMemoryError: CUDA out of memory", None),
        (1, "the loss is not a number", None),
        (-9, "", None),
    ],
)
def test_permanent_fault_is_found(code: int, log_tail: str, fault: PermanentFault | None) -> None:
    assert find_permanent_fault(RankView(0, None, code), log_tail) is fault


def test_permanent_fault_is_found_in_the_report_of_a_rank() -> None:
    failed = build_rank(RankPhase.FAILED, code=1, reason="ModuleNotFoundError: No module named 'apex'")
    assert find_permanent_fault(failed, "RuntimeError: ignored") is PermanentFault.IMPORT_ERROR


def test_fault_keeps_the_end_of_a_long_log() -> None:
    described = describe_fault(RankView(0, None, 1), "x" * 4000 + "ValueError: the end")
    assert described.startswith("rank 0 exited with code 1: ")
    assert described.endswith("ValueError: the end")
    assert len(described) < 500
