"""Megatron-LM: command-line arguments of `pretrain_*.py`.

Context parallelism is a ring (`p2p`), Ulysses (`a2a`), or Ulysses within a ring (`a2a+p2p`, whose inner groups come
first, as in our order of ranks). ZeRO-1 is the distributed optimizer. Experts are split by the tensor degree too, which
is Megatron's default.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from scheduler.domain.framework_limits import FRAMEWORK_LIMITS
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute
from scheduler.plan_export.framework import (
    ExportedPlan,
    Framework,
    count_samples_per_replica,
    get_uniform_strategy,
    list_stage_lengths,
)


def _write(plan: ParallelPlan) -> ExportedPlan:
    strategy = get_uniform_strategy(plan)
    groups = (_list_degrees(plan, strategy), _list_context(strategy), _list_memory(strategy), _list_stages(plan))
    return ExportedPlan(args=tuple(chain(*groups)))


def _list_degrees(plan: ParallelPlan, strategy: LayerStrategy) -> Iterator[str]:
    yield from ("--tensor-model-parallel-size", str(strategy.tp))
    yield from ("--pipeline-model-parallel-size", str(plan.pipeline_devices))
    yield from ("--context-parallel-size", str(strategy.ulysses * strategy.ring))
    yield from ("--expert-model-parallel-size", str(strategy.ep))
    yield from ("--micro-batch-size", str(count_samples_per_replica(plan)))
    yield from ("--global-batch-size", str(plan.global_batch))
    if strategy.sequence_sharding:
        yield "--sequence-parallel"


def _list_context(strategy: LayerStrategy) -> Iterator[str]:
    match strategy.ulysses > 1, strategy.ring > 1:
        case True, True:
            yield from ("--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes")
            yield from (str(strategy.ulysses), str(strategy.ring))
        case True, False:
            yield from ("--cp-comm-type", "a2a")
        case False, True:
            yield from ("--cp-comm-type", "p2p")


def _list_memory(strategy: LayerStrategy) -> Iterator[str]:
    if strategy.zero == 1:
        yield "--use-distributed-optimizer"
    if strategy.recompute is Recompute.SELECTIVE:
        yield from ("--recompute-granularity", "selective")
    elif strategy.recompute is Recompute.FULL:
        yield from ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


def _list_stages(plan: ParallelPlan) -> Iterator[str]:
    """Yield the cuts of the pipeline: E and L are embedding and head, `t*3` is three layers.

    An interleaved pipeline has as many parts as it has chunks on all devices, from which Megatron derives their number.
    """
    lengths = list_stage_lengths(plan)
    if len(set(lengths)) > 1:
        layout = "|".join(f"t*{length}" for length in lengths)
        yield from ("--pipeline-model-parallel-layout", f"E{layout}L")
    elif plan.schedule.interleave > 1:
        yield from ("--num-layers-per-virtual-pipeline-stage", str(lengths[0]))


FRAMEWORK = Framework(
    name="megatron-lm",
    title="Megatron-LM",
    module="megatron.core",
    limits=FRAMEWORK_LIMITS["megatron-lm"],
    write=_write,
    has_args=True,
)
