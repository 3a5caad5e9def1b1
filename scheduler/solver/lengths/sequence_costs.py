"""Time and memory of sequences of unlike lengths on sequence-parallel groups of unlike degrees (FlexSP).

Source: FlexSP (ASPLOS'25, arXiv 2412.01523), section 4.1. A group of degree s computes the sequences that it holds one
after the other, each split over its s GPUs by Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

EXCHANGES_PER_LAYER = 8
"""All-to-alls of one layer: queries, keys, values and the output, forward and backward (arXiv 2309.14509)."""


@dataclass(frozen=True, slots=True)
class SequenceCosts:
    """Costs of one training step on `gpus` equal GPUs, cut into groups whose degrees are powers of two.

    A sequence of L tokens takes `(quadratic_s * L^2 + linear_s * L + exchange_s[degree] * L) / degree` seconds on a
    group, and `start_s` more if the degree is above 1. All groups of a micro-batch run at the same time; the slowest
    sets the time.

    Attributes:
        exchange_s: pairs (degree, GPU-seconds per token for the all-to-alls). It must not fall as the degree rises.
        micro_batch_s: constant time of each micro-batch, added to the time of its sequences.
        start_s: start-up time of all exchanges of a sequence. Published constants have none.
        gpu_tokens_max: tokens whose activations fit on one GPU. A group of degree s holds s times as many.
    """

    gpus: int
    quadratic_s: float
    linear_s: float
    exchange_s: tuple[tuple[int, float], ...]
    micro_batch_s: float
    gpu_tokens_max: int
    start_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gpus", "gpu_tokens_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("quadratic_s", "linear_s", "micro_batch_s", "start_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a finite number of at least 0")
        expected = [1 << power for power in range(len(self.exchange_s))]
        if not self.exchange_s or list(self.degrees) != expected or expected[-1] > self.gpus:
            raise ValueError(
                f"exchange_s has degrees {list(self.degrees)}; they must be 1, 2, 4 and so on, "
                f"at most gpus, {self.gpus}"
            )
        for (low, low_s), (high, high_s) in pairwise(self.exchange_s):
            if not 0 <= low_s <= high_s < float("inf"):
                raise ValueError(
                    f"exchange_s is {low_s} at degree {low} and {high_s} at degree {high}; it must not fall with degree"
                )

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees that a group may have, ascending."""
        return tuple(degree for degree, _ in self.exchange_s)

    @property
    def sequence_tokens_max(self) -> int:
        """Length of the longest sequence that fits on a group."""
        return self.gpu_tokens_max * self.degrees[-1]

    def compute_times(self, lengths: Counts) -> Floats:
        """Return the seconds of each sequence at each degree: shape [degrees, sequences]."""
        tokens = lengths.astype(np.float64)
        degrees = np.array(self.degrees, np.float64)[:, None]
        exchange = np.array([seconds for _, seconds in self.exchange_s])[:, None]
        times: Floats = (self.quadratic_s * tokens**2 + (self.linear_s + exchange) * tokens) / degrees
        return times + self.start_s * (degrees > 1)


def compute_exchange_s(
    layers: int, hidden: int, *, bandwidths: Mapping[int, float], value_bytes: int = 2
) -> tuple[tuple[int, float], ...]:
    """Return GPU-seconds per token of the all-to-alls, by degree; degree 1 exchanges nothing.

    Args:
        bandwidths: bytes per second that one GPU achieves, by degree from 2 upwards.
    """
    volume = EXCHANGES_PER_LAYER * layers * hidden * value_bytes
    return ((1, 0.0), *((degree, volume / bandwidth) for degree, bandwidth in sorted(bandwidths.items())))


FLEXSP_GPT_7B_A100 = SequenceCosts(
    gpus=64,
    quadratic_s=5.128e-9,
    linear_s=0.18396e-3,
    exchange_s=compute_exchange_s(
        32, 4096, bandwidths={2: 119.5e9, 4: 104.1e9, 8: 96.5e9, 16: 10.33e9, 32: 5.94e9, 64: 4.87e9}
    ),
    micro_batch_s=0.62936,
    gpu_tokens_max=int((80e9 - 16 * 6.7e9 / 64) / 4.48e6),
)
"""Published constants of GPT-7B on 64 A100-80G (arXiv 2412.01523, appendix), with 4.48 MB of activations per token.

The remaining memory holds 16 bytes per parameter, split over all GPUs by ZeRO-3."""
