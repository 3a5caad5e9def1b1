"""Time of one solver call from request to proven plan, in one process after a warm-up: medians of a few calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, process_time

from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.solver.costs.layer_chain import _build_layer_chain
from scheduler.solver.costs.pipeline_costs import compute_stage_costs
from scheduler.solver.profiles.catalog import load_gpu, load_model
from scheduler.solver.profiles.model_profile import LayerProfile, ModelProfile
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.plan_search import search_plan
from scheduler.solver.search.stage_bounds import build_windows

REPETITIONS = 5
GB = 10**9
ALIKE, THREE_TYPES, ALL_DIFFERENT = 1, 3, 0

MIXED = (
    {"a100-80g": 1, "h100-80g": 1},
    {"v100-32g": 1, "a100-80g": 1, "h100-80g": 1},
    {"a100-80g": 2, "h100-80g": 1, "h200": 1},
    {"v100-32g": 1, "a100-40g": 1, "a100-80g": 1, "h100-80g": 1},
)
"""Nodes of 8 GPUs of each model, for llama-2-70b."""

_SCALED = (
    "flops_per_sample",
    "attention_flops_per_sample",
    "parameters",
    "activation_bytes_per_sample",
    "replicated_activation_bytes_per_sample",
    "traffic_bytes_per_sample",
)


@dataclass(frozen=True)
class Case:
    """Return layers of the size of llama-2-7b on a100-80g. `kinds` 0 makes every layer different."""

    layers: int
    kinds: int
    gpus: int
    bar: str
    tolerance: float = 0.001
    memory_gb: int = 0

    @property
    def name(self) -> str:
        kinds = {ALIKE: "identical", THREE_TYPES: "of three types"}.get(self.kinds, "all different")
        memory = f", {self.memory_gb} GB" if self.memory_gb else ""
        return f"solver: {self.layers} layers {kinds} on {self.gpus} GPUs{memory}"

    def request(self) -> SolveRequest:
        shape = GpuShape.packed("a100-80g", self.gpus, 8)
        batch = max(64, self.gpus)
        return SolveRequest(_model(self.layers, self.kinds), (load_gpu("a100-80g"),), shape, batch, self.memory_gb * GB)


CASES = (
    *(Case(layers, ALIKE, gpus, "100 ms") for layers in (32, 48, 96) for gpus in (64, 1024, 4096)),
    *(Case(layers, ALIKE, 8, bar) for layers, bar in ((32, "100 ms"), (48, "100 ms"), (96, "250 ms"))),
    *(Case(48, THREE_TYPES, gpus, "300 ms") for gpus in (8, 64)),
    *(Case(96, THREE_TYPES, gpus, "2 s") for gpus in (8, 64)),
    *(Case(layers, ALL_DIFFERENT, gpus, "1 s") for layers in (32, 48) for gpus in (8, 64)),
    *(Case(96, ALL_DIFFERENT, gpus, "5 s", tolerance=0.01) for gpus in (8, 64)),
    *(Case(layers, ALIKE, 64, "100 ms", memory_gb=24) for layers in (32, 48, 96)),
    Case(32, ALIKE, 8, "100 ms", memory_gb=24),
    Case(48, THREE_TYPES, 64, "300 ms", memory_gb=24),
    Case(48, ALL_DIFFERENT, 64, "1 s", memory_gb=24),
)


def rows() -> list[tuple[str, str, str]]:
    """Return (name, target, median with the proven gap)."""
    return [
        *((case.name, f"{case.bar}, gap {case.tolerance:.1%}", _time_solve(case)) for case in CASES),
        _mixed_layers(),
        *map(_mixed_models, MIXED),
    ]


def _time_solve(case: Case) -> str:
    return _median(case.request(), case.tolerance)


def _mixed_layers() -> tuple[str, str, str]:
    shape = GpuShape((GpuGroup("h100-80g", 4, 8), GpuGroup("l40s", 4, 8)))
    hardware = (load_gpu("h100-80g"), load_gpu("l40s"))
    request = SolveRequest(_model(48, ALIKE), hardware, shape, 512)
    return "solver: 48 layers identical on 32 h100-80g + 32 l40s", "1 s, gap 0.5%", _median(request, 0.005)


def _mixed_models(nodes: dict[str, int]) -> tuple[str, str, str]:
    shape = GpuShape(tuple(GpuGroup(gpu, count, 8) for gpu, count in nodes.items()))
    request = SolveRequest(load_model("llama-2-70b"), tuple(map(load_gpu, nodes)), shape, 256)
    return f"solver: llama-2-70b on {shape}", "2 s CPU, gap 0%", _median(request, 0.0, process_time)


def _median(request: SolveRequest, tolerance: float, clock: Callable[[], float] = perf_counter) -> str:
    search_plan(request, tolerance=tolerance)
    taken_s = []
    for _ in range(REPETITIONS):
        for remembered in (_build_layer_chain, compute_stage_costs, build_windows):
            remembered.cache_clear()  # A call that has seen nothing of the request yet.
        begin_s = clock()
        result = search_plan(request, tolerance=tolerance).result
        taken_s.append(clock() - begin_s)
    found = f"gap {result.optimality_gap:.3%}" if isinstance(result, ParallelPlan) else f"none: {result.constraint}"
    return f"{median(taken_s) * 1e3:.0f} ms, {found}"


def _model(layers: int, kinds: int) -> ModelProfile:
    """Return kinds of the llama-2-7b layer, scaled by a seeded factor from 0.5 to 1.5."""
    preset = load_model("llama-2-7b")
    base = preset.layers[0]
    if kinds == ALIKE:
        return replace(preset, layers=(replace(base, layers=layers),))
    seeded = random.Random(1)
    factors = [seeded.uniform(0.5, 1.5) for _ in range(kinds or layers)]
    return replace(preset, layers=tuple(_runs(base, factors, layers // len(factors))))


def _runs(base: LayerProfile, factors: list[float], length: int) -> Iterator[LayerProfile]:
    for factor in factors:
        figures = {name: type(getattr(base, name))(getattr(base, name) * factor) for name in _SCALED}
        yield replace(base, layers=length, **figures)


if __name__ == "__main__":
    for name, bar, measured in rows():
        print(f"{name}: {measured} (bar: {bar})")
