"""UniAP's mixed integer program as an independent reference solver.

It shares only the instance and its costs with the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from baselines.milp.formulation import MilpFormulation
from scheduler.solver.instance import Floats, Instance, Solution, evaluate_solution

OBJECTIVE_TOLERANCE = 1e-6
"""Relative tolerance of HiGHS: it may call either of two solutions closer than this the optimum."""


@dataclass(frozen=True, slots=True)
class MilpOutcome:
    """Result of HiGHS on one instance, or on several.

    Attributes:
        solution: the best one found, integer and within memory by `evaluate_solution`; None if there is none below the
            cutoff.
        objective_s: its objective; infinite without a solution.
        bound_s: no solution takes less, up to `OBJECTIVE_TOLERANCE`; infinite if none exists.
        proven: HiGHS finished: the solution is optimal, or there is none, in its arithmetic. HiGHS closes a node whose
            best point misses a memory limit by 1e-8 to 1e-7 of it, so a better solution in the same node can be lost.
            One that fits by `evaluate_solution` is then the proof.
        status: in HiGHS's words.
        time_s: by HiGHS's own clock, without building the program.
        number: index of the instance that the solution belongs to.
    """

    solution: Solution | None
    objective_s: float
    bound_s: float
    proven: bool
    status: str
    time_s: float
    number: int = 0


def solve_instance(instance: Instance, *, time_limit_s: float = inf, cutoff_s: float = inf) -> MilpOutcome:
    """Return the best solution of `instance` that takes less than `cutoff_s`; any number of groups, in any order.

    HiGHS keeps memory limits within a tolerance. A solution that exceeds a limit by that little is forbidden and HiGHS
    starts again, so that the result fits to the byte.

    Raises:
        ModuleNotFoundError: highspy is not installed.
    """
    total_s, bound_s = float(_compute_fastest_s(instance).sum()), compute_lower_bound_s(instance)
    if bound_s == inf or bound_s >= cutoff_s:
        return MilpOutcome(None, inf, bound_s, True, "infeasible by its simple bound", 0.0)
    unit_s = total_s / instance.devices or 1.0
    spare_s, weight = (
        cutoff_s - instance.objective.compute_time_s(total_s, 0.0),
        instance.objective.compute_time_s(0.0, 1.0),
    )
    formulation = MilpFormulation(instance, unit_s, spare_s / weight if weight > 0 else inf)
    time_s = 0.0
    while True:
        answer = formulation.model.solve(time_limit_s=time_limit_s - time_s, cutoff=cutoff_s / unit_s)
        time_s += answer.time_s
        bound_s = max(bound_s, answer.bound * unit_s)
        none = MilpOutcome(None, inf, bound_s, answer.proven, answer.status, time_s)
        if not len(answer.values):
            return none
        solution = formulation.read_solution(answer.values)
        found = evaluate_solution(instance, solution)
        if found.fits:
            whole = replace(none, solution=solution, objective_s=found.time_s)
            # HiGHS's heuristics can return solutions beyond the cutoff; the tree search has then found no other.
            return whole if found.time_s < cutoff_s else none
        for device, group in enumerate(solution.order):
            host_limit = instance.host_capacity_bytes[group] if instance.host_capacity_bytes else inf
            if found.memory_bytes[device] > instance.capacity_bytes[group] or found.host_bytes[device] > host_limit:
                formulation.forbid(solution, device)


def solve_instances(instances: Sequence[Instance], *, time_limit_s: float = inf, shared: bool = True) -> MilpOutcome:
    """Return the best solution over all `instances`: UniAP's outer loop over pipeline degrees and micro-batches.

    Instances are solved in order of `compute_lower_bound_s`. Once that bound reaches the best objective so far, all
    remaining ones are slower; until then, the best objective is the cutoff of the next.

    Args:
        shared: if false, each instance is solved to its own optimum, as in UniAP's loop.

    Raises:
        ModuleNotFoundError: highspy is not installed.
    """
    best, stopped = MilpOutcome(None, inf, inf, True, "infeasible", 0.0), ""
    floors_s = [compute_lower_bound_s(instance) for instance in instances]
    for number in sorted(range(len(instances)), key=floors_s.__getitem__):
        cutoff_s = best.objective_s if shared else inf
        if floors_s[number] >= cutoff_s:
            break
        found = solve_instance(instances[number], time_limit_s=time_limit_s - best.time_s, cutoff_s=cutoff_s)
        best = replace(
            replace(found, number=number) if found.objective_s < best.objective_s else best,
            bound_s=min(best.bound_s, found.bound_s),
            proven=best.proven and found.proven,
            time_s=best.time_s + found.time_s,
        )
        stopped = stopped if found.proven else found.status
    return replace(best, status=stopped or ("optimal" if best.solution else "infeasible"))


def compute_lower_bound_s(instance: Instance) -> float:
    """Return a time that no solution beats: every layer at its fastest, and the largest load the mean or one layer."""
    if instance.devices * instance.interleave > instance.layers:
        return inf
    fastest_s = _compute_fastest_s(instance)
    longest_s = max(fastest_s.sum() / instance.devices, fastest_s.max())
    return float(instance.objective.compute_time_s(fastest_s.sum(), longest_s))


def _compute_fastest_s(instance: Instance) -> Floats:
    """Return [L]: the minimum time of each layer on any group."""
    return np.asarray(np.min([costs.time_s.min(axis=1) for costs in instance.costs], axis=0)[instance.types])
