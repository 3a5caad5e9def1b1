"""Receipts of recalls: what each tick adds to them, from snapshots and decisions alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from scheduler.domain.decisions import (
    CancelRecall,
    Decision,
    LendNode,
    PreemptJob,
    Reason,
    ReasonCode,
    RecallChoice,
    RecallNode,
    ResizeJob,
    ReturnNode,
    StopJob,
)
from scheduler.domain.events import Event, EventCode
from scheduler.domain.fleet import LoanState
from scheduler.domain.gpu_sets import Gpus
from scheduler.domain.job import Job
from scheduler.domain.job_state import JobState
from scheduler.domain.observation import Observation, Run, RunPhase
from scheduler.domain.recall_receipts import SERVING_WAIT_S, JobExit, RecallOutcome, RecallReceipt
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.desired_state import apply_decisions, archive_ended
from scheduler.scheduling.event_messages import receipt_event
from scheduler.scheduling.recall_tracking import update_receipts
from tests.builders import GPU, a_fleet, a_job, a_loan, a_snapshot

FLEET = a_fleet(training=2, inference=2, gpus_per_node=4)
REASON = Reason(ReasonCode.INFERENCE_NEEDS_NODE, "inference needs it")
CHOICE = RecallChoice(120.0, nodes=1, alternatives=1)
RECALL = RecallNode("i0", 400.0, REASON, CHOICE)


class Ticks:
    """Plays ticks by hand: each applies a change of the observed state, then its decisions."""

    def __init__(self, *jobs: Job) -> None:
        self.now = a_snapshot(FLEET, jobs, [a_loan("i0"), a_loan("i1")], now_s=90.0, generation=4)
        self.closed: list[RecallReceipt] = []
        self.settled: list[RecallReceipt] = []

    def tick(
        self,
        now_s: float,
        *decisions: Decision,
        jobs: Sequence[Job] = (),
        events: Sequence[Event] = (),
        runs: Sequence[Run] = (),
        converged: int | None = None,
        serving: str = "",
        lost: str = "",
    ) -> None:
        before, observed = self.now, replace(self.now, now_s=now_s)
        observed = replace(observed, jobs={**observed.jobs, **{job.id: job for job in jobs}})
        if serving:
            node = replace(observed.nodes[serving], inference_gpus=2)
            observed = replace(observed, nodes={**observed.nodes, serving: node})
        if lost:
            loan = observed.loans[lost].transition_to(LoanState.LOST, now_s)
            observed = replace(observed, loans={**observed.loans, lost: loan})
        effective = before.generation if converged is None else converged
        seen = Observation(now_s, effective, tuple(runs))
        update = update_receipts(before, seen, observed, events, decisions)
        after = replace(apply_decisions(observed, decisions), recalls=update.open)
        self.now = archive_ended(replace(after, generation=before.generation + 1)).snapshot
        self.closed += update.closed
        self.settled += update.settled

    def receipt(self) -> RecallReceipt:
        return self.now.recalls["i0"]


def on(gpus: Gpus, job_id: str = "a") -> Job:
    return a_job(job_id, 2, 4, state=JobState.RUNNING, on=gpus, now_s=10.0)


def gone(job: Job) -> Job:
    """Return the job after its released GPUs were observed to be free."""
    return replace(job, allocation=replace(job.allocation, releasing={}))


def moved(target: Gpus) -> ResizeJob:
    count = sum(map(len, target.values()))
    return ResizeJob("a", target, build_data_parallel_plan(GPU, count), 400.0, REASON)


def test_receipt_of_a_job_that_moves_has_every_time_in_order() -> None:
    ticks = Ticks(on({"i0": (0, 1)}))
    ticks.tick(100.0, RECALL, moved({"t0": (0, 1)}))
    (job,) = ticks.receipt().jobs
    assert (job.job_id, job.gpus, job.exit, job.decided_at_s) == ("a", 2, JobExit.MOVED, 100.0)
    assert (ticks.receipt().code, ticks.receipt().choice) == (ReasonCode.INFERENCE_NEEDS_NODE, CHOICE)
    ticks.tick(101.0, converged=4)
    assert ticks.receipt().acknowledged_at_s is None
    ticks.tick(102.0, converged=5)
    assert ticks.receipt().acknowledged_at_s == 102.0
    ticks.tick(110.0, ReturnNode("i0", REASON), jobs=[gone(ticks.now.jobs["a"])])
    assert (ticks.receipt().freed_at_s, ticks.receipt().returned_at_s, ticks.receipt().outcome) == (
        110.0,
        110.0,
        "in_time",
    )
    assert ticks.receipt().jobs[0].left_at_s == 110.0
    assert [each.outcome for each in ticks.settled] == [RecallOutcome.IN_TIME]
    ticks.tick(170.0, serving="i0")
    (closed,) = ticks.closed
    assert (closed.serving_at_s, closed.closed_at_s, ticks.now.recalls) == (170.0, 170.0, {})
    numbers = receipt_event(closed).numbers
    assert (numbers["return_s"], numbers["early_s"], numbers["serving_after_s"]) == (10.0, 290.0, 60.0)
    assert (numbers["cost_gpu_s"], numbers["alternatives"], numbers["jobs_moved"]) == (120.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("decision", "job_exit"),
    [
        (moved({"t0": (0, 1, 2)}), JobExit.SHRANK),
        (moved({"t0": (0, 1, 2, 3)}), JobExit.MOVED),
        (PreemptJob("a", 400.0, REASON), JobExit.PREEMPTED),
        (StopJob("a", 400.0, REASON), JobExit.ENDED),
    ],
    ids=["shrank", "moved", "preempted", "stopped"],
)
def test_exit_follows_from_the_first_decision_that_leaves_the_node(decision: Decision, job_exit: JobExit) -> None:
    ticks = Ticks(on({"i0": (0, 1), "t1": (0, 1)}))
    ticks.tick(100.0, RECALL)
    assert ticks.receipt().jobs[0].exit is None
    ticks.tick(130.0, decision)
    (job,) = ticks.receipt().jobs
    assert (job.exit, job.decided_at_s, job.order_generation) == (job_exit, 130.0, 6)


def test_job_that_keeps_the_node_has_no_exit_yet() -> None:
    ticks = Ticks(on({"i0": (0, 1), "t1": (0, 1)}))
    ticks.tick(100.0, RECALL, moved({"i0": (0, 1)}))
    assert ticks.receipt().jobs[0].exit is None


def test_job_that_fails_on_the_node_ended_by_itself_and_its_loss_does_not_count() -> None:
    ticks = Ticks(on({"i0": (0, 1)}))
    ticks.tick(100.0, RECALL)
    failed = replace(ticks.now.jobs["a"], allocation=a_job("a", releasing={"i0": (0, 1)}).allocation)
    loss = Event(120.0, EventCode.JOB_LOST_WORK, "a", "", {"gpu_s": 50.0, "steps": 5.0})
    ticks.tick(120.0, jobs=[failed], events=[loss])
    (job,) = ticks.receipt().jobs
    assert (job.exit, job.lost_gpu_s, job.left_at_s, job.order_generation) == (JobExit.ENDED, 0.0, None, 0)
    assert ticks.receipt().acknowledged_at_s is None


def test_job_that_was_leaving_before_the_recall() -> None:
    leaving = a_job("a", 2, 4, state=JobState.PREEMPTED, releasing={"i0": (0, 1)})
    leaving = replace(leaving, allocation=replace(leaving.allocation, asked_at_generation=3))
    ticks = Ticks(leaving)
    ticks.tick(100.0, RECALL)
    assert ticks.receipt().jobs[0].exit is JobExit.LEAVING
    ticks.tick(101.0)
    assert ticks.receipt().acknowledged_at_s == 101.0


def test_ranks_that_report_leaving_have_been_told() -> None:
    ticks = Ticks(on({"i0": (0, 1)}))
    ticks.tick(100.0, RECALL, moved({"t0": (0, 1)}))
    ticks.tick(105.0, runs=[Run("a", 1, RunPhase.LEAVING, {"i0": (0, 1)})], converged=4)
    assert ticks.receipt().acknowledged_at_s == 105.0


def test_lost_work_is_shared_between_the_recalled_nodes_of_a_job() -> None:
    ticks = Ticks(on({"i0": (0, 1, 2), "i1": (0,)}))
    both = (RECALL, replace(RECALL, node="i1"), PreemptJob("a", 400.0, REASON))
    ticks.tick(100.0, *both)
    loss = Event(110.0, EventCode.JOB_LOST_WORK, "a", "", {"gpu_s": 80.0, "steps": 4.0})
    ticks.tick(110.0, jobs=[gone(ticks.now.jobs["a"])], events=[loss])
    shares = {node: (receipt.lost_gpu_s, receipt.lost_steps) for node, receipt in ticks.now.recalls.items()}
    assert shares == {"i0": (60.0, 3.0), "i1": (20.0, 1.0)}


def test_newer_checkpoint_counts_as_saved() -> None:
    ticks = Ticks(on({"i0": (0, 1)}))
    ticks.tick(100.0, RECALL, PreemptJob("a", 400.0, REASON))
    job = ticks.now.jobs["a"]
    ticks.tick(104.0, jobs=[replace(job, progress=replace(job.progress, checkpoint_steps=7.0))])
    assert ticks.receipt().jobs[0].saved


@pytest.mark.parametrize(("freed_at_s", "outcome"), [(400.0, RecallOutcome.IN_TIME), (400.5, RecallOutcome.LATE)])
def test_node_is_late_if_jobs_hold_it_after_the_deadline(freed_at_s: float, outcome: RecallOutcome) -> None:
    ticks = Ticks(on({"i0": (0, 1)}))
    ticks.tick(100.0, RECALL, PreemptJob("a", 400.0, REASON))
    ticks.tick(freed_at_s, ReturnNode("i0", REASON), jobs=[gone(ticks.now.jobs["a"])])
    assert ticks.receipt().outcome is outcome


def test_node_without_jobs_is_free_at_once() -> None:
    ticks = Ticks()
    ticks.tick(100.0, RECALL)
    assert (ticks.receipt().freed_at_s, ticks.receipt().jobs) == (100.0, ())


def test_cancelled_recall_has_a_complete_receipt_and_the_next_one_gets_another() -> None:
    ticks = Ticks(on({"i0": (0, 1)}))
    ticks.tick(100.0, RECALL)
    ticks.tick(120.0, CancelRecall("i0", REASON))
    ticks.tick(140.0, replace(RECALL, return_by_s=440.0))
    (closed,) = ticks.closed
    assert (closed.outcome, closed.freed_at_s, closed.closed_at_s) == (RecallOutcome.CANCELLED, None, 120.0)
    assert closed.loan_id == ticks.receipt().loan_id
    assert closed.id != ticks.receipt().id


def test_recall_of_a_node_that_goes_down_is_lost() -> None:
    ticks = Ticks(on({"i0": (0, 1)}))
    ticks.tick(100.0, RECALL)
    ticks.tick(130.0, lost="i0")
    assert [(each.outcome, each.settled_at_s) for each in ticks.closed] == [(RecallOutcome.LOST, 130.0)]
    assert ticks.settled == ticks.closed


def test_receipt_closes_when_training_gets_the_node_again_or_after_a_day() -> None:
    ticks = Ticks()
    both = (replace(RECALL, node="i1"), RECALL)
    ticks.tick(100.0, *both)
    ticks.tick(101.0, ReturnNode("i0", REASON), ReturnNode("i1", REASON))
    ticks.tick(500.0, LendNode("i1", REASON))
    assert [(each.node, each.serving_at_s) for each in ticks.closed] == [("i1", None)]
    ticks.tick(100.0 + SERVING_WAIT_S)
    assert len(ticks.closed) == 1
    ticks.tick(101.0 + SERVING_WAIT_S)
    assert [each.node for each in ticks.closed] == ["i1", "i0"]


def test_nothing_changes_without_recalls() -> None:
    snapshot = Snapshot()
    assert update_receipts(snapshot, Observation(0.0, 0), snapshot, (), ()).open is snapshot.recalls
