"""LoanStatistics counts loans and recalls from the snapshots around each tick."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.simulator.recorder import LoanStatistics
from tests.builders import a_fleet, a_loan

POOLS, NODES = a_fleet(training=1, inference=2, gpus_per_node=4, lending=LendingPolicy(cold_start_s=100.0))


class Timeline:
    """Snapshots of one simulation in order of time."""

    def __init__(self) -> None:
        self.book = LoanStatistics(POOLS.values(), NODES.values(), PolicySettings(full_pass_period_s=150.0))
        self.state = Snapshot(pools=POOLS, nodes=NODES)

    def at(self, now_s: float, *loans: Loan) -> None:
        after = replace(self.state, now_s=now_s, loans={loan.node: loan for loan in loans})
        self.book.record_tick(self.state, after)
        self.state = after


LENT = a_loan("i1")
UNUSED = replace(LENT, unused_since_s=100.0)
RECALLED = a_loan("i1", LoanState.RECALLED, return_by_s=1000.0)


def test_loan_counts_once_with_duration_and_recall() -> None:
    story = Timeline()
    story.at(0.0, a_loan("i1", LoanState.OFFERED))
    story.at(60.0, LENT)
    story.at(700.0, RECALLED)
    story.at(800.0, RECALLED)
    story.at(1000.0)
    book = story.book
    assert (book.loans, book.recalls, book.recalls_late, book.loaned_gpu_s) == (1, 1, 0, 4000.0)


def test_node_returned_after_its_deadline_is_late() -> None:
    story = Timeline()
    story.at(700.0, RECALLED)
    story.at(1000.5)
    assert story.book.recalls_late == 1


def test_open_loan_counts_until_the_end() -> None:
    story = Timeline()
    story.at(100.0, LENT)
    story.book.finish(replace(story.state, now_s=600.0))
    assert story.book.loaned_gpu_s == 2400.0


@pytest.mark.parametrize(
    ("ends", "unused_s"),
    [
        ([UNUSED, LENT, None], 200.0),
        ([UNUSED, replace(RECALLED, unused_since_s=100.0, recalled_at_s=900.0), None], 500.0),
        ([UNUSED, None], 500.0),
        ([replace(UNUSED, unused_since_s=700.0), None], 0.0),
    ],
    ids=["used again", "recalled", "returned", "below the minimum loan"],
)
def test_unused_time_beyond_the_minimum_loan(ends: list[Loan | None], unused_s: float) -> None:
    story = Timeline()
    for now_s, loan in zip((600.0, 900.0, 1500.0), ends, strict=False):
        story.at(now_s, *([loan] if loan else []))
    assert story.book.unused_gpu_s == unused_s * 4
