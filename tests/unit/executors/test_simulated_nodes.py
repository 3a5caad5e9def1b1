"""SimulatedNodes: pods that stay where they are, drain, start cold, and are missing meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.domain.fleet import Loan, LoanState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.executors.simulated_nodes import SimulatedNodes, UnservedSteps
from tests.builders import a_fleet, a_loan

POOLS, NODES = a_fleet(training=1, inference=3, gpus_per_node=4, lending=LendingPolicy(cold_start_s=300.0))
DRAIN_S, COLD_START_S = 60.0, 300.0
NAMES = ("i0", "i1", "i2")


class World:
    def __init__(self) -> None:
        self.nodes = SimulatedNodes(NODES.values(), drain_s=DRAIN_S)

    def demand(self, at_s: float, gpus: float) -> None:
        self.nodes.set_demand("inference", gpus, at_s)

    def loans(self, at_s: float, *loans: Loan) -> tuple[str, ...]:
        return self.nodes.apply_loans({loan.node: loan for loan in loans}, POOLS, at_s)

    def pods(self) -> list[int]:
        facts = self.nodes.get_facts()
        return [facts[name].inference_gpus for name in NAMES]

    def unserved(self, at_s: float) -> UnservedSteps:
        return list(self.nodes.list_unserved(at_s)["inference"])


OFFERED, LENT = LoanState.OFFERED, LoanState.ACTIVE


def partial_loan(node: str, state: LoanState = OFFERED) -> Loan:
    return replace(a_loan(node, state), gpus=2, indices=(2, 3))


def test_pods_of_an_offered_node_are_missing_from_the_end_of_their_drain_to_their_replacements_start() -> None:
    world = World()
    world.demand(0.0, 6.0)
    assert world.loans(100.0, a_loan("i1", OFFERED)) == ("i1",)
    assert world.pods() == [4, 2, 2], "two drain, and their replacements start"
    assert not world.nodes.finish_drain("i1", 159.0)
    assert world.nodes.finish_drain("i1", 160.0)
    assert world.pods() == [4, 0, 2]
    assert world.unserved(1_000.0) == [(160.0, 2.0), (400.0, 0.0)]


def test_pods_of_a_partly_lent_node_stay_and_use_the_rest() -> None:
    world = World()
    world.demand(0.0, 6.0)
    assert world.loans(100.0, partial_loan("i1")) == (), "nothing drains"
    assert world.pods() == [4, 2, 0]
    world.demand(200.0, 8.0)
    assert world.pods() == [4, 2, 2], "new pods take no GPUs of the loan"
    world.demand(300.0, 12.0)
    assert world.unserved(400.0) == [(300.0, 2.0)], "GPUs 2 and 3 of i1 are away"


def test_gpus_that_a_partial_loan_takes_are_used_last_and_others_of_its_node_first() -> None:
    nodes = [replace(node, lendable_gpus=(1, 2, 3)) if node.name == "i2" else node for node in NODES.values()]
    world = World()
    world.nodes = SimulatedNodes(nodes, drain_s=DRAIN_S)
    for gpus, pods in ((8.0, [4, 3, 1]), (11.0, [4, 4, 3]), (9.0, [4, 4, 1]), (4.0, [3, 0, 1]), (0.0, [0, 0, 0])):
        world.demand(0.0, gpus)
        assert world.pods() == pods


def test_returned_part_of_a_node_serves_after_a_cold_start() -> None:
    world = World()
    world.demand(0.0, 12.0)
    world.demand(50.0, 9.0)
    world.loans(100.0, partial_loan("i2", LENT))
    world.demand(150.0, 12.0)
    world.loans(200.0)
    assert world.pods() == [4, 4, 4]
    assert world.unserved(1_000.0) == [(150.0, 2.0), (500.0, 0.0)]


def test_growing_demand_ends_no_shortage_of_moved_pods_and_falling_demand_does() -> None:
    world = World()
    world.demand(0.0, 6.0)
    world.loans(100.0, a_loan("i1", OFFERED))
    world.nodes.finish_drain("i1", 160.0)
    world.demand(200.0, 7.0)
    world.demand(250.0, 5.0)
    assert world.unserved(1_000.0) == [(160.0, 2.0), (250.0, 0.0)], "starting pods end first"
    assert world.pods() == [4, 0, 1]


def test_returned_node_serves_after_its_cold_start() -> None:
    world = World()
    world.loans(0.0, a_loan("i2", LENT))
    world.demand(0.0, 8.0)
    world.loans(1_000.0)
    world.demand(1_100.0, 10.0)
    assert world.pods() == [4, 4, 2]
    world.demand(1_200.0, 9.5)
    assert world.unserved(2_000.0) == [(1_100.0, 2.0), (1_200.0, 1.5), (1_300.0, 0.0)]


def test_demand_that_waits_for_a_lent_node_is_unserved() -> None:
    world = World()
    world.loans(0.0, a_loan("i1", LENT), a_loan("i2", LENT))
    world.demand(50.0, 6.0)
    world.loans(200.0, a_loan("i2", LENT))
    assert world.unserved(200.0) == [(50.0, 2.0)]
    assert world.unserved(900.0) == [(50.0, 2.0), (500.0, 0.0)]


def test_pods_stay_where_they_are() -> None:
    world = World()
    world.loans(0.0, a_loan("i0", LENT))
    world.demand(0.0, 8.0)
    world.loans(10.0)
    world.demand(1_000.0, 6.0)
    assert world.pods() == [0, 4, 2], "no pod moves to the returned node"
    world.demand(1_000.0, 9.0)
    assert world.pods() == [3, 4, 2]


def test_withdrawn_offer_keeps_the_pods_that_still_drain() -> None:
    world = World()
    world.demand(0.0, 6.0)
    world.loans(100.0, a_loan("i1", OFFERED))
    world.loans(130.0)
    assert world.pods() == [4, 2, 0]
    assert not world.nodes.finish_drain("i1", 160.0)
    assert world.unserved(1_000.0) == []


def test_demand_above_the_nodes_that_are_up_does_not_count() -> None:
    world = World()
    world.demand(0.0, 50.0)
    world.nodes.mark_down("i1", 10.0)
    world.nodes.mark_up("i1", 20.0)
    assert world.unserved(100.0) == []


STEPS = st.lists(
    st.tuples(
        st.floats(0.0, 200.0),
        st.one_of(
            st.floats(0.0, 16.0),
            st.tuples(st.sampled_from(NAMES), st.sampled_from([OFFERED, LENT, None])),
            st.tuples(st.sampled_from(NAMES), st.booleans()),
        ),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_pods_match_the_demand_and_no_served_demand_is_called_unserved(
    steps: list[tuple[float, float | tuple[str, LoanState | bool | None]]],
) -> None:
    world, now_s, demand = World(), 0.0, 0.0
    loans: dict[str, Loan] = {}
    up: Mapping[str, bool] = dict.fromkeys(NAMES, True)
    drains: list[tuple[float, str]] = []
    for wait_s, change in steps:
        now_s += wait_s
        for at_s, name in [drain for drain in drains if drain[0] <= now_s]:
            world.nodes.finish_drain(name, at_s)
            drains.remove((at_s, name))
        if isinstance(change, float):
            demand = change
            world.demand(now_s, demand)
        elif isinstance(change[1], bool):
            up = {**up, change[0]: change[1]}
            (world.nodes.mark_up if change[1] else world.nodes.mark_down)(change[0], now_s)
        else:
            loans.pop(change[0], None)
            if change[1] is not None:
                loans[change[0]] = a_loan(change[0], change[1])
            drains += [(now_s + DRAIN_S, name) for name in world.loans(now_s, *loans.values())]
        room = 4 * sum(up[name] and name not in loans for name in NAMES)
        placed = sum(gpus for name, gpus in zip(NAMES, world.pods(), strict=True) if name not in loans)
        assert placed == min(math.ceil(demand), room)
        missing = world.unserved(now_s)[-1:] or [(0.0, 0.0)]
        assert 0.0 <= missing[0][1] <= min(demand, 4 * sum(up.values()))
    times_s = [at_s for at_s, _ in world.unserved(now_s + 1_000.0)]
    assert times_s == sorted(times_s)
    if not loans and not drains:
        assert not world.unserved(now_s + 1_000.0) or world.unserved(now_s + 1_000.0)[-1][1] == pytest.approx(0.0)
