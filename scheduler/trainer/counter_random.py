"""Random numbers as a function of a key and a counter.

A number depends on neither the numbers drawn before it nor the rank that draws it. Dropout masks and initial weights
are therefore the same under every layout, and each rank draws only those of its own shards. The function is SplitMix64
(Steele et al., OOPSLA 2014, figure 13), the generator's state being `key + counter x golden ratio`.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

# 64-bit constants of SplitMix64 as signed integers, which torch multiplies modulo 2^64.
_GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64
_FRACTION_BITS = 53


def derive_key(*words: object) -> int:
    """Return the key of a sequence of random numbers that `words` name, such as a seed and a layer."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "big", signed=True)


def draw_uniform(key: int, counters: Tensor) -> Tensor:
    """Return numbers above 0 and below 1, float64, in the shape of the integers `counters`."""
    fractions = _shift_right(_mix(counters * _GOLDEN_RATIO + key), 64 - _FRACTION_BITS)
    drawn: Tensor = (fractions.double() + 0.5) * 2.0**-_FRACTION_BITS
    return drawn


def draw_normal(key: int, counters: Tensor) -> Tensor:
    """Return numbers of the standard normal distribution, float64, in the shape of the integers `counters`."""
    drawn: Tensor = torch.special.erfinv(2.0 * draw_uniform(key, counters) - 1.0) * math.sqrt(2.0)
    return drawn


def draw_mask(key: int | Tensor, counters: Tensor, *, probability: float) -> Tensor:
    """Return booleans that are true with `probability`, in the shape of the integers `counters`.

    Args:
        key: may be a scalar tensor of int64 on the CPU, whatever the device of `counters`.
    """
    bits = 32
    drawn: Tensor = _shift_right(_mix(counters * _GOLDEN_RATIO + key), 64 - bits) < round(probability * 2**bits)
    return drawn


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _FIRST_FACTOR
    state = (state ^ _shift_right(state, 27)) * _SECOND_FACTOR
    return state ^ _shift_right(state, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift without the sign: torch's shift of signed integers repeats it."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
