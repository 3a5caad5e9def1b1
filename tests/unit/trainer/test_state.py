"""Who stores what of a state that several ranks hold alike: each piece of it once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from scheduler.domain.parallel_plan import LayerStrategy
from scheduler.trainer.layout import build_layout
from scheduler.trainer.mesh import build_meshes
from scheduler.trainer.model import SIZES
from scheduler.trainer.model_parts import BuildOptions, build_model_parts
from scheduler.trainer.optimizer import build_optimizers
from scheduler.trainer.training_state import TrainablePart, collect_checkpoint_share, collect_stored_state
from tests.unit.trainer.test_layout import plan_of

L = LayerStrategy
Piece = tuple[str, tuple[int, ...]]


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """torch believes to be one rank of many, and forgets what it has remembered as another; nothing is sent."""
    debug._clear_python_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch's
    debug._clear_fast_path_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch's
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def pieces_of(state: dict[str, Any]) -> set[Piece]:
    """Each distributed or large tensor, by its name and where in the whole it begins."""
    found = set()
    for kind in ("model", "optimizer"):
        for name, entry in state[kind].items():
            if isinstance(entry, DTensor):
                for chunk in entry.__create_chunk_list__():  # type: ignore[no-untyped-call]  # torch's
                    if all(chunk.sizes):
                        found.add((name, tuple(chunk.offsets)))
            elif entry.dim():
                found.add((name, ()))
    return found


def held_and_given(*stages: tuple[LayerStrategy, ...], model: str) -> tuple[Counter[Piece], Counter[Piece]]:
    """Over all ranks of the plan: the pieces that they hold, and those that they give to a checkpoint."""
    plan, size = plan_of(*stages), SIZES[model]
    held, given = Counter[Piece](), Counter[Piece]()
    for rank in range(plan.world_size):
        with as_rank(rank, plan.world_size):
            made = build_layout(plan, world_size=plan.world_size, block_count=size.layers)
            build = BuildOptions(size, rank, "cpu", dtype=torch.float32, for_loading=True)
            parts = tuple(
                TrainablePart(part.module, build_optimizers(part, made, learning_rate=1.0, for_loading=True))
                for part in build_model_parts(made, build_meshes(made, device="cpu"), build)
            )
            held.update(pieces_of(collect_stored_state(parts)))
            given.update(pieces_of(collect_checkpoint_share(parts)))
    return held, given


@pytest.mark.parametrize(
    ("stages", "copies"),
    [
        (((L(2, dp=2, tp=2),),), 2),
        (((L(2, dp=4, zero=3, shard_group=2),),), 2),
        (((L(2, dp=4, zero=3, shard_group=4),),), 1),
        (((L(2, dp=2, ring=2),),), 4),
        (((L(1, dp=2, tp=2), L(1, dp=4)),), 2),
        (((L(1, tp=2),), (L(1, dp=2),)), 1),
    ],
)
def test_each_piece_of_the_state_is_given_by_one_of_the_ranks_that_hold_it(
    stages: tuple[tuple[LayerStrategy, ...], ...], copies: int
) -> None:
    """But for the little that tensor-parallel ranks hold whole, which each of them gives."""
    held, given = held_and_given(*stages, model="nano-gpt")
    assert set(given) == set(held)
    assert min(held.values()) == copies
    twice = {name for (name, _), count in given.items() if count > 1}
    assert all("norm" in name or "positions" in name for name in twice)
    assert not twice or any(strategy.tp > 1 for strategies in stages for strategy in strategies)


def test_each_expert_is_given_once() -> None:
    held, given = held_and_given((L(2, dp=4, ep=2),), model="nano-moe")
    assert set(given) == set(held)
    assert set(given.values()) == {1}


def test_ranks_share_what_they_all_hold_about_evenly() -> None:
    strategy, size = L(4, dp=2, tp=2), SIZES["tiny-gpt"]
    plan, shares = plan_of((strategy,)), list[int]()
    for rank in range(4):
        with as_rank(rank, 4):
            made = build_layout(plan, world_size=4, block_count=size.layers)
            (part,) = build_model_parts(
                made, build_meshes(made, device="cpu"), BuildOptions(size, rank, "cpu", for_loading=True)
            )
            optimizers = build_optimizers(part, made, learning_rate=1.0, for_loading=True)
            shares.append(len(pieces_of(collect_checkpoint_share([TrainablePart(part.module, optimizers)]))))
    assert min(shares) > 0.6 * max(shares)
