"""Problems that are planted in a fleet are found, each once, with figures that are those of the state."""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.core import TyperGroup

from cli.app import SUBCOMMANDS, load_command
from scheduler.domain.fleet import Forecast, LoanState
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingMode, LendingPolicy
from scheduler.domain.problems import MEANINGS, Problem, ProblemCode, Severity, get_problem_order
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.scheduling.problems.detection import find_problems
from scheduler.scheduling.problems.evidence import Evidence, GpuTimeUse
from scheduler.scheduling.problems.job_activity import JobActivity
from tests.builders import a_fleet, a_job, a_loan, a_snapshot
from tests.console.fleets import large_store
from tests.unit.scheduling.problems.planted import (
    HOUR_S,
    LEVELS,
    NOW_S,
    OOM,
    QUANTILES,
    a_machine,
    a_reading,
    failed_job,
    planted_evidence,
    planted_snapshot,
)

CODES = ProblemCode


def codes_of(snapshot: Snapshot, evidence: Evidence | None = None) -> list[ProblemCode]:
    return [problem.code for problem in find_problems(snapshot, evidence or Evidence(NOW_S))]


@pytest.fixture(scope="module")
def planted() -> tuple[Problem, ...]:
    return find_problems(planted_snapshot(), planted_evidence())


def test_each_planted_problem_is_found_once(planted: tuple[Problem, ...]) -> None:
    assert Counter(problem.code for problem in planted) == Counter(CODES)
    assert set(MEANINGS) == set(CODES)
    subjects = {problem.code: problem.subject for problem in planted}
    assert subjects[CODES.INFERENCE_SHORT] == "lending"
    assert subjects[CODES.RECALL_LATE] == "i-late"
    assert subjects[CODES.RECALL_AT_RISK] == "i-risk"
    assert subjects[CODES.DEMAND_LOST] == "lost"
    assert subjects[CODES.DEMAND_STALE] == "stale"
    assert subjects[CODES.DEMAND_MISSING] == "unmeasured"
    assert subjects[CODES.FORECAST_MISSING] == "unforecast"
    assert subjects[CODES.NODE_DOWN] == "t-down"
    assert subjects[CODES.NODE_QUARANTINED] == "t-bad"
    assert subjects[CODES.NODE_SLOW] == "t-slow"
    assert subjects[CODES.AGENT_SILENT] == "m-silent"
    assert subjects[CODES.GUARANTEE_UNSERVED] == "promised"
    assert subjects[CODES.QUEUE_STUCK] == "stuck"
    assert subjects[CODES.JOB_OUT_OF_MEMORY] == "greedy"
    assert subjects[CODES.JOB_THRASHING] == "restless"
    assert subjects[CODES.JOB_LOSES_WORK] == "loser"
    assert subjects[CODES.JOB_FAILED] == "failed"
    assert subjects[CODES.WEBHOOK_FAILING] == "wh-1"


def test_most_severe_problems_come_first(planted: tuple[Problem, ...]) -> None:
    assert list(planted) == sorted(planted, key=get_problem_order)
    severities = [problem.severity for problem in planted]
    assert severities == sorted(severities, key=list(Severity).index)


def test_figures_of_a_cause_are_its_numbers(planted: tuple[Problem, ...]) -> None:
    for problem in planted:
        spoken = _list_figures(problem)
        known = set(problem.numbers.values()) | {value / HOUR_S for value in problem.numbers.values()}
        known |= {100 * value for value in problem.numbers.values()}
        unknown = [figure for figure in spoken if not any(abs(figure - value) <= 0.51 for value in known)]
        assert unknown == [], problem


def _list_figures(problem: Problem) -> list[float]:
    """Return the figures of a cause without those of names, and of texts that come from elsewhere."""
    text = problem.cause.partition(": rank")[0].replace(str(OOM), "")
    if problem.subject:
        text = text.replace(problem.subject, "")
    text = text.replace("24 hours", "")
    return [float(figure) for figure in re.findall(r"(?<![\w-])\d+(?:\.\d+)?(?![\w-])", text)]


def test_levers_are_commands_that_exist(planted: tuple[Problem, ...]) -> None:
    commands = {each.name: each for each in SUBCOMMANDS}
    for problem in planted:
        program, name, *words = shlex.split(problem.command)
        assert program == "ebbtide"
        command = load_command(commands[name])
        while isinstance(command, TyperGroup) and words and words[0] in command.commands:
            command, words = command.commands[words[0]], words[1:]
        command.make_context(name, words, resilient_parsing=False).close()


