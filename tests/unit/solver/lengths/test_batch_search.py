"""The search for sequence-parallel groups, against brute force, single degrees and its own bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product
from math import inf
from random import Random

import numpy as np
import pytest

from scheduler.solver.lengths.batch_plan import BatchPlan
from scheduler.solver.lengths.batch_search import search_batch_plan
from scheduler.solver.lengths.sequence_costs import FLEXSP_GPT_7B_A100, SequenceCosts, compute_exchange_s
from scheduler.solver.lengths.uniform_search import search_uniform_plan


@pytest.mark.parametrize("cases", [30, pytest.param(1000, marks=pytest.mark.full)])
def test_a_tiny_batch_has_the_plan_of_brute_force(cases: int) -> None:
    for seed in range(cases):
        costs, lengths = draw_tiny_case(Random(seed))
        plan = search_batch_plan(costs, lengths)
        check_plan(costs, lengths, plan)
        assert plan.time_s == pytest.approx(find_least_time(costs, lengths), rel=1e-9), seed
        assert plan.optimality_gap == pytest.approx(0, abs=1e-8), seed


@pytest.mark.parametrize("seed", range(6))
def test_a_large_batch_has_a_legal_plan_no_slower_than_any_single_degree(seed: int) -> None:
    costs, lengths = FLEXSP_GPT_7B_A100, draw_lengths(Random(seed), 200)
    plan = search_batch_plan(costs, lengths)
    check_plan(costs, lengths, plan)
    assert plan.bound_s <= plan.time_s
    uniform = [found.time_s for degree in costs.degrees if (found := search_uniform_plan(costs, lengths, degree))]
    assert plan.time_s <= min(uniform) * (1 + 1e-9)


def test_a_batch_that_needs_many_micro_batches_fits_in_memory() -> None:
    lengths = draw_lengths(Random(1), 120)
    costs = draw_costs(gpus=8, gpu_tokens_max=max(lengths) // 8 + 1)
    plan = search_batch_plan(costs, lengths)
    check_plan(costs, lengths, plan)
    assert len(plan.micro_batches) >= sum(lengths) / (8 * costs.gpu_tokens_max)


def test_the_search_is_deterministic() -> None:
    lengths = draw_lengths(Random(2), 100)
    assert search_batch_plan(FLEXSP_GPT_7B_A100, lengths) == search_batch_plan(FLEXSP_GPT_7B_A100, lengths)


def test_a_long_sequence_among_short_ones_gets_the_larger_group() -> None:
    plan = search_batch_plan(FLEXSP_GPT_7B_A100, [60_000, *[2_000] * 200])
    groups = plan.micro_batches[0].groups
    assert groups[0].degree > groups[-1].degree
    assert 0 in groups[0].sequences


def test_unlike_degrees_gain_more_than_a_tenth_on_unlike_lengths() -> None:
    costs, lengths = FLEXSP_GPT_7B_A100, [60_000, *[2_000] * 200]
    uniform = [found.time_s for degree in costs.degrees if (found := search_uniform_plan(costs, lengths, degree))]
    assert search_batch_plan(costs, lengths).time_s < 0.9 * min(uniform)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "lengths is empty; it must have at least one sequence"),
        ([5, 0], r"lengths\[1\] is 0; it must be from 1 to 40, the tokens that 4 GPUs hold"),
        ([41], r"lengths\[0\] is 41; it must be from 1 to 40"),
    ],
)
def test_a_batch_that_cannot_run_is_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search_batch_plan(draw_costs(gpus=4, gpu_tokens_max=10), lengths)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("gpus", 0, "gpus is 0; it must be at least 1"),
        ("gpu_tokens_max", 0, "gpu_tokens_max is 0; it must be at least 1"),
        ("linear_s", -1.0, "linear_s is -1.0; it must be a finite number of at least 0"),
        ("exchange_s", ((1, 0.0), (3, 0.0)), r"exchange_s has degrees \[1, 3\]; they must be 1, 2, 4 and so on"),
        ("exchange_s", ((1, 0.2), (2, 0.1)), "exchange_s is 0.2 at degree 1 and 0.1 at degree 2; it must not fall"),
    ],
)
def test_costs_that_cannot_be_are_refused(field: str, value: object, message: str) -> None:
    given = {"gpus": 4, "quadratic_s": 0.0, "linear_s": 1.0, "exchange_s": ((1, 0.0),), "micro_batch_s": 0.0}
    with pytest.raises(ValueError, match=message):
        SequenceCosts(**{**given, "gpu_tokens_max": 10, field: value})  # type: ignore[arg-type]  # one is wrong


def draw_costs(*, gpus: int, gpu_tokens_max: int, fixed_s: float = 0.5, start_s: float = 0.0) -> SequenceCosts:
    degrees = [1 << power for power in range(1, gpus.bit_length())]
    exchange_s = compute_exchange_s(2, 64, bandwidths={degree: 9e4 / degree for degree in degrees})
    return SequenceCosts(gpus, 1e-3, 0.05, exchange_s, fixed_s, gpu_tokens_max, start_s)


def draw_tiny_case(random: Random) -> tuple[SequenceCosts, list[int]]:
    gpus = random.choice([1, 2, 3, 4, 4, 5, 6])
    costs = draw_costs(
        gpus=gpus,
        gpu_tokens_max=random.choice([20, 40, 200]),
        fixed_s=random.choice([0.0, 0.3, 2.0, 20.0]),
        start_s=random.choice([0.0, 0.4]),
    )
    longest = min(costs.sequence_tokens_max, 100)
    return costs, [random.randint(1, longest) for _ in range(random.randint(1, 5))]


def draw_lengths(random: Random, count: int) -> list[int]:
    return [min(int(random.lognormvariate(6, 1.5)) + 1, 190_000) for _ in range(count)]


def check_plan(costs: SequenceCosts, lengths: Sequence[int], plan: BatchPlan) -> None:
    """Each sequence runs once, groups use all GPUs and fit in memory, and times are those of the cost model."""
    times = costs.compute_times(np.array(lengths))
    members = [index for part in plan.micro_batches for group in part.groups for index in group.sequences]
    assert sorted(members) == list(range(len(lengths)))
    for part in plan.micro_batches:
        assert sum(group.degree for group in part.groups) == costs.gpus
        for group in part.groups:
            assert sum(lengths[index] for index in group.sequences) <= group.degree * costs.gpu_tokens_max
            row = times[costs.degrees.index(group.degree)]
            assert group.time_s == pytest.approx(sum(row[index] for index in group.sequences))
        assert part.time_s == pytest.approx(max(group.time_s for group in part.groups) + costs.micro_batch_s)
    assert plan.time_s == pytest.approx(sum(part.time_s for part in plan.micro_batches))


def find_least_time(costs: SequenceCosts, lengths: Sequence[int]) -> float:
    """Return the least time over all cuts of the sorted batch, all multisets and all assignments."""
    ordered, best = sorted(lengths, reverse=True), inf
    size = len(ordered)
    for count in range(size):
        for inner in combinations(range(1, size), count):
            parts = [ordered[begin:end] for begin, end in pairwise((0, *inner, size))]
            best = min(best, sum(find_least_part_time(costs, part) + costs.micro_batch_s for part in parts))
    return best


def find_least_part_time(costs: SequenceCosts, part: Sequence[int]) -> float:
    best = inf
    for degrees in list_partitions(costs.gpus, costs.degrees):
        for groups in product(range(len(degrees)), repeat=len(part)):
            times, tokens = [0.0] * len(degrees), [0] * len(degrees)
            for length, group in zip(part, groups, strict=True):
                times[group] += compute_time(costs, length, degrees[group])
                tokens[group] += length
            if all(used <= degree * costs.gpu_tokens_max for used, degree in zip(tokens, degrees, strict=True)):
                best = min(best, max(times))
    return best


def compute_time(costs: SequenceCosts, length: int, degree: int) -> float:
    exchange_s = dict(costs.exchange_s)[degree]
    seconds = (costs.quadratic_s * length**2 + costs.linear_s * length + exchange_s * length) / degree
    return seconds + (costs.start_s if degree > 1 else 0.0)


def list_partitions(gpus: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not gpus:
        yield ()
    for index, degree in enumerate(degrees):
        if degree <= gpus:
            for rest in list_partitions(gpus - degree, degrees[: index + 1]):
                yield (degree, *rest)
