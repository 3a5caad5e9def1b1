"""Four real processes attend to sequences split by Ulysses, ring and both, against attention over the whole."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.parallel_plan import Recompute
from tests.e2e.context_rank import RANKS, TOLERANCES, cases, taking_part
from tests.e2e.forked_ranks import Farm
from tests.e2e.rank_programs import found_by_ranks

pytestmark = pytest.mark.e2e


def test_attention_over_a_split_sequence_is_attention_over_the_whole(ranks: Farm, tmp_path: Path) -> None:
    told = found_by_ranks(ranks, "tests.e2e.context_rank", tmp_path, ranks=RANKS)
    outputs_and_gradients_are_those_of_the_whole_sequence(told)
    a_block_of_the_model_computes_the_same_with_its_tokens_spread(told)
    what_cannot_be_split_is_refused_by_every_rank(told)


def outputs_and_gradients_are_those_of_the_whole_sequence(told: list[dict[str, Any]]) -> None:
    for rank, own in enumerate(told):
        shared = [case for case in cases() if rank < taking_part(case.ulysses, case.ring)]
        assert [entry["case"] for entry in own["cases"]] == [asdict(case) for case in shared]
        for case, entry in zip(shared, own["cases"], strict=True):
            assert set(entry["errors"]) == {"output", "query", "key", "value"}
            assert max(entry["errors"].values()) < TOLERANCES[case.dtype], (rank, entry)


def a_block_of_the_model_computes_the_same_with_its_tokens_spread(told: list[dict[str, Any]]) -> None:
    for rank, own in enumerate(told):
        assert set(own["block"]) == {recompute.value for recompute in Recompute}
        for recompute, errors in own["block"].items():
            assert {"output", "inputs", "attention.project_in.weight"} < set(errors)
            assert max(errors.values()) < 1e-12, (rank, recompute, errors)


def what_cannot_be_split_is_refused_by_every_rank(told: list[dict[str, Any]]) -> None:
    expected = [
        "there are 6 heads, they must be a multiple of ulysses 4",
        "a rank of ring 4 has 7 x ulysses 1 tokens, it must have an even number: two chunks of the sequence",
        "query, key and value have shapes [(1, 4, 8, 3), (1, 4, 6, 3), (1, 4, 6, 3)], they must be equal",
    ]
    assert [own["refusals"] for own in told] == [expected] * RANKS
