"""Published measurements of a serving engine under open-loop load.

Source: github.com/IOG-Foundation/llm-inference-benchmarks, folder `results` (Apache-2.0): vLLM 0.8.5 in fp16 on one RTX
4090, 200 prompts of ShareGPT, Poisson arrivals, means and percentiles over all requests of a run. Runs whose prompts
were in the prefix cache (those of GPUs with more memory) are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.serving.length_mixes import LognormalLengths, draw_lengths
from tests.serving.serving_simulation import Arrival, draw_arrivals

REQUESTS = 200
SPAN_S = 188.0
"""Time of the last arrival at 1 request/s: the duration of that run less about 4 s for its last request. One seed gives
the arrivals of all runs the same pattern, so the span at another rate is a part of it."""
KV_TOKENS = 43_000
"""24 GiB x 0.9, less 16.1 GB of weights and 1.4 GB of activations, at 131,072 bytes a token."""


class PublishedRun(NamedTuple):
    """Duration in seconds, mean TTFT, mean and 95th percentile of TPOT in milliseconds, at a rate in requests/s."""

    rate_per_s: float
    duration_s: float
    ttft_ms: float
    tpot_ms: float
    tpot_p95_ms: float


class PublishedModel(NamedTuple):
    """Runs of one model. `prompt_tokens` and `output_tokens` are the totals over the 200 requests of a run."""

    name: str
    prompt_tokens: int
    output_tokens: int
    runs: tuple[PublishedRun, ...]


LLAMA_3_8B = PublishedModel(
    "Meta-Llama-3-8B-Instruct",
    41_169,
    40_377,
    (
        PublishedRun(1, 192.07, 49.2, 19.51, 20.09),
        PublishedRun(4, 58.91, 56.9, 22.60, 25.66),
        PublishedRun(8, 37.95, 69.2, 26.82, 30.00),
        PublishedRun(16, 28.68, 85.8, 32.89, 41.60),
        PublishedRun(32, 24.52, 161.5, 46.31, 85.03),
    ),
)
DEEPSEEK_R1_LLAMA_8B = PublishedModel(
    "DeepSeek-R1-Distill-Llama-8B",
    41_169,
    42_743,
    (
        PublishedRun(1, 191.99, 47.6, 19.29, 19.85),
        PublishedRun(4, 58.81, 58.0, 22.58, 25.47),
        PublishedRun(8, 38.06, 67.8, 26.86, 30.36),
        PublishedRun(16, 31.59, 86.9, 32.96, 41.62),
        PublishedRun(32, 29.27, 157.9, 45.88, 80.56),
    ),
)
SHAREGPT = LognormalLengths(220, 1.1, 220, 0.9, 1_024, 1_024)
"""Spread of ShareGPT's lengths, cut as the benchmark's sampling does. The totals are those of the runs."""


def draw_run(model: PublishedModel, rate_per_s: float, seed: int) -> list[Arrival]:
    """Return the requests of a run: lengths with the published totals, and arrivals over the published span."""
    lengths = draw_lengths(np.random.default_rng(seed), (SHAREGPT,), REQUESTS).astype(np.float64)
    lengths *= np.array([model.prompt_tokens, model.output_tokens]) / lengths.sum(axis=0)
    rows = np.maximum(lengths.round(), 2).astype(np.int64)
    drawn = list(draw_arrivals(np.random.default_rng(seed + 50), rate_per_s, rows))
    stretch = SPAN_S / rate_per_s / drawn[-1].at_s
    return [arrival._replace(at_s=arrival.at_s * stretch) for arrival in drawn]
