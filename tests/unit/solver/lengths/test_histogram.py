"""Histograms of the lengths in a file."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from scheduler.solver.lengths.histogram import BINS_MAX, build_histogram, read_lengths


def test_few_lengths_are_kept_exactly() -> None:
    assert build_histogram([7, 3, 7, 512]) == ((3, 1), (7, 2), (512, 1))


def test_many_lengths_are_merged_into_bins_that_keep_tokens_and_the_longest() -> None:
    random = Random(1)
    lengths = [max(1, int(random.lognormvariate(7, 1.5))) for _ in range(20_000)]
    histogram = build_histogram(lengths)
    assert len(histogram) <= BINS_MAX
    assert sum(samples for _, samples in histogram) == len(lengths)
    assert sum(tokens * samples for tokens, samples in histogram) == pytest.approx(sum(lengths), rel=1e-3)
    assert histogram[-1] == (max(lengths), lengths.count(max(lengths)))
    assert sorted({tokens for tokens, _ in histogram}) == [tokens for tokens, _ in histogram]


@pytest.mark.parametrize(("text", "words"), [("", "empty"), ("5\n-1\n", "length 2"), ("5 six", "'six'"), ("0", "'0'")])
def test_invalid_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_lengths(tmp_path / "lengths")


def test_length_above_the_context_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("64\n129\n")
    with pytest.raises(ValueError, match="from 1 to 128"):
        read_lengths(tmp_path / "lengths", context=128)
