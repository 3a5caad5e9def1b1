"""The number of nodes that can be on loan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.fleet import DemandReading, Forecast, LoanState, NodeState
from scheduler.domain.lending_policy import Blackout, LendingPolicy
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.scheduling.policies.lending import LendingTarget, lend_forecast_idle, lend_nothing
from scheduler.scheduling.policies.settings import PolicySettings
from tests.builders import a_fleet, a_loan, a_snapshot

SETTINGS = PolicySettings(demand_stale_s=100.0)


def world(
    observed: float, expected: float | None, rules: LendingPolicy | None = None, *, now_s: float = 0.0
) -> Snapshot:
    """Four nodes of 8."""
    snapshot = a_snapshot(
        a_fleet(training=0, inference=4, lending=rules or LendingPolicy(headroom=0.0)),
        now_s=now_s,
        demand={"inference": DemandReading(now_s, observed, observed)},
    )
    if expected is None:
        return snapshot
    return replace(snapshot, forecasts={"inference": Forecast(now_s, 600.0, (0.5, 0.999), (0.0, expected), "scripted")})


def target(snapshot: Snapshot) -> LendingTarget:
    return lend_forecast_idle(snapshot, snapshot.pools["inference"], SETTINGS)


@pytest.mark.parametrize(
    ("observed", "expected", "nodes"),
    [(0, 0, 4), (1, 1, 3), (8, 8, 3), (8, 9, 2), (20, 3, 1), (32, 32, 0), (32, 40, 0)],
)
def test_nodes_beyond_observation_and_forecast_are_lent(observed: float, expected: float, nodes: int) -> None:
    assert target(world(observed, expected)).nodes == nodes


def cordoned(snapshot: Snapshot, names: str, *, inference_gpus: int = 0, draining: bool = False) -> Snapshot:
    closed = {
        name: replace(snapshot.nodes[name], cordoned=True, inference_gpus=inference_gpus, draining=draining)
        for name in names.split()
    }
    return replace(snapshot, nodes={**snapshot.nodes, **closed})


def test_cordoned_node_counts_only_with_its_running_inference() -> None:
    assert target(world(8, 8)).nodes == 3
    drained = target(cordoned(world(8, 8), "i0 i1 i2"))
    assert (drained.nodes, drained.reason.numbers["cordoned_gpus"]) == (0, 24.0)
    assert "24 GPUs" in drained.reason.detail
    assert target(cordoned(world(8, 8), "i0 i1 i2", inference_gpus=8)).nodes == 3
    assert target(cordoned(world(8, 8), "i0 i1 i2", inference_gpus=8, draining=True)).nodes == 0
    assert target(cordoned(world(0, 0, LendingPolicy(headroom=0.0, kept_nodes_min=3)), "i0")).nodes == 0


def test_cordoned_lent_node_recalls_no_other() -> None:
    snapshot = replace(cordoned(world(8, 8), "i0"), loans={"i0": a_loan("i0")})
    assert target(snapshot).nodes == 3
    home_soon = {"i0": a_loan("i0", LoanState.RECALLED, return_by_s=9.0)}
    assert target(replace(snapshot, loans=home_soon)).nodes == 2


def test_headroom_is_added() -> None:
    assert target(world(8, 8, LendingPolicy(headroom=0.02))).nodes == 2


def test_reason_has_the_numbers() -> None:
    numbers = target(world(4, 9)).reason.numbers
    known = {"capacity_gpus": 32.0, "observed_gpus": 4.0, "needed_gpus": 9.0, "lendable_nodes": 2.0}
    assert numbers == {**known, "quantile": 0.9999}


def test_kept_and_lent_node_limits_are_hard_bounds() -> None:
    assert target(world(0, 0, LendingPolicy(headroom=0.0, kept_nodes_min=3))).nodes == 1
    assert target(world(0, 0, LendingPolicy(headroom=0.0, lent_nodes_max=2))).nodes == 2
    assert target(world(0, 0, LendingPolicy(headroom=0.0, kept_nodes_min=9))).nodes == 0


def test_down_nodes_are_not_counted() -> None:
    snapshot = world(8, 8)
    nodes = {**snapshot.nodes, "i0": replace(snapshot.nodes["i0"], state=NodeState.DOWN)}
    assert target(replace(snapshot, nodes=nodes)).nodes == 2


@pytest.mark.parametrize(("now_s", "grows"), [(0.0, False), (3_000.0, False), (7_200.0, True), (82_000.0, False)])
def test_nothing_new_is_lent_in_a_blackout(now_s: float, grows: bool) -> None:
    rules = LendingPolicy(headroom=0.0, blackouts=(Blackout(0.0, 3600.0), Blackout(80_000.0, 100.0)))
    found = target(world(8, 8, rules, now_s=now_s))
    assert (found.nodes, found.allows_new_loans) == (3, grows)


def test_stale_reading_or_missing_forecast_permits_no_new_loans() -> None:
    stale = target(replace(world(8, 8), now_s=101.0))
    assert (stale.nodes, stale.allows_new_loans) == (3, False)
    blind = target(world(8, None))
    assert (blind.nodes, blind.allows_new_loans) == (3, False)


def test_pool_can_set_when_a_reading_is_stale() -> None:
    late = replace(world(8, 8, LendingPolicy(headroom=0.0, demand_stale_s=300.0)), now_s=300.0)
    assert (target(late).nodes, target(late).allows_new_loans) == (3, True)
    stale = target(replace(late, now_s=301.0))
    assert (stale.nodes, stale.allows_new_loans) == (3, False)


def test_without_a_reading_nothing_is_lent() -> None:
    found = target(replace(world(0, 0), demand={}))
    assert (found.nodes, found.allows_new_loans) == (0, False)


def test_switches_pause_lending_or_recall_all_loans() -> None:
    paused = target(replace(world(0, 0), switches=Switches(lending_paused=True)))
    assert (paused.nodes, paused.allows_new_loans) == (4, False)
    recalled = target(replace(world(0, 0), switches=Switches(loans_recalled=True)))
    assert (recalled.nodes, recalled.allows_new_loans) == (0, False)
    assert target(world(0, 0, LendingPolicy(enabled=False))).nodes == 0


def test_set_that_does_not_lend_recalls_all_loans() -> None:
    snapshot = world(0, 0)
    assert lend_nothing(snapshot, snapshot.pools["inference"], SETTINGS).nodes == 0


def test_new_loan_must_fit_the_demand_over_the_shortest_loan() -> None:
    snapshot = world(0, 8, LendingPolicy(headroom=0.0, loan_s_min=3600.0))
    soon = snapshot.forecasts["inference"]
    later = replace(snapshot, forecasts={"inference": soon.with_min_loan_forecast(replace(soon, gpus=(0.0, 20.0)))})
    assert (target(snapshot).nodes, target(snapshot).lasting_nodes) == (3, 3)
    assert (target(later).nodes, target(later).lasting_nodes) == (3, 1)


def test_pool_with_a_profile_lends_without_a_calibrated_forecast() -> None:
    rules = LendingPolicy(headroom=0.0, demand_profile=(8.0,) * 24)
    guess = Forecast(0.0, 600.0, (0.5, 0.999), (4.0, 8.0), "demand profile", is_calibrated=False)
    snapshot = replace(world(8, 8, rules), forecasts={"inference": guess})
    assert (target(snapshot).nodes, target(snapshot).allows_new_loans) == (3, True)
    unread = replace(snapshot, demand={})
    assert (target(unread).nodes, target(unread).allows_new_loans) == (3, True)
    assert target(replace(unread, forecasts={})).allows_new_loans is False
    stale = replace(snapshot, now_s=101.0)
    assert target(stale).allows_new_loans is False


def test_reason_names_the_event_that_raises_the_forecast() -> None:
    snapshot = world(8, 8)
    raised = replace(snapshot.forecasts["inference"], gpus=(24.0, 24.0), event="launch")
    found = target(replace(snapshot, forecasts={"inference": raised}))
    assert (found.nodes, "'launch'" in found.reason.detail) == (1, True)
