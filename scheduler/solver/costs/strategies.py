"""The strategies a layer may follow on the GPUs of its stage."""

from __future__ import annotations

from math import gcd

from scheduler.domain.parallel_plan import LayerStrategy, Recompute
from scheduler.solver.costs.chain import Layer
from scheduler.solver.costs.divisors import divisors
from scheduler.solver.costs.setting import Setting
from scheduler.solver.profiles.hardware_profile import Dimension, HardwareProfile


def strategies(layers: tuple[Layer, ...], setting: Setting) -> tuple[LayerStrategy, ...]:
    """Every strategy that each of `layers` can follow, in a fixed order; empty where there is none.

    Degrees are any divisors, not powers of two alone. The tensor-parallel degree divides the heads of every layer
    and the GPUs of a node, so that its group never leaves the node; what remains of the stage is data parallel,
    and must divide the micro-batch.
    """
    found = []
    for tp in divisors(gcd(setting.stage_gpus, setting.topology.node_gpus)):
        if _tensor_degree_fits(tp, layers, setting):
            dp = setting.stage_gpus // tp
            found.extend(_variants(tp, dp, setting.hardware))
    return tuple(found)


def _tensor_degree_fits(tp: int, layers: tuple[Layer, ...], setting: Setting) -> bool:
    if tp > 1 and not setting.hardware.supports(Dimension.TENSOR):
        return False
    if any(layer.heads % tp for layer in layers):
        return False
    return setting.micro_batch_size % (setting.stage_gpus // tp) == 0


def _variants(tp: int, dp: int, hardware: HardwareProfile) -> list[LayerStrategy]:
    sharding = [(0, 1)]
    if dp > 1 and hardware.supports(Dimension.FSDP):
        sharding.append((3, dp))
    recompute = [Recompute.NONE]
    if hardware.supports(Dimension.RECOMPUTE):
        recompute.append(Recompute.FULL)
    return [
        LayerStrategy(layers=1, tp=tp, dp=dp, zero=zero, shard_group=group, recompute=again)
        for zero, group in sharding
        for again in recompute
    ]
