"""Four processes attend to sequences split by Ulysses, ring and both.

The reference is attention over the whole sequence.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.parallel_plan import Recompute
from tests.e2e.context_parallel_ranks import RANKS, TOLERANCES, cases, taking_part
from tests.e2e.rank_launcher import RankLauncher
from tests.e2e.rank_programs import run_on_ranks

pytestmark = pytest.mark.e2e


def test_attention_over_a_split_sequence_equals_attention_over_the_whole(ranks: RankLauncher, tmp_path: Path) -> None:
    results = run_on_ranks(ranks, "tests.e2e.context_parallel_ranks", tmp_path, ranks=RANKS)
    _check_outputs_and_gradients(results)
    _check_model_block(results)
    _check_rejections(results)


def _check_outputs_and_gradients(results: list[dict[str, Any]]) -> None:
    for rank, own in enumerate(results):
        shared = [case for case in cases() if rank < taking_part(case.ulysses, case.ring)]
        assert [entry["case"] for entry in own["cases"]] == [asdict(case) for case in shared]
        for case, entry in zip(shared, own["cases"], strict=True):
            assert set(entry["errors"]) == {"output", "query", "key", "value"}
            assert max(entry["errors"].values()) < TOLERANCES[case.dtype], (rank, entry)


def _check_model_block(results: list[dict[str, Any]]) -> None:
    for rank, own in enumerate(results):
        assert set(own["block"]) == {recompute.value for recompute in Recompute}
        for recompute, errors in own["block"].items():
            assert {"output", "inputs", "attention.project_in.weight"} < set(errors)
            assert max(errors.values()) < 1e-12, (rank, recompute, errors)


def _check_rejections(results: list[dict[str, Any]]) -> None:
    for own in results:
        heads, tokens, shapes = own["refusals"]
        assert "6 heads" in heads
        assert "7 x ulysses 1 tokens" in tokens
        assert "[(1, 4, 8, 3), (1, 4, 6, 3), (1, 4, 6, 3)]" in shapes
