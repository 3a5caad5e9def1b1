"""Lower bounds of stages, candidate prices, windows and dominance."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.solver.instance import StageCosts
from scheduler.solver.search.stage_bounds import (
    build_windows,
    compute_candidate_prices,
    compute_lower_bounds,
    compute_stage_lower_bounds,
    find_undominated,
)
from tests.unit.solver.search.random_stages import RandomStage, random_costs, random_stage

SEEDS = range(40)


def _bounds(stage: RandomStage, capacity_bytes: int) -> np.ndarray:
    return compute_stage_lower_bounds(
        stage.windows,
        stage.costs,
        in_flight=stage.in_flight,
        capacity_bytes=capacity_bytes,
        prices=stage.prices,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_bound_never_exceeds_the_stage_optimum(seed: int) -> None:
    stage = random_stage(seed)
    if len(stage.chunks) == 1:
        window = stage.windows.ids[stage.chunks[0]]
        assert _bounds(stage, stage.capacity_bytes)[window] <= stage.fastest_s * (1 + 1e-12)
        assert np.isinf(_bounds(stage, 1)[window])
    held = np.concatenate([stage.types[first:end] for first, end in stage.chunks])
    counts = np.bincount(held, minlength=len(stage.costs.time_s)).astype(np.float64)[None]
    bound_s = compute_lower_bounds(
        counts,
        stage.costs,
        length=len(held),
        in_flight=stage.in_flight,
        capacity_bytes=stage.capacity_bytes,
        prices=stage.prices,
    )
    assert bound_s[0] <= stage.fastest_s * (1 + 1e-12)


def test_without_a_limit_the_bound_is_every_layer_at_its_fastest() -> None:
    stage = random_stage(5)
    windows = stage.windows
    fastest = stage.costs.time_s.min(axis=1)[stage.types]
    bounds = _bounds(stage, 10**9)
    for first, end in windows.spans.tolist():
        assert bounds[windows.ids[first, end]] == pytest.approx(fastest[first:end].sum(), rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_single_layer_bound_is_tight_at_hull_corners(seed: int) -> None:
    """The dual is exact at the memory of a hull's corner."""
    costs = random_costs(np.random.default_rng(seed), 1, 5)
    memory, time_s = costs.compute_memory_bytes(1.0)[0] + costs.working_bytes, costs.time_s[0]
    prices = compute_candidate_prices(time_s[None], memory[None])
    assert prices[0] == 0
    for price in prices:
        corner = int(np.lexsort((memory, time_s + price * memory))[0])
        bounds = (time_s + prices[:, None] * (memory - memory[corner])).min(axis=1)
        assert bounds.max() == pytest.approx(time_s[corner], rel=1e-12)


def test_prices_of_many_unlike_layers_stay_few() -> None:
    generator = np.random.default_rng(0)
    prices = compute_candidate_prices(generator.uniform(1, 2, (60, 40)), generator.integers(1, 10**6, (60, 40)))
    assert 2 <= len(prices) <= 24
    assert (np.diff(prices) > 0).all()


def test_windows_with_equal_layers_and_ends_are_equal() -> None:
    windows = build_windows((0, 0, 1, 0, 0, 1, 0), 3)
    assert windows.ids[1, 3] == windows.ids[4, 6]
    assert windows.ids[0, 2] != windows.ids[3, 5]
    assert windows.ids[5, 7] != windows.ids[2, 4]
    assert windows.ids[3, 3] == windows.ids[4, 2] == -1
    first, end = windows.spans[windows.ids[4, 6]]
    assert (first, end) == (1, 3)
    assert windows.counts[windows.ids[0, 7]].tolist() == [5, 2, 0]
    assert windows.lengths[windows.ids[2, 6]] == 4


def test_windows_of_equal_layers_grow_with_the_depth_alone() -> None:
    at_the_start, at_the_end, inside, whole = 47, 47, 46, 1
    assert len(build_windows((0,) * 48, 1).spans) == at_the_start + at_the_end + inside + whole


@pytest.mark.parametrize("seed", SEEDS)
def test_dominance_keeps_the_best_choice(seed: int) -> None:
    stage = random_stage(seed)
    kept = find_undominated(stage.costs, in_flight_max=3.0)
    allowed = np.isin(stage.choices, kept).all(axis=1)
    time_s, memory = stage.priced
    fitting_s = np.where(memory <= stage.capacity_bytes, time_s, np.inf)
    assert np.where(allowed, fitting_s, np.inf).min() == fitting_s.min()


def test_dominance_keeps_the_first_of_equal_strategies() -> None:
    row = np.array([[2.0, 2.0, 3.0, 3.0]])
    same = np.array([[5, 5, 5, 5]])
    costs = StageCosts(
        layouts=np.array([0, 0, 0, 1]),
        time_s=row,
        state_bytes=same,
        kept_bytes=same,
        working_bytes=same[0],
        reshard_s=np.zeros((1, 2, 2)),
        border_s=row,
    )
    assert find_undominated(costs, in_flight_max=4.0).tolist() == [0, 3]