def test_cause_and_advice_are_sentences(planted: tuple[Problem, ...]) -> None:
    for problem in planted:
        assert problem.cause.endswith("."), problem
        assert problem.advice.endswith("."), problem
        assert "\n" not in problem.cause


def test_empty_fleet_and_idle_fleet_have_no_problems() -> None:
    assert codes_of(Snapshot()) == []
    fleet = a_fleet(training=2, inference=2, lending=LendingPolicy(enabled=False))
    assert codes_of(a_snapshot(fleet)) == []


@pytest.mark.parametrize(("age_s", "is_listed"), [(86_400.0, True), (86_401.0, False)])
def test_failed_job_is_listed_for_a_day(age_s: float, is_listed: bool) -> None:
    evidence = Evidence(NOW_S, failed_jobs=(failed_job(at_s=NOW_S - age_s),))
    assert (codes_of(Snapshot(), evidence) == [CODES.JOB_FAILED]) is is_listed


def test_job_that_recovered_from_out_of_memory_is_no_problem() -> None:
    base = replace(planted_snapshot().jobs["greedy"], state=JobState.RUNNING)
    fleet = a_fleet(training=1, inference=0, lending=LendingPolicy(enabled=False))
    recent = a_snapshot(fleet, [replace(base, state_since_s=NOW_S - 60)])
    settled = a_snapshot(fleet, [replace(base, state_since_s=NOW_S - 1000)])
    assert codes_of(recent) == [CODES.JOB_OUT_OF_MEMORY]
    assert codes_of(settled) == []


@pytest.mark.parametrize(
    ("activity", "is_thrashing"),
    [
        (JobActivity(0.0, resizes=12), False),
        (JobActivity(0.0, preemptions=3), False),
        (JobActivity(0.0, restarts=2), False),
        (JobActivity(0.0, resizes=20), True),
        (JobActivity(0.0, preemptions=6), True),
        (JobActivity(0.0, restarts=3), True),
    ],
)
def test_thrashing_needs_many_disturbances(activity: JobActivity, is_thrashing: bool) -> None:
    fleet = a_fleet(training=1, inference=0, lending=LendingPolicy(enabled=False))
    snapshot = a_snapshot(fleet, [a_job("a", 1, state=JobState.RUNNING, on={"t0": (0,)}, now_s=NOW_S)])
    assert bool(codes_of(snapshot, Evidence(NOW_S, activity={"a": activity}))) is is_thrashing


@pytest.mark.parametrize(
    ("gpu_hours", "lost_hours", "severity"),
    [
        (2.0, 2.0, None),  # a small test
        (1000.0, 50.0, None),
        (7.9, 7.0, None),
        (100.0, 0.9, None),
        (100.0, 11.0, Severity.WARNING),
        (100.0, 72.0, Severity.CRITICAL),
        (10.0, 40.0, Severity.CRITICAL),  # work of earlier hours that was lost now
    ],
)
def test_goodput_is_judged_on_enough_gpu_time(gpu_hours: float, lost_hours: float, severity: Severity | None) -> None:
    use = GpuTimeUse(NOW_S, gpu_hours * HOUR_S, lost_hours * HOUR_S)
    found = find_problems(Snapshot(), Evidence(NOW_S, gpu_time=use))
    assert [problem.severity for problem in found] == ([] if severity is None else [severity])


def test_shortage_is_critical_only_because_of_loans() -> None:
    fleet = a_fleet(training=0, inference=2)
    forecast = {"inference": Forecast(NOW_S, 600.0, QUANTILES, LEVELS, "test")}
    demand = {"inference": replace(a_reading(16.0), asked_gpus=20.0)}
    home = a_snapshot(fleet, demand=demand, forecasts=forecast, now_s=NOW_S)
    [problem] = find_problems(home, Evidence(NOW_S))
    assert (problem.code, problem.severity) == (CODES.INFERENCE_SHORT, Severity.WARNING)
    lent = a_snapshot(fleet, loans=[a_loan("i0")], demand=demand, forecasts=forecast, now_s=NOW_S)
    [problem] = find_problems(lent, Evidence(NOW_S))
    assert (problem.severity, problem.command) == (Severity.CRITICAL, "ebbtide lending recall-all")
    assert problem.numbers == {"asked_gpus": 20.0, "supply_gpus": 8.0, "lent_gpus": 8.0}


