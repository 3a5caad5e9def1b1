"""Predicted speed-up of the search over hand-written plans, under the same evaluator.

Three references, each on the same model, GPUs and batch:

* data parallel only: the best of DDP, ZeRO and FSDP with any recompute and micro-batches;
* rule of thumb: tensor parallel within the node, as few pipeline stages across nodes as fit, data parallel for the rest
  (ZeRO-1), with the best micro-batch (a power of two) and recompute;
* even stages and powers of two: the same search with stages of equal length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

from scheduler.domain.gpu_sets import GpuShape
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute
from scheduler.solver.calibration.measured_runs import build_even_plan
from scheduler.solver.evaluate import PlanError, evaluate
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.profiles.hardware_profile import Dimension
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.pipeline_search import PipelineSearch, search_best_first
from scheduler.solver.search.pipelines import enumerate_pipelines
from scheduler.solver.search.plan_search import search_plan
from scheduler.solver.search.stage_oracle import OracleCache

MODELS = ("bert-large", "llama-2-7b", "llama-2-13b", "llama-2-70b", "mixtral-8x7b", "vit-huge")
SIZES = (8, 32, 64, 256)
SAMPLES_PER_GPU = 8
NODE_GPUS = 8
TOLERANCE = 0.001

_DATA_PARALLEL = frozenset(
    {
        Dimension.DATA,
        Dimension.ZERO,
        Dimension.FSDP,
        Dimension.HYBRID_SHARD,
        Dimension.RECOMPUTE,
        Dimension.SELECTIVE_RECOMPUTE,
    }
)


def rows() -> list[tuple[str, str, str]]:
    """Return (model on GPUs, no target, predicted speed-ups)."""
    return [(f"speedup: {model} on {gpus} a100-80g", "none", _gains(_request(model, gpus))) for model, gpus in _cases()]


def _cases() -> Iterator[tuple[str, int]]:
    yield from product(MODELS, SIZES)


def _request(model: str, gpus: int) -> SolveRequest:
    shape = GpuShape.packed("a100-80g", gpus, NODE_GPUS)
    return SolveRequest(load_model(model), (load_gpu("a100-80g"),), shape, SAMPLES_PER_GPU * gpus)


def _gains(request: SolveRequest) -> str:
    best_s = _time_s(search_plan(request, tolerance=TOLERANCE).result)
    rivals = {"data parallel": _data_parallel_s, "hand rule": _hand_rule_s, "even stages": _even_stages_s}
    return ", ".join(f"{name} {_gain(rival(request), best_s)}" for name, rival in rivals.items())


def _gain(rival_s: float, best_s: float) -> str:
    if best_s == inf:
        return "nothing fits"
    return "does not fit" if rival_s == inf else f"{rival_s / best_s:.2f}x"


def _data_parallel_s(request: SolveRequest) -> float:
    hardware = tuple(replace(profile, dimensions=_DATA_PARALLEL) for profile in request.hardware)
    return _time_s(search_plan(replace(request, hardware=hardware), tolerance=TOLERANCE).result)


def _even_stages_s(request: SolveRequest) -> float:
    """Return the hand-written plan. GPU counts are powers of two, so every degree is one."""
    pairs = []
    overhead_s = request.hardware[0].iteration_overhead_s
    for pipeline in enumerate_pipelines(request, OracleCache()):
        layers = len(pipeline.layers)
        if pipeline.config.borders or layers % pipeline.devices:
            continue
        borders = tuple(range(0, layers + 1, layers // pipeline.devices))
        pairs.append(PipelineSearch.from_instance(replace(pipeline.search.instance, borders=borders)))
    found = search_best_first(pairs, tolerance=TOLERANCE)
    return inf if found.best is None else found.best.cost_s + overhead_s


def _hand_rule_s(request: SolveRequest) -> float:
    tensor = min(NODE_GPUS, request.model.layers[0].heads, request.gpus)
    stages = 1
    while stages * tensor <= request.gpus and stages <= request.model.layer_count:
        choices = product(Recompute, (1, 2, 4, 8))
        best_s = min(_evaluate_s(_hand_written_plan(request, tensor, stages, *choice), request) for choice in choices)
        if best_s < inf:
            return best_s
        stages *= 2
    return inf


def _hand_written_plan(
    request: SolveRequest, tensor: int, stages: int, recompute: Recompute, samples: int
) -> ParallelPlan:
    data = request.gpus // stages // tensor
    strategy = LayerStrategy(
        layers=1,
        tp=tensor,
        sequence_sharding=tensor > 1,
        dp=data,
        zero=1 if data > 1 else 0,
        shard_group=data,
        recompute=recompute,
    )
    return build_even_plan(
        strategy,
        layers=request.model.layer_count,
        gpu=request.hardware[0].gpu,
        pipeline=stages,
        interleave=1,
        micro_batches=request.global_batch // (data * samples),
        samples_per_replica=samples,
    )


def _evaluate_s(plan: ParallelPlan, request: SolveRequest) -> float:
    try:
        judged = evaluate(plan, request)
    except PlanError:
        return inf
    return judged.iteration_time_s if judged.fits else inf


def _time_s(result: object) -> float:
    return result.iteration_time_s if isinstance(result, ParallelPlan) else inf


if __name__ == "__main__":
    for name, _, measured in rows():
        print(f"{name}: {measured}")
