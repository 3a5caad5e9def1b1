"""Every invariant with a decision that breaks it, and every breach with a state that has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.decisions import (
    CancelRecall,
    Decision,
    LendNode,
    PreemptJob,
    ProposeLoan,
    Reason,
    ReasonCode,
    RecallNode,
    RejectJob,
    ResizeJob,
    ReturnNode,
    StartJob,
    decision_subject,
)
from scheduler.domain.fleet import DemandReading, Loan, LoanState, NodeState, Pool, PoolKind
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_records import MemoryRecord
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingMode, LendingPolicy
from scheduler.domain.observation import Observation, Run, RunPhase
from scheduler.domain.pod_requirements import NodeCapacity
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import BreachKind, Invariant, Violation
from scheduler.scheduling.desired_state import apply_decision
from scheduler.scheduling.legality import find_breaches, find_violation
from scheduler.scheduling.mutable_snapshot import MutableSnapshot
from tests.builders import GPU, a_fleet, a_job, a_loan, a_node, a_snapshot

WHY = Reason(ReasonCode.FIRST_IN_ORDER, "next in order")
NOW_S = 100.0


def world() -> Snapshot:
    """t0: running jobs on 0-1 and 6. t1: down, with a job on 7. h0: another model. i0: lent. i1: recalled, used.

    i2: not lent. i3: GPUs 4-7 are lent. Limit: 5. Pool notice: n0 not lent, n1 proposed, n2 proposed with its notice
    over, n3 vetoed. Pool shadow, in shadow mode: s0.
    """
    pools, nodes = a_fleet(training=2, inference=4)
    for pool, lending in (
        ("notice", LendingPolicy(notice_s=60.0)),
        ("shadow", LendingPolicy(mode=LendingMode.SHADOW)),
    ):
        pools[pool] = Pool(pool, PoolKind.INFERENCE, lending)
    nodes |= {name: a_node(name, "notice") for name in ("n0", "n1", "n2")}
    nodes |= {"n3": a_node("n3", "notice", vetoed_until_s=NOW_S + 1.0), "s0": a_node("s0", "shadow")}
    nodes = {**nodes, "t1": replace(nodes["t1"], state=NodeState.DOWN), "h0": a_node("h0", gpu="h100-80g")}
    nodes["full"] = a_node("full", capacity=NodeCapacity(allocatable=(("pods", 1),), requested=(("pods", 1),)))
    jobs = [
        a_job("queued", 2, 4, gpu=GPU),
        a_job("runner", 2, 4, state=JobState.RUNNING, on={"t0": (0, 1)}),
        a_job("fixed", 1, 2, state=JobState.RUNNING, on={"t0": (6,)}, queue="free", on_resize=OnResize.NEVER),
        a_job("stranded", 1, state=JobState.RUNNING, on={"t1": (7,)}, queue="free", on_resize=None),
        a_job("owned-only", 1, queue="free", on_resize=OnResize.NEVER),
        a_job("leaver", 2, state=JobState.PREEMPTED, releasing={"i1": (0, 1)}),
    ]
    loans = [a_loan("i0"), a_loan("i1", LoanState.RECALLED, return_by_s=NOW_S + 10)]
    loans.append(replace(a_loan("i3"), gpus=4, indices=(4, 5, 6, 7)))
    for name, notice_ends_s in (("n1", NOW_S + 1.0), ("n2", NOW_S)):
        loans.append(Loan(f"{name}-1", name, "notice", LoanState.PROPOSED, notice_ends_s, 0.0, proposed_at_s=0.0))
    queues = {"default": JobQueue("default", limit_gpus=5), "free": JobQueue("free")}
    return a_snapshot((pools, nodes), jobs, loans, now_s=NOW_S, queues=queues)


def start(gpus: Gpus, *, plan_gpus: int = 0, gpu: str = GPU, reason: Reason = WHY) -> StartJob:
    return StartJob("queued", gpus, build_data_parallel_plan(gpu, plan_gpus or sum(map(len, gpus.values()))), reason)


FITS = {"t0": (2, 3)}


@pytest.mark.parametrize(
    ("queue", "decision", "detail"),
    [
        (JobQueue("default", limit_gpus=3), start(FITS), "needs 2 GPUs; queue default uses 2 of its limit of 3"),
        (
            JobQueue("default", user_limit_gpus=3),
            ResizeJob("runner", {"t0": (0, 1, 2, 3)}, build_data_parallel_plan(GPU, 4), NOW_S, WHY),
            "needs 2 GPUs; its owner has 2 of 3 GPUs in queue default",
        ),
    ],
)
def test_decision_above_a_queue_limit_is_a_violation(queue: JobQueue, decision: Decision, detail: str) -> None:
    limited = replace(world(), queues={"default": queue, "free": JobQueue("free")})
    assert find_violation(MutableSnapshot(limited), decision) == Violation(
        Invariant.QUEUE_LIMIT_EXCEEDED, decision_subject(decision), detail
    )
    wider = replace(queue, limit_gpus=None, user_limit_gpus=4)
    draft = MutableSnapshot(replace(limited, queues={**limited.queues, "default": wider}))
    assert find_violation(draft, decision) is None
    apply_decision(draft, decision)
    both = {job_id: draft.jobs[job_id].allocation.target_gpus for job_id in ("queued", "runner")}
    assert sum(both.values()) == draft.quota.used("default") == 4, "decisions count once they are taken"


BROKEN: list[tuple[Decision, Invariant]] = [
    (PreemptJob("nobody", NOW_S, WHY), Invariant.UNKNOWN_SUBJECT),
    (start({"t0": (2, 3, 4, 5)}), Invariant.QUEUE_LIMIT_EXCEEDED),
    (LendNode("nowhere", WHY), Invariant.UNKNOWN_SUBJECT),
    (start({"full": (2, 3)}), Invariant.NODE_DOES_NOT_FIT),
    (PreemptJob("queued", NOW_S, WHY), Invariant.WRONG_STATE),
    (RejectJob("leaver", WHY), Invariant.WRONG_STATE),
    (RecallNode("i2", NOW_S, WHY), Invariant.WRONG_STATE),
    (CancelRecall("i0", WHY), Invariant.WRONG_STATE),
    (ReturnNode("i0", WHY), Invariant.WRONG_STATE),
    (LendNode("i0", WHY), Invariant.WRONG_STATE),
    (start(FITS, reason=Reason(ReasonCode.FIRST_IN_ORDER, "")), Invariant.NO_REASON),
    (start(FITS, gpu="h100-80g"), Invariant.PLAN_SIZE_MISMATCH),
    (start({"t0": (1, 2)}), Invariant.GPU_HELD_TWICE),
    (start({"t0": (2, 2)}), Invariant.GPU_HELD_TWICE),
    (start({"nowhere": (0, 1)}), Invariant.GPU_UNKNOWN),
    (start({"t0": (7, 8)}), Invariant.GPU_UNKNOWN),
    (ResizeJob("fixed", {"t0": (6, 7)}, build_data_parallel_plan(GPU, 2), NOW_S, WHY), Invariant.NOT_RESIZABLE),
    (StartJob("owned-only", {"i0": (0,)}, build_data_parallel_plan(GPU, 1), WHY), Invariant.LENT_NODE_BARRED),
    (start({"i2": (0, 1)}), Invariant.NODE_NOT_SERVING),
    (start({"i3": (3, 4)}), Invariant.GPU_NOT_LENT),
    (start({"i1": (6, 7)}), Invariant.NODE_NOT_SERVING),
    (start({"t1": (0, 1)}), Invariant.NODE_NOT_SERVING),
    (start({"t0": (2,)}), Invariant.OUT_OF_RANGE),
    (start({"t0": (2, 3, 4, 5, 6)}), Invariant.OUT_OF_RANGE),
    (start({"h0": (0, 1)}), Invariant.WRONG_GPU_MODEL),
    (start(FITS, plan_gpus=3), Invariant.PLAN_SIZE_MISMATCH),
    (
        replace(start(FITS), plan=replace(build_data_parallel_plan(GPU, 2), peak_bytes_per_gpu=10**12)),
        Invariant.PEAK_MEMORY_EXCEEDED,
    ),
    (
        ResizeJob("runner", FITS, build_data_parallel_plan(GPU, 2), NOW_S, WHY, (("t0", 2),)),
        Invariant.RANK_PLACEMENT_MISMATCH,
    ),
    (
        ResizeJob("runner", FITS, build_data_parallel_plan(GPU, 2), NOW_S, WHY, (("t0", 2), ("t0", 2))),
        Invariant.RANK_PLACEMENT_MISMATCH,
    ),
    (
        ResizeJob("runner", FITS, build_data_parallel_plan(GPU, 2), NOW_S, WHY, (("t0", 2), ("t0", 4))),
        Invariant.RANK_PLACEMENT_MISMATCH,
    ),
    (ReturnNode("i1", WHY), Invariant.NODE_STILL_USED),
    (PreemptJob("runner", NOW_S - 1.0, WHY), Invariant.DEADLINE_PASSED),
    (RecallNode("i0", NOW_S - 1.0, WHY), Invariant.DEADLINE_PASSED),
    (ProposeLoan("i0", NOW_S, WHY), Invariant.WRONG_STATE),
    (ProposeLoan("n0", NOW_S - 1.0, WHY), Invariant.DEADLINE_PASSED),
    (LendNode("n0", WHY), Invariant.NOTICE_RUNNING),
    (LendNode("n1", WHY), Invariant.NOTICE_RUNNING),
    (ProposeLoan("n1", NOW_S, WHY), Invariant.WRONG_STATE),
    (ProposeLoan("n3", NOW_S, WHY), Invariant.LOAN_VETOED),
    (ProposeLoan("s0", NOW_S, WHY), Invariant.POOL_IN_SHADOW),
    (LendNode("s0", WHY), Invariant.POOL_IN_SHADOW),
]
KEPT: list[Decision] = [
    ResizeJob("stranded", {"t0": (7,)}, build_data_parallel_plan(GPU, 1), NOW_S, WHY),
    StartJob("owned-only", {"t0": (7,)}, build_data_parallel_plan(GPU, 1), WHY),
    start(FITS),
    start({"i0": (0, 1)}),
    ResizeJob("runner", {"t0": (0, 1, 2)}, build_data_parallel_plan(GPU, 3), NOW_S, WHY),
    ResizeJob("runner", FITS, build_data_parallel_plan(GPU, 2), NOW_S, WHY, (("t0", 3), ("t0", 2))),
    PreemptJob("runner", NOW_S, WHY),
    LendNode("i2", WHY),
    ProposeLoan("n0", NOW_S, WHY),
    LendNode("n2", WHY),
    ReturnNode("n1", WHY),
    RecallNode("i0", NOW_S, WHY),
    CancelRecall("i1", WHY),
]


@pytest.mark.parametrize(("decision", "law"), BROKEN, ids=lambda item: str(item)[:60])
def test_violation_names_the_broken_invariant(decision: Decision, law: Invariant) -> None:
    violation = find_violation(MutableSnapshot(world()), decision)
    assert violation is not None
    assert violation.invariant is law
    assert violation.detail


@pytest.mark.parametrize("decision", KEPT, ids=lambda item: str(item)[:60])
def test_legal_decision_has_no_violation(decision: Decision) -> None:
    assert find_violation(MutableSnapshot(world()), decision) is None


def test_memory_check_uses_the_jobs_correction() -> None:
    """70 of 80 GiB are predicted, and the job failed with corrections of 1.1, then 1.2."""
    planned = replace(build_data_parallel_plan(GPU, 2), peak_bytes_per_gpu=70 * 2**30)
    for gpus, decision in (
        ("queued", start(FITS)),
        ("runner", ResizeJob("runner", {"t0": (0, 1)}, planned, NOW_S, WHY)),
    ):
        for percent, law in ((110, None), (115, Invariant.PEAK_MEMORY_EXCEEDED), (120, Invariant.PEAK_MEMORY_EXCEEDED)):
            snapshot = world()
            job = replace(snapshot.jobs[gpus], memory=MemoryRecord(percent))
            corrected = replace(snapshot, jobs={**snapshot.jobs, gpus: job})
            violation = find_violation(MutableSnapshot(corrected), replace(decision, plan=planned))
            assert (violation.invariant if violation else None) is law


def test_every_invariant_has_an_example() -> None:
    assert {law for _, law in BROKEN} == set(Invariant)


def kinds(snapshot: Snapshot, *runs: Run) -> set[BreachKind]:
    return {breach.kind for breach in find_breaches(snapshot, Observation(NOW_S, 0, runs))}


def test_consistent_state_has_no_breach() -> None:
    snapshot = a_snapshot(a_fleet(training=1, inference=1), loans=[a_loan("i0")])
    assert kinds(snapshot, Run("j", 1, RunPhase.RUNNING, {"t0": (0,), "i0": (0,)})) == set()


def test_cordoned_gpus_count_as_missing_for_inference() -> None:
    fleet = a_fleet(training=1, inference=3)
    demand = {"inference": DemandReading(NOW_S, 12.0, 12.0)}
    snapshot = a_snapshot(fleet, loans=[a_loan("i0")], now_s=NOW_S, demand=demand)
    assert kinds(snapshot) == set()
    closed = {**snapshot.nodes, "i1": replace(snapshot.nodes["i1"], cordoned=True, inference_gpus=3)}
    assert kinds(replace(snapshot, nodes=closed)) == {BreachKind.INFERENCE_SHORT}
    assert kinds(replace(snapshot, nodes=closed, loans={})) == set(), "nothing is lent: that is its own trouble"
    all_lent = a_snapshot(a_fleet(training=0, inference=1), loans=[a_loan("i0")], now_s=NOW_S, demand=demand)
    assert kinds(all_lent) == {BreachKind.INFERENCE_SHORT}
    away = {**snapshot.nodes, "i0": replace(snapshot.nodes["i0"], state=NodeState.DOWN)}
    assert kinds(replace(snapshot, nodes=away)) == {BreachKind.NODE_DOWN}, "what is lent and down is missing once"


def test_breaches_are_found() -> None:
    assert kinds(world()) == {BreachKind.NODE_DOWN}
    assert BreachKind.RECALL_LATE in kinds(replace(world(), now_s=NOW_S + 11))
    short = replace(world(), demand={"inference": DemandReading(NOW_S, 13.0, 13.0)})
    assert BreachKind.INFERENCE_SHORT in kinds(short)
    twice = (Run("a", 1, RunPhase.RUNNING, {"t0": (0,)}), Run("a", 2, RunPhase.RUNNING, {"t0": (0,)}))
    assert BreachKind.GPU_HELD_TWICE in kinds(world(), *twice)
    assert BreachKind.ON_UNLENT_NODE in kinds(world(), Run("a", 1, RunPhase.RUNNING, {"i2": (0,)}))


def test_loan_of_a_node_that_is_not_lendable_is_a_violation() -> None:
    snapshot = world()
    nodes = {**snapshot.nodes, "i2": replace(snapshot.nodes["i2"], lendable=False)}
    assert find_violation(MutableSnapshot(snapshot), LendNode("i2", WHY)) is None
    found = find_violation(MutableSnapshot(replace(snapshot, nodes=nodes)), LendNode("i2", WHY))
    assert found is not None
    assert found.invariant is Invariant.WRONG_STATE
