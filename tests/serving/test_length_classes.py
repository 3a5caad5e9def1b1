"""Length classes and batches of similar lengths: optimality against enumeration, and splits of replicas."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.serving.length_classes import choose_length_classes, cut_batches, split_replicas
from scheduler.serving.request_mix import Floats

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=14)


def _squares(lengths: Floats) -> Floats:
    return 5 + lengths + lengths**2 / 10


@given(lengths=LENGTHS, classes=st.integers(1, 5), squared=st.booleans())
def test_classes_have_the_least_padded_cost(lengths: list[int], classes: int, squared: bool) -> None:
    cost_of = _squares if squared else (lambda tokens: tokens)
    found = choose_length_classes(Counter(lengths), classes, cost_of=cost_of)
    distinct = sorted(set(lengths))
    price = dict(zip(distinct, cost_of(np.array(distinct, dtype=np.float64)).tolist(), strict=True))
    best = min(
        sum(price[limits[bisect_left(limits, tokens)]] for tokens in lengths)
        for count in range(min(classes, len(distinct)))
        for cut in combinations(distinct[:-1], count)
        for limits in [(*cut, distinct[-1])]
    )
    assert len(found.classes) <= classes
    assert sum(each.cost for each in found.classes) == pytest.approx(best)
    assert sum(each.ideal for each in found.classes) == pytest.approx(sum(price[tokens] for tokens in lengths))
    assert sum(each.requests for each in found.classes) == len(lengths)
    assert all(one.limit == two.above for one, two in pairwise(found.classes))


def test_as_many_classes_as_lengths_pad_nothing() -> None:
    found = choose_length_classes({3: 1.0, 9: 2.0, 20: 1.0}, 8)
    assert found.limits == (3, 9, 20)
    assert found.padding_ratio == 1.0


def test_last_class_takes_the_longest_length() -> None:
    assert choose_length_classes({3: 1.0, 9: 2.0}, 1, longest=50).limits == (50,)
    assert choose_length_classes({3: 1.0, 9: 2.0}, 2, longest=50).limits == (9, 50)


def test_eight_classes_cost_at_most_a_fifth_more_on_unseen_lengths() -> None:
    """Lengths of a chat, at the cost of a request that an H100 computes alone. One half chooses, the other judges."""
    drawn = np.random.default_rng(8).lognormal(5.0, 0.9, 20_000).clip(1, 2_048).round().astype(int).tolist()
    found = choose_length_classes(Counter(drawn[::2]), 8, longest=2_048, cost_of=lambda tokens: 300 + tokens)
    padded = sum(300 + found.limits[bisect_left(found.limits, tokens)] for tokens in drawn[1::2])
    assert found.padding_ratio <= 1.2
    assert padded / sum(300 + tokens for tokens in drawn[1::2]) <= 1.2


@pytest.mark.parametrize(
    ("counts", "classes", "longest", "field"),
    [({}, 2, 0, "lengths"), ({0: 1.0}, 2, 0, "lengths"), ({5: 1.0}, 0, 0, "classes"), ({5: 1.0}, 2, 4, "longest")],
)
def test_invalid_classes_are_rejected(counts: dict[int, float], classes: int, longest: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        choose_length_classes(counts, classes, longest=longest)


@given(loads=st.lists(st.floats(0, 10), min_size=1, max_size=4), extra=st.integers(0, 6))
def test_split_has_the_least_largest_load(loads: list[float], extra: int) -> None:
    active = [load for load in loads if load > 0]
    replicas = len(active) + extra
    split = split_replicas(loads, replicas)
    assert sum(split) == (replicas if active else 0)
    assert all((count > 0) == (load > 0) for count, load in zip(split, loads, strict=True))
    if active:
        worst = max(load / count for load, count in zip(loads, split, strict=True) if count)
        cuts = combinations(range(1, replicas), len(active) - 1)
        best = min(
            max(load / (end - begin) for load, (begin, end) in zip(active, pairwise((0, *cut, replicas)), strict=True))
            for cut in cuts
        )
        assert worst == pytest.approx(best)


def test_too_few_replicas_are_rejected() -> None:
    with pytest.raises(ValueError, match="replicas"):
        split_replicas([1.0, 2.0], 1)


def _cost_of_batch(sizes: Floats, length: int) -> Floats:
    return 20 + sizes * length


@given(lengths=st.lists(st.integers(1, 60), max_size=9), most=st.integers(0, 4))
def test_batches_take_the_least_time(lengths: list[int], most: int) -> None:
    batches = cut_batches(lengths, _cost_of_batch, requests_max=most)
    ordered = sorted(lengths)
    assert [tokens for batch in batches for tokens in batch] == ordered
    assert all(len(batch) <= (most or len(batch)) for batch in batches)
    cost = sum(20 + len(batch) * batch[-1] for batch in batches)
    best = min(
        (
            sum(20 + (end - begin) * ordered[end - 1] for begin, end in pairwise((0, *cut, len(ordered))))
            for count in range(len(ordered))
            for cut in combinations(range(1, len(ordered)), count)
            if not most or all(end - begin <= most for begin, end in pairwise((0, *cut, len(ordered))))
        ),
        default=0,
    )
    assert cost == pytest.approx(best)


def test_batches_of_invalid_lengths_are_rejected() -> None:
    with pytest.raises(ValueError, match="lengths"):
        cut_batches([3, 0], _cost_of_batch)
