"""Mixture of experts: a feed-forward part of which each token uses a few of many networks, and its expert parallelism.

A token's output is the sum of its best experts' outputs, weighted by a softmax over their logits alone (Mixtral, arXiv
2401.04088, section 2.1). No expert has a capacity and no token is dropped (MegaBlocks, arXiv 2211.15841), and no loss
balances the experts: what a token gets depends on that token only, so every layout trains the same model.

With expert parallelism each rank of a group holds equally many consecutive experts. Tokens travel to the ranks of their
experts and back by all-to-all (GShard, arXiv 2006.16668, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional


class Experts(nn.Module):
    """Feed-forward networks in stacks: dimension 0 of each parameter counts experts, those of this rank once spread.

    A module of its own, so that `fully_shard` can spread it over other ranks than the router beside it.
    """

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(0.02 * torch.randn(experts, hidden, 4 * hidden))
        self.up_bias = nn.Parameter(torch.zeros(experts, 4 * hidden))
        self.down = nn.Parameter(0.02 * torch.randn(experts, 4 * hidden, hidden))
        self.down_bias = nn.Parameter(torch.zeros(experts, hidden))

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of shape (rows, hidden), sorted by expert, `counts` of them for each expert held here; so the result."""
        weights = (_held(weight).unbind() for weight in (self.up, self.up_bias, self.down, self.down_bias))
        # An expert without rows is computed too: its gradient is then zero and not missing, as FSDP needs it, and
        # recomputation sees the same operations on each rank.
        outputs = [
            torch.addmm(down_bias, functional.gelu(torch.addmm(up_bias, part, up)), down)
            for part, up, up_bias, down, down_bias in zip(torch.split(rows, list(counts)), *weights, strict=True)
        ]
        return torch.cat(outputs)


class MixtureOfExperts(nn.Module):
    """Inputs of shape (..., hidden) to outputs of the same shape. Of equal logits the first expert's comes first.

    With one expert per token the softmax is over one logit, so the router gets a gradient of zero.

    Attributes:
        group: over whose ranks the experts are spread; None where this rank has all. Set by `spread_experts`. All its
            ranks must run forward and backward equally often, each on any number of tokens.
    """

    def __init__(self, *, hidden: int, experts: int, experts_per_token: int) -> None:
        """
        Raises:
            ValueError: experts_per_token is not from 1 to experts.
        """
        if not 1 <= experts_per_token <= experts:
            raise ValueError(f"experts_per_token is {experts_per_token}, it must be from 1 to experts ({experts})")
        super().__init__()
        self.group: dist.ProcessGroup | None = None
        self.experts_per_token = experts_per_token
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(-1, inputs.shape[-1])
        shares, chosen = self._route(tokens)
        by_expert = chosen.flatten().argsort(stable=True)
        # Copied first and sorted then: no row is taken twice, so the backward pass adds in the same order each time.
        copies = tokens.unsqueeze(1).expand(-1, self.experts_per_token, -1).reshape(-1, tokens.shape[1])
        counts = torch.bincount(chosen.flatten(), minlength=self.router.out_features)
        computed = self._compute(copies.index_select(0, by_expert), counts)
        outputs = computed.index_select(0, by_expert.argsort()).view(*chosen.shape, tokens.shape[1])
        return (outputs * shares.unsqueeze(-1)).sum(dim=1).view(inputs.shape)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of each token's experts, both of shape (tokens, experts_per_token)."""
        # topk does not say which of two equal logits it takes; a stable sort does.
        logits, experts = self.router(tokens).sort(dim=-1, descending=True, stable=True)
        return logits[:, : self.experts_per_token].softmax(dim=-1), experts[:, : self.experts_per_token]

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, `counts` of them for each, to their outputs, wherever the experts are."""
        if self.group is None:
            here: Tensor = self.experts(rows, counts.tolist())
            return here
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        ranks, held = self.group.size(), counts.numel() // self.group.size()
        # The host needs all of these numbers, and each copy to it waits for the device: one copy.
        leave, arrive = torch.stack([counts, arriving]).view(2, ranks, held).tolist()
        sent, received = [sum(row) for row in leave], [sum(row) for row in arrive]
        rows = _exchange(rows, sent, received, self.group)
        # What arrived is sorted by rank and then by expert.
        number = torch.arange(held, device=rows.device).repeat(ranks)
        number = number.repeat_interleave(arriving, output_size=sum(received))
        by_expert = number.argsort(stable=True)
        outputs = self.experts(rows.index_select(0, by_expert), [sum(column) for column in zip(*arrive, strict=True)])
        return _exchange(outputs.index_select(0, by_expert.argsort()), received, sent, self.group)


def spread_experts(module: MixtureOfExperts, mesh: DeviceMesh) -> None:
    """Leaves each rank of a mesh of one dimension its share of the experts, as DTensors; checkpoints keep them whole.

    All ranks must hold the same weights before: nothing is sent. What shards the module further comes after this:

        mesh = init_device_mesh(device, (dp, ep), mesh_dim_names=("dp", "ep"))
        spread_experts(moe, mesh["ep"])
        fully_shard(moe.experts, mesh=mesh["dp"])
        fully_shard(block, mesh=every_rank)                 # the router and the rest, over all dp x ep ranks

    On its rank an expert gets the sum of the gradients from all ranks of `mesh`. FSDP on top has to sum as well: its
    average would be over dp alone.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    count = module.router.out_features
    if count % mesh.size():
        raise ValueError(f"ep is {mesh.size()}, it must divide the {count} experts")
    assert mesh.ndim == 1
    assert module.group is None, "the experts are spread already"
    for name, weight in list(module.experts.named_parameters()):
        # A view of its part would keep the whole in memory.
        part = weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        spread = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        setattr(module.experts, name, nn.Parameter(spread, requires_grad=weight.requires_grad))
    module.group = mesh.get_group()


def _held(weight: Tensor) -> Tensor:
    """The part of a weight that this rank computes with."""
    local: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return local


class _AllToAll(Function):
    """Rows to the ranks of a group and their gradients back, each rank any number of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


_exchange: Callable[[Tensor, list[int], list[int], dist.ProcessGroup], Tensor] = _AllToAll.apply
"""The first `sent[0]` rows go to rank 0 of the group and so on; `received[r]` rows of the result are of its rank r."""


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
