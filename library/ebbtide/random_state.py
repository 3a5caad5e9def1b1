"""The random state of a process: torch on the CPU and on this rank's GPU, Python, and NumPy, if it is loaded."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SEED_BITS = 63
_WEYL_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring positions get distant seeds


def mix_seed(seed: int, *numbers: int) -> int:
    """Return a seed that depends on all arguments (splitmix64), the same on every machine."""
    state = seed & (2**64 - 1)
    for number in numbers:
        state = (state + (number + 1) * _WEYL_STEP) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> (64 - _SEED_BITS)


@contextmanager
def seeded_random(seed: int) -> Iterator[None]:
    """Seed all generators. Restore them at the end."""
    numpy_random, is_gpu_used = _find_numpy_random(), torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    before = torch.default_generator.get_state(), random.getstate()
    gpu_before = torch.cuda.get_rng_state() if is_gpu_used else None
    numpy_before = None if numpy_random is None else numpy_random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if gpu_before is not None:
        torch.cuda.manual_seed(seed)
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        if gpu_before is not None:
            torch.cuda.set_rng_state(gpu_before)
        if numpy_random is not None:
            numpy_random.set_state(numpy_before)


def encode_random_state() -> bytes:
    """Return the states of all generators.

    A process that has not used its GPU has drawn nothing there, and asking for the state would take memory on it.
    """
    numpy_random = _find_numpy_random()
    is_gpu_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return pickle.dumps(
        {
            "torch": bytes(torch.get_rng_state().tolist()),
            "cuda": bytes(torch.cuda.get_rng_state().tolist()) if is_gpu_used else b"",
            "python": random.getstate(),
            "numpy": None if numpy_random is None else numpy_random.get_state(),
        }
    )


def restore_random_state(encoded: bytes) -> None:
    state = pickle.loads(encoded)
    torch.set_rng_state(torch.tensor(list(state["torch"]), dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(list(state["cuda"]), dtype=torch.uint8))
    random.setstate(state["python"])
    numpy_random = _find_numpy_random()
    if numpy_random is not None and state["numpy"] is not None:
        numpy_random.set_state(state["numpy"])


def seed_random_state(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy_random = _find_numpy_random()
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)


def _find_numpy_random() -> Any:
    """Return `numpy.random` if the script has imported NumPy, else None."""
    return getattr(sys.modules.get("numpy"), "random", None)
