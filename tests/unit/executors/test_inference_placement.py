"""Placement of inference demand on local nodes."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.fleet import DemandReading, LoanState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.observation import StandbyFacts
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.standby import Standby, StandbyPhase
from scheduler.executors.inference_placement import place_inference
from tests.builders import a_fleet, a_loan, a_snapshot


def world(gpus: float, **loans: LoanState) -> Snapshot:
    fleet = a_fleet(training=1, inference=3, gpus_per_node=4)
    demand = {"inference": DemandReading(0.0, gpus, gpus), "training": DemandReading(0.0, 4.0, 4.0)}
    return a_snapshot(fleet, loans=[a_loan(node, state) for node, state in loans.items()], demand=demand)


def used(state: Snapshot, *down: str) -> dict[str, int]:
    return {name: facts.inference_gpus for name, facts in place_inference(state, down=down).items()}


def test_demand_fills_nodes_by_name_and_rounds_up() -> None:
    assert used(world(5.2)) == {"i0": 4, "i1": 2, "i2": 0, "t0": 0}


def test_lent_and_offered_nodes_get_no_inference() -> None:
    state = world(5.0, i0=LoanState.ACTIVE, i1=LoanState.OFFERED)
    assert used(state) == {"i0": 0, "i1": 0, "i2": 4, "t0": 0}


def test_gpus_that_a_partial_loan_takes_are_filled_last_and_others_of_its_node_first() -> None:
    state = world(7.0)
    state = replace(state, nodes={**state.nodes, "i2": replace(state.nodes["i2"], lendable_gpus=(1, 2, 3))})
    assert used(state) == {"i0": 4, "i1": 2, "i2": 1, "t0": 0}
    full = replace(state, demand={"inference": DemandReading(0.0, 11.0, 11.0)})
    assert used(full) == {"i0": 4, "i1": 4, "i2": 3, "t0": 0}
    loan = replace(a_loan("i2", LoanState.OFFERED), gpus=3, indices=(1, 2, 3))
    assert used(replace(full, loans={"i2": loan})) == {"i0": 4, "i1": 4, "i2": 1, "t0": 0}


def test_recovered_node_gets_inference_again() -> None:
    assert used(world(5.0, i0=LoanState.RETURNED))["i0"] == 4


def test_failed_node_is_down_and_gets_no_inference() -> None:
    facts = place_inference(world(5.0), down=["i0"])
    assert (facts["i0"].up, facts["i0"].inference_gpus) == (False, 0)
    assert (facts["i1"].inference_gpus, facts["i2"].inference_gpus) == (4, 1)


def test_nodes_are_idle_without_demand() -> None:
    assert set(used(a_snapshot(a_fleet(training=1, inference=2))).values()) == {0}


def test_offered_node_is_in_use_until_its_replicas_sleep() -> None:
    state = world(5.0, i2=LoanState.OFFERED)
    standby = Standby(url="http://{node}:8000")
    pool = replace(state.pools["inference"], lending=replace(state.pools["inference"].lending, standby=standby))
    state = replace(state, pools={**state.pools, "inference": pool})
    assert place_inference(state, down=())["i2"].inference_gpus == 1
    asleep = {"i2": StandbyFacts(StandbyPhase.ASLEEP)}
    facts = place_inference(state, down=(), standby=asleep)
    assert (facts["i2"].inference_gpus, facts["i2"].standby) == (0, asleep["i2"])
    assert (facts["i0"].standby, facts["t0"].standby) == (StandbyFacts(), None)
    state = replace(state, pools={**state.pools, "inference": replace(pool, lending=LendingPolicy())})
    assert all(each.standby is None for each in place_inference(state, down=()).values())
