"""The cost of a solution, added up by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.solver.instance import Instance, Solution, StageCosts, evaluate_solution

INF = float("inf")
COSTS = StageCosts(
    layouts=np.array([0, 1]),
    time_s=np.array([[1.0, 2.0], [3.0, 5.0]]),
    state_bytes=np.array([[10, 4], [20, 6]]),
    kept_bytes=np.array([[3, 1], [5, 2]]),
    working_bytes=np.array([0, 7]),
    reshard_s=np.array([[[0.0, 0.25], [0.5, 0.0]], [[0.0, 0.75], [1.0, 0.0]]]),
    border_s=np.array([[0.125, 0.0], [0.0625, 0.03125]]),
)
SLOW = replace(COSTS, time_s=COSTS.time_s * 10)


def _links(*loads_s: tuple[float, ...], groups: int = 1) -> np.ndarray:
    rows = np.array([(INF, *row, INF) for row in loads_s])
    return np.broadcast_to(rows[:, None, None, :], (len(rows), groups, groups, rows.shape[1])).copy()


def _instance(**changes: object) -> Instance:
    plain = Instance(
        types=np.array([0, 0, 1, 1]),
        costs=(COSTS,),
        counts=(2,),
        capacity_bytes=(52,),
        in_flight=(2.0, 1.5),
        hand_over_s=_links((0.1, 0.2, 0.3)),
        micro_batches=4,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # any field


def test_a_pipeline_of_two_stages() -> None:
    found = evaluate_solution(_instance(), Solution(order=(0, 0), borders=(0, 3, 4), choice=(0, 1, 1, 0)))

    first_s = 1 + 2 + 5 + 0.25 + 0.0 + 0.03125  # layers, resharding after layers 0 and 1, gathering at its end
    second_s = 3 + 0.0625
    assert found.devices_s == (first_s, second_s)
    assert found.links_s == (0.3,)
    assert found.time_s == pytest.approx(first_s + second_s + 0.3 + 3 * first_s)
    assert found.memory_bytes == ((10 + 6) + (4 + 2) + (6 + 4) + 7, 20 + 8)  # kept: 5 x 1.5 is rounded up


def test_a_solution_fits_up_to_the_last_byte_of_each_device() -> None:
    solution = Solution(order=(0, 0), borders=(0, 3, 4), choice=(0, 1, 1, 0))
    assert evaluate_solution(_instance(capacity_bytes=(39,)), solution).fits
    assert not evaluate_solution(_instance(capacity_bytes=(38,)), solution).fits


def test_each_group_has_its_own_costs_links_and_limit() -> None:
    links_s = _links((0.1, 0.2, 0.3), groups=2)
    links_s[0, 1, 0, 2] = 50.0
    mixed = _instance(costs=(COSTS, SLOW), counts=(1, 1), capacity_bytes=(60, 28), hand_over_s=links_s)

    found = evaluate_solution(mixed, Solution(order=(1, 0), borders=(0, 2, 4), choice=(1, 1, 0, 0)))

    assert found.devices_s == (40.0, 3 + 3 + 0.0625)
    assert found.links_s == (50.0,)
    assert found.memory_bytes == (6 + 6 + 7, 28 + 28)
    assert found.fits
    assert not evaluate_solution(mixed, Solution(order=(0, 1), borders=(0, 2, 4), choice=(1, 1, 0, 0))).fits


def test_an_interleaved_device_holds_two_chunks_and_the_ring_leads_back() -> None:
    ring = _instance(interleave=2, hand_over_s=_links((0.1, 0.2, 0.3), (1.1, 1.2, 1.3)))

    found = evaluate_solution(ring, Solution(order=(0, 0), borders=(0, 1, 2, 3, 4), choice=(0, 0, 0, 0)))

    devices_s = (1 + 0.125 + 3 + 2 * 0.0625, 1 + 2 * 0.125 + 3 + 0.0625)
    links_s = (0.1 + 0.3, 1.2)
    assert found.devices_s == pytest.approx(devices_s)
    assert found.links_s == pytest.approx(links_s)
    assert found.time_s == pytest.approx((sum(devices_s) + sum(links_s)) / 2 + 3.5 * max(devices_s))
    assert found.memory_bytes == (16 + 30, 15 + 28)
