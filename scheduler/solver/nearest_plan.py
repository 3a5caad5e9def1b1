"""The plan within limits that is nearest to a plan which breaks them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, product

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, Stage
from scheduler.domain.plan_limits import NO_LIMITS
from scheduler.solver.evaluate import evaluate
from scheduler.solver.plan_rules import PlanError
from scheduler.solver.request import SolveRequest


def find_nearest_plan(plan: ParallelPlan, request: SolveRequest) -> ParallelPlan | None:
    """Return the plan within the request's limits that changes the fewest properties of `plan`; the fastest of several.

    The properties are the pipeline's cuts and schedule, and each field of the layers' strategy. Candidates have one
    strategy for all layers, made from one of the plan's: degrees that the limits exclude become data parallelism.
    None if no candidate is within limits and memory.
    """
    known = sorted(dict.fromkeys(_list_candidates(plan)), key=lambda pair: pair[0])
    for _, alike in groupby(known, key=lambda pair: pair[0]):
        runnable = [found for _, candidate in alike if (found := _evaluate_within_limits(candidate, request))]
        if runnable:
            return min(runnable, key=lambda found: found.iteration_time_s)
    return None


def _list_candidates(plan: ParallelPlan) -> Iterator[tuple[int, ParallelPlan]]:
    """Yield (number of changes, plan)."""
    if plan.is_mixed or plan.is_replicated_mix:
        return
    strategies = list(dict.fromkeys(replace(run, layers=1) for stage in plan.stages for run in stage.strategies))
    unlike = len(strategies) - 1
    for base, (changed_cuts, lengths, schedule) in product(strategies, _list_pipelines(plan)):
        devices = len(lengths) // schedule.interleave
        widened = replace(base, dp=base.dp * plan.pipeline_devices // devices)
        for strategy in _list_variants(widened):
            if plan.micro_batch_size % strategy.dp == 0:
                changes = changed_cuts + unlike + _count_changes(base, strategy)
                yield changes, _build_plan(plan, lengths, schedule, strategy)


def _list_pipelines(plan: ParallelPlan) -> Iterator[tuple[int, tuple[int, ...], Schedule]]:
    """Yield (number of changes, layers of the stages, schedule): as given, with equal cuts, plain 1F1B, one stage."""
    given = tuple(stage.last_layer - stage.first_layer + 1 for stage in plan.stages)
    devices = plan.pipeline_devices
    yield 0, given, plan.schedule
    if len(set(given)) > 1 and plan.layers % len(given) == 0:
        yield 1, (plan.layers // len(given),) * len(given), plan.schedule
    if plan.schedule != Schedule() and plan.layers % devices == 0:
        yield 1, (plan.layers // devices,) * devices, Schedule()
    if devices > 1:
        yield 2, (plan.layers,), Schedule()


def _list_variants(base: LayerStrategy) -> Iterator[LayerStrategy]:
    contexts = dict.fromkeys((
        (base.dp, base.ulysses, base.ring),
        (base.dp, base.ulysses * base.ring, 1),
        (base.dp, 1, base.ulysses * base.ring),
        (base.dp * base.ulysses * base.ring, 1, 1),
    ))  # fmt: skip
    for tp, (dp, ulysses, ring) in product(dict.fromkeys((base.tp, 1)), contexts):
        degrees = replace(base, tp=tp, dp=dp * base.tp // tp, ulysses=ulysses, ring=ring)
        replicas = degrees.dp * ulysses * ring
        for zero, recompute, (offload, parameters, inputs), ep in product(
            range(4), Recompute, _list_offloads(base), dict.fromkeys((base.ep, 1))
        ):
            is_hybrid = zero == base.zero == 3 and base.shard_group < base.dp * base.ulysses * base.ring
            groups = [1] if zero == 0 else [replicas, base.shard_group] if is_hybrid else [replicas]
            for group, sharding in product(groups, dict.fromkeys((base.sequence_sharding and tp > 1, False))):
                yield replace(
                    degrees,
                    zero=zero,
                    shard_group=group,
                    recompute=recompute,
                    offload=offload,
                    offload_parameters=parameters,
                    offload_activations=inputs and recompute is Recompute.FULL,
                    ep=ep,
                    sequence_sharding=sharding,
                )


def _list_offloads(base: LayerStrategy) -> list[tuple[bool, bool, bool]]:
    """Return what the host may hold: optimizer state, parameters, inputs of layers; each as given, or on the GPU."""
    states = dict.fromkeys(((base.offload, base.offload_parameters), (base.offload, False), (False, False)))
    return [(*state, inputs) for state in states for inputs in dict.fromkeys((base.offload_activations, False))]


def _count_changes(base: LayerStrategy, strategy: LayerStrategy) -> int:
    """Count the fields that differ. The shard group follows from the others, except for shards within a node."""
    degrees = ("tp", "sequence_sharding", "dp", "zero", "ulysses", "ring", "ep")
    fields = (*degrees, "recompute", "offload", "offload_parameters", "offload_activations")
    changes = [field for field in fields if getattr(base, field) != getattr(strategy, field)]
    return len(changes) + int(_is_hybrid(base) != _is_hybrid(strategy))


def _is_hybrid(strategy: LayerStrategy) -> bool:
    return strategy.zero == 3 and strategy.shard_group < strategy.dp * strategy.ulysses * strategy.ring


def _build_plan(
    plan: ParallelPlan, lengths: tuple[int, ...], schedule: Schedule, strategy: LayerStrategy
) -> ParallelPlan:
    stages, first = [], 0
    for length in lengths:
        run = replace(strategy, layers=length)
        stages.append(Stage(first, first + length - 1, plan.stages[0].gpu, strategy.gpus, (run,)))
        first += length
    return replace(plan, schedule=schedule, stages=tuple(stages))


def _evaluate_within_limits(plan: ParallelPlan, request: SolveRequest) -> ParallelPlan | None:
    """Return the plan with its predictions, None if it breaks a limit or a rule, or does not fit."""
    if request.limits.find_violation(plan):
        return None
    try:
        evaluation = evaluate(plan, replace(request, limits=NO_LIMITS))
    except PlanError:
        return None
    if not evaluation.fits:
        return None
    return replace(
        plan,
        iteration_time_s=evaluation.iteration_time_s,
        samples_per_s=plan.global_batch / evaluation.iteration_time_s,
        peak_bytes_per_gpu=evaluation.peak_bytes_per_gpu,
        terms=evaluation.terms,
        profile_time_s=evaluation.iteration_time_s,
    )
