"""RollingArray compared with a plain list."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.forecast.demand_history import RollingArray


@pytest.mark.parametrize("seed", range(5))
def test_rolling_array_matches_the_end_of_the_series(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rolling, whole = RollingArray(7, start_index=3), [0.0] * 3
    for _ in range(200):
        count = int(generator.integers(1, 18))
        if generator.random() < 0.5:
            numbers = generator.random(count)
            rolling.extend(numbers)
            whole.extend(numbers.tolist())
        else:
            rolling.append_repeated(float(count), count)
            whole.extend([float(count)] * count)
        rolling.raise_last(0.7)
        whole[-1] = max(whole[-1], 0.7)
        assert rolling.end_index == len(whole)
        assert rolling.values.tolist() == whole[rolling.start_index :]
        assert rolling.latest().tolist() == whole[3:][-7:]


def test_appending_a_huge_count_costs_no_more_than_the_window() -> None:
    rolling = RollingArray(4)
    rolling.append_repeated(2.0, 10**15)
    assert rolling.end_index == 10**15
    assert rolling.values.tolist() == [2.0] * 4
