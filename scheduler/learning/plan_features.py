"""Features by which measured steps of one plan say something about the steps of another.

A plan has two kinds of features. Its terms are the shares of its predicted step by cause, so a wrong constant of the
hardware moves every plan in proportion to its share of that term. Its layout is its degrees and its placement, by which
similar plans have similar errors that no constant explains.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import STEP_TERMS, ParallelPlan, Recompute

TERM_SD = (0.3, 0.3, 1.5, 0.5, 0.5, 1.0)
"""Standard deviations of the logarithm of true over predicted time of each of STEP_TERMS.

They are judgment, as the priors of `ebbtide fit` are: rates of computation and of links within a node are known to
about a third, those of experts' tokens and of host memory to a half, the overhead of an iteration to a factor of 2.7,
and the network to one of 4.5, because sites have anything from one shared port to a port per GPU.
"""


@dataclass(frozen=True, slots=True)
class PlanFeatures:
    """Features of a plan on a shape of one GPU model.

    `terms` are the shares of the predicted step by cause, in the order of STEP_TERMS. `layout` is that of
    `describe_layout`.

    Raises:
        ValueError: the number of terms is wrong, or a term is negative, or all are 0.
    """

    terms: tuple[float, ...]
    layout: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.terms) != len(STEP_TERMS) or min(self.terms) < 0.0 or sum(self.terms) <= 0.0:
            raise ValueError(f"terms must be {len(STEP_TERMS)} shares of at least 0, not all 0, got {self.terms}")


def describe_layout(plan: ParallelPlan, shape: GpuShape) -> tuple[float, ...]:
    """Return the layout of `plan` on `shape`, in which 1 is a doubling or a switch.

    Strategies that differ between layers count by their layers. The entries are the logarithms of the tensor, data,
    sequence, expert and pipeline degrees, of the micro-batches, of the nodes, and of the fullest node over the mean,
    then the shares of layers with a sharded state, with its offload (2 if parameters are offloaded too), and with full
    and selective recompute.
    """
    strategies = [strategy for stage in plan.stages for strategy in stage.strategies]
    layers = sum(strategy.layers for strategy in strategies)
    by_layer = [
        (
            log2(strategy.tp),
            log2(strategy.dp),
            log2(strategy.ulysses * strategy.ring),
            log2(strategy.ep),
            float(strategy.zero > 0),
            float(strategy.offload + strategy.offload_parameters),
            float(strategy.recompute is Recompute.FULL),
            float(strategy.recompute is Recompute.SELECTIVE),
        )
        for strategy in strategies
    ]
    means = [
        sum(strategy.layers * values[at] for strategy, values in zip(strategies, by_layer, strict=True)) / layers
        for at in range(len(by_layer[0]))
    ]
    fullest = max(group.gpus_per_node for group in shape.groups)
    return (
        *means[:4],
        log2(plan.pipeline_devices),
        log2(plan.micro_batches),
        log2(shape.nodes),
        log2(fullest * shape.nodes / shape.gpus),
        *means[4:],
    )
