"""What the library asks of a GPU, with a GPU that only exists in name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbtide.random_state import encode_random_state, restore_random_state, seeded_random


class NamedGpu:
    """A random generator in the place of a GPU's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_initialized: bool) -> None:
        self.state, self.calls = torch.tensor([7], dtype=torch.uint8), list[str]()
        names = {"get_rng_state": self.get, "set_rng_state": self.set, "manual_seed": self.seed}
        constants = {"is_available": lambda: True, "is_initialized": lambda: is_initialized}
        for name, replacement in {**names, **constants}.items():
            monkeypatch.setattr(torch.cuda, name, replacement)

    def get(self) -> torch.Tensor:
        self.calls.append("get")
        return self.state.clone()

    def set(self, state: torch.Tensor) -> None:
        self.calls.append("set")
        self.state = state

    def seed(self, seed: int) -> None:
        self.calls.append("seed")
        self.state = torch.tensor([seed % 256], dtype=torch.uint8)


def test_random_state_of_a_gpu_in_use_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = NamedGpu(monkeypatch, is_initialized=True)
    encoded = encode_random_state()
    gpu.state = torch.tensor([9], dtype=torch.uint8)
    restore_random_state(encoded)
    assert gpu.state.tolist() == [7]


def test_saving_does_not_touch_a_gpu_that_the_process_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = NamedGpu(monkeypatch, is_initialized=False)
    restore_random_state(encode_random_state())
    with seeded_random(3):
        pass
    assert gpu.calls == []


@pytest.mark.parametrize("error", [None, RuntimeError("the function of the user failed")])
def test_data_drawn_on_a_gpu_depends_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    gpu = NamedGpu(monkeypatch, is_initialized=True)
    drawn = list[int]()

    def draw(seed: int) -> None:
        with seeded_random(seed):
            drawn.extend(gpu.state.tolist())
            if error is not None:
                raise error

    for seed in (3, 4, 3):
        if error is None:
            draw(seed)
        else:
            with pytest.raises(RuntimeError):
                draw(seed)
    assert drawn == [3, 4, 3]
    assert gpu.state.tolist() == [7]
