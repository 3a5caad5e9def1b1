"""Costs derived from profiles, and costs calibrated from measured latencies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.serving.calibration import FACTOR_MAX, MeasuredLatency, calibrate_costs, predict_means
from scheduler.serving.replica_model import (
    ENGINE_OVERHEAD_S,
    BatchLimits,
    IterationCosts,
    ReplicaModel,
    count_kv_bytes,
    count_kv_tokens,
    derive_costs,
)
from scheduler.serving.request_mix import build_request_mix
from scheduler.solver.profiles.catalog import load_gpu, load_model
from tests.serving.length_mixes import CHAT, LONG_PROMPT, draw_lengths
from tests.serving.published_serving_runs import KV_TOKENS, LLAMA_3_8B, draw_run
from tests.serving.serving_simulation import ReplicaNumbers, draw_arrivals, simulate

LIMITS = BatchLimits(2_048, 256, 400_000)


def test_llama_3_8b_caches_131072_bytes_a_token() -> None:
    """32 layers x keys and values x 8 heads x 128 values x 2 bytes (arXiv 2407.21783, table 3)."""
    model = load_model("llama-3-8b")
    assert count_kv_bytes(model, 1) == 131_072
    assert count_kv_bytes(model, 8) == 131_072 / 8
    assert count_kv_bytes(model, 16) == 131_072 / 8
    gpu = load_gpu("h100-80g")
    assert count_kv_tokens(model, gpu, 1, 0.9) == pytest.approx((0.87 * 80e9 - 16.06e9) / 131_072, rel=0.01)


def test_tensor_parallelism_divides_the_costs_of_decoding() -> None:
    model, gpu = load_model("llama-3.1-70b"), load_gpu("h100-80g")
    one, four = derive_costs(model, gpu, 1), derive_costs(model, gpu, 4)
    assert (one.base_s - ENGINE_OVERHEAD_S) / 4 < four.base_s < one.base_s / 2
    assert four.kv_token_s == pytest.approx(one.kv_token_s / 4)
    assert one.prefill_token_s / 4 < four.prefill_token_s < one.prefill_token_s


def test_derived_costs_are_those_of_the_roofline() -> None:
    gpu = load_gpu("h100-80g")
    costs = derive_costs(load_model("llama-3-8b"), gpu, 1)
    assert costs.base_s == pytest.approx(ENGINE_OVERHEAD_S + 2 * 7.505e9 / gpu.memory_bandwidth_bytes_per_s, rel=1e-3)
    assert costs.prefill_token_s == pytest.approx(2 * 6.98e9 / (gpu.peak_flops_per_s * gpu.efficiency), rel=1e-2)
    assert costs.kv_token_s == pytest.approx(131_072 / gpu.memory_bandwidth_bytes_per_s)


def test_weights_that_do_not_fit_name_the_degree() -> None:
    with pytest.raises(ValueError, match="tensorDegree"):
        count_kv_tokens(load_model("llama-3.1-70b"), load_gpu("h100-80g"), 1, 0.9)


def test_model_without_attention_heads_has_no_cache() -> None:
    model = load_model("llama-3-8b")
    headless = replace(model, layers=tuple(replace(run, head_width=0) for run in model.layers))
    with pytest.raises(ValueError, match="head_width"):
        count_kv_bytes(headless, 1)


@pytest.mark.parametrize("field", ["base_s", "prefill_token_s"])
def test_required_costs_are_above_0(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        replace(IterationCosts(1.0, 1.0, 0.0, 0.0, 0.0), **{field: 0.0})


def test_invalid_limits_are_rejected() -> None:
    with pytest.raises(ValueError, match="kv_tokens"):
        BatchLimits(2_048, 256, 0)
    with pytest.raises(ValueError, match="sequences"):
        BatchLimits(256, 256, 1_000)


def _measure(numbers: ReplicaNumbers, kind: str, rate_per_s: float) -> MeasuredLatency:
    kinds = {"chat": (CHAT,), "long prompt": (LONG_PROMPT,)}[kind]
    lengths = np.tile(draw_lengths(np.random.default_rng(6), kinds, 250), (8, 1))
    report = simulate(
        numbers, 1, list(draw_arrivals(np.random.default_rng(7), rate_per_s, lengths)), measured=(0.1, 0.9)
    )
    mix = build_request_mix(rate_per_s, lengths.tolist())
    return MeasuredLatency(mix, float(report.tpot_s.mean()), float(report.ttft_s.mean()))


def test_calibration_finds_the_costs_of_simulated_runs() -> None:
    true = ReplicaNumbers(0.012, 80e-6, 0.0, 60e-6, 9e-8, *(2_048, 256, 400_000))
    runs = (("chat", 2.0), ("chat", 8.0), ("chat", 15.0), ("long prompt", 0.5), ("long prompt", 1.5))
    rows = [_measure(true, *run) for run in runs]
    start = ReplicaModel(IterationCosts(0.020, 150e-6, 0.0, 20e-6, 5e-8), LIMITS, 1)
    found = calibrate_costs(start, rows)
    assert found.error < 0.1
    assert found.costs.base_s == pytest.approx(true.base_s, rel=0.05)
    assert found.costs.prefill_token_s == pytest.approx(true.prefill_token_s, rel=0.15)
    unseen = _measure(true, "chat", 12.0)
    assert predict_means(replace(start, costs=found.costs), unseen)[1] == pytest.approx(unseen.tpot_s, rel=0.05)


def test_one_wrong_row_hardly_moves_the_fit() -> None:
    true = ReplicaNumbers(0.012, 80e-6, 0.0, 60e-6, 9e-8, *(2_048, 256, 400_000))
    rows = [_measure(true, "chat", rate) for rate in (1.0, 2.0, 4.0, 8.0, 12.0)]
    rows.append(replace(rows[0], tpot_s=5 * rows[0].tpot_s))
    start = ReplicaModel(IterationCosts(0.020, 150e-6, 0.0, 20e-6, 5e-8), LIMITS, 1)
    assert calibrate_costs(start, rows).costs.base_s == pytest.approx(true.base_s, rel=0.1)


def test_concurrency_rows_calibrate_as_well() -> None:
    mix = build_request_mix(1.0, [(1_024, 128)])
    true = ReplicaModel(IterationCosts(0.012, 80e-6, 0.0, 60e-6, 9e-8), LIMITS, 1)
    rows = [
        MeasuredLatency(mix, predict_means(true, MeasuredLatency(mix, 1.0, concurrency=number))[1], concurrency=number)
        for number in (1, 8, 64)
    ]
    start = replace(true, costs=IterationCosts(0.03, 200e-6, 0.0, 60e-6, 9e-8))
    assert calibrate_costs(start, rows).costs.base_s == pytest.approx(0.012, rel=0.02)


def test_published_runs_at_low_rates_predict_those_at_a_higher_one() -> None:
    """The run at 8 requests/s lasts five residences of a request, so its mean lies below that of the steady state."""
    lengths = [(arrival.prompt, arrival.output) for arrival in draw_run(LLAMA_3_8B, 1.0, 0)]
    rows = {
        run.rate_per_s: MeasuredLatency(
            build_request_mix(run.rate_per_s, lengths), 1e-3 * run.tpot_ms, 1e-3 * run.ttft_ms
        )
        for run in LLAMA_3_8B.runs
    }
    costs = derive_costs(load_model("llama-3-8b"), load_gpu("rtx-4090"), 1)
    start = ReplicaModel(costs, BatchLimits(2_048, 256, KV_TOKENS), 1)
    derived_s = predict_means(start, rows[1])[1]
    assert derived_s == pytest.approx(rows[1].tpot_s, rel=0.3)
    found = replace(start, costs=calibrate_costs(start, [rows[1], rows[4]]).costs)
    ttft_s, tpot_s = predict_means(found, rows[8])
    assert ttft_s == pytest.approx(rows[8].ttft_s, rel=0.1)
    assert rows[8].tpot_s < tpot_s < 1.2 * rows[8].tpot_s


def test_calibration_needs_rows_and_stays_within_its_bounds() -> None:
    start = ReplicaModel(IterationCosts(0.012, 80e-6, 0.0, 60e-6, 9e-8), LIMITS, 1)
    with pytest.raises(ValueError, match="measurements"):
        calibrate_costs(start, [])
    with pytest.raises(ValueError, match="tpot"):
        MeasuredLatency(build_request_mix(1.0, [(1, 2)]), 0.0)
    far = MeasuredLatency(build_request_mix(1.0, [(10, 20)]), 100.0, concurrency=1)
    assert calibrate_costs(start, [far]).costs.base_s <= FACTOR_MAX * 0.012 * 1.000001
