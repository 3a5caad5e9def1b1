"""Why there is no plan, in one sentence with numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.solver.costs.chain import chain
from scheduler.solver.costs.cost_tables import Floats, Ints, cost_tables
from scheduler.solver.costs.setting import Setting
from scheduler.solver.costs.strategies import strategies
from scheduler.solver.request import Infeasible, SolveRequest

_GB = 1e9


def shape_infeasible(request: SolveRequest) -> Infeasible:
    """The shape holds more than one GPU model."""
    models = ", ".join(sorted({group.gpu for group in request.shape.groups}))
    return Infeasible(f"mixed GPU models are not solved yet: {request.shape} holds {models}", "shape")


def batch_infeasible(request: SolveRequest) -> Infeasible:
    """No pair of pipeline degree and micro-batches leaves any strategy."""
    spread = ", ".join(sorted(dimension.value for dimension in request.hardware.dimensions))
    return Infeasible(
        f"a global batch of {request.global_batch} cannot be split evenly over {request.gpus} GPUs of "
        f"{request.hardware.gpu} ({request.shape}): no pipeline, tensor and data degree multiply to {request.gpus} "
        f"with the data degree dividing a micro-batch (supported: {spread})",
        "batch",
    )


def memory_infeasible(request: SolveRequest, settings: list[Setting]) -> Infeasible:
    """Nothing fits: the leanest plan that follows one strategy in each stage, and what it would need."""
    leanest = min((_leanest(request, setting) for setting in settings), key=lambda need: need.bytes_per_gpu)
    strategy = leanest.strategy
    sharding = f", fsdp={strategy.shard_group}" if strategy.zero == 3 else ""
    return Infeasible(
        f"needs {leanest.bytes_per_gpu / _GB:.1f} GB of {request.memory_limit_bytes / _GB:.1f} GB per GPU at "
        f"tp={strategy.tp}, pp={leanest.setting.stages}, recompute={strategy.recompute.value}{sharding}, "
        f"{leanest.setting.micro_batches} micro-batches of {leanest.setting.micro_batch_size}, "
        "the leanest plan with one strategy per stage",
        "memory",
    )


@dataclass(frozen=True, slots=True)
class _Need:
    """Memory of the fullest stage, and the strategy of that stage."""

    bytes_per_gpu: int
    strategy: LayerStrategy
    setting: Setting


def _leanest(request: SolveRequest, setting: Setting) -> _Need:
    """The partition whose fullest stage is least full, every stage at its leanest strategy."""
    layers = chain(request.model, request.hardware.precision, stages=setting.stages)
    tables = cost_tables(layers, strategies(layers, setting), setting)
    by_stage = []
    for stage in range(setting.stages):
        memory = tables.state_bytes + setting.in_flight(stage) * tables.kept_bytes
        by_stage.append(_stage_bytes(memory[tables.types].T, tables.working_bytes))
    reach = by_stage[0].min(axis=0)[0]
    for needs in by_stage[1:]:
        reach = np.maximum(reach[:, None], needs.min(axis=0)).min(axis=0)
    peak = reach[-1]
    binding = next(number for needs in by_stage for number, _, _ in np.argwhere(needs == peak))
    return _Need(int(peak) + request.hardware.reserve_bytes, tables.strategies[int(binding)], setting)


def _stage_bytes(memory: Ints, working: Ints) -> Floats:
    """[S, L+1, L+1]: memory of layers a to b-1 under one strategy; infinite where there is no layer."""
    options, count = memory.shape
    sums = np.concatenate([np.zeros((options, 1), dtype=memory.dtype), np.cumsum(memory, axis=1)], axis=1)
    needs: Floats = (sums[:, None, :] - sums[:, :, None] + working[:, None, None]).astype(np.float64)
    needs[:, np.tril_indices(count + 1)[0], np.tril_indices(count + 1)[1]] = np.inf
    return needs
