"""Loans, recalls and shortages, counted from the states around each tick."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.fleet import LendingPolicy, Loan, LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.simulator.demand import DemandChange
from scheduler.simulator.recorder import LoanStatistics
from scheduler.simulator.report import ShortageRatio
from tests.builders import a_fleet, a_loan

POOLS, NODES = a_fleet(training=1, inference=2, gpus_per_node=4, lending=LendingPolicy(cold_start_s=100.0))


class Story:
    """States of one loan book, told in order of time."""

    def __init__(self) -> None:
        self.book = LoanStatistics(POOLS.values(), NODES.values())
        self.state = Snapshot(pools=POOLS, nodes=NODES)

    def at(self, now_s: float, *loans: Loan) -> None:
        after = replace(self.state, now_s=now_s, loans={loan.node: loan for loan in loans})
        self.book.record_tick(self.state, after)
        self.state = after

    def demand(self, at_s: float, gpus: float, *, first_pass: bool = True) -> None:
        self.book.record_demand_change(DemandChange(at_s, "inference", gpus, first_pass))


LENT = a_loan("i1")
RECALLED = a_loan("i1", LoanState.RECALLED, return_by_s=1000.0)


def test_a_loan_is_counted_once_with_its_time_and_its_recall() -> None:
    story = Story()
    story.at(0.0, a_loan("i1", LoanState.OFFERED))
    story.at(60.0, LENT)
    story.at(700.0, RECALLED)
    story.at(800.0, RECALLED)
    story.at(1000.0)
    book = story.book
    assert (book.loans, book.recalls, book.recalls_late, book.loaned_gpu_s) == (1, 1, 0, 4000.0)


def test_a_node_that_comes_home_after_its_deadline_is_late() -> None:
    story = Story()
    story.at(700.0, RECALLED)
    story.at(1000.5)
    assert story.book.recalls_late == 1


def test_a_loan_that_is_still_out_at_the_end_counts_up_to_then() -> None:
    story = Story()
    story.at(100.0, LENT)
    story.book.finish(replace(story.state, now_s=600.0))
    assert story.book.loaned_gpu_s == 2400.0


def test_an_interval_is_short_when_loans_leave_fewer_gpus_than_needed() -> None:
    story = Story()
    story.demand(0.0, 3.0)
    story.at(10.0, LENT)
    story.demand(600.0, 5.0)
    story.demand(1200.0, 4.0)
    story.book.finish(replace(story.state, now_s=1800.0))
    assert story.book.compute_short_ratio() == ShortageRatio(1 / 3, 1 / 3)


def test_a_returned_node_serves_only_after_its_cold_start() -> None:
    story = Story()
    story.at(0.0, LENT)
    story.at(950.0)
    story.demand(1000.0, 8.0, first_pass=False)
    story.demand(1600.0, 8.0, first_pass=False)
    story.book.finish(replace(story.state, now_s=2200.0))
    assert story.book.compute_short_ratio() == ShortageRatio(0.0, 0.5)


def test_demand_above_the_capacity_is_not_the_loans_fault() -> None:
    story = Story()
    story.demand(0.0, 50.0)
    story.book.finish(replace(story.state, now_s=600.0))
    assert story.book.compute_short_ratio() == ShortageRatio(0.0, 0.0)
