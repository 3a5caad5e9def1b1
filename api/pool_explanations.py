"""Why a pool lends nothing, or nothing more, and what a pool in shadow mode would have lent."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import ContextDep, PoolNamePath, ServiceDep, create_router
from api.http.errors import problem_responses, raise_conflict
from api.identity.authorization import VIEWER, requires
from scheduler.domain.fleet import Pool, PoolKind, get_shortages
from scheduler.domain.shadow_lending import get_shadow
from scheduler.domain.snapshot import Snapshot
from scheduler.scheduling.pool_explanation import PoolExplanation, PoolReasonCode, WantedModel, explain_pool


class ShadowView(TypedDict):
    """Loans that a pool in shadow mode would have made. No node is lent."""

    since_s: Annotated[float, Field(description="When the pool entered shadow mode, in seconds since 1970 (UTC).")]
    nodes: Annotated[list[str], Field(description="Nodes that would be on loan now, by name.")]
    gpus: Annotated[float, Field(description="Number of their GPUs that jobs would use now.")]
    gpu_hours: Annotated[float, Field(description="GPU-hours that jobs would have used so far.")]
    loans: Annotated[int, Field(description="Number of loans that would have begun.")]
    recalls: Annotated[int, Field(description="Number of them that inference would have ended by a recall.")]
    intervals: Annotated[int, Field(description="Number of closed five-minute intervals of the last four weeks.")]
    short_intervals: Annotated[
        int, Field(description="Number of them in which the loans would have left inference short.")
    ]


class WantedModelView(TypedDict):
    """GPUs of a model that jobs could use."""

    jobs: Annotated[int, Field(description="Number of jobs that could use more GPUs of the model.")]
    gpus: Annotated[float, Field(description="Number of GPUs that they could use beyond those free or coming.")]


class LendingSwitchView(TypedDict):
    """The last change of the fleet's lending switches."""

    lending_paused: Annotated[bool, Field(description="Whether no new loans are offered.")]
    loans_recalled: Annotated[bool, Field(description="Whether all existing loans are recalled as well.")]
    set_by: Annotated[
        str, Field(description="Display name of the caller who made the change. Empty: none, or unknown.")
    ]
    set_at_s: Annotated[
        float | None, Field(description="Time of the change, in seconds since 1970 (UTC). Null: none, or unknown.")
    ]


class PoolExplanationView(TypedDict):
    """Why an inference pool lends nothing, or nothing more. The numbers are those by which the policy decides."""

    pool: Annotated[str, Field(description="Name of the inference pool.")]
    code: Annotated[PoolReasonCode, Field(description="First obstacle to a new loan, as a CamelCase word to compare.")]
    summary: Annotated[str, Field(description="The obstacle as one sentence, with numbers.")]
    lever: Annotated[str, Field(description="What changes it, as one sentence.")]
    capacity_gpus: Annotated[int, Field(description="Number of GPUs of nodes that are not down.")]
    observed_gpus: Annotated[float | None, Field(description="Number of GPUs that inference needs. Null: no reading.")]
    demand_age_s: Annotated[float | None, Field(description="Age of the reading, in seconds. Null: no reading.")]
    stale_after_s: Annotated[float, Field(description="Age in seconds after which a reading permits no new loan.")]
    quantile: Annotated[float, Field(description="Quantile of the forecast that must stay covered, 0 to 1.")]
    forecast_gpus: Annotated[
        float | None, Field(description="Forecast demand at this quantile within the horizon. Null: no forecast.")
    ]
    is_calibrated: Annotated[bool, Field(description="Whether there is a forecast, and enough have met their outcome.")]
    needed_gpus: Annotated[float, Field(description="Number of GPUs that must stay: the larger of both.")]
    headroom_gpus: Annotated[float, Field(description="Number of GPUs that the policy keeps free in addition.")]
    kept_nodes_min: Annotated[int, Field(description="Number of nodes that are never lent.")]
    lent_nodes_max: Annotated[int | None, Field(description="Maximum number of nodes on loan. Null: no limit.")]
    cordoned_nodes: Annotated[int, Field(description="Number of cordoned nodes that are up and not on loan.")]
    cordoned_gpus: Annotated[int, Field(description="Number of GPUs on cordoned nodes that inference cannot use.")]
    vetoed_nodes: Annotated[int, Field(description="Number of nodes that a veto protects now.")]
    standby_blocked_nodes: Annotated[
        int, Field(description="Number of nodes that are up, not on loan, and without a replica that can be idle.")
    ]
    lent_nodes: Annotated[int, Field(description="Number of nodes that are offered, lent or being returned.")]
    lent_gpus: Annotated[int, Field(description="Number of GPUs that are offered, lent or being returned.")]
    partly_used_nodes: Annotated[
        int, Field(description="Number of nodes not on loan of which inference uses GPUs that are in `lendable_gpus`.")
    ]
    proposed_nodes: Annotated[int, Field(description="Number of proposed loans, whose notice has not ended.")]
    lendable_nodes: Annotated[int, Field(description="Number of loans that the pool can bear now.")]
    lasting_nodes: Annotated[int, Field(description="Number that it can bear for the shortest worthwhile loan.")]
    lendable_gpus: Annotated[int, Field(description="Number of GPUs that loans of the pool may take together now.")]
    lasting_gpus: Annotated[int, Field(description="Number that they may take for the shortest worthwhile loan.")]
    wanted: Annotated[dict[str, WantedModelView], Field(description="What jobs could use, by GPU model of the pool.")]
    next_full_pass_at_s: Annotated[
        float, Field(description="When new loans are considered next, in seconds since 1970 (UTC).")
    ]
    in_blackout: Annotated[
        bool, Field(description="Whether the pool is in one of its daily windows without new loans.")
    ]
    budget_left: Annotated[
        float | None,
        Field(description="Share of the promised short intervals that is left, 0 to 1. Null: a quantile is fixed."),
    ]
    switches: Annotated[LendingSwitchView, Field(description="Switches of lending, and who set them last.")]
    shadow: Annotated[ShadowView | None, Field(description="What it would have lent. Null: not in shadow mode.")]


