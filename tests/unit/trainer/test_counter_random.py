"""Random numbers as a function of a key and a counter."""

import pytest
import torch

from scheduler.trainer.counter_random import derive_key, draw_mask, draw_normal, draw_uniform

COUNTERS = torch.arange(1 << 16)


def test_first_numbers_are_those_of_splitmix64() -> None:
    # Outputs of the published generator for the seed 1234567, whose state advances before each output.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    drawn = draw_uniform(1234567, torch.tensor([1, 2, 3])) * 2.0**64
    assert drawn.tolist() == pytest.approx(published, rel=1e-14)


def test_numbers_depend_on_the_key_and_the_counter_alone() -> None:
    key = derive_key("weights", 3)
    assert torch.equal(draw_normal(key, COUNTERS)[100:200], draw_normal(key, COUNTERS[100:200]))
    assert not torch.equal(draw_normal(key, COUNTERS), draw_normal(derive_key("weights", 4), COUNTERS))


def test_distributions_have_their_moments() -> None:
    uniform, normal = draw_uniform(1, COUNTERS), draw_normal(2, COUNTERS)
    assert 0.0 < uniform.min() < uniform.max() < 1.0
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.01)
    assert (normal.mean().item(), normal.std().item()) == pytest.approx((0.0, 1.0), abs=0.015)
    assert draw_mask(3, COUNTERS, probability=0.9).double().mean().item() == pytest.approx(0.9, abs=0.005)
