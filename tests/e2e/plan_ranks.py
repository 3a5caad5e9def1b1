"""A rank of a group that makes one step under each of many plans and compares it with the same step on one rank.

`main(FOLDER, RANK, RANKS, ONLY)` runs all plans for this number of ranks with ONLY in their names. It writes the
differences of the loss and of each gradient to `FOLDER/found-RANK.json`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, ScheduleName
from scheduler.trainer.dataset import BatchLoader, TextDataset
from scheduler.trainer.layout import build_layout
from scheduler.trainer.mesh import build_meshes
from scheduler.trainer.model import SIZES, build_gpt
from scheduler.trainer.model_parts import BuildOptions, build_model_parts
from scheduler.trainer.pipeline import build_forward_backward
from tests.e2e.rank_launcher import make_plan

BATCH = 12
SEED = 1
L = LayerStrategy

Found = dict[str, dict[str, float]]


def plan(*stages: tuple[LayerStrategy, ...], micro_batches: int = 1) -> ParallelPlan:
    return make_plan(*stages, batch=BATCH, micro_batches=micro_batches)


EXPERTS = {
    "experts: tp2": plan((L(2, tp=2),)),
    "experts: tp2 by tokens": plan((L(2, tp=2, sequence_sharding=True),), micro_batches=2),
    "experts: tp2 x dp2": plan((L(2, tp=2, dp=2),), micro_batches=2),
    "experts: tp2 x dp2 sharded": plan((L(2, tp=2, dp=2, zero=3, shard_group=2),)),
    "experts: ep2 x tp2": plan((L(2, tp=2, dp=2, ep=2),)),
    "experts: ep2 x tp2 by tokens, again": plan(
        (L(2, tp=2, dp=2, ep=2, sequence_sharding=True, recompute=Recompute.FULL),), micro_batches=2
    ),
    "experts: ep2 x tp2 sharded": plan((L(2, tp=2, dp=2, ep=2, zero=3, shard_group=2, sequence_sharding=True),)),
    "experts: ep2 over a ring, x tp2": plan((L(2, tp=2, ring=2, ep=2, zero=2, shard_group=2),)),
    "experts: ep2, unequal shards": plan((L(2, dp=6, ep=2, zero=3, shard_group=6),)),
    "experts: unlike layers": plan((L(1, tp=2, dp=2, ep=2), L(1, dp=4, ep=4)), micro_batches=3),
}
GPIPE = Schedule(ScheduleName.GPIPE)
STAGES = {
    "pp2": plan((L(1),), (L(1),), micro_batches=4),
    "pp2, GPipe": replace(plan((L(1),), (L(1),), micro_batches=3), schedule=GPIPE),
    "pp2 interleaved": make_plan((L(1),), (L(1),), (L(1),), (L(1),), batch=BATCH, micro_batches=2, interleave=2),
    "pp2 interleaved, chunks of unlike length": make_plan(
        (L(1),), (L(2),), (L(2),), (L(1),), batch=BATCH, micro_batches=2, interleave=2
    ),
    "one to dp2": plan((L(1),), (L(1, dp=2),), micro_batches=3),
    "one to tp2 by tokens": plan((L(1),), (L(1, tp=2, sequence_sharding=True, recompute=Recompute.FULL),)),
    "tp2 to one, GPipe": replace(plan((L(1, tp=2),), (L(1),), micro_batches=3), schedule=GPIPE),
    "sharded ring2 to one": plan((L(1, ring=2, zero=3, shard_group=2),), (L(1),), micro_batches=2),
    "experts: ep2 to one": plan((L(1, dp=2, ep=2),), (L(1),), micro_batches=3),
    "unlike stages: dp2 to tp2": plan((L(1, dp=2),), (L(1, tp=2),), micro_batches=3),
    "dp3 to one": plan((L(1, dp=3),), (L(1),), micro_batches=2),
    "experts: one to tp2 x ep1 to one": plan((L(1),), (L(2, tp=2),), (L(1),), micro_batches=4),
}


def model_of(case: str) -> str:
    if "unlike length" in case:
        return "tiny-gpt"
    return "nano-moe" if case.startswith("experts") else "nano-gpt"


def cases(ranks: int, only: str) -> dict[str, ParallelPlan]:
    plans = EXPERTS | STAGES
    return {name: each for name, each in plans.items() if each.world_size == ranks and only in name}


def names(model: str) -> set[str]:
    """Return the names of all weights."""
    return {name for name, _ in build_gpt(SIZES[model], seed=None, dtype=torch.float32).named_parameters()}


def alone(model: str) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the first batch on one rank."""
    size = SIZES[model]
    gpt = build_gpt(size, seed=SEED, dtype=torch.float64)
    inputs, targets = TextDataset(sequence=size.sequence, seed=SEED).load_samples(range(BATCH))
    loss = functional.cross_entropy(gpt(inputs).flatten(0, 1), targets.flatten())
    torch.autograd.backward(loss)
    return loss.item(), {name: whole(weight.grad) for name, weight in gpt.named_parameters()}


def differences(chosen: ParallelPlan, model: str) -> dict[str, float]:
    """Return the differences of the loss and of this rank's gradients, as shares of the largest value.

    If the model has experts, "held" is the share of the first block's experts on this rank.
    """
    size = SIZES[model]
    layout = build_layout(chosen, world_size=dist.get_world_size(), block_count=size.layers)
    meshes = build_meshes(layout, device="cpu")
    options = BuildOptions(size, dist.get_rank(), "cpu", SEED, torch.float64)
    parts = build_model_parts(layout, meshes, options)
    data = TextDataset(sequence=size.sequence, seed=SEED)
    batches = BatchLoader(layout, size=size, rank=dist.get_rank(), data=data, device="cpu")
    share = build_forward_backward(layout, meshes, parts, options)(*batches.load_batch(0))
    loss = share if batches.counts_loss else torch.zeros_like(share)
    dist.all_reduce(loss)
    expected_loss, expected = alone(model)
    found = {"loss": abs(loss.item() - expected_loss)}
    for part in parts:
        for name, weight in part.model.named_parameters():
            found[name] = off(whole(weight.grad), expected[name])
            if name == "blocks.0.feed_forward.experts.up":
                found["held"] = local(weight).numel() / weight.numel()
    return found


def off(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main(folder: Path, rank: int, ranks: int, only: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found: Found = {name: differences(chosen, model_of(name)) for name, chosen in cases(ranks, only).items()}
    part = folder / f"found-{rank}.part"
    part.write_text(json.dumps(found))
    part.rename(folder / f"found-{rank}.json")
    # No rank leaves while another still waits for its messages.
    dist.barrier()
