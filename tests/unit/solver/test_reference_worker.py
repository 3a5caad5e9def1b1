"""The worker can run everything that the solver plans for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Stage
from scheduler.solver.costs.collectives import StageSetting
from scheduler.solver.costs.layer_chain import build_layer_chain
from scheduler.solver.costs.pipeline_costs import compute_stage_costs
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.profiles.hardware_profile import Dimension, Precision
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.plan_search import search_plan
from scheduler.trainer.activation_sharding import compute_stage_handoff, compute_token_shardings
from scheduler.trainer.context_parallel import compute_token_positions
from scheduler.trainer.layout import build_layout
from scheduler.trainer.model import SIZES
from scheduler.trainer.model_parts import validate_divisibility
from tests.properties.plan_space import Pipe, enumerate_pipes

CPU = load_gpu("cpu")
COUNTS = (1, 2, 3, 4, 6, 8)


def can_split_tokens(strategy: LayerStrategy, tokens: int) -> None:
    share = len(compute_token_positions(tokens=tokens, ulysses=strategy.ulysses, ring=strategy.ring, index=0))
    assert share * strategy.ulysses * strategy.ring == tokens
    assert not strategy.sequence_sharding or share % strategy.tp == 0


@pytest.mark.parametrize("tokens", [64, 60, 50, 49, 12, 6])
@pytest.mark.parametrize("gpus", COUNTS)
def test_candidates_split_sequences_as_the_worker_does(gpus: int, tokens: int) -> None:
    heads = SIZES["mini-gpt"].heads
    layers = build_layer_chain(load_model("mini-gpt", tokens), Precision.FP32, stages=1)
    setting = StageSetting.for_stage(CPU, node_gpus=gpus, gpus=gpus, global_batch=4)
    for costed in compute_stage_costs(layers, setting).values():
        for strategy in map(costed.build_strategy, range(costed.costs.strategies)):
            can_split_tokens(strategy, tokens)
            assert heads % (strategy.tp * strategy.ulysses) == 0


def test_every_plan_for_a_reference_model_fits_it() -> None:
    """On one node and on many, whose network makes other dimensions win."""
    found = 0
    for name, gpus, batch, size in product(SIZES, COUNTS, (1, 2, 4, 12), (1, 8)):
        shape = GpuShape.packed("cpu", gpus, size)
        plan = search_plan(SolveRequest(load_model(name), (CPU,), shape, batch), tolerance=0.01).result
        if isinstance(plan, ParallelPlan):
            found += 1
            run = build_layout(plan, world_size=gpus, block_count=SIZES[name].layers)
            for strategy in run.strategies:
                can_split_tokens(strategy, SIZES[name].sequence)
    assert found > 150


def plans_with_every_strategy(pipe: Pipe) -> Iterator[ParallelPlan]:
    """Plans of one pipeline, with its stages in the order of the groups and its cuts as even as they can be, in which
    every strategy of every group appears; its layers have one each."""
    layers, order = pipe.request.model.layer_count, [g for g, count in enumerate(pipe.counts) for _ in range(count)]
    borders = pipe.borders or tuple(layers * stage // len(order) for stage in range(len(order) + 1))
    groups = [
        order[chunk % len(order)] for chunk, (first, end) in enumerate(pairwise(borders)) for _ in range(first, end)
    ]
    left = [iter(options) for options in pipe.options]
    while True:
        fresh = [next(left[group], None) for group in groups]
        if not any(fresh):
            return
        chosen = [strategy or pipe.options[group][0] for strategy, group in zip(fresh, groups, strict=True)]
        stages = tuple(
            Stage(
                first,
                end - 1,
                pipe.request.groups[groups[first]].hardware.gpu,
                pipe.widths[groups[first]],
                tuple(chosen[first:end]),
            )
            for first, end in pairwise(borders)
        )
        yield ParallelPlan(pipe.schedule, pipe.micro_batches, pipe.samples, 1.0, 1.0, 1, stages)


ABLE = replace(
    CPU,
    dimensions=frozenset(Dimension),
    host_bandwidth_bytes_per_s=CPU.memory_bandwidth_bytes_per_s,
    host_optimizer_s_per_parameter=1e-9,
)
"""Its worker does all that a profile may say, offload too."""
SHAPES = {"1": (1,), "2": (2,), "3": (3,), "4": (4,), "1 + 2": (1, 2), "3 + 1": (3, 1)}
"""GPUs of one model, or of two."""


@pytest.mark.parametrize("gpus", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["nano-gpt", "mini-gpt", "wide-gpt", "nano-moe", "mini-moe"])
def test_the_worker_accepts_every_plan_that_the_solver_may_choose(name: str, gpus: tuple[int, ...]) -> None:
    size = SIZES[name]
    hardware = tuple(replace(ABLE, gpu=f"gpu{number}") for number in range(len(gpus)))
    shape = GpuShape(tuple(GpuGroup(profile.gpu, 1, count) for profile, count in zip(hardware, gpus, strict=True)))
    strategies = set[LayerStrategy]()
    for pipe in enumerate_pipes(SolveRequest(load_model(name), hardware, shape, global_batch=12)):
        for plan in plans_with_every_strategy(pipe):
            run = build_layout(plan, world_size=plan.world_size, block_count=size.layers)
            validate_divisibility(run, size)
            spreads = compute_token_shardings(run, size.sequence)
            for stage in range(len(run.stages) - 1):
                compute_stage_handoff(run, spreads, stage)
            strategies.update(run.strategies)
    assert len(strategies) >= 3 * sum(gpus)
    assert any(strategy.offload for strategy in strategies)
