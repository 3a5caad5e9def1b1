"""Allotments: which jobs start, grow, shrink, are preempted or wait, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from scheduler.domain import gpu_sets
from scheduler.domain.decisions import Decision, PreemptJob, Reason, ReasonCode, ResizeJob, StartJob
from scheduler.domain.fleet import LoanState
from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.domain.tick_report import TickResult
from scheduler.scheduling.policies.allotment import Allotment
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import PolicySet
from scheduler.scheduling.scheduler import decide
from scheduler.scheduling.stages.assignment import AssignByAllotment
from tests.builders import GPU, a_curve, a_fleet, a_job, a_loan, a_node, a_snapshot

FLEET = a_fleet(training=2, inference=0, gpus_per_node=4)
T0, T1 = {"t0": (0, 1, 2, 3)}, {"t1": (0, 1, 2, 3)}
LATER_S = 10_000.0


def decided(jobs: Iterable[Job], gpus: Mapping[str, int], *, full: bool = True, frozen: bool = False) -> TickResult:
    """Decide once under a policy set that allots `gpus`, and nothing to all other jobs."""
    at_s = float("-inf") if full else LATER_S
    switches = Switches(resizes_frozen=frozen)
    return scripted(a_snapshot(FLEET, jobs, now_s=LATER_S, full_pass_at_s=at_s, switches=switches), gpus)


def scripted(snapshot: Snapshot, gpus: Mapping[str, int], capacities: list[int] | None = None) -> TickResult:
    def allot(view: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
        if capacities is not None:
            capacities.append(capacity)
        others = [job_id for job_id in view.jobs if not gpus.get(job_id)]
        why = Reason(ReasonCode.INSUFFICIENT_GPUS, "later in the order", {"needed_gpus": 1.0})
        present = {job_id: count for job_id, count in gpus.items() if job_id in view.jobs}
        return Allotment(present, dict.fromkeys(others, why), valid_until_s=snapshot.now_s + 7.0)

    return decide(snapshot, PolicySet("scripted", "", "", AssignByAllotment(allot)))


def summarize(decisions: Iterable[Decision]) -> list[tuple[str, str, int]]:
    """Return (decision, job, GPUs afterwards) of each decision."""
    found = []
    for decision in decisions:
        assert isinstance(decision, StartJob | ResizeJob | PreemptJob)
        count = 0 if isinstance(decision, PreemptJob) else gpu_sets.count(decision.gpus)
        found.append((type(decision).__name__, decision.job_id, count))
    return found


def running(job_id: str, low: int, high: int, on: Mapping[str, tuple[int, ...]], *, since_s: float = 0.0) -> Job:
    job = a_job(job_id, low, high, state=JobState.RUNNING, on=on)
    return replace(job, state_since_s=since_s)


def test_pending_jobs_start_on_their_allotment() -> None:
    result = decided([a_job("a", 2, 8), a_job("b", 1, 4)], {"a": 5, "b": 3})
    assert summarize(result.decisions) == [("StartJob", "a", 5), ("StartJob", "b", 3)]
    assert result.waiting == {}


def test_job_without_allotment_waits_with_the_policys_reason() -> None:
    result = decided([a_job("a", 8), a_job("b", 1)], {"a": 8})
    assert result.waiting["b"].detail == "later in the order"


def test_preemption_names_the_job_that_gets_the_gpus() -> None:
    jobs = [running("a", 4, 4, T0), running("b", 4, 4, T1), a_job("c", 4)]
    result = decided(jobs, {"c": 4, "a": 4})
    assert summarize(result.decisions) == [("PreemptJob", "b", 0)]
    reason = result.decisions[0].reason
    assert reason.code is ReasonCode.OUTRANKED
    assert reason.detail.startswith("c ")
    assert reason.numbers == {"needed_gpus": 4.0, "allotted_gpus": 0.0}
    assert result.waiting["c"].code is ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS


def test_no_job_is_preempted_while_enough_gpus_are_free() -> None:
    assert summarize(decided([running("a", 4, 4, T0), a_job("c", 4)], {"c": 4}).decisions) == [("StartJob", "c", 4)]
    assert decided([running("a", 4, 4, T0)], {}).decisions == ()
    leaving = a_job("gone", 4, state=JobState.PREEMPTED, releasing=T1)
    result = decided([running("a", 4, 4, T0), leaving, a_job("c", 4)], {"c": 4})
    assert (result.decisions, result.waiting["c"].code) == ((), ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS)


def test_fewest_jobs_are_preempted() -> None:
    jobs = [running("small", 1, 1, {"t0": (0,)}), running("large", 3, 3, {"t0": (1, 2, 3)}), a_job("c", 7)]
    result = decided(jobs, {"c": 7})
    assert summarize(result.decisions) == [("PreemptJob", "large", 0)]


def test_jobs_shrink_before_others_are_preempted() -> None:
    jobs = [running("wide", 1, 4, T0), running("whole", 3, 3, {"t1": (0, 1, 2)}), a_job("c", 4)]
    result = decided(jobs, {"c": 4, "wide": 1})
    assert summarize(result.decisions) == [("ResizeJob", "wide", 1)]
    assert result.decisions[0].reason.code is ReasonCode.MAKES_ROOM_FOR_WAITING_JOB
    assert result.decisions[0].reason.numbers == {"allotted_gpus": 1.0, "needed_gpus": 4.0}


def test_job_grows_after_the_resize_pause() -> None:
    shares = {"a": 6}
    assert summarize(decided([running("a", 2, 8, T0)], shares, full=False).decisions) == [("ResizeJob", "a", 6)]
    assert decided([running("a", 2, 8, T0, since_s=LATER_S - 10.0)], shares).decisions == ()
    at_least = running("a", 4, 8, T0, since_s=LATER_S - 10.0)
    assert summarize(decided([at_least], shares).decisions) == [("ResizeJob", "a", 6)]


def test_growth_takes_gpus_from_other_jobs_in_full_passes_only() -> None:
    jobs = [running("a", 1, 8, T0), running("b", 1, 8, T1)]
    assert decided(jobs, {"a": 7, "b": 1}, full=False).decisions == ()
    assert summarize(decided(jobs, {"a": 7, "b": 1}).decisions) == [("ResizeJob", "b", 1)]


def test_pending_job_starts_before_a_running_job_grows() -> None:
    jobs = [running("a", 4, 8, T0), a_job("b", 4)]
    assert summarize(decided(jobs, {"b": 4, "a": 8}).decisions) == [("StartJob", "b", 4)]


def test_frozen_resizes_leave_running_jobs_unchanged() -> None:
    jobs = [running("a", 1, 8, T0), running("b", 1, 3, {"t1": (0, 1, 2)}), a_job("c", 4), a_job("d", 1)]
    result = decided(jobs, {"c": 4, "a": 3, "d": 1}, frozen=True)
    assert summarize(result.decisions) == [("StartJob", "d", 1)]


def test_job_without_a_plan_is_passed_over() -> None:
    modelled = a_job("modelled", 2, model="llama-2-7b", global_batch=8)
    result = decided([modelled, a_job("plain", 8)], {"modelled": 2, "plain": 8})
    assert summarize(result.decisions) == [("StartJob", "plain", 8)]
    assert result.waiting["modelled"].code is ReasonCode.WAITING_FOR_PLAN
    assert [wanted.shape.gpus for wanted in result.wanted_shapes] == [2]


def test_policy_receives_the_capacity_that_training_can_use() -> None:
    pools, nodes = a_fleet(training=2, inference=2, gpus_per_node=4)
    nodes = {**nodes, "t1": replace(nodes["t1"], cordoned=True)}
    loans = [a_loan("i0"), a_loan("i1", LoanState.RECALLED, return_by_s=LATER_S + 60.0)]
    jobs = [running("a", 2, 2, {"t1": (0, 1)})]
    capacities: list[int] = []
    snapshot = a_snapshot((pools, nodes), jobs, loans, now_s=LATER_S, full_pass_at_s=LATER_S)
    scripted(snapshot, {"a": 2}, capacities)
    assert capacities == [4 + 2]


def test_tick_wakes_when_the_allotment_expires() -> None:
    assert decided([running("a", 4, 4, T0)], {"a": 4}).next_wake_s == LATER_S + 7.0


def test_jobs_on_other_gpu_models_are_not_preempted() -> None:
    pools, nodes = a_fleet(training=1, inference=0, gpus_per_node=4)
    fleet = (pools, {**nodes, "v0": a_node("v0", gpu="v100-32g", gpus=4)})
    jobs = [running("a", 4, 4, T0), a_job("b", 4, gpu="v100-32g"), a_job("c", 4, gpu="v100-32g")]
    snapshot = a_snapshot(fleet, jobs, now_s=LATER_S)
    assert summarize(scripted(snapshot, {"b": 4, "c": 4}).decisions) == [("StartJob", "b", 4)]


def test_gpus_above_a_queue_limit_go_to_other_queues() -> None:
    jobs = [a_job("a", 4, queue="q"), a_job("b", 4, queue="q"), a_job("c", 2)]
    queues = {"q": JobQueue("q", limit_gpus=6)}

    def allot(view: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
        first = [job_id for job_id in ("a", "b", "c") if job_id in view.jobs][:2]
        counts = {job_id: view.jobs[job_id].spec.min_gpus for job_id in first}
        why = Reason(ReasonCode.INSUFFICIENT_GPUS, "not among the first two")
        return Allotment(counts, {job_id: why for job_id in view.jobs if job_id not in first})

    snapshot = a_snapshot(FLEET, jobs, now_s=LATER_S, queues=queues)
    result = decide(snapshot, PolicySet("scripted", "", "", AssignByAllotment(allot)))
    assert summarize(result.decisions) == [("StartJob", "a", 4), ("StartJob", "c", 2)]
    assert result.waiting["b"].code is ReasonCode.WAITING_FOR_QUOTA


def test_first_job_of_a_full_queue_replaces_its_last_job() -> None:
    jobs = [running("a", 4, 4, T0), a_job("b", 4, queue="q"), a_job("c", 4, queue="q")]
    jobs[0] = replace(jobs[0], spec=replace(jobs[0].spec, queue="q"))
    other = running("other", 4, 4, T1)
    snapshot = a_snapshot(FLEET, [*jobs, other], now_s=LATER_S, queues={"q": JobQueue("q", limit_gpus=4)})
    result = scripted(snapshot, {"b": 4, "a": 4, "other": 4})
    assert summarize(result.decisions) == [("PreemptJob", "a", 0)]
    reason = result.decisions[0].reason
    assert (reason.numbers["used_gpus"], reason.numbers["limit_gpus"]) == (4.0, 4.0)


def test_gpus_without_speedup_are_used_only_without_requires_speedup() -> None:
    times_s = {GpuShape.packed(GPU, 4, 4): 1.0, GpuShape.packed(GPU, 8, 4): 1.5}
    job = a_job("j", 4, 8, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(FLEET, [job], curves={job.spec.curve_key: a_curve(times_s)}, now_s=LATER_S)

    def allot(view: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
        return Allotment({"j": 8}, {})

    policies = PolicySet("scripted", "", "", AssignByAllotment(allot))
    assert summarize(decide(snapshot, policies).decisions) == [("StartJob", "j", 4)]
    assert summarize(decide(snapshot, replace(policies, requires_speedup=False)).decisions) == [("StartJob", "j", 8)]
