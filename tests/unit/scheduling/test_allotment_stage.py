"""Bringing what jobs hold towards their allotment: who starts, who gives way to whom, who waits and why."""

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
from scheduler.scheduling.policies.policy_set import PolicySet
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_curve, a_fleet, a_job, a_loan, a_node, a_snapshot

FLEET = a_fleet(training=2, inference=0, gpus_per_node=4)
T0, T1 = {"t0": (0, 1, 2, 3)}, {"t1": (0, 1, 2, 3)}
LATER_S = 10_000.0


def settled(jobs: Iterable[Job], gpus: Mapping[str, int], *, full: bool = True, frozen: bool = False) -> TickResult:
    """One decide under a policy set that allots `gpus`, and nothing to all the others."""
    at_s = float("-inf") if full else LATER_S
    switches = Switches(resizes_frozen=frozen)
    return scripted(a_snapshot(FLEET, jobs, now_s=LATER_S, full_pass_at_s=at_s, switches=switches), gpus)


def scripted(snapshot: Snapshot, gpus: Mapping[str, int], capacities: list[int] | None = None) -> TickResult:
    def allot(view: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
        if capacities is not None:
            capacities.append(capacity)
        others = [job_id for job_id in view.jobs if not gpus.get(job_id)]
        why = Reason(ReasonCode.INSUFFICIENT_GPUS, "its turn has not come", {"needed_gpus": 1.0})
        present = {job_id: count for job_id, count in gpus.items() if job_id in view.jobs}
        return Allotment(present, dict.fromkeys(others, why), valid_until_s=snapshot.now_s + 7.0)

    return decide(snapshot, PolicySet("scripted", "", "", allot=allot))


def told(decisions: Iterable[Decision]) -> list[tuple[str, str, int]]:
    """(what, job, GPUs afterwards) of each decision."""
    found = []
    for decision in decisions:
        assert isinstance(decision, StartJob | ResizeJob | PreemptJob)
        count = 0 if isinstance(decision, PreemptJob) else gpu_sets.count(decision.gpus)
        found.append((type(decision).__name__, decision.job_id, count))
    return found


def running(job_id: str, low: int, high: int, on: Mapping[str, tuple[int, ...]], *, since_s: float = 0.0) -> Job:
    job = a_job(job_id, low, high, state=JobState.RUNNING, on=on)
    return replace(job, state_since_s=since_s)


def test_who_is_allotted_free_gpus_starts_on_as_many() -> None:
    result = settled([a_job("a", 2, 8), a_job("b", 1, 4)], {"a": 5, "b": 3})
    assert told(result.decisions) == [("StartJob", "a", 5), ("StartJob", "b", 3)]
    assert result.waiting == {}


def test_who_is_allotted_nothing_waits_with_the_reason_of_the_policy() -> None:
    result = settled([a_job("a", 8), a_job("b", 1)], {"a": 8})
    assert result.waiting["b"].detail == "its turn has not come"


def test_a_running_job_makes_way_with_the_name_of_the_one_it_makes_way_for() -> None:
    jobs = [running("a", 4, 4, T0), running("b", 4, 4, T1), a_job("c", 4)]
    result = settled(jobs, {"c": 4, "a": 4})
    assert told(result.decisions) == [("PreemptJob", "b", 0)]
    reason = result.decisions[0].reason
    assert reason.code is ReasonCode.OUTRANKED
    assert reason.detail == "c comes before it and needs 4 GPUs; its turn has not come"
    assert reason.numbers == {"needed_gpus": 4.0, "allotted_gpus": 0.0}
    assert result.waiting["c"].code is ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS


def test_nobody_makes_way_for_nobody() -> None:
    assert told(settled([running("a", 4, 4, T0), a_job("c", 4)], {"c": 4}).decisions) == [("StartJob", "c", 4)]
    assert settled([running("a", 4, 4, T0)], {}).decisions == ()
    leaving = a_job("gone", 4, state=JobState.PREEMPTED, releasing=T1)
    result = settled([running("a", 4, 4, T0), leaving, a_job("c", 4)], {"c": 4})
    assert (result.decisions, result.waiting["c"].code) == ((), ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS)


def test_no_more_jobs_make_way_than_have_to() -> None:
    jobs = [running("small", 1, 1, {"t0": (0,)}), running("large", 3, 3, {"t0": (1, 2, 3)}), a_job("c", 7)]
    result = settled(jobs, {"c": 7})
    assert told(result.decisions) == [("PreemptJob", "large", 0)]


def test_parts_are_given_up_before_whole_jobs() -> None:
    jobs = [running("wide", 1, 4, T0), running("whole", 3, 3, {"t1": (0, 1, 2)}), a_job("c", 4)]
    result = settled(jobs, {"c": 4, "wide": 1})
    assert told(result.decisions) == [("ResizeJob", "wide", 1)]
    assert result.decisions[0].reason.code is ReasonCode.MAKES_ROOM_FOR_WAITING_JOB
    assert result.decisions[0].reason.detail == "its share is 1 GPU now; c is to have 4 GPUs"


def test_a_job_grows_into_free_gpus_once_it_has_rested() -> None:
    shares = {"a": 6}
    assert told(settled([running("a", 2, 8, T0)], shares, full=False).decisions) == [("ResizeJob", "a", 6)]
    assert settled([running("a", 2, 8, T0, since_s=LATER_S - 10.0)], shares).decisions == ()
    at_least = running("a", 4, 8, T0, since_s=LATER_S - 10.0)
    assert told(settled([at_least], shares).decisions) == [("ResizeJob", "a", 6)]


def test_growing_takes_gpus_from_others_at_full_passes_only() -> None:
    jobs = [running("a", 1, 8, T0), running("b", 1, 8, T1)]
    assert settled(jobs, {"a": 7, "b": 1}, full=False).decisions == ()
    assert told(settled(jobs, {"a": 7, "b": 1}).decisions) == [("ResizeJob", "b", 1)]


def test_a_waiting_job_gets_its_room_before_a_running_one_grows() -> None:
    jobs = [running("a", 4, 8, T0), a_job("b", 4)]
    assert told(settled(jobs, {"b": 4, "a": 8}).decisions) == [("StartJob", "b", 4)]


def test_while_resizes_are_frozen_everybody_keeps_what_he_has() -> None:
    jobs = [running("a", 1, 8, T0), running("b", 1, 3, {"t1": (0, 1, 2)}), a_job("c", 4), a_job("d", 1)]
    result = settled(jobs, {"c": 4, "a": 3, "d": 1}, frozen=True)
    assert told(result.decisions) == [("StartJob", "d", 1)]


def test_a_job_without_a_plan_for_the_free_gpus_is_passed_over() -> None:
    modelled = a_job("modelled", 2, model="llama-2-7b", global_batch=8)
    result = settled([modelled, a_job("plain", 8)], {"modelled": 2, "plain": 8})
    assert told(result.decisions) == [("StartJob", "plain", 8)]
    assert result.waiting["modelled"].code is ReasonCode.WAITING_FOR_PLAN
    assert [wanted.shape.gpus for wanted in result.wanted_shapes] == [2]


def test_the_policy_is_told_how_many_gpus_training_may_use_now() -> None:
    pools, nodes = a_fleet(training=2, inference=2, gpus_per_node=4)
    nodes = {**nodes, "t1": replace(nodes["t1"], cordoned=True)}
    loans = [a_loan("i0"), a_loan("i1", LoanState.RECALLED, return_by_s=LATER_S + 60.0)]
    jobs = [running("a", 2, 2, {"t1": (0, 1)})]
    capacities: list[int] = []
    snapshot = a_snapshot((pools, nodes), jobs, loans, now_s=LATER_S, full_pass_at_s=LATER_S)
    scripted(snapshot, {"a": 2}, capacities)
    assert capacities == [4 + 2]


def test_the_tick_wakes_when_time_alone_changes_the_allotment() -> None:
    assert settled([running("a", 4, 4, T0)], {"a": 4}).next_wake_s == LATER_S + 7.0


def test_gpus_of_another_model_are_no_reason_to_make_way() -> None:
    pools, nodes = a_fleet(training=1, inference=0, gpus_per_node=4)
    fleet = (pools, {**nodes, "v0": a_node("v0", gpu="v100-32g", gpus=4)})
    jobs = [running("a", 4, 4, T0), a_job("b", 4, gpu="v100-32g"), a_job("c", 4, gpu="v100-32g")]
    snapshot = a_snapshot(fleet, jobs, now_s=LATER_S)
    assert told(scripted(snapshot, {"b": 4, "c": 4}).decisions) == [("StartJob", "b", 4)]


def test_a_queue_keeps_within_its_limit_and_the_rest_is_dealt_to_others() -> None:
    jobs = [a_job("a", 4, queue="q"), a_job("b", 4, queue="q"), a_job("c", 2)]
    queues = {"q": JobQueue("q", limit_gpus=6)}

    def allot(view: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
        first = [job_id for job_id in ("a", "b", "c") if job_id in view.jobs][:2]
        counts = {job_id: view.jobs[job_id].spec.min_gpus for job_id in first}
        why = Reason(ReasonCode.INSUFFICIENT_GPUS, "not among the first two")
        return Allotment(counts, {job_id: why for job_id in view.jobs if job_id not in first})

    snapshot = a_snapshot(FLEET, jobs, now_s=LATER_S, queues=queues)
    result = decide(snapshot, PolicySet("scripted", "", "", allot=allot))
    assert told(result.decisions) == [("StartJob", "a", 4), ("StartJob", "c", 2)]
    assert result.waiting["b"].code is ReasonCode.WAITING_FOR_QUOTA


def test_within_a_queue_at_its_limit_the_first_in_order_takes_the_place_of_the_last() -> None:
    jobs = [running("a", 4, 4, T0), a_job("b", 4, queue="q"), a_job("c", 4, queue="q")]
    jobs[0] = replace(jobs[0], spec=replace(jobs[0].spec, queue="q"))
    other = running("other", 4, 4, T1)
    snapshot = a_snapshot(FLEET, [*jobs, other], now_s=LATER_S, queues={"q": JobQueue("q", limit_gpus=4)})
    result = scripted(snapshot, {"b": 4, "a": 4, "other": 4})
    assert told(result.decisions) == [("PreemptJob", "a", 0)]
    assert result.decisions[0].reason.detail.endswith("queue q uses 4 of its limit of 4")


def test_a_set_that_is_not_thrifty_uses_gpus_that_gain_nothing() -> None:
    times_s = {GpuShape.packed(GPU, 4, 4): 1.0, GpuShape.packed(GPU, 8, 4): 1.5}
    job = a_job("j", 4, 8, model="llama-2-7b", global_batch=8)
    snapshot = a_snapshot(FLEET, [job], curves={job.spec.curve_key: a_curve(times_s)}, now_s=LATER_S)

    def allot(view: Snapshot, capacity: int, settings: PolicySettings) -> Allotment:
        return Allotment({"j": 8}, {})

    thrifty = PolicySet("thrifty", "", "", allot=allot)
    assert told(decide(snapshot, thrifty).decisions) == [("StartJob", "j", 4)]
    assert told(decide(snapshot, replace(thrifty, requires_speedup=False)).decisions) == [("StartJob", "j", 8)]
