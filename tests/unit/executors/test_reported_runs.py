"""Runs derived from agent reports, and when the next generation may begin."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace

import pytest

from scheduler.domain.job import Job
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.observation import (
    AgentReport,
    BegunRun,
    FailureCause,
    KillOrder,
    RankPhase,
    RankReport,
    RankStatus,
    Run,
    RunPhase,
)
from scheduler.domain.run_document import MasterAddress
from scheduler.executors.reported_runs import (
    FIRST_STATUS_TIMEOUT_S,
    START_LAG_S,
    TEARDOWN_TIMEOUT_S,
    AgentEnd,
    ReportedRun,
    build_begun_run,
    can_begin,
    compute_reported_runs,
)
from tests.builders import a_job

NOW_S = 1000.0
KILLED = -signal.SIGKILL
THERE = {("a", "n0"): "p0", ("a", "n1"): "p1"}
N1_GONE = {("a", "n0"): "p0"}
JOB = a_job("a", 1, 8, on={"n0": (2,), "n1": (5,)})
RUN = build_begun_run(JOB, (("n0", 2), ("n1", 5)), THERE, NOW_S - 60.0)


def status(phase: str, **more: object) -> RankStatus:
    return replace(RankStatus(RankPhase(phase)), **more)  # type: ignore[arg-type]  # each field by its name


def rank(number: int, phase: str = "", code: int | None = None, **more: object) -> RankReport:
    """Build a rank that reported `phase`; an empty one means no status."""
    return RankReport(number, code, status(phase, **more) if phase else None)


def report(number: int, told: RankReport | None, **more: object) -> AgentReport:
    """Build the report of the agent of node n<number> about its only rank, unchanged for a minute."""
    ranks = () if told is None else (told,)
    base = AgentReport("a", f"n{number}", f"p{number}", NOW_S, 1 if ranks else 0, ranks, since_s=NOW_S - 60.0)
    return replace(base, **more)  # type: ignore[arg-type]  # each field by its name


def look(
    *ranks: RankReport | None,
    run: BegunRun = RUN,
    agents: Mapping[tuple[str, str], str] = THERE,
    job: Job | None = JOB,
    now_s: float = NOW_S,
    ends: Mapping[str, AgentEnd] | None = None,
) -> ReportedRun:
    """Return the run, given the ranks that the agents of n0 and n1 report (None: no report for this generation)."""
    reports = [report(number, told) for number, told in enumerate(ranks)]
    jobs = {} if job is None else {"a": job}
    (seen,) = compute_reported_runs([run], reports, agents, jobs, now_s, ends=ends or {})
    return seen


def moving(*, leave_by_s: float) -> Job:
    """Return the job with its next generation."""
    return replace(JOB, allocation=replace(JOB.allocation, generation=2, leave_by_s=leave_by_s))


BOTH = {"n0": (2,), "n1": (5,)}


@pytest.mark.parametrize(
    ("ranks", "phase", "gpus"),
    [
        ((None, None), "starting", BOTH),
        ((rank(0), None), "starting", BOTH),
        ((rank(0, "starting"), rank(1, "starting")), "starting", BOTH),
        ((rank(0, "running"), rank(1, "starting")), "running", BOTH),
        ((rank(0, "saving"), rank(1, "saving")), "running", BOTH),
        ((rank(0, "left"), rank(1, "left", 0)), "running", {"n0": (2,)}),
        ((rank(0, "left", 0), rank(1, "left", 0)), "left", {}),
        ((rank(0, "left", -signal.SIGABRT), rank(1, "saving", KILLED)), "left", {}),
        ((rank(0, "succeeded", 0), rank(1, "running", 0)), "succeeded", {}),
        ((rank(0, code=0), rank(1, code=0)), "succeeded", {}),
    ],
)
def test_phase_follows_the_rank_statuses(
    ranks: tuple[RankReport | None, ...], phase: str, gpus: dict[str, tuple[int, ...]]
) -> None:
    seen = look(*ranks).run
    assert (seen.phase.value, seen.gpus) == (phase, gpus)


def test_steps_are_as_of_the_report_of_the_node_of_rank_0() -> None:
    reports = [
        report(0, rank(0, "running", step=12), at_s=NOW_S - 7.0),
        report(1, rank(1, "running", step=12), at_s=NOW_S - 3.0),
    ]
    (seen,) = compute_reported_runs([RUN], reports, THERE, {"a": JOB}, NOW_S)
    assert (seen.run.steps, seen.run.steps_at_s) == (12.0, NOW_S - 7.0)


def test_progress_is_from_rank_0_and_memory_is_the_maximum() -> None:
    seen = look(
        rank(0, "running", step=12, checkpoint_step=10, loss=0.5, samples_per_s=8.0, peak_bytes=5, frozen_layers=2),
        rank(1, "running", step=13, peak_bytes=9, phases_s={"load": 0.5}),
    ).run
    assert (seen.steps, seen.checkpoint_steps, seen.loss, seen.samples_per_s) == (12.0, 10.0, 0.5, 8.0)
    assert (seen.peak_bytes, seen.phases_s, seen.frozen_layers) == (9, {"load": 0.5}, 2)


def test_silent_script_is_running_after_the_timeout() -> None:
    reports = [
        report(0, rank(0), since_s=NOW_S - FIRST_STATUS_TIMEOUT_S),
        report(1, rank(1), since_s=NOW_S - FIRST_STATUS_TIMEOUT_S + 1.0),
    ]
    for now_s, phase in ((NOW_S, RunPhase.STARTING), (NOW_S + 1.0, RunPhase.RUNNING)):
        (seen,) = compute_reported_runs([RUN], reports, THERE, {"a": JOB}, now_s)
        assert seen.run.phase is phase


def test_moved_run_is_killed_at_its_deadline() -> None:
    both = rank(0, "running", step=3), rank(1, "running")
    early = look(*both, job=moving(leave_by_s=NOW_S + 1.0))
    assert (early.run.phase, early.kill_order) == (RunPhase.LEAVING, None)
    late = look(*both, job=moving(leave_by_s=NOW_S))
    assert late.kill_order == KillOrder(NOW_S, loss="it was killed at its deadline")
    doomed = replace(RUN, doom=late.kill_order)
    dead = look(rank(0, "running", KILLED, step=3), rank(1, "saving", KILLED), run=doomed)
    assert (dead.run.phase, dead.run.reason, dead.run.steps) == (RunPhase.LOST, "it was killed at its deadline", 3.0)
    assert dead.has_just_ended


def test_run_without_job_is_killed() -> None:
    assert look(rank(0, "running"), rank(1, "running"), job=None).kill_order == KillOrder(NOW_S, loss="its job is gone")


def test_dead_rank_is_blamed_and_others_are_killed() -> None:
    first = look(rank(0, "running"), RankReport(1, -signal.SIGSEGV, status("running"), tail="oh"))
    assert first.kill_order == KillOrder(NOW_S, fault="rank 1 was killed by SIGSEGV: oh")
    assert first.run.phase is RunPhase.RUNNING
    doomed = replace(RUN, doom=first.kill_order)
    then = look(rank(0, "failed", 1, reason="peer"), rank(1, "running", -signal.SIGSEGV), run=doomed)
    assert (then.run.phase, then.run.reason) == (RunPhase.FAILED, "rank 1 was killed by SIGSEGV: oh")


def test_end_of_a_failed_run_tells_whether_a_retry_can_help() -> None:
    dead = RankReport(0, 1, tail="File train.py | ModuleNotFoundError: No module named 'apex'")
    seen = look(dead, RankReport(1, KILLED))
    assert (seen.run.phase, seen.run.permanent_fault, seen.run.ran_s) == (
        RunPhase.FAILED,
        PermanentFault.IMPORT_ERROR,
        60.0,
    )
    assert look(dead, RankReport(1)).run.permanent_fault is None, "it has not ended"


def test_start_that_cannot_succeed_is_not_retried() -> None:
    fault = PermanentFault.COMMAND_NOT_FOUND
    failed = report(0, rank(0, code=127), failure="no train.py", permanent_fault=fault)
    (seen,) = compute_reported_runs([RUN], [failed, report(1, rank(1, code=KILLED))], THERE, {"a": JOB}, NOW_S)
    assert (seen.run.phase, seen.run.reason, seen.run.permanent_fault) == (RunPhase.FAILED, "no train.py", fault)


def test_failed_rank_has_time_to_exit() -> None:
    text = look(rank(0, "failed", reason="ValueError: no"), rank(1, "running"))
    doom = KillOrder(NOW_S + TEARDOWN_TIMEOUT_S, fault="rank 0: ValueError: no", is_hearsay=True)
    assert text.kill_order == doom
    ended = look(rank(0, "failed", 1), rank(1, "running"), run=replace(RUN, doom=doom), now_s=NOW_S + 1.0)
    assert ended.kill_order == replace(doom, by_s=NOW_S + 1.0)


def test_ranks_that_outlive_the_final_status_are_killed() -> None:
    text = look(rank(0, "succeeded"), rank(1, "running"))
    assert text.kill_order == KillOrder(NOW_S + TEARDOWN_TIMEOUT_S)
    later = look(
        rank(0, "succeeded", 0),
        rank(1, "running"),
        run=replace(RUN, doom=text.kill_order),
        now_s=NOW_S + TEARDOWN_TIMEOUT_S,
    )
    assert later.kill_order == text.kill_order
    assert look(
        rank(0, "succeeded", 0), rank(1, "running", KILLED), run=replace(RUN, doom=text.kill_order)
    ).run.phase is (RunPhase.SUCCEEDED)


def test_run_is_lost_with_an_agent_before_the_final_status() -> None:
    seen = look(rank(0, "running"), rank(1, "running"), agents=N1_GONE)
    assert seen.kill_order == KillOrder(NOW_S, loss="the agent of node n1 is gone")
    assert seen.run.gpus == {"n0": (2,)}
    dead = look(
        rank(0, "failed", KILLED), rank(1, "running"), agents=N1_GONE, run=replace(RUN, doom=seen.kill_order)
    ).run
    assert (dead.phase, dead.reason, dead.gpus) == (RunPhase.LOST, "the agent of node n1 is gone", {})


@pytest.mark.parametrize("told", [rank(1, "left"), rank(1, "left", 0), rank(1, code=0)])
def test_agent_may_end_after_the_final_status(told: RankReport) -> None:
    seen = look(rank(0, "left", 0) if told.status else rank(0, code=0), told, agents={})
    assert seen.run.phase is (RunPhase.LEFT if told.status else RunPhase.SUCCEEDED)


def test_replaced_agent_does_not_report_for_its_predecessor() -> None:
    reports = [report(0, rank(0, "running")), replace(report(1, None), pod="p9")]
    agents = {**THERE, ("a", "n1"): "p9"}
    (seen,) = compute_reported_runs([RUN], reports, agents, {"a": JOB}, NOW_S)
    assert seen.kill_order == KillOrder(NOW_S, loss="the agent of node n1 is gone")


def test_failure_caused_by_a_lost_agent_is_not_blamed() -> None:
    text = look(rank(0, "failed", 1, reason="connection closed by peer"), rank(1, "running"))
    assert text.kill_order is not None
    assert text.kill_order.is_hearsay
    seen = look(rank(0, "failed", 1), rank(1, "running"), run=replace(RUN, doom=text.kill_order), agents=N1_GONE).run
    assert (seen.phase, seen.reason) == (RunPhase.LOST, "the agent of node n1 is gone")
    died = look(rank(0, "running", -signal.SIGSEGV), rank(1, "running"))
    own = look(
        rank(0, "running", -signal.SIGSEGV), rank(1, "running"), run=replace(RUN, doom=died.kill_order), agents=N1_GONE
    )
    assert own.run.phase is RunPhase.FAILED, "a death without agent loss is no hearsay"


def test_agent_that_exits_by_itself_fails_the_run() -> None:
    ends = {"p1": AgentEnd("node n1: the container ran out of memory", True, FailureCause.OUT_OF_MEMORY)}
    seen = look(rank(0, "running", KILLED), rank(1, "running"), agents=N1_GONE, ends=ends).run
    assert (seen.phase, seen.reason, seen.cause) == (
        RunPhase.FAILED,
        "node n1: the container ran out of memory",
        FailureCause.OUT_OF_MEMORY,
    )


def test_start_failure_fails_the_run() -> None:
    failure = "rank 1 cannot be started: no such program"
    reports = [report(0, rank(0, "starting")), report(1, rank(1, code=127), failure=failure)]
    (seen,) = compute_reported_runs([RUN], reports, THERE, {"a": JOB}, NOW_S)
    assert seen.kill_order == KillOrder(NOW_S, fault=failure)


def test_run_killed_by_its_agent_is_lost() -> None:
    reports = [report(0, rank(0, "running")), report(1, rank(1, "saving", KILLED), killed="the pod was deleted")]
    (seen,) = compute_reported_runs([RUN], reports, THERE, {"a": JOB}, NOW_S)
    assert seen.kill_order == KillOrder(NOW_S, loss="the pod was deleted")


@pytest.mark.parametrize(("counted", "cause"), [(4, FailureCause.OUT_OF_MEMORY), (3, None), (None, None)])
def test_oom_kill_count_proves_out_of_memory(counted: int | None, cause: FailureCause | None) -> None:
    before = status("running", oom_kills=3, memory_events="/sys/fs/cgroup/memory.events")
    seen = look(RankReport(0, KILLED, before, oom_kills=3), RankReport(1, KILLED, before, oom_kills=counted))
    assert (seen.run.phase, seen.run.cause) == (RunPhase.FAILED, cause)


@pytest.mark.parametrize(("code", "cause"), [(KILLED, FailureCause.OUT_OF_MEMORY), (1, None)])
def test_run_beyond_its_memory_limit_fails_with_the_limit(code: int, cause: FailureCause | None) -> None:
    """The kernel may also have killed a worker of a data loader, after which the rank ends by itself."""
    silent = RankReport(1, code, tail="Killed")
    reports = [report(0, rank(0, code=KILLED)), report(1, silent, exceeded_memory=64 << 30)]
    (seen,) = compute_reported_runs([RUN], reports, THERE, {"a": JOB}, NOW_S)
    assert (seen.run.phase, seen.run.cause) == (RunPhase.FAILED, cause)
    assert all(part in seen.run.reason for part in ("node n1", "64 GiB", "resources.memory"))


def test_unstarted_ranks_are_awaited_until_the_kill_order_expires() -> None:
    doomed = replace(RUN, doom=KillOrder(NOW_S, loss="it was killed at its deadline"))
    for now_s, phase in ((NOW_S, RunPhase.STARTING), (NOW_S + START_LAG_S, RunPhase.LOST)):
        assert look(rank(0, "starting", KILLED), None, run=doomed, now_s=now_s).run.phase is phase


@pytest.mark.parametrize(("terminated", "phase"), [(True, RunPhase.LEFT), (False, RunPhase.SUCCEEDED)])
def test_silent_script_leaves_on_sigterm(terminated: bool, phase: RunPhase) -> None:
    reports = [report(0, rank(0, code=0), terminated=terminated), report(1, rank(1, code=0))]
    (seen,) = compute_reported_runs([RUN], reports, THERE, {"a": JOB}, NOW_S)
    assert seen.run.phase is phase


def test_recorded_end_is_final() -> None:
    end = Run("a", 1, RunPhase.LEFT, steps=7.0)
    seen = look(rank(0, "running"), None, run=replace(RUN, end=end), agents={})
    assert seen.run is end
    assert not seen.has_just_ended


ENDED = replace(RUN, end=Run("a", 1, RunPhase.LEFT))
IDLE = (report(0, None), report(1, None))
LIVING = report(1, rank(1, "saving"))
ELSEWHERE = replace(LIVING, node="n2")
NEXT = replace(JOB, allocation=replace(JOB.allocation, generation=2))


@pytest.mark.parametrize(
    ("why", "begun", "reports", "agents", "may"),
    [
        ("the first one", (), IDLE, THERE, True),
        ("the one before has ended", (ENDED,), IDLE, THERE, True),
        ("another job's runs", (replace(RUN, job_id="b"),), IDLE, THERE, True),
        ("its end is not written down", (RUN,), IDLE, THERE, False),
        ("it was begun", (ENDED, replace(RUN, generation=2)), IDLE, THERE, False),
        ("a newer one was begun", (replace(ENDED, generation=3),), IDLE, THERE, False),
        ("the job was finished", (replace(RUN, end=Run("a", 1, RunPhase.SUCCEEDED)),), IDLE, THERE, False),
        ("an agent is missing", (), IDLE, N1_GONE, False),
        ("an agent has not reported", (), IDLE[:1], THERE, False),
        ("only the agent before it has", (), IDLE, {**THERE, ("a", "n1"): "p9"}, False),
        ("an old rank lives", (ENDED,), (IDLE[0], LIVING), THERE, False),
        ("an old rank has ended", (ENDED,), (IDLE[0], report(1, rank(1, "saving", 0))), THERE, True),
        ("it lives elsewhere", (), (*IDLE, ELSEWHERE), {**THERE, ("a", "n2"): "p1"}, False),
        ("it died with its agent", (), (*IDLE, ELSEWHERE), THERE, True),
        ("another job's rank lives", (), (*IDLE, replace(LIVING, job_id="b")), {**THERE, ("b", "n1"): "p1"}, True),
    ],
)  # fmt: skip
def test_can_begin(
    why: str,
    begun: tuple[BegunRun, ...],
    reports: tuple[AgentReport, ...],
    agents: Mapping[tuple[str, str], str],
    may: bool,
) -> None:
    assert can_begin(NEXT, begun, reports, agents) is may, why


def test_job_without_target_cannot_begin() -> None:
    assert not can_begin(a_job("a"), (), IDLE, THERE)


def test_begun_run_is_bound_to_the_current_agents() -> None:
    assert RUN.pods == {"n0": "p0", "n1": "p1"}
    assert (RUN.generation, RUN.gpus, RUN.plan) == (1, JOB.allocation.target, JOB.allocation.plan)


def test_restored_run_goes_on_while_its_agents_report_it_and_never_starts_again() -> None:
    restored = replace(RUN, is_restored=True)
    assert not restored.may_start
    assert look(rank(0, "running"), rank(1, "running"), run=restored).run.phase is RunPhase.RUNNING
    unheard = compute_reported_runs([restored], [], THERE, {"a": JOB}, NOW_S)
    assert unheard[0].run.gpus == BOTH  # its agents have not been heard of since the restore


@pytest.mark.parametrize("generation", [0, 7])
def test_restored_run_that_an_agent_no_longer_has_is_lost_without_a_suspect(generation: int) -> None:
    restored = replace(RUN, is_restored=True, master=MasterAddress("10.0.0.1", 29500))
    other = (rank(0, "running"),) if generation else ()
    reports = [report(0, None, generation=generation, ranks=other), report(1, rank(1, "running"))]
    (seen,) = compute_reported_runs([restored], reports, THERE, {"a": JOB}, NOW_S)
    assert seen.run.gpus == {"n1": (5,)}
    assert seen.kill_order is not None
    assert (seen.kill_order.by_s, seen.kill_order.suspects) == (NOW_S, ())
    ended = [reports[0], report(1, rank(1, "running", code=KILLED))]
    (lost,) = compute_reported_runs([replace(restored, doom=seen.kill_order)], ended, THERE, {"a": JOB}, NOW_S)
    assert lost.run.phase is RunPhase.LOST


@pytest.mark.parametrize(
    ("codes", "terminated", "saved", "phase"),
    [
        ((0, 0), True, True, RunPhase.LEFT),
        ((-signal.SIGTERM, 3), True, True, RunPhase.LEFT),
        ((0, 0), False, True, RunPhase.SUCCEEDED),
        ((3, 3), True, False, RunPhase.FAILED),
    ],
)
def test_script_that_saved_after_it_was_asked_has_left(
    codes: tuple[int, int], terminated: bool, saved: bool, phase: RunPhase
) -> None:
    reports = [
        report(0, rank(0, code=codes[0]), terminated=terminated, saved=saved, checkpoint_at_s=NOW_S - 5.0),
        report(1, rank(1, code=codes[1])),
    ]
    (seen,) = compute_reported_runs([RUN], reports, THERE, {"a": moving(leave_by_s=NOW_S + 60.0)}, NOW_S, ends={})
    assert (seen.run.phase, seen.run.checkpoint_at_s) == (phase, NOW_S - 5.0)


def test_other_ranks_are_ended_soon_after_the_one_that_saved() -> None:
    reports = [report(0, rank(0, code=0), terminated=True, saved=True), report(1, rank(1))]
    (seen,) = compute_reported_runs([RUN], reports, THERE, {"a": moving(leave_by_s=NOW_S + 600.0)}, NOW_S, ends={})
    assert seen.kill_order == KillOrder(NOW_S + TEARDOWN_TIMEOUT_S)
