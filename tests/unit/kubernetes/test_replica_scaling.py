"""Orders for the replicas of served models, and the conditions that Pools get from their results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.domain.fleet import DemandReading, Pool, PoolKind
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.replica_advice import ReplicaAdvice
from scheduler.domain.serving import ScaleTarget, ServedModel, SizingMode, SizingPolicy
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.replica_scaling import (
    READING_STALE_S,
    ScaleOrder,
    ScaleOutcome,
    ScaleResult,
    build_scale_conditions,
    list_scale_orders,
)
from scheduler.kubernetes.resources.fleet import PoolResource

NOW_S = 1_000_000.0
TARGET = ScaleTarget("apps/v1", "Deployment", "serving", "chat", "deployments")
ORDER = ScaleOrder("chat", TARGET, 4, is_dry=False)


def list_orders(policy: SizingPolicy, *, age_s: float = 0.0, stale_s: float | None = None) -> tuple[ScaleOrder, ...]:
    served = ServedModel("chat", "h100-80g", 1.0, 0.05, sizing=policy)
    pool = Pool("serving", PoolKind.INFERENCE, LendingPolicy(demand_stale_s=stale_s), serving=(served,))
    reading = DemandReading(NOW_S - age_s, 4.0, 4.0, advice=(ReplicaAdvice("chat", 4, 0.0),))
    return list_scale_orders(PoolResource(pool, "uid-1", {}), Snapshot(now_s=NOW_S, demand={"serving": reading}))


def test_only_models_that_are_sized_and_name_a_target_have_orders() -> None:
    assert list_orders(SizingPolicy(SizingMode.SCALE, target=TARGET)) == (ORDER,)
    assert list_orders(SizingPolicy(SizingMode.ADVISE, target=TARGET)) == (replace(ORDER, is_dry=True),)
    assert list_orders(SizingPolicy(SizingMode.ADVISE)) == ()
    assert list_orders(SizingPolicy(target=TARGET)) == ()


@pytest.mark.parametrize(("stale_s", "limit_s"), [(None, READING_STALE_S), (60.0, 60.0)])
def test_stale_reading_orders_nothing(stale_s: float | None, limit_s: float) -> None:
    policy = SizingPolicy(SizingMode.SCALE, target=TARGET)
    assert list_orders(policy, age_s=limit_s, stale_s=stale_s) == (ORDER,)
    assert list_orders(policy, age_s=limit_s + 1, stale_s=stale_s) == (replace(ORDER, replicas=None),)


def test_worst_result_names_the_condition() -> None:
    other = replace(ORDER, model="code")
    good, bad = ScaleResult(ScaleOutcome.SCALED, "done"), ScaleResult(ScaleOutcome.CONFLICT, "changed")
    assert build_scale_conditions([]) == ()
    [condition] = build_scale_conditions([(ORDER, good), (other, bad)])
    assert (condition.type, condition.holds, condition.reason) == ("ReplicasSet", False, "Conflict")
    assert condition.message == "code: changed; chat: done"
    [condition] = build_scale_conditions([(ORDER, good), (other, ScaleResult(ScaleOutcome.DRY_RUN, "would"))])
    assert (condition.holds, condition.reason) == (True, "DryRun")