def test_recall_with_time_left_or_without_jobs_is_no_risk() -> None:
    fleet = a_fleet(training=0, inference=1, lending=LendingPolicy(enabled=False))
    jobs = [a_job("a", 1, state=JobState.RUNNING, on={"i0": (0,)}, now_s=NOW_S)]
    early = a_loan("i0", LoanState.RECALLED, return_by_s=NOW_S + 61)
    soon = a_loan("i0", LoanState.RECALLED, return_by_s=NOW_S + 59)
    assert codes_of(a_snapshot(fleet, jobs, [early], demand={"inference": a_reading(0.0)})) == []
    assert codes_of(a_snapshot(fleet, jobs, [soon], demand={"inference": a_reading(0.0)})) == [CODES.RECALL_AT_RISK]
    assert codes_of(a_snapshot(fleet, [], [soon], demand={"inference": a_reading(0.0)})) == []


def test_pool_that_lends_nothing_needs_no_demand() -> None:
    fleet = a_fleet(training=0, inference=1)
    assert codes_of(a_snapshot(fleet)) == [CODES.DEMAND_MISSING]
    assert codes_of(a_snapshot(fleet), Evidence(NOW_S, lends=False)) == []
    shadow = a_fleet(training=0, inference=1, lending=LendingPolicy(mode=LendingMode.SHADOW))
    assert codes_of(a_snapshot(shadow)) == [CODES.DEMAND_MISSING]


def test_stopped_lending_is_forgotten_after_a_shift() -> None:
    switched = Snapshot(switches=Switches(loans_recalled=True), lending_set_at_s=NOW_S - 8 * HOUR_S)
    assert codes_of(switched) == [CODES.LENDING_STOPPED]
    assert codes_of(replace(switched, lending_set_at_s=NOW_S - 7 * HOUR_S)) == []
    assert codes_of(replace(switched, switches=Switches())) == []


def test_queue_at_its_limit_or_with_recent_starts_is_not_stuck() -> None:
    fleet = a_fleet(training=4, inference=0, lending=LendingPolicy(enabled=False))
    pending = a_job("pending", 8, queue="q", now_s=NOW_S - 3 * HOUR_S)
    runs = a_job("runs", 8, state=JobState.RUNNING, on={"t0": tuple(range(8))}, queue="q", now_s=NOW_S)
    started = replace(runs, account=replace(runs.account, last_started_at_s=NOW_S - HOUR_S))
    assert codes_of(a_snapshot(fleet, [pending])) == [CODES.QUEUE_STUCK]
    assert codes_of(a_snapshot(fleet, [pending, started])) == []
    limited = {"q": JobQueue("q", limit_gpus=12)}
    assert codes_of(a_snapshot(fleet, [pending, runs])) == [CODES.QUEUE_STUCK]
    assert codes_of(a_snapshot(fleet, [pending, runs], queues=limited)) == []


def test_agent_of_a_down_node_is_no_second_problem() -> None:
    snapshot = planted_snapshot()
    down = Evidence(NOW_S, machines=(a_machine("m", "t-down", silent_s=900.0),), lends=False)
    found = [problem for problem in find_problems(snapshot, down) if problem.subject in ("m", "t-down")]
    assert [problem.code for problem in found] == [CODES.NODE_DOWN]
    assert "machine m" in found[0].cause


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_goodput_of_any_use_is_a_share(gpu_s: float, lost_gpu_s: float) -> None:
    for problem in find_problems(Snapshot(), Evidence(NOW_S, gpu_time=GpuTimeUse(0.0, gpu_s, lost_gpu_s))):
        assert 0.0 <= problem.numbers["goodput"] < problem.numbers["target"]


def test_large_fleet_is_examined_within_50_ms() -> None:
    snapshot = large_store().load().snapshot
    evidence = Evidence(snapshot.now_s + 60)
    find_problems(snapshot, evidence)
    times_s = []
    for _ in range(5):
        begun_s = time.process_time()
        find_problems(snapshot, evidence)
        times_s.append(time.process_time() - begun_s)
    assert min(times_s) < 0.05
