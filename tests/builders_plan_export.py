"""Plans for tests of the exports, given and random."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, ScheduleName, Stage
from scheduler.plan_export.framework import Framework


def build_plan(
    *lengths: int,
    strategy: LayerStrategy | None = None,
    interleave: int = 1,
    micro_batches: int = 8,
    samples: int = 2,
    others: tuple[LayerStrategy, ...] = (),
) -> ParallelPlan:
    """Return a plan whose stages have these numbers of layers.

    Args:
        samples: samples of a micro-batch on each replica.
        others: strategies of the last layers of the last stage, one layer each.
    """
    each = strategy or LayerStrategy(1)
    stages, first = [], 0
    for number, length in enumerate(lengths):
        tail = others if number == len(lengths) - 1 else ()
        runs = (replace(each, layers=length - len(tail)), *(replace(other, layers=1) for other in tail))
        stages.append(Stage(first, first + length - 1, "a100-80g", each.gpus, runs))
        first += length
    name = ScheduleName.INTERLEAVED if interleave > 1 else ScheduleName.ONE_F_ONE_B
    return ParallelPlan(Schedule(name, interleave), micro_batches, samples * each.dp, 1.0, 1.0, 2**30, tuple(stages))


def draw_plan(rng: random.Random, framework: Framework) -> ParallelPlan:
    """Return a random plan that the framework can express."""
    while True:
        plan = _draw_any_plan(rng, is_uniform=framework.limits.is_uniform)
        if not framework.find_problem(plan):
            return plan


def _draw_any_plan(rng: random.Random, *, is_uniform: bool) -> ParallelPlan:
    strategy = _draw_strategy(rng)
    devices, interleave = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2))
    interleave = interleave if devices > 1 else 1
    length = rng.randint(1, 4)
    lengths = [length] * (devices * interleave)
    if interleave == 1 and rng.random() < 0.5:
        lengths = [rng.randint(1, 4) for _ in lengths]
    others: tuple[LayerStrategy, ...] = ()
    if not is_uniform and lengths[-1] > 1:
        alike = (drawn for drawn in (_draw_strategy(rng) for _ in range(50)) if drawn.gpus == strategy.gpus)
        others = tuple(islice((other for other in alike if other.dp == strategy.dp), lengths[-1] - 1))
    micro_batches = devices * rng.randint(1, 4)
    return build_plan(
        *lengths,
        strategy=strategy,
        interleave=interleave,
        micro_batches=micro_batches,
        samples=rng.randint(1, 4),
        others=others,
    )


def _draw_strategy(rng: random.Random) -> LayerStrategy:
    tp, dp, ulysses, ring = (rng.choice((1, 1, 2, 4)) for _ in range(4))
    replicas = dp * ulysses * ring
    zero = rng.randint(0, 3) if replicas > 1 else 0
    is_hybrid = zero == 3 and replicas > 2 and rng.random() < 0.3
    group = 1 if zero == 0 else 2 if is_hybrid else replicas
    return LayerStrategy(
        layers=1,
        tp=tp,
        sequence_sharding=tp > 1 and rng.random() < 0.7,
        dp=dp,
        zero=zero,
        shard_group=group,
        ulysses=ulysses,
        ring=ring,
        ep=rng.choice([ep for ep in (1, 1, 2, 4) if replicas % ep == 0]),
        recompute=rng.choice(tuple(Recompute)),
        offload=rng.random() < 0.2 and (zero > 0 or replicas == 1),
    )
