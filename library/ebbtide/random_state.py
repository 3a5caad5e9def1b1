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
    numpy_random, torch_generators = _find_numpy_random(), [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch_generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    before = [generator.get_state() for generator in torch_generators]
    python_before = random.getstate()
    numpy_before = None if numpy_random is None else numpy_random.get_state()
    for generator in torch_generators:
        generator.manual_seed(seed)
    random.seed(seed)
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)
    try:
        yield
    finally:
        for generator, state in zip(torch_generators, before, strict=True):
            generator.set_state(state)
        random.setstate(python_before)
        if numpy_random is not None:
            numpy_random.set_state(numpy_before)


def encode_random_state() -> bytes:
    """Return the states of all generators."""
    numpy_random = _find_numpy_random()
    return pickle.dumps(
        {
            "torch": bytes(torch.get_rng_state().tolist()),
            "cuda": bytes(torch.cuda.get_rng_state().tolist()) if torch.cuda.is_available() else b"",
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
