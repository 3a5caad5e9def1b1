"""Time of one solver call from profile to plan, on one core, after a warm-up."""

from __future__ import annotations

from statistics import median
from time import perf_counter

from scheduler.domain.gpu_shape import GpuShape
from scheduler.solver.profiles.shipped import load_gpu, load_model
from scheduler.solver.request import SolveRequest
from scheduler.solver.search.search import solve

BAR = "300 ms"
REPETITIONS = 9
GB = 10**9


def rows() -> list[tuple[str, str, str]]:
    """(name, bar, measured median)."""
    return [
        ("solver: llama-2-7b on 8 a100-80g", BAR, _median_ms(_request(gpus=8))),
        ("solver: llama-2-7b on 64 a100-80g", BAR, _median_ms(_request(gpus=64))),
        ("solver: llama-2-7b on 8 a100-80g limited to 24 GB", "none", _median_ms(_request(gpus=8, memory_gb=24))),
        ("solver: llama-2-7b on 64 a100-80g limited to 8 GB", "none", _median_ms(_request(gpus=64, memory_gb=8))),
    ]


def _request(*, gpus: int, memory_gb: int = 0) -> SolveRequest:
    shape = GpuShape.packed("a100-80g", gpus, 8)
    return SolveRequest(load_model("llama-2-7b"), load_gpu("a100-80g"), shape, 64, memory_gb * GB)


def _median_ms(request: SolveRequest) -> str:
    solve(request)
    taken_s = []
    for _ in range(REPETITIONS):
        begin_s = perf_counter()
        solve(request)
        taken_s.append(perf_counter() - begin_s)
    return f"{median(taken_s) * 1e3:.0f} ms"


if __name__ == "__main__":
    for name, bar, measured in rows():
        print(f"{name}: {measured} (bar: {bar})")
