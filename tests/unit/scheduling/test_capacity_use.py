"""Use of GPUs by pool: every GPU counts once, and commits integrate every second once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.capacity_history import (
    CAPACITY_TIERS,
    GPU_USES,
    MAX_FIELDS,
    SUMMED_FIELDS,
    CapacityBin,
    PoolUse,
    build_bins,
    roll_up,
)
from scheduler.domain.fleet import DemandReading, Loan, LoanState, NodeState, Pool, PoolKind
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_state import JobState
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.capacity_use import (
    UNOBSERVED_AFTER_S,
    classify_capacity,
    count_loan_changes,
    integrate_capacity,
)
from tests.builders import GPU, a_fleet, a_job, a_loan, a_node, a_snapshot

POOLS = {
    "own": Pool("own", PoolKind.TRAINING), "serve": Pool("serve", PoolKind.INFERENCE),
    "empty": Pool("empty", PoolKind.INFERENCE),
}  # fmt: skip


def running(job_id: str, on: dict[str, tuple[int, ...]]) -> Job:
    return a_job(job_id, state=JobState.RUNNING, on=on)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Return any fleet, also one with GPUs that are counted twice by their observers."""
    nodes, jobs, loans = [], [], []
    for at in range(draw(st.integers(0, 6))):
        pool, gpus = draw(st.sampled_from(["own", "serve"])), draw(st.integers(1, 8))
        node = a_node(
            f"n{at}",
            pool,
            gpus=gpus,
            gpu=draw(st.sampled_from([GPU, "h100"])),
            state=draw(st.sampled_from(NodeState)),
            cordoned=draw(st.booleans()),
            inference_gpus=draw(st.integers(0, 9)),
            other_gpus=draw(st.integers(0, 9)),
        )
        nodes.append(node)
        if held := draw(st.sets(st.integers(0, gpus - 1))):
            jobs.append(running(f"j{at}", {node.name: tuple(sorted(held))}))
        if pool == "serve" and draw(st.booleans()):
            live = st.sampled_from([LoanState.PROPOSED, LoanState.OFFERED, LoanState.ACTIVE, LoanState.RECALLED])
            loans.append(replace(a_loan(node.name, draw(live)), pool=pool))
    for at in range(draw(st.integers(0, 3))):
        pending = a_job(f"w{at}", draw(st.integers(1, 4)), gpu=draw(st.sampled_from(["", GPU, "h100"])))
        jobs.append(replace(pending, intent=draw(st.sampled_from(Intent))))
    demand = {"serve": DemandReading(0.0, 3.0, draw(st.floats(0, 99)))} if draw(st.booleans()) else {}
    fleet = (POOLS, {node.name: node for node in nodes})
    return replace(a_snapshot(fleet, jobs, loans, demand=demand), now_s=draw(st.floats(0, 1e6)))


@given(snapshots())
def test_uses_add_up_to_the_gpus_of_each_pool(snapshot: Snapshot) -> None:
    gpus = Counter[str]()
    for node in snapshot.nodes.values():
        gpus[node.pool] += node.gpus
    uses = classify_capacity(snapshot)
    assert {pool: use.gpus for pool, use in uses.items()} == {pool: gpus[pool] for pool in POOLS}
    for pool, use in uses.items():
        assert all(getattr(use, name) >= 0 for name in GPU_USES)
        assert use.lent_idle_waited <= use.lent_idle
        assert use.free_waited <= use.free
        assert (use.used == 0) or pool == "own"
        assert (use.lent_used, use.lent_idle) == (0, 0) or pool == "serve"
        assert use.pending_jobs or not (use.free_waited or use.lent_idle_waited)


@given(snapshots(), st.lists(st.floats(0.01, UNOBSERVED_AFTER_S), min_size=1, max_size=5))
@settings(max_examples=50)
def test_every_second_is_integrated_once_in_every_tier(snapshot: Snapshot, pauses_s: list[float]) -> None:
    bins, now_s = list[CapacityBin](), snapshot.now_s
    for pause_s in pauses_s:
        bins += integrate_capacity(replace(snapshot, now_s=now_s), now_s + pause_s)
        now_s += pause_s
    whole = {pool: scale(use, now_s - snapshot.now_s) for pool, use in classify_capacity(snapshot).items()}
    for tier in CAPACITY_TIERS:
        rolled = roll_up(bins, tier.step_s)
        assert all(each.at_s % tier.step_s == 0 and 0 < each.seconds <= tier.step_s + 1e-6 for each in rolled)
        for pool, expected in whole.items():
            mine = [each for each in rolled if each.pool == pool]
            for name in SUMMED_FIELDS:
                total = sum(getattr(each, name) for each in mine)
                assert total == pytest.approx(getattr(expected, name), rel=1e-6, abs=1e-4), name
            for name in MAX_FIELDS:
                assert max(getattr(each, name) for each in mine) == getattr(expected, name)


