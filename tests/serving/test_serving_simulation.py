"""The referee of the capacity model: exact times of small cases, its invariants, and published measurements."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.published_serving_runs import (
    DEEPSEEK_R1_LLAMA_8B,
    KV_TOKENS,
    LLAMA_3_8B,
    PublishedModel,
    PublishedRun,
    draw_run,
)
from tests.serving.serving_simulation import Arrival, ReplicaNumbers, simulate

NUMBERS = ReplicaNumbers(1.0, 0.01, 0.0, 0.1, 0.001, 100, 10, 1_000)
FITTED: Mapping[PublishedModel, ReplicaNumbers] = {
    LLAMA_3_8B: ReplicaNumbers(18.70e-3, 94.8e-6, 0.0, 56.0e-6, 7.45e-8, 2_048, 256, KV_TOKENS),
    DEEPSEEK_R1_LLAMA_8B: ReplicaNumbers(18.40e-3, 95.6e-6, 0.0, 59.5e-6, 7.52e-8, 2_048, 256, KV_TOKENS),
}
"""Numbers under which the referee has the published means at 1 and 16 requests/s, fitted by least squares."""


def test_one_request_takes_its_prompt_and_one_iteration_a_token() -> None:
    report = simulate(NUMBERS, 1, [Arrival(2.0, 50, 3)])
    assert report.ttft_s.tolist() == pytest.approx([1.0 + 50 * 0.01])
    # Each of the two further tokens reads the prompt and the tokens before it.
    assert report.tpot_s.tolist() == pytest.approx([(2 * 1.1 + 0.051 + 0.052) / 2])


def test_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    arrivals = [Arrival(0.0, 10, 5), Arrival(0.5, 150, 2)]
    report = simulate(NUMBERS, 1, arrivals)
    # First iteration until 1.1 s; then 99 tokens of the prompt with one decode, then 51.
    first_s = 1.0 + 0.99 + 0.1 + 0.011
    second_s = 1.0 + 0.51 + 0.1 + 0.012
    assert report.ttft_s[1] == pytest.approx(1.1 + first_s + second_s - 0.5)


def test_without_chunks_prompts_stall_decoding() -> None:
    arrivals = [Arrival(0.0, 10, 5), Arrival(0.5, 90, 2)]
    report = simulate(NUMBERS._replace(chunked=False), 1, arrivals)
    assert report.ttft_s[1] == pytest.approx(1.1 + 1.9 - 0.5)
    assert report.tpot_s[0] > simulate(NUMBERS._replace(chunked=False), 1, arrivals[:1]).tpot_s[0]


def test_cache_that_overflows_preempts_the_last_request_and_finishes_it_later() -> None:
    numbers = NUMBERS._replace(kv_tokens=60)
    report = simulate(numbers, 1, [Arrival(0.0, 20, 30), Arrival(0.0, 20, 30)])
    assert report.preemptions == 1
    assert report.tpot_s[1] > 1.5 * report.tpot_s[0]


def test_request_that_never_fits_is_an_error() -> None:
    with pytest.raises(ValueError, match="KV cache"):
        simulate(NUMBERS._replace(kv_tokens=60), 1, [Arrival(0.0, 20, 100)])


@settings(max_examples=40)
@given(
    requests=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=30),
    replicas=st.integers(1, 3),
    kv_tokens=st.integers(200, 1_000),
    chunked=st.booleans(),
)
def test_every_request_ends_after_its_first_token(
    requests: list[tuple[float, int, int]], replicas: int, kv_tokens: int, chunked: bool
) -> None:
    numbers = NUMBERS._replace(kv_tokens=kv_tokens, chunked=chunked)
    arrivals = [Arrival(*request) for request in sorted(requests)]
    report = simulate(numbers, replicas, arrivals)
    prompts = np.array([arrival.prompt for arrival in arrivals])
    assert np.all(report.ttft_s >= numbers.base_s + numbers.prefill_token_s * prompts - 1e-9)
    assert np.all(report.tpot_s >= numbers.base_s - 1e-9)
    assert len(report.tpot_s) == sum(arrival.output > 1 for arrival in arrivals)


@pytest.mark.parametrize(
    ("model", "run"),
    [(model, run) for model in FITTED for run in model.runs],
    ids=lambda value: value.name if isinstance(value, PublishedModel) else f"{value.rate_per_s}/s",
)
def test_referee_has_the_latencies_of_published_runs(model: PublishedModel, run: PublishedRun) -> None:
    """Rates 4, 8 and 32 took no part in the fit. At 32 requests/s the first tokens depend on the exact lengths."""
    reports = [simulate(FITTED[model], 1, draw_run(model, run.rate_per_s, seed)) for seed in range(8)]
    tpot_ms = [1e3 * np.mean(report.tpot_s) for report in reports]
    assert np.mean(tpot_ms) == pytest.approx(run.tpot_ms, rel=0.05)
    tpot_p95_ms = [1e3 * np.percentile(report.tpot_s, 95) for report in reports]
    assert np.mean(tpot_p95_ms) == pytest.approx(run.tpot_p95_ms, rel=0.15)
    assert np.mean([report.end_s for report in reports]) == pytest.approx(run.duration_s, rel=0.14)
    if run.rate_per_s < 32:
        ttft_ms = [1e3 * np.mean(report.ttft_s) for report in reports]
        assert np.mean(ttft_ms) == pytest.approx(run.ttft_ms, rel=0.1)
