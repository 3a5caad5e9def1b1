"""Which rank writes which entry of a state that several ranks hold, and the ledger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
from scheduler.trainer.training_state import (
    Ledger,
    TrainablePart,
    collect_checkpoint_share,
    collect_stored_state,
    compute_state_digest,
)
from tests.unit.trainer.test_layout import plan_of

L = LayerStrategy
Entry = tuple[str, tuple[int, ...]]


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Let torch act as one rank of a fake process group, without its caches from other ranks."""
    debug._clear_python_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch's
    debug._clear_fast_path_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch's
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def list_entries(state: dict[str, Any]) -> set[Entry]:
    """Return each distributed or non-scalar tensor by its name and its offsets in the whole tensor."""
    entries = set()
    for kind in ("model", "optimizer"):
        for name, entry in state[kind].items():
            if isinstance(entry, DTensor):
                for chunk in entry.__create_chunk_list__():  # type: ignore[no-untyped-call]  # torch's
                    if all(chunk.sizes):
                        entries.add((name, tuple(chunk.offsets)))
            elif entry.dim():
                entries.add((name, ()))
    return entries


def count_entries(*stages: tuple[LayerStrategy, ...], model: str) -> tuple[Counter[Entry], Counter[Entry]]:
    """Count, over all ranks of the plan, the entries that they hold and those that they write to a checkpoint."""
    plan, size = plan_of(*stages), SIZES[model]
    held, written = Counter[Entry](), Counter[Entry]()
    for rank in range(plan.world_size):
        with as_rank(rank, plan.world_size):
            layout = build_layout(plan, world_size=plan.world_size, block_count=size.layers)
            options = BuildOptions(size, rank, "cpu", dtype=torch.float32, for_loading=True)
            parts = tuple(
                TrainablePart(part.module, build_optimizers(part, layout, learning_rate=1.0, for_loading=True))
                for part in build_model_parts(layout, build_meshes(layout, device="cpu"), options)
            )
            held.update(list_entries(collect_stored_state(parts)))
            written.update(list_entries(collect_checkpoint_share(parts)))
    return held, written


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
def test_each_entry_is_written_by_one_of_the_ranks_that_hold_it(
    stages: tuple[tuple[LayerStrategy, ...], ...], copies: int
) -> None:
    # Tensor-parallel ranks all write the few entries that they hold whole.
    held, written = count_entries(*stages, model="nano-gpt")
    assert set(written) == set(held)
    assert min(held.values()) == copies
    repeated = {name for (name, _), count in written.items() if count > 1}
    assert all("norm" in name or "positions" in name for name in repeated)
    assert not repeated or any(strategy.tp > 1 for strategies in stages for strategy in strategies)


def test_each_expert_is_written_once() -> None:
    held, written = count_entries((L(2, dp=4, ep=2),), model="nano-moe")
    assert set(written) == set(held)
    assert set(written.values()) == {1}


def test_copies_are_written_in_about_equal_shares() -> None:
    strategy, size = L(4, dp=2, tp=2), SIZES["tiny-gpt"]
    plan, shares = plan_of((strategy,)), list[int]()
    for rank in range(4):
        with as_rank(rank, 4):
            layout = build_layout(plan, world_size=4, block_count=size.layers)
            (part,) = build_model_parts(
                layout, build_meshes(layout, device="cpu"), BuildOptions(size, rank, "cpu", for_loading=True)
            )
            optimizers = build_optimizers(part, layout, learning_rate=1.0, for_loading=True)
            shares.append(len(list_entries(collect_checkpoint_share([TrainablePart(part.module, optimizers)]))))
    assert min(shares) > 0.6 * max(shares)


def _read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_rank_records_samples_and_rank_0_records_losses(tmp_path: Path) -> None:
    for rank in (0, 1):
        ledger = Ledger(tmp_path / "ledger", generation=3, rank=rank)
        ledger.record_step(1, samples=[rank, rank + 2], loss=4.5)
        ledger.record_step(2, samples=[rank + 4, rank + 6], loss=4.25)
        ledger.record_state(2, "saved", digest="d1")
    assert _read_lines(tmp_path / "ledger" / "samples-g3-r1.jsonl") == [
        {"step": 1, "samples": [1, 3]},
        {"step": 2, "samples": [5, 7]},
    ]
    assert _read_lines(tmp_path / "ledger" / "losses-g3.jsonl") == [{"step": 1, "loss": 4.5}, {"step": 2, "loss": 4.25}]
    assert [line["event"] for line in _read_lines(tmp_path / "ledger" / "states-g3.jsonl")] == ["saved"]


def test_ledger_without_a_directory_records_nothing() -> None:
    ledger = Ledger(None, generation=0, rank=0)
    ledger.record_step(1, samples=[1], loss=1.0)
    assert not ledger.is_enabled


def test_digest_depends_on_names_shapes_dtypes_and_bits() -> None:
    ones = torch.ones(4)
    nudged = ones.clone()
    nudged[2] += 1e-7
    states: list[dict[str, Any]] = [
        {"a": ones},
        {"b": ones},
        {"a": ones.view(2, 2)},
        {"a": ones.double()},
        {"a": nudged},
        {"a": 1.0},
    ]
    assert len({compute_state_digest(state) for state in states}) == len(states)
    assert compute_state_digest({"a": ones, "b": nudged}) == compute_state_digest(
        {"b": nudged.clone(), "a": ones.clone()}
    )
