"""The exact search against the UniAP MILP on HiGHS: one thread each, the same arrays, the loop over all pairs.

HiGHS is timed by its own clock, without building its model. Its loop solves each pair to its own optimum as in UniAP,
and once more with the best objective so far as a cutoff, which favors it over the published method.
"""

from __future__ import annotations

import random
from statistics import median
from time import perf_counter

from baselines.milp.solver import solve_instances
from scheduler.solver.instance import Instance
from scheduler.solver.search.pipeline_search import PipelineSearch, search_best_first
from tests.builders_loop import a_loop

LOOPS = 12
TIME_LIMIT_S = 20.0
BAR = "median 100x, worst 10x"


def rows() -> list[tuple[str, str, str]]:
    """Compare over the loops that HiGHS proved."""
    loops = [_loop(seed) for seed in range(LOOPS)]
    own_s = [_own_s(loop) for loop in loops]
    return [
        ("referee: HiGHS over the search, each pair alone (UniAP)", BAR, _ratios(loops, own_s, shared=False)),
        ("referee: HiGHS over the search, cutoff shared by pairs", BAR, _ratios(loops, own_s, shared=True)),
    ]


def _loop(seed: int) -> list[Instance]:
    seeded = random.Random(f"benchmark {seed}")
    layers = seeded.choice([6, 8, 12, 16, 20, 24])
    return a_loop(seeded, layers=layers, kinds=seeded.choice([1, 2, 3, layers]), gpus=8, batch=16)


def _own_s(loop: list[Instance]) -> float:
    taken_s = []
    for _ in range(3):
        begin_s = perf_counter()
        search_best_first([PipelineSearch.from_instance(instance) for instance in loop])
        taken_s.append(perf_counter() - begin_s)
    return median(taken_s)


def _ratios(loops: list[list[Instance]], own_s: list[float], *, shared: bool) -> str:
    outcomes = [solve_instances(loop, time_limit_s=TIME_LIMIT_S, shared=shared) for loop in loops]
    pairs = zip(outcomes, own_s, strict=True)
    ratios = [outcome.time_s / alone_s for outcome, alone_s in pairs if outcome.proven]
    if not ratios:
        return f"HiGHS proved none of {len(loops)}"
    return f"median {median(ratios):.0f}x, worst {min(ratios):.1f}x ({len(ratios)} of {len(loops)} proven)"


if __name__ == "__main__":
    for name, bar, measured in rows():
        print(f"{name}: {measured} (bar: {bar})")
