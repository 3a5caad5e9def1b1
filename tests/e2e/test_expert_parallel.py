"""Experts sharded over four processes compute, train and save as on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ebbtide.environment import RankEnvironment
from ebbtide.session import Session
from scheduler.trainer import checkpoint
from scheduler.trainer.checkpoint_manifest import find_latest_manifest
from scheduler.trainer.training_state import TrainablePart
from tests.e2e.expert_ranks import RANKS, SAVED_AS, Found, build, digest, optimizer
from tests.e2e.rank_launcher import RankLauncher
from tests.e2e.rank_programs import run_on_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.full]

TOLERANCES = {"float32": 1e-5, "float64": 1e-12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def found(ranks: RankLauncher, folder: Path) -> list[Found]:
    """The results of each rank. All cases share one start."""
    return run_on_ranks(ranks, "tests.e2e.expert_ranks", folder, ranks=RANKS)


@pytest.mark.parametrize("experts_per_token", [1, 2], ids="top{}".format)
@pytest.mark.parametrize("over", ["plain", "fsdp"])
@pytest.mark.parametrize("ep", [1, 2, 4], ids="ep{}".format)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_sharded_experts_have_the_outputs_and_gradients_of_one_rank(
    found: list[Found], dtype: str, ep: int, over: str, experts_per_token: int
) -> None:
    for of_rank in found:
        differences = of_rank[f"{dtype} ep{ep} top{experts_per_token} {over}"]
        # Outputs, inputs, the router, four weights of experts, and the unused expert.
        assert len(differences) == 8
        assert all(float(difference) < TOLERANCES[dtype] for difference in differences.values()), differences
        assert differences["unused"] == 0


@pytest.mark.parametrize("ep", [2, 4], ids="ep{}".format)
def test_model_with_sharded_experts_learns_the_weights_of_one_rank(found: list[Found], ep: int) -> None:
    for of_rank in found:
        differences = of_rank[f"training ep{ep}"]
        assert len(differences) == len(list(build(seed=0).parameters()))
        assert all(float(difference) < 1e-9 for difference in differences.values()), differences


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    with Session(RankEnvironment()) as session:
        session.init_process_group()
        yield
        session.succeed()


def test_checkpoint_of_four_expert_ranks_loads_bitwise_into_two_by_two(found: list[Found]) -> None:
    result = found[0]["resharding"]
    assert result["before"] != result["saved"] == result["loaded"]


@pytest.mark.usefixtures("group_of_one")
def test_checkpoint_of_four_expert_ranks_loads_bitwise_into_one(found: list[Found], folder: Path) -> None:
    manifest = find_latest_manifest(folder / SAVED_AS)
    assert manifest is not None
    model = build(seed=2)
    adamw = optimizer(model)
    random_state = torch.get_rng_state()
    checkpoint.load(folder / SAVED_AS, manifest, [TrainablePart(model, [adamw])], settings={}, node="t0")
    torch.set_rng_state(random_state)
    assert digest(model, adamw) == found[0]["resharding"]["saved"]
