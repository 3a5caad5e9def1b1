"""A rank of a group of four that trains on sequences of unlike lengths, in planned and in uniform groups.

`main(FOLDER, RANK, RANKS)` writes losses and distances of gradients to `FOLDER/found-RANK.json`.
"""

from __future__ import annotations

import json
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.nn import Parameter, functional

from scheduler.solver.lengths.batch_plan import BatchPlan
from scheduler.solver.lengths.batch_search import search_batch_plan
from scheduler.solver.lengths.sequence_costs import SequenceCosts
from scheduler.solver.lengths.uniform_search import search_uniform_plan
from scheduler.trainer.model import Gpt, GptSize, build_gpt
from scheduler.trainer.sequence_groups import SequenceGroups, list_degrees, run_micro_batches, sum_gradients

RANKS = 4
SIZE = GptSize(layers=2, hidden=32, heads=4, vocabulary=256, sequence=128)
STEPS = 3
LENGTHS = (127, 1, 9, 30, 31, 12, 17, 5, 3, 22)
COSTS = SequenceCosts(RANKS, 1e-3, 0.02, ((1, 0.0), (2, 0.01), (4, 0.1)), 1.0, 80)
"""The longest sequence needs two ranks for its memory."""


def main(folder: Path, rank: int, ranks: int) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    groups = SequenceGroups(list_degrees(ranks, heads=SIZE.heads))
    plans = list_plans()
    results = {
        "losses": {name: train(groups, plan) for name, plan in plans.items()},
        "gradients": {name: compare_gradients(groups, plan) for name, plan in plans.items()},
        "degrees": [[group.degree for group in part.groups] for part in plans["planned"].micro_batches],
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


def list_plans() -> dict[str, BatchPlan]:
    plans = {"planned": search_batch_plan(COSTS, LENGTHS)}
    for degree in (2, 4):
        plan = search_uniform_plan(COSTS, LENGTHS, degree)
        assert plan is not None
        plans[f"uniform {degree}"] = plan
    return plans


def train(groups: SequenceGroups, plan: BatchPlan) -> list[float]:
    """Return the losses of some steps from the same weights."""
    model = build_gpt(SIZE, seed=0, dtype=torch.float32)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        losses.append(run_batch(model, groups, plan, draw_sequences(step)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compare_gradients(groups: SequenceGroups, plan: BatchPlan) -> float:
    """Return the largest difference from the gradients of one process that runs every sequence whole, in float64."""
    model, alone = (build_gpt(SIZE, seed=0, dtype=torch.float64) for _ in range(2))
    sequences = draw_sequences(0)
    run_batch(model, groups, plan, sequences)
    for sequence in sequences:
        logits = alone(sequence[:-1].unsqueeze(0)).flatten(0, 1)
        loss = functional.cross_entropy(logits, sequence[1:], reduction="sum") / sum(LENGTHS)
        torch.autograd.backward(loss)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(float((get_gradient(own) - get_gradient(other)).abs().max()) for own, other in pairs)


def get_gradient(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def run_batch(model: Gpt, groups: SequenceGroups, plan: BatchPlan, sequences: list[Tensor]) -> float:
    loss = run_micro_batches(model, groups, plan, sequences)
    sum_gradients(model)
    distributed.all_reduce(loss)
    return loss.item()


def draw_sequences(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(256, (length + 1,), generator=generator) for length in LENGTHS]
