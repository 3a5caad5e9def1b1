"""What the solver plans for the reference worker, the worker runs."""

from __future__ import annotations

from itertools import product

import pytest

from scheduler.domain.gpu_shape import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan
from scheduler.solver.costs.chain import chain
from scheduler.solver.costs.setting import Setting
from scheduler.solver.costs.stage_costs import stage_costs
from scheduler.solver.profiles.hardware_profile import Precision
from scheduler.solver.profiles.shipped import load_gpu, load_model
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.search import search
from scheduler.worker.context_attention import token_positions
from scheduler.worker.layout import layout
from scheduler.worker.model import SIZES

CPU = load_gpu("cpu")
COUNTS = (1, 2, 3, 4, 6, 8)


def splits_tokens(strategy: LayerStrategy, tokens: int) -> None:
    share = len(token_positions(tokens=tokens, ulysses=strategy.ulysses, ring=strategy.ring, index=0))
    assert share * strategy.ulysses * strategy.ring == tokens
    assert not strategy.sequence_sharding or share % strategy.tp == 0


@pytest.mark.parametrize("tokens", [64, 60, 50, 49, 12, 6])
@pytest.mark.parametrize("gpus", COUNTS)
def test_every_candidate_splits_sequences_as_the_worker_can(gpus: int, tokens: int) -> None:
    heads = SIZES["mini-gpt"].heads
    layers = chain(load_model("mini-gpt", tokens), Precision.FP32, stages=1)
    setting = Setting.of(CPU, node_gpus=gpus, gpus=gpus, global_batch=4)
    for costed in stage_costs(layers, setting).values():
        for strategy in map(costed.strategy, range(costed.costs.strategies)):
            splits_tokens(strategy, tokens)
            assert heads % (strategy.tp * strategy.ulysses) == 0


def test_every_plan_for_a_reference_model_fits_it() -> None:
    """On one node and on many, whose network makes other dimensions win."""
    found = 0
    for name, gpus, batch, size in product(SIZES, COUNTS, (1, 2, 4, 12), (1, 8)):
        shape = GpuShape.packed("cpu", gpus, size)
        plan = search(SolveRequest(load_model(name), (CPU,), shape, batch), tolerance=0.01).result
        if isinstance(plan, ParallelPlan):
            found += 1
            run = layout(plan, world_size=gpus, blocks=SIZES[name].layers)
            for strategy in run.layers:
                splits_tokens(strategy, SIZES[name].sequence)
    assert found > 150
