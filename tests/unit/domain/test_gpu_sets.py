"""Set operations on exact GPUs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.domain import gpu_sets
from scheduler.domain.gpu_sets import Gpus

INDICES = st.sets(st.integers(0, 7), min_size=1).map(lambda indices: tuple(sorted(indices)))
GPUS = st.dictionaries(st.sampled_from(["t0", "t1", "i0"]), INDICES)


def pairs(gpus: Gpus) -> set[tuple[str, int]]:
    return {(node, index) for node, indices in gpus.items() for index in indices}


@given(GPUS, GPUS)
def test_operations_match_those_of_sets(left: Gpus, right: Gpus) -> None:
    assert pairs(gpu_sets.union(left, right)) == pairs(left) | pairs(right)
    assert pairs(gpu_sets.difference(left, right)) == pairs(left) - pairs(right)
    assert pairs(gpu_sets.intersection(left, right)) == pairs(left) & pairs(right)
    assert gpu_sets.count(left) == len(pairs(left))


@given(GPUS, GPUS)
def test_results_have_ascending_indices_and_no_empty_nodes(left: Gpus, right: Gpus) -> None:
    for result in (gpu_sets.union(left, right), gpu_sets.difference(left, right), gpu_sets.intersection(left, right)):
        assert all(indices and list(indices) == sorted(set(indices)) for indices in result.values())


@given(GPUS)
def test_without_nodes_keeps_the_other_nodes(gpus: Gpus) -> None:
    assert pairs(gpu_sets.without_nodes(gpus, ["t0"])) == {pair for pair in pairs(gpus) if pair[0] != "t0"}


def test_formatted_gpus_show_ranges() -> None:
    assert gpu_sets.format_gpus({"t1": (0, 3), "t0": (0, 1, 2), "i0": (5,)}) == "i0[5] t0[0-2] t1[0,3]"
    assert gpu_sets.format_gpus({}) == "none"
