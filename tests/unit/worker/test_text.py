import pytest

from scheduler.worker.text import TextData


def test_each_pass_shows_every_window_once_in_an_order_of_its_own() -> None:
    data = TextData(sequence=16, seed=5)
    first = [data.window(sample) for sample in range(data.windows)]
    second = [data.window(sample) for sample in range(data.windows, 2 * data.windows)]
    assert sorted(first) == sorted(second) == list(range(data.windows))
    assert first != second


def test_a_sample_is_the_same_whenever_it_is_asked_for() -> None:
    data, again = TextData(sequence=16, seed=5), TextData(sequence=16, seed=5)
    late = 3 * data.windows + 7
    expected = data.window(late)
    data.window(1)
    assert data.window(late) == again.window(late) == expected
    other = TextData(sequence=16, seed=6)
    assert [other.window(sample) for sample in range(50)] != [data.window(sample) for sample in range(50)]


def test_targets_are_the_next_bytes() -> None:
    data = TextData(sequence=4, seed=0, text=b"abcdefghi")
    inputs, targets = data.batch([0, 1])
    assert inputs.shape == targets.shape == (2, 4)
    assert (targets - inputs == 1).all()


def test_a_text_shorter_than_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="the text has 4 bytes, a sample needs 5"):
        TextData(sequence=4, seed=0, text=b"abcd")


def test_the_shipped_text_is_ascii_and_long_enough_for_the_largest_model() -> None:
    data = TextData(sequence=256, seed=0)
    inputs, _ = data.batch(range(data.windows))
    assert data.windows > 500
    assert int(inputs.max()) < 128
