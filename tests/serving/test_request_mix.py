"""Request mixes: what merging keeps, and what is rejected."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.serving.request_mix import BINS_MAX, LengthCount, RequestMix, build_request_mix
from tests.serving.length_mixes import BIMODAL, draw_lengths


def test_few_lengths_stay_exact() -> None:
    mix = build_request_mix(2.0, [(10, 5), (10, 5), (7, 3)])
    assert set(mix.lengths) == {LengthCount(10.0, 5.0, 2.0), LengthCount(7.0, 3.0, 1.0)}
    assert mix.with_rate(4.0).rate_per_s == 4.0


def test_merging_keeps_means_and_nearly_the_second_moments() -> None:
    lengths = draw_lengths(np.random.default_rng(5), BIMODAL, 30_000)
    prompts, outputs, shares = build_request_mix(1.0, lengths.tolist()).columns
    assert len(prompts) <= BINS_MAX + 1
    assert shares @ prompts == pytest.approx(lengths[:, 0].mean())
    assert shares @ outputs == pytest.approx(lengths[:, 1].mean())
    assert shares @ prompts**2 == pytest.approx((lengths[:, 0].astype(float) ** 2).mean(), rel=0.01)
    assert shares @ (prompts * outputs) == pytest.approx((lengths[:, 0] * lengths[:, 1]).mean(), rel=0.01)


@pytest.mark.parametrize(
    ("rate", "pairs", "scv", "field"),
    [
        (0.0, [(1, 1)], 1.0, "rate_per_s"),
        (1.0, [(1, 1)], float("nan"), "arrival_scv"),
        (1.0, [], 1.0, "lengths"),
        (1.0, [(0, 1)], 1.0, "lengths"),
    ],
)
def test_invalid_mix_is_rejected(rate: float, pairs: list[tuple[int, int]], scv: float, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        build_request_mix(rate, pairs, arrival_scv=scv)


def test_weights_must_be_positive() -> None:
    with pytest.raises(ValueError, match="lengths"):
        RequestMix(1.0, (LengthCount(1.0, 1.0, 0.0),))
