"""Time to solve whole scaling curves in one process after a warm-up."""

from __future__ import annotations

from statistics import median
from time import perf_counter

from scheduler.domain.parallel_plan import ParallelPlan
from scheduler.domain.scaling_curve import CurveRequest
from scheduler.solver.costs.pipeline_costs import compute_stage_costs
from scheduler.solver.curve import CURVE_TOLERANCE, list_canonical_shapes, solve_curve

GPUS = ("a100-80g", "h100-80g", "l40s")
REQUEST = CurveRequest(model="llama-2-7b", profile_json="", global_batch=64, sequence_length=0)
REPETITIONS = 5


def rows() -> list[tuple[str, str, str]]:
    """Return (name, target, median time and largest proven gap). Costs are computed anew each time."""
    shapes = [shape for gpu in GPUS for shape in list_canonical_shapes(gpu, gpus_per_node=8, gpus_max=64)]
    taken_s, gap = [], 0.0
    for _ in range(1 + REPETITIONS):
        compute_stage_costs.cache_clear()
        begin_s = perf_counter()
        points = solve_curve(REQUEST, shapes)
        taken_s.append(perf_counter() - begin_s)
        gap = max(point.optimality_gap for point in points.values() if isinstance(point, ParallelPlan))
    what = f"curve: llama-2-7b, {len(shapes)} canonical shapes of 1 to 64 GPUs on {', '.join(GPUS)}"
    return [(what, f"2 s, gap {CURVE_TOLERANCE:.1%}", f"{median(taken_s[1:]):.2f} s, gap {gap:.2%}")]


if __name__ == "__main__":
    for name, bar, measured in rows():
        print(f"{name}: {measured} (bar: {bar})")
