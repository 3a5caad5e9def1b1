"""Defragmentation: whole nodes for a job whose plans need them."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.decisions import ReasonCode, ResizeJob, StartJob
from scheduler.domain.fleet import DemandReading, Forecast
from scheduler.domain.gpu_sets import Gpus, GpuShape
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.scaling_curve import ScalingCurve
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.domain.tick_report import TickResult
from scheduler.scheduling.desired_state import apply_decisions
from scheduler.scheduling.policies.whole_nodes import count_no_whole_nodes
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_curve, a_fleet, a_job, a_loan, a_snapshot

SPREAD = (GpuShape.from_node_counts([(GPU, 7), (GPU, 1)]), GpuShape.from_node_counts([(GPU, 4), (GPU, 4)]))
LONG_S = 10_000.0


def whole_node_curve() -> ScalingCurve:
    """Return a curve with a plan for 8 GPUs of one node, and none for two other distributions."""
    curve = a_curve({GpuShape.packed(GPU, 8, 8): 1.0})
    for shape in SPREAD:
        curve = curve.with_infeasible(shape, "measured on whole nodes only")
    return curve


def small(job_id: str, on: Gpus, for_s: float = LONG_S) -> Job:
    gpus = sum(map(len, on.values()))
    return a_job(job_id, gpus, state=JobState.RUNNING, on=on, steps=int(for_s * gpus))


def whole(job_id: str = "whole") -> Job:
    return a_job(job_id, 8, steps=10, model="gpt2", global_batch=8)


def seen(*jobs: Job, training: int = 2) -> Snapshot:
    key = whole().spec.curve_key
    return a_snapshot(a_fleet(training=training, inference=0), jobs, curves={key: whole_node_curve()})


def decided(snapshot: Snapshot) -> TickResult:
    return decide(snapshot, load_policy_set("ebbtide"))


def resized(result: TickResult) -> dict[str, Gpus]:
    return {decision.job_id: decision.gpus for decision in result.decisions if isinstance(decision, ResizeJob)}


def test_policy_set_without_whole_nodes_moves_no_job() -> None:
    snapshot = seen(small("one", {"t0": (0,)}), small("four", {"t1": (0, 1, 2, 3)}), whole())
    policies = replace(load_policy_set("ebbtide"), count_whole_nodes=count_no_whole_nodes)
    assert resized(decide(snapshot, policies)) == {}


def test_small_job_moves_off_a_node_needed_whole() -> None:
    snapshot = seen(small("one", {"t0": (0,)}), small("four", {"t1": (0, 1, 2, 3)}), whole())
    result = decided(snapshot)
    assert resized(result) == {"one": {"t1": (4,)}}
    (move,) = result.decisions
    assert (move.reason.code, "whole" in move.reason.detail) == (ReasonCode.DEFRAGMENTED, True)
    assert result.waiting["whole"].code is ReasonCode.WAITING_FOR_PREEMPTED_WORKLOADS


def test_moved_job_gets_no_more_than_its_lowered_maximum() -> None:
    two, four = small("two", {"t0": (0, 1)}), small("four", {"t1": (0, 1, 2, 3)})
    lowered = replace(two, spec=replace(two.spec, min_gpus=1, max_gpus=1))
    assert resized(decided(seen(lowered, four, whole()))) == {"two": {"t1": (4,)}}


def test_moved_jobs_do_not_share_free_gpus() -> None:
    jobs = (
        *(small("one", {"t0": (0, 1)}), small("two", {"t0": (2, 3)})),
        *(small("lent", {"i0": tuple(range(6))}), small("six", {"t1": tuple(range(6))}), whole()),
    )
    snapshot = a_snapshot(
        a_fleet(training=2, inference=1, lending=LendingPolicy(headroom=0.0)),
        jobs,
        [a_loan("i0")],
        curves={whole().spec.curve_key: whole_node_curve()},
        demand={"inference": DemandReading(0.0, 0.0, 0.0)},
        forecasts={"inference": Forecast(0.0, 600.0, (0.999,), (0.0,), "scripted")},
    )
    assert resized(decided(snapshot)) == {"one": {"t1": (6, 7)}, "two": {"i0": (6, 7)}}


def test_no_move_if_waiting_is_cheaper() -> None:
    """A move costs 30 GPU-seconds; 8 GPUs would wait for 3 s."""
    snapshot = seen(small("one", {"t0": (0,)}, for_s=3.0), small("four", {"t1": (0, 1, 2, 3)}), whole())
    assert resized(decided(snapshot)) == {}


def test_no_move_without_free_gpus_elsewhere() -> None:
    snapshot = seen(small("six", {"t0": (0, 1, 2, 3, 4, 5)}), small("five", {"t1": (0, 1, 2, 3, 4)}), whole())
    assert resized(decided(snapshot)) == {}


def test_no_move_while_resizes_are_frozen() -> None:
    snapshot = seen(small("one", {"t0": (0,)}), small("four", {"t1": (0, 1, 2, 3)}), whole())
    assert resized(decided(replace(snapshot, switches=Switches(resizes_frozen=True)))) == {}


def test_no_move_for_a_job_that_may_fit_otherwise() -> None:
    snapshot = seen(small("one", {"t0": (0,)}), small("four", {"t1": (0, 1, 2, 3)}), whole())
    curve = a_curve({GpuShape.packed(GPU, 8, 8): 1.0})
    result = decided(replace(snapshot, curves={whole().spec.curve_key: curve}))
    assert (resized(result), result.waiting["whole"].code) == ({}, ReasonCode.WAITING_FOR_PLAN)


def test_later_jobs_stay_off_emptied_nodes() -> None:
    before = seen(small("one", {"t0": (0,)}), small("four", {"t1": (0, 1, 2, 3)}), whole())
    leaving = apply_decisions(before, decided(before).decisions)
    behind = a_job("behind", 4, steps=10**6)
    result = decided(replace(leaving, now_s=1.0, jobs={**leaving.jobs, "behind": behind}))
    assert result.decisions == ()
    assert "behind" in result.waiting


def test_job_starts_after_the_moved_job_left() -> None:
    before = seen(small("one", {"t0": (0,)}), small("four", {"t1": (0, 1, 2, 3)}), whole())
    leaving = apply_decisions(before, decided(before).decisions)
    moved = leaving.jobs["one"]
    left = replace(moved, allocation=replace(moved.allocation, releasing={}))
    result = decided(replace(leaving, now_s=60.0, jobs={**leaving.jobs, "one": left}))
    (start,) = result.decisions
    assert (type(start), getattr(start, "gpus", None)) == (StartJob, {"t0": tuple(range(8))})
