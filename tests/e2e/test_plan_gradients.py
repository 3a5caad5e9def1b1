"""Real processes make one step under plans of many kinds. Loss and gradients equal those of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.trainer.layout import build_layout, count_shards
from scheduler.trainer.model import SIZES
from tests.e2e.plan_ranks import Found, cases, model_of, names
from tests.e2e.rank_launcher import RankLauncher
from tests.e2e.rank_programs import run_on_ranks

pytestmark = pytest.mark.e2e


FULL = [pytest.param(count, "", marks=pytest.mark.full) for count in (3, 4, 6)]


@pytest.mark.parametrize(("count", "only"), [(2, ""), (4, "unlike"), *FULL])
def test_step_under_a_plan_equals_the_step_of_one_rank(
    ranks: RankLauncher, tmp_path: Path, count: int, only: str
) -> None:
    """Run all plans with `only` in their names."""
    found: list[Found] = run_on_ranks(ranks, "tests.e2e.plan_ranks", tmp_path, only, ranks=count)
    for case, chosen in cases(count, only).items():
        compared = {name for of_rank in found for name in of_rank[case]}
        assert compared - {"loss", "held"} == names(model_of(case)), case
        first = build_layout(chosen, world_size=count, block_count=SIZES[model_of(case)].layers).strategies[1]
        for of_rank in found:
            held = of_rank[case].pop("held", None)
            if held is not None and "unequal" not in case:
                assert held == 1 / (first.tp * first.ep * max(1, count_shards(first) // first.ep)), case
            assert max(of_rank[case].values()) < 1e-12, (case, of_rank[case])
