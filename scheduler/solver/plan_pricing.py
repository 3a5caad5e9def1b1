"""Pricing of a given plan: its predicted step, its memory, whether it can run, and how it compares with the optimum."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from scheduler.domain.parallel_plan import ParallelPlan, plan_to_json
from scheduler.domain.plan_limits import NO_LIMITS
from scheduler.solver.evaluate import evaluate
from scheduler.solver.inspection import Inspection, inspect_plan
from scheduler.solver.plan_rules import PlanError
from scheduler.solver.request import Infeasibility, SolveRequest

_BYTES_PER_GB = 1e9


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """A plan with predictions of its own, or with the rule that it breaks.

    `violation` is empty for a plan that can run. A plan that breaks a rule of the request's limits still has
    predictions. One that breaks a rule of the model, the GPUs or their worker has none: `inspection` is None.
    """

    plan: ParallelPlan
    inspection: Inspection | None
    fits: bool
    violation: str


def price_plan(plan: ParallelPlan, request: SolveRequest) -> PricedPlan:
    """Predict the step of `plan`, by the independent evaluation, and check whether it can run."""
    violation, unlimited = request.limits.find_violation(plan), replace(request, limits=NO_LIMITS)
    try:
        evaluation = evaluate(plan, unlimited)
    except PlanError as error:
        return PricedPlan(plan, None, fits=False, violation=str(error))
    priced = replace(
        plan,
        iteration_time_s=evaluation.iteration_time_s,
        samples_per_s=plan.global_batch / evaluation.iteration_time_s,
        peak_bytes_per_gpu=evaluation.peak_bytes_per_gpu,
        terms=evaluation.terms,
        profile_time_s=evaluation.iteration_time_s,
    )
    inspection = inspect_plan(plan, unlimited)
    return PricedPlan(priced, inspection, evaluation.fits, violation or _find_memory_violation(inspection))


def priced_plan_to_json(
    priced: PricedPlan, optimum: ParallelPlan | Infeasibility, request: SolveRequest
) -> dict[str, Any]:
    """Return the plan in its contract's form, with its comparison with the optimum of the same request.

    `slower_ratio` says how much longer its step takes than the optimum's, as a fraction; None if one has no step time.
    """
    document = plan_to_json(priced.plan)
    if priced.inspection is None:
        for name in ("iteration_time_s", "samples_per_s", "peak_bytes_per_gpu", "optimality_gap"):
            document[name] = None
    slower = None
    if isinstance(optimum, ParallelPlan) and priced.inspection is not None:
        slower = priced.plan.iteration_time_s / optimum.iteration_time_s - 1.0
        least_s = optimum.iteration_time_s * (1.0 - optimum.optimality_gap)
        document["optimality_gap"] = max(0.0, 1.0 - least_s / priced.plan.iteration_time_s)
    return {
        **document,
        "runnable": not priced.violation,
        "violation": priced.violation,
        "fits": priced.fits,
        "inspection": None if priced.inspection is None else asdict(priced.inspection),
        "slower_ratio": slower,
        "optimum": None if isinstance(optimum, Infeasibility) else _optimum_to_json(optimum, request),
        "remark": optimum.reason if isinstance(optimum, Infeasibility) else "",
    }


def _optimum_to_json(optimum: ParallelPlan, request: SolveRequest) -> dict[str, Any]:
    return {**plan_to_json(optimum), "inspection": asdict(inspect_plan(optimum, request))}


def _find_memory_violation(inspection: Inspection) -> str:
    """Return which stage exceeds its memory by most; empty if all fit."""
    position, fullest = max(
        enumerate(inspection.devices), key=lambda entry: entry[1].memory_bytes / max(entry[1].memory_bytes_max, 1)
    )
    if fullest.memory_bytes <= fullest.memory_bytes_max:
        return _find_host_violation(inspection)
    return (
        f"stage {position} needs {fullest.memory_bytes / _BYTES_PER_GB:.1f} GB per GPU; "
        f"a plan may use {fullest.memory_bytes_max / _BYTES_PER_GB:.1f} GB of {fullest.gpu}"
    )


def _find_host_violation(inspection: Inspection) -> str:
    """Return which stage needs most of what its host lacks; empty if all have enough."""
    position, fullest = max(enumerate(inspection.devices), key=lambda entry: entry[1].host_bytes)
    if fullest.host_bytes_max is None or fullest.host_bytes <= fullest.host_bytes_max:
        return ""
    return (
        f"stage {position} offloads {fullest.host_bytes / _BYTES_PER_GB:.1f} GB per GPU to the host, which has "
        f"{fullest.host_bytes_max / _BYTES_PER_GB:.1f} GB for each GPU of {fullest.gpu}"
    )
