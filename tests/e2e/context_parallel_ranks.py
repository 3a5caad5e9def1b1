"""A rank of a group of four that compares context-parallel attention with attention over the whole sequence.

`main(FOLDER, RANK, RANKS)` writes the differences of outputs and gradients to `FOLDER/found-RANK.json`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from scheduler.domain.parallel_plan import Recompute
from scheduler.trainer.context_parallel import ContextGroups, compute_token_positions, context_attention
from scheduler.trainer.model import Block, GptSize

RANKS = 4
TOLERANCES = {"float64": 1e-12, "bfloat16": 0.05}
# (Ulysses, ring). Splits over two ranks run twice, with different tensors. In splits over three ranks one rank is idle.
SPLITS = ((2, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2))


@dataclass(frozen=True, slots=True)
class Case:
    ulysses: int
    ring: int
    dtype: str
    samples: int
    heads: int
    tokens: int
    head_size: int
    seed: int


def cases() -> list[Case]:
    shapes = ((2, 4, 48, 16), (1, 8, 24, 5), (3, 4, 72, 1))
    return [
        Case(*split, dtype, *shape, seed=100 * seed)
        for seed, (split, dtype, shape) in enumerate(product(SPLITS, TOLERANCES, shapes))
    ]


def taking_part(ulysses: int, ring: int) -> int:
    return RANKS // (ulysses * ring) * ulysses * ring


class Rank:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._meshes = {
            split: DeviceMesh(
                "cpu",
                torch.arange(taking_part(*split)).view(-1, split[1], split[0]),
                mesh_dim_names=("data", "ring", "ulysses"),
            )
            for split in SPLITS
        }

    def takes_part(self, ulysses: int, ring: int) -> bool:
        return self._rank < taking_part(ulysses, ring)

    def groups(self, ulysses: int, ring: int) -> ContextGroups:
        mesh = self._meshes[ulysses, ring]
        return ContextGroups(ulysses=mesh.get_group("ulysses"), ring=mesh.get_group("ring"))

    def errors(self, case: Case) -> dict[str, float]:
        """Return the largest differences from float64 attention over the whole sequence."""
        split = case.ulysses, case.ring
        replica, index = divmod(self._rank, case.ulysses * case.ring)
        positions = compute_token_positions(tokens=case.tokens, ulysses=case.ulysses, ring=case.ring, index=index)
        dtype: torch.dtype = getattr(torch, case.dtype)
        shape = (4, case.samples, case.heads, case.tokens, case.head_size)
        generator = torch.Generator().manual_seed(case.seed + replica)
        tensors = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
        plain_attention = partial(functional.scaled_dot_product_attention, is_causal=True)
        expected = _attend(plain_attention, tensors.to(torch.float64).unbind())
        actual = _attend(partial(context_attention, groups=self.groups(*split)), tensors[..., positions, :].unbind())
        assert all(tensor.dtype == dtype for tensor in actual.values())
        return {name: _distance(actual[name], expected[name][..., positions, :]) for name in expected}

    def block_errors(self, recompute: Recompute) -> dict[str, float]:
        """Compare a model block with context attention over 2 x 2 ranks.

        Gradients of parameters are summed over the ranks.
        """
        torch.manual_seed(5)
        block = Block(GptSize(layers=1, hidden=24, heads=4, vocabulary=8, sequence=32)).to(torch.float64)
        inputs, weights = torch.randn(2, 2, 32, 24, dtype=torch.float64)
        whole = _run_block(block, inputs, weights)
        block.recompute = recompute
        block.attention.attend = partial(context_attention, groups=self.groups(2, 2))
        positions = compute_token_positions(tokens=32, ulysses=2, ring=2, index=self._rank)
        part = _run_block(block, inputs[:, positions], weights[:, positions])
        expected = {name: whole[name][:, positions] for name in ("output", "inputs")}
        for name, _ in block.named_parameters():
            distributed.all_reduce(part[name])
            expected[name] = whole[name]
        return {name: _distance(part[name], expected[name]) for name in expected}

    def refusals(self) -> Iterator[str]:
        """Yield the errors for six heads on four ranks, seven tokens on a ring rank, and fewer keys than queries."""
        for split, heads, tokens, keys in (((4, 1), 6, 8, 8), ((1, 4), 4, 7, 7), ((2, 2), 4, 8, 6)):
            query, key = torch.zeros(1, heads, tokens, 3), torch.zeros(1, heads, keys, 3)
            try:
                context_attention(query, key, key, self.groups(*split))
            except ValueError as error:
                yield str(error)


def _attend(attention: Any, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    *inputs, weights = tensors
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output: Tensor = attention(*leaves)
    gradients = torch.autograd.grad(output, leaves, weights)
    return {"output": output.detach(), **dict(zip(("query", "key", "value"), gradients, strict=True))}


def _run_block(block: nn.Module, inputs: Tensor, weights: Tensor) -> dict[str, Tensor]:
    leaf = inputs.clone().requires_grad_()
    output: Tensor = block(leaf)
    names, parameters = zip(*block.named_parameters(), strict=True)
    gradients = torch.autograd.grad(output, (leaf, *parameters), weights)
    return {"output": output.detach(), **dict(zip(("inputs", *names), gradients, strict=True))}


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def main(folder: Path, rank: int, ranks: int) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    own = Rank(rank)
    results = {
        "cases": [
            {"case": asdict(case), "errors": own.errors(case)}
            for case in cases()
            if own.takes_part(case.ulysses, case.ring)
        ],
        "block": {recompute.value: own.block_errors(recompute) for recompute in Recompute},
        "refusals": list(own.refusals()),
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(results))
    # No rank leaves while another still waits for its messages.
    distributed.barrier()
    distributed.destroy_process_group()
