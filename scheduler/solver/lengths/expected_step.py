"""Plan of a job whose samples have unlike lengths: data parallelism, with sequence-parallel groups for each batch.

The plan's step time is the mean over batches drawn from the distribution of lengths. Source: FlexSP (ASPLOS'25, arXiv
2412.01523): every batch has its own groups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from itertools import accumulate
from statistics import fmean

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, Stage
from scheduler.domain.scaling_curve import LengthHistogram
from scheduler.solver.lengths.batch_plan import BatchPlan
from scheduler.solver.lengths.batch_search import search_batch_plan
from scheduler.solver.lengths.derived_costs import DerivedCosts, derive_costs
from scheduler.solver.profiles.model_profile import ModelProfile
from scheduler.solver.request import DeviceGroup, Infeasibility, SolveRequest

BATCHES = 8
"""Batches whose mean time is that of the plan. They are stratified, so that few suffice."""
SAMPLES_MAX = 1024
"""Samples of a batch that are searched. The time of a larger batch is in proportion: it has more micro-batches."""


def plan_unlike_lengths(
    load_model: Callable[[int], ModelProfile], request: SolveRequest, lengths: LengthHistogram
) -> ParallelPlan | Infeasibility:
    """Return the faster of plain data parallelism and ZeRO-3 over all GPUs of the request's shape.

    Args:
        load_model: returns the request's model at a number of tokens.
    """
    if len(request.hardware) > 1:
        return Infeasibility("lengths is set; all GPUs must be of one model", "shape")
    if request.global_batch % request.gpus:
        return Infeasibility(
            f"globalBatch is {request.global_batch}; with lengths it must be a multiple of the {request.gpus} GPUs",
            "batch",
        )
    batches, (group,) = draw_batches(lengths, min(request.global_batch, SAMPLES_MAX)), request.groups
    plans, problems = list[ParallelPlan](), list[str]()
    for zero in (0, 3) if request.gpus > 1 else (0,):
        try:
            costs = derive_costs(load_model, group, context=lengths[-1][0], zero=zero)
            steps = [search_batch_plan(costs.sequences, batch) for batch in batches]
        except ValueError as error:
            problems.append(str(error))
            continue
        plans.append(_build_plan(request, group, costs, zero, tuple(zip(steps, batches, strict=True))))
    if not plans:
        return Infeasibility(problems[-1], "memory")
    return min(plans, key=lambda plan: plan.iteration_time_s)


def draw_batches(lengths: LengthHistogram, batch: int) -> list[list[int]]:
    """Return BATCHES batches of `batch` lengths that together are at evenly spaced quantiles of the distribution.

    Which batch has which quantiles depends on digests, so batches differ as random ones do.
    """
    ends, count = [*accumulate(samples for _, samples in lengths)], BATCHES * batch
    quantiles = sorted(range(count), key=lambda number: sha256(b"%d" % number).digest())
    drawn = [lengths[bisect_right(ends, ends[-1] * (2 * number + 1) // (2 * count))][0] for number in quantiles]
    return [drawn[number::BATCHES] for number in range(BATCHES)]


def _build_plan(
    request: SolveRequest,
    group: DeviceGroup,
    costs: DerivedCosts,
    zero: int,
    steps: Sequence[tuple[BatchPlan, Sequence[int]]],
) -> ParallelPlan:
    layers, gpus = request.model.layer_count, request.gpus
    samples = len(steps[0][1])
    step_s = costs.step_s + fmean(step.time_s for step, _ in steps) * request.global_batch / samples
    gpu_tokens = max(tokens for step, batch in steps for tokens in _count_gpu_tokens(step, batch))
    strategy = LayerStrategy(layers, dp=gpus, zero=zero, shard_group=gpus if zero else 1)
    return ParallelPlan(
        schedule=Schedule(),
        micro_batches=1,
        micro_batch_size=request.global_batch,
        iteration_time_s=step_s,
        samples_per_s=request.global_batch / step_s,
        peak_bytes_per_gpu=int(costs.fixed_bytes + costs.token_bytes * gpu_tokens),
        stages=(Stage(0, layers - 1, group.hardware.gpu, gpus, (strategy,)),),
    )


def _count_gpu_tokens(step: BatchPlan, batch: Sequence[int]) -> Iterable[float]:
    """Yield the tokens on one GPU of each group of a step."""
    for micro_batch in step.micro_batches:
        for group in micro_batch.groups:
            yield sum(batch[position] for position in group.sequences) / group.degree
