"""Why a pool lends nothing, or nothing more: one state for each code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.fleet import DemandReading, Forecast, Loan, LoanState
from scheduler.domain.job import Job
from scheduler.domain.lending_policy import Blackout, LendingMode, LendingPolicy
from scheduler.domain.shortages import ShortageDay, ShortageRecord
from scheduler.domain.snapshot import Snapshot, Switches
from scheduler.domain.standby import StandbyPhase, StandbyState
from scheduler.scheduling.policies.lending import LendingBlock, LendingBound, assess_lending, lend_forecast_idle
from scheduler.scheduling.policy_sets import load_policy_set
from scheduler.scheduling.pool_explanation import LendingObstacle, PoolReasonCode, WantedModel, explain_pool
from scheduler.scheduling.scheduler import decide
from tests.builders import GPU, a_fleet, a_job, a_loan, a_snapshot

NOW_S = 1000.0
WANTS_TWO_NODES = (a_job("waits", 12),)
SPENT = ShortageRecord((ShortageDay(0, 288, 9),), 20)
LENT = (a_loan("i0"), a_loan("i1"))


def world(
    needs: float = 0.0,
    loans: Iterable[Loan] = (),
    jobs: Iterable[Job] = WANTS_TWO_NODES,
    *,
    lasting: float | None = None,
    shortages: ShortageRecord | None = None,
    changes: dict[str, Any] | None = None,
    **lending: Any,
) -> Snapshot:
    """Three nodes of 8 GPUs. `changes` are fields of node i0, or of the snapshot."""
    forecast = Forecast(NOW_S, 600.0, (0.999,), (needs,), "scripted", () if lasting is None else (lasting,))
    snapshot = a_snapshot(
        a_fleet(training=0, inference=3, lending=LendingPolicy(**{"headroom": 0.0, **lending})),
        jobs,
        loans,
        now_s=NOW_S,
        full_pass_at_s=NOW_S - 100.0,
        demand={"inference": DemandReading(NOW_S, needs, needs, shortages or ShortageRecord())},
        forecasts={"inference": forecast},
    )
    return replace(snapshot, **(changes or {}))


def with_node(snapshot: Snapshot, names: str, **fields: Any) -> Snapshot:
    changed = {name: replace(snapshot.nodes[name], **fields) for name in names.split()}
    return replace(snapshot, nodes={**snapshot.nodes, **changed})


def proposal(node: str) -> Loan:
    return Loan(f"{node}-1", node, "inference", LoanState.PROPOSED, NOW_S + 9, NOW_S, proposed_at_s=NOW_S)


ABSENT = StandbyState(StandbyPhase.ABSENT, 0.0, "no pod runs on the node")
GUESS = replace(world().forecasts["inference"], is_calibrated=False)
STATES: list[tuple[PoolReasonCode, Snapshot]] = [
    (LendingBlock.SWITCHED_OFF, world(enabled=False)),
    (LendingBlock.LOANS_RECALLED, world(changes={"switches": Switches(True, True)})),
    (LendingBlock.PAUSED, world(changes={"switches": Switches(True)})),
    (LendingBlock.NO_DEMAND, world(changes={"demand": {}})),
    (LendingBlock.DEMAND_LOST, world(changes={"now_s": NOW_S + 3600.0})),
    (LendingBlock.STALE_DEMAND, world(changes={"now_s": NOW_S + 1801.0})),
    (LendingBlock.NO_FORECAST, world(changes={"forecasts": {}})),
    (LendingBlock.NOT_CALIBRATED, world(changes={"forecasts": {"inference": GUESS}})),
    (LendingBlock.BLACKOUT, world(blackouts=(Blackout(0.0, 2000.0),))),
    (LendingObstacle.SHADOW_MODE, world(mode=LendingMode.SHADOW)),
    (LendingBound.DEMAND, world(8.0, LENT)),
    (LendingObstacle.BUDGET_SPENT, world(8.0, LENT, shortages=SPENT)),
    (LendingBound.KEPT_NODES, world(0.0, LENT, kept_nodes_min=1)),
    (LendingBound.MAXIMUM, world(0.0, LENT, lent_nodes_max=2)),
    (LendingObstacle.LOAN_TOO_SHORT, world(0.0, LENT, lasting=8.0, loan_s_min=3600.0)),
    (LendingObstacle.PROPOSALS_WAITING, world(16.0, [proposal("i0")], notice_s=60.0)),
    (LendingObstacle.ALL_NODES_LENT, world(0.0, (*LENT, a_loan("i2")))),
    (LendingObstacle.NODES_VETOED, with_node(world(), "i0 i1 i2", vetoed_until_s=NOW_S + 1.0)),
    (LendingObstacle.REPLICAS_CANNOT_SLEEP, with_node(world(), "i0 i1 i2", standby=ABSENT)),
    (LendingObstacle.NODES_CORDONED, with_node(world(), "i0 i1 i2", cordoned=True, inference_gpus=8)),
    (LendingObstacle.LENDABLE_GPUS_IN_USE, with_node(world(), "i0 i1 i2", lendable_gpus=(6, 7), inference_gpus=7)),
    (LendingObstacle.NO_JOB_WANTS_GPUS, world(jobs=())),
    (LendingObstacle.NEXT_FULL_PASS, world()),
]


@pytest.mark.parametrize(("code", "snapshot"), STATES, ids=[code.value for code, _ in STATES])
def test_code_names_the_first_obstacle(code: PoolReasonCode, snapshot: Snapshot) -> None:
    found = explain_pool(snapshot, load_policy_set("ebbtide"), "inference")
    assert found.code is code
    assert found.summary
    assert found.lever
    result = decide(replace(snapshot, full_pass_at_s=float("-inf")), load_policy_set("ebbtide"))
    lends = any(type(decision).__name__ in ("LendNode", "ProposeLoan") for decision in result.decisions)
    assert lends is (code is LendingObstacle.NEXT_FULL_PASS), "the explanation agrees with the next full pass"


def test_every_code_has_a_state() -> None:
    named = {code for code, _ in STATES} | {LendingObstacle.POLICY_LENDS_NOTHING}
    assert named == {*LendingBlock, *LendingBound, *LendingObstacle}
    found = explain_pool(world(), load_policy_set("ebbtide-scaling"), "inference")
    assert found.code is LendingObstacle.POLICY_LENDS_NOTHING


def test_numbers_are_those_of_the_policy() -> None:
    snapshot = world(8.0, [a_loan("i0")])
    policies = load_policy_set("ebbtide")
    found = explain_pool(snapshot, policies, "inference")
    assert found.assessment == assess_lending(snapshot, snapshot.pools["inference"], policies.settings)
    target = lend_forecast_idle(snapshot, snapshot.pools["inference"], policies.settings)
    assert (target.nodes, target.lasting_nodes) == (found.assessment.nodes, found.assessment.lasting_nodes) == (2, 2)
    assert found.wanted == {GPU: WantedModel(jobs=1, gpus=4.0)}
    assert (found.lent_nodes, found.budget_left, found.next_full_pass_at_s) == (1, 1.0, 1200.0)


def test_pause_names_its_author_and_age() -> None:
    paused = world(changes={"switches": Switches(True), "lending_set_by": "ada", "lending_set_at_s": NOW_S - 40.0})
    summary = explain_pool(paused, load_policy_set("ebbtide"), "inference").summary
    assert "ada" in summary
    assert "40 s" in summary
