"""Random plans and GPU slots for tests and benchmarks of resharding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, ScheduleName, Stage
from scheduler.resharding.placement import GpuSlot

NODE_GPUS = 8


@dataclass(frozen=True, slots=True)
class Transition:
    """A job's plan and slots before and after; `new_slots` are in the order in which a launcher would fill them."""

    old_plan: ParallelPlan
    old_slots: tuple[GpuSlot, ...]
    new_plan: ParallelPlan
    new_slots: tuple[GpuSlot, ...]

    @property
    def shrinks(self) -> bool:
        return len(self.new_slots) < len(self.old_slots)


def a_plan(stages: Sequence[Sequence[LayerStrategy]], *, interleave: int = 1) -> ParallelPlan:
    """Return a plan whose stages hold these runs of layers; only figures that determine the placement of state are
    set."""
    starts = [0, *accumulate(sum(run.layers for run in runs) for runs in stages)]
    schedule = Schedule(ScheduleName.INTERLEAVED if interleave > 1 else ScheduleName.ONE_F_ONE_B, interleave)
    held = zip(pairwise(starts), stages, strict=True)
    return ParallelPlan(
        schedule=schedule,
        micro_batches=1,
        micro_batch_size=1,
        iteration_time_s=1.0,
        samples_per_s=1.0,
        peak_bytes_per_gpu=1,
        stages=tuple(Stage(first, end - 1, "gpu", runs[0].gpus, tuple(runs)) for (first, end), runs in held),
    )


def a_strategy(rng: random.Random, gpus: int, layers: int, *, experts: int = 0) -> LayerStrategy:
    """Return any strategy over `gpus`: tensor parallelism within a node, then context, experts and sharding of the
    replicas."""
    tp = rng.choice([tp for tp in (1, 1, 1, 2, 4, 8) if gpus % tp == 0])
    replicas = gpus // tp
    ulysses = rng.choice([1, 1, 1, *(size for size in (2, 4) if replicas % size == 0)])
    ring = rng.choice([1, 1, 1, *(size for size in (2,) if replicas // ulysses % size == 0)])
    ep = rng.choice([size for size in (1, 2, 4, 8) if replicas % size == 0 and experts % size == 0])
    zero = rng.choice([0, 1, 2, 3, 3, 3]) if replicas > 1 else 0
    in_node = max(1, NODE_GPUS // tp)
    hybrid = 1 < in_node < replicas and replicas % in_node == 0 and (in_node % ep == 0 or ep % in_node == 0)
    group = rng.choice([replicas, in_node]) if zero == 3 and hybrid else replicas if zero else 1
    dp = replicas // (ulysses * ring)
    return LayerStrategy(
        layers, tp=tp, dp=dp, zero=zero, shard_group=group, ulysses=ulysses, ring=ring, ep=ep if experts else 1
    )


def a_random_plan(rng: random.Random, gpus: int, layers: int, *, experts: int = 0) -> ParallelPlan:
    """Return any pipeline over `gpus`, plain or interleaved, with uneven cuts and some stages of two runs of layers."""
    devices = rng.choice([size for size in (1, 1, 2, 3, 4, 8) if gpus % size == 0 and size <= layers])
    interleave = 2 if devices > 1 and layers >= 2 * devices and rng.random() < 0.2 else 1
    cuts = sorted(rng.sample(range(1, layers), devices * interleave - 1))
    stages = list[list[LayerStrategy]]()
    for first, end in pairwise([0, *cuts, layers]):
        count, width = end - first, gpus // devices
        head = rng.randint(1, count - 1) if count > 1 and rng.random() < 0.3 else 0
        runs = [head, count - head] if head else [count]
        stages.append([a_strategy(rng, width, run, experts=experts) for run in runs])
    return a_plan(stages, interleave=interleave)


def slots_on(counts: dict[int, int]) -> tuple[GpuSlot, ...]:
    """Return the first GPUs of numbered nodes, node after node."""
    return tuple(GpuSlot(f"n{node:02d}", gpu) for node, gpus in sorted(counts.items()) for gpu in range(gpus))


def a_transition(rng: random.Random, layers: int, *, gpus_max: int = 64, experts: int = 0) -> Transition:
    """Return a transition in which a job grows, shrinks, or moves in part: whole nodes if it has several, else
    single GPUs."""
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 16, 24, 32, 40, 48, 56, 64) if size <= gpus_max]
    old_gpus, new_gpus = rng.choice(sizes), rng.choice(sizes)
    if rng.random() < 0.2:
        new_gpus = old_gpus
    old_plan = a_random_plan(rng, old_gpus, layers, experts=experts)
    return a_move(rng, old_plan, a_random_plan(rng, new_gpus, layers, experts=experts))


def a_move(rng: random.Random, old_plan: ParallelPlan, new_plan: ParallelPlan) -> Transition:
    """Return the transition from one plan to another: on some of the GPUs that the job has, and on fresh ones."""
    old_slots = _on_nodes(range(-(-old_plan.world_size // NODE_GPUS)), old_plan.world_size)
    return Transition(old_plan, old_slots, new_plan, _after(rng, old_slots, new_plan.world_size))


def _after(rng: random.Random, old: tuple[GpuSlot, ...], gpus: int) -> tuple[GpuSlot, ...]:
    """Return slots that the job keeps without regard to its state, and fresh ones on other nodes."""
    old_nodes, nodes = len({slot.node for slot in old}), -(-gpus // NODE_GPUS)
    if gpus < NODE_GPUS:
        home = rng.randrange(old_nodes)
        here = [slot for slot in old if slot.node == f"n{home:02d}"]
        free = [GpuSlot(f"n{home:02d}", gpu) for gpu in range(len(here), NODE_GPUS)]
        kept = rng.sample(here, min(gpus, len(here)))
        return tuple(sorted([*kept, *free[: gpus - len(kept)]]))
    kept_most = min(old_nodes, nodes)
    staying = kept_most if rng.random() < 0.7 else rng.randint(0, kept_most)
    fresh = rng.sample(range(old_nodes, old_nodes + 2 * nodes), nodes - staying)
    return _on_nodes(sorted([*rng.sample(range(old_nodes), staying), *fresh]), gpus)


def _on_nodes(nodes: Sequence[int], gpus: int) -> tuple[GpuSlot, ...]:
    return slots_on({node: min(NODE_GPUS, gpus - NODE_GPUS * number) for number, node in enumerate(nodes)})