def scale(use: PoolUse, seconds: float) -> CapacityBin:
    """Return a use that lasted so long as one bin, whose place does not matter."""
    [one] = build_bins("p", use, from_s=0.0, to_s=1.0)
    return replace(one, **{name: getattr(one, name) * seconds for name in SUMMED_FIELDS})


def use_of(pool: str, jobs: Iterable[Job] = (), loans: Iterable[Any] = (), **changes: Any) -> PoolUse:
    """Return the use of one node with 8 GPUs."""
    pools, nodes = a_fleet(training=1, inference=1)
    nodes = {name: replace(node, **changes) if node.pool == pool else node for name, node in nodes.items()}
    return classify_capacity(a_snapshot((pools, nodes), jobs, loans))[pool]


PENDING = a_job("w", 2)


def test_lent_nodes_are_used_or_idle_until_their_return() -> None:
    job = running("j", {"i0": (0, 1)})
    assert use_of("inference", [job], [a_loan("i0")])[:7] == (0, 0, 2, 6, 0, 0, 0)
    assert use_of("inference", [job, PENDING], [a_loan("i0", LoanState.RECALLED)]).lent_idle_waited == 6
    assert use_of("inference", [], [a_loan("i0", LoanState.OFFERED)], inference_gpus=3)[:7] == (3, 0, 0, 0, 5, 0, 0)
    assert use_of("inference", [job])[:7] == (0, 0, 2, 0, 6, 0, 0), "the ranks have not left a returned node"


def test_unused_gpus_of_a_cordoned_node_are_down_and_used_ones_are_not() -> None:
    job = running("j", {"t0": (0, 1, 2)})
    cordoned = use_of("training", [job, PENDING], cordoned=True, other_gpus=1)
    assert (cordoned[:7], cordoned.free_waited) == ((0, 3, 0, 0, 0, 1, 4), 0)
    assert use_of("training", [job], state=NodeState.DOWN)[:7] == (0, 0, 0, 0, 0, 0, 8)


@pytest.mark.parametrize(
    ("pending", "waited"),
    [(PENDING, 8), (a_job("w", gpu="h100"), 0), (a_job("w", gpu=GPU), 8), (replace(PENDING, intent=Intent.CANCEL), 0)],
)
def test_free_gpus_wait_for_jobs_that_accept_their_model(pending: Job, waited: int) -> None:
    use = use_of("training", [pending])
    assert (use.free, use.free_waited, use.pending_jobs) == (8, waited, waited // 8)


def test_pool_is_short_only_while_lending_takes_what_demand_needs() -> None:
    fleet = a_fleet(training=0, inference=2)
    for gpus, loans, is_short in ((8.0, ["i0"], False), (8.5, ["i0"], True), (16.0, [], False)):
        demand = {"inference": DemandReading(0.0, gpus, gpus)}
        use = classify_capacity(a_snapshot(fleet, (), map(a_loan, loans), demand=demand))["inference"]
        assert (use.is_short, use.demand_gpus, use.lent_nodes) == (is_short, gpus, len(loans))


def test_loans_are_counted_when_they_begin_are_recalled_and_return() -> None:
    fleet = a_fleet(training=0, inference=1)

    def at(now_s: float, loan: Loan | None) -> Snapshot:
        return replace(a_snapshot(fleet, (), [loan] if loan else []), now_s=now_s)

    def counted(before: Snapshot, after: Snapshot, ended: Iterable[Loan] = ()) -> list[tuple[int, ...]]:
        bins = count_loan_changes(before, after, ended)
        return [(each.at_s, each.lends, each.recalls, each.returns, each.late_returns) for each in bins]

    offered = replace(a_loan("i0", LoanState.OFFERED), lent_at_s=None)
    active = offered.transition_to(LoanState.ACTIVE, 60.0)
    recalled = active.transition_to(LoanState.RECALLED, 120.0, return_by_s=150.0)
    returned = recalled.transition_to(LoanState.RETURNED, 190.0)
    assert counted(at(0.0, None), at(1.0, offered)) == []
    assert counted(at(0.0, offered), at(60.0, active)) == [(60, 1, 0, 0, 0)]
    assert counted(at(60.0, active), at(119.9, active)) == []
    assert counted(at(60.0, active), at(125.0, recalled)) == [(120, 0, 1, 0, 0)]
    assert counted(at(125.0, recalled), at(190.0, None), [returned]) == [(180, 0, 0, 1, 1)]
    assert counted(at(125.0, recalled), at(149.0, None), [returned]) == [(120, 0, 0, 1, 0)]
    assert counted(at(0.0, offered), at(1.0, None), [offered.transition_to(LoanState.RETURNED, 1.0)]) == []


@pytest.mark.parametrize("pause_s", [0.0, -5.0, UNOBSERVED_AFTER_S + 1.0])
def test_gaps_and_a_clock_that_was_set_back_are_not_integrated(pause_s: float) -> None:
    snapshot = replace(a_snapshot(a_fleet(training=1, inference=1)), now_s=1000.0)
    assert integrate_capacity(snapshot, 1000.0 + pause_s) == ()
