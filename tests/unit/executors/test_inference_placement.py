"""Placement of inference demand on local nodes."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.fleet import DemandReading, LoanState
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


def test_pool_with_a_standby_has_no_replica_that_sleeps() -> None:
    state = world(5.0)
    standby = Standby("chat", {"app": "llm"})
    pool = replace(state.pools["inference"], lending=replace(state.pools["inference"].lending, standby=standby))
    facts = place_inference(replace(state, pools={**state.pools, "inference": pool}), down=())
    phases = {name: None if each.standby is None else each.standby.phase for name, each in facts.items()}
    assert phases["i0"] is StandbyPhase.ABSENT
    assert all(each.standby is None for each in place_inference(state, down=()).values())
