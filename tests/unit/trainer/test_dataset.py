"""Samples of the bundled text."""

import pytest

from scheduler.trainer.dataset import TextDataset


def test_each_pass_visits_every_window_once_in_a_new_order() -> None:
    data = TextDataset(sequence=16, seed=5)
    first = [data.find_window(sample) for sample in range(data.window_count)]
    second = [data.find_window(sample) for sample in range(data.window_count, 2 * data.window_count)]
    assert sorted(first) == sorted(second) == list(range(data.window_count))
    assert first != second


def test_sample_depends_only_on_its_number_and_the_seed() -> None:
    data, same = TextDataset(sequence=16, seed=5), TextDataset(sequence=16, seed=5)
    late = 3 * data.window_count + 7
    expected = data.find_window(late)
    data.find_window(1)
    assert data.find_window(late) == same.find_window(late) == expected
    other = TextDataset(sequence=16, seed=6)
    assert [other.find_window(sample) for sample in range(50)] != [data.find_window(sample) for sample in range(50)]


def test_targets_are_the_next_bytes() -> None:
    data = TextDataset(sequence=4, seed=0, text=b"abcdefghi")
    inputs, targets = data.load_samples([0, 1])
    assert inputs.shape == targets.shape == (2, 4)
    assert (targets - inputs == 1).all()


def test_text_shorter_than_a_sample_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"4 bytes.*5"):
        TextDataset(sequence=4, seed=0, text=b"abcd")


def test_bundled_text_is_ascii_and_long_enough_for_the_largest_model() -> None:
    data = TextDataset(sequence=256, seed=0)
    inputs, _ = data.load_samples(range(data.window_count))
    assert data.window_count > 500
    assert int(inputs.max()) < 128