def shadow_view(pool: Pool, snapshot: Snapshot) -> ShadowView | None:
    """Return what a pool in shadow mode would have lent, or None."""
    if not pool.lending.is_shadow:
        return None
    shadow = get_shadow(snapshot.shadows, pool.name, snapshot.now_s)
    record = get_shortages(snapshot.demand, pool.name)
    return {
        "since_s": shadow.since_s,
        "nodes": list(shadow.nodes),
        "gpus": shadow.gpus,
        "gpu_hours": shadow.compute_gpu_s(snapshot.now_s) / 3600.0,
        "loans": shadow.loans,
        "recalls": shadow.recalls,
        "intervals": record.intervals,
        "short_intervals": record.short_intervals,
    }


def pool_explanation_view(found: PoolExplanation, snapshot: Snapshot) -> PoolExplanationView:
    pool, numbers = snapshot.pools[found.pool], found.assessment
    forecast = snapshot.forecasts.get(found.pool)
    return {
        "pool": found.pool,
        "code": found.code,
        "summary": found.summary,
        "lever": found.lever,
        "capacity_gpus": numbers.capacity_gpus,
        "observed_gpus": numbers.observed_gpus,
        "demand_age_s": numbers.demand_age_s,
        "stale_after_s": numbers.stale_after_s,
        "quantile": numbers.quantile,
        "forecast_gpus": numbers.forecast_gpus,
        "is_calibrated": forecast is not None and forecast.is_calibrated,
        "needed_gpus": numbers.needed_gpus,
        "headroom_gpus": numbers.headroom_gpus,
        "kept_nodes_min": pool.lending.kept_nodes_min,
        "lent_nodes_max": pool.lending.lent_nodes_max,
        "cordoned_nodes": found.cordoned_nodes,
        "cordoned_gpus": numbers.cordoned_gpus,
        "vetoed_nodes": found.vetoed_nodes,
        "standby_blocked_nodes": found.standby_blocked_nodes,
        "lent_nodes": found.lent_nodes,
        "lent_gpus": found.lent_gpus,
        "partly_used_nodes": found.partly_used_nodes,
        "proposed_nodes": found.proposed_nodes,
        "lendable_nodes": numbers.nodes,
        "lasting_nodes": numbers.lasting_nodes,
        "lendable_gpus": numbers.gpus,
        "lasting_gpus": numbers.lasting_gpus,
        "wanted": {gpu: _wanted_view(wanted) for gpu, wanted in found.wanted.items()},
        "next_full_pass_at_s": found.next_full_pass_at_s,
        "in_blackout": numbers.in_blackout,
        "budget_left": found.budget_left,
        "switches": _switch_view(snapshot),
        "shadow": shadow_view(pool, snapshot),
    }


def _wanted_view(wanted: WantedModel) -> WantedModelView:
    return {"jobs": wanted.jobs, "gpus": wanted.gpus}


def _switch_view(snapshot: Snapshot) -> LendingSwitchView:
    switches = snapshot.switches
    return {
        "lending_paused": switches.lending_paused,
        "loans_recalled": switches.loans_recalled,
        "set_by": snapshot.lending_set_by,
        "set_at_s": snapshot.lending_set_at_s,
    }


router = create_router("fleet")


@router.get("/pools/{name}/explanation", responses=problem_responses(409))
@requires(VIEWER)
def get_pool_explanation(name: PoolNamePath, context: ContextDep, service: ServiceDep) -> PoolExplanationView:
    """Explain why the pool lends nothing, or nothing more, and what would change that."""
    if context.pool(name).kind is not PoolKind.INFERENCE:
        raise_conflict(f"pool {name} is a training pool. Only inference pools lend nodes")
    return pool_explanation_view(explain_pool(context.snapshot, service.policies, name), context.snapshot)
