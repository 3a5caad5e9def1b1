"""Length distributions of requests for tests of serving: chat, long prompts, long outputs, and a mix of two kinds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class LognormalLengths(NamedTuple):
    """Mean prompt and output in tokens, the standard deviations of their logarithms, and their largest values."""

    prompt: float
    prompt_sigma: float
    output: float
    output_sigma: float
    prompt_max: int = 16_384
    output_max: int = 4_096


CHAT = LognormalLengths(220, 1.1, 200, 0.9, 4_096, 1_024)
"""About the means of ShareGPT, as in the published runs of `published_serving_runs`."""
LONG_PROMPT = LognormalLengths(3_000, 0.7, 150, 0.7)
LONG_OUTPUT = LognormalLengths(200, 0.8, 1_200, 0.6)
BIMODAL = (CHAT, LognormalLengths(6_000, 0.3, 300, 0.5))

MIXES = {"chat": (CHAT,), "long prompt": (LONG_PROMPT,), "long output": (LONG_OUTPUT,), "bimodal": BIMODAL}
SECOND_SHARE = 0.1
"""Share of the second kind in a mix of two."""


def draw_lengths(
    generator: np.random.Generator, kinds: tuple[LognormalLengths, ...], requests: int
) -> NDArray[np.int64]:
    """Return rows (prompt, output) of requests."""
    rows = _draw_kind(generator, kinds[0], requests)
    for kind in kinds[1:]:
        chosen = generator.random(requests) < SECOND_SHARE
        rows[chosen] = _draw_kind(generator, kind, int(chosen.sum()))
    return rows


def _draw_kind(generator: np.random.Generator, kind: LognormalLengths, requests: int) -> NDArray[np.int64]:
    sides = ((kind.prompt, kind.prompt_sigma, kind.prompt_max), (kind.output, kind.output_sigma, kind.output_max))
    columns = [
        np.clip(generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, requests).round(), 2, most)
        for mean, sigma, most in sides
    ]
    return np.stack(columns, axis=1).astype(np.int64)
