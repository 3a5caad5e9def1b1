"""Mixture of experts: a feed-forward part of which each token uses a few of many networks, and its expert parallelism.

A token's output is the sum of its best experts' outputs, weighted by a softmax over their logits alone (Mixtral, arXiv
2401.04088, section 2.1). No expert has a capacity and no token is dropped (MegaBlocks, arXiv 2211.15841), and no loss
balances the experts: what a token gets depends on that token only, so every layout trains the same model.

With expert parallelism each rank of a group holds equally many consecutive experts. Tokens travel to the ranks of their
experts and back by all-to-all (GShard, arXiv 2006.16668, section 3.2).

With tensor parallelism each expert is split like a dense feed-forward part, by columns and then by rows (Megatron-LM,
arXiv 1909.08053, section 3). All tensor-parallel ranks have the same tokens and route them alike; what they compute are
terms of a sum. Where tokens also travel, each of them sends its part of a token's values alone.
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
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

_SHARD_DIMENSIONS = {"up": 2, "up_bias": 1, "down": 1, "down_bias": 1}
"""The dimension in which tensor-parallel ranks share a weight of the experts. Of the last bias each has a part, so that
the sum over ranks has it once."""


class ColumnShard:
    """A rank's equal share of the values of each row, among the ranks of a mesh of one dimension."""

    def __init__(self, mesh: DeviceMesh, width: int) -> None:
        self._mesh = mesh
        self._width = width
        self._share = width // mesh.size()
        self._begin = mesh.get_local_rank() * self._share

    def select_own(self, rows: Tensor) -> Tensor:
        return rows.narrow(1, self._begin, self._share)

    def pad(self, part: Tensor) -> Tensor:
        """This rank's columns between zeros: a term of the sum that has all columns."""
        return functional.pad(part, (self._begin, self._width - self._begin - self._share))

    def all_gather(self, part: Tensor) -> Tensor:
        """All columns from each rank's own. Collective."""
        whole = DTensor.from_local(part, self._mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def reduce_scatter(self, term: Tensor) -> Tensor:
        """This rank's own columns of the sum of each rank's term. Collective."""
        total = DTensor.from_local(term, self._mesh, [Partial()], run_check=False)
        return total.redistribute(placements=[Shard(1)]).to_local()


class Experts(nn.Module):
    """Feed-forward networks in stacks: dimension 0 of each parameter counts experts, those of this rank once spread.

    A module of its own, so that `fully_shard` can spread it over other ranks than the router beside it.
    """

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.column_shard: ColumnShard | None = None
        self.up = nn.Parameter(0.02 * torch.randn(experts, hidden, 4 * hidden))
        self.up_bias = nn.Parameter(torch.zeros(experts, 4 * hidden))
        self.down = nn.Parameter(0.02 * torch.randn(experts, 4 * hidden, hidden))
        self.down_bias = nn.Parameter(torch.zeros(experts, hidden))

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of shape (rows, hidden), sorted by expert, `counts` of them for each expert held here; so the result, or
        where the experts are split this rank's term of it."""
        up, up_bias, down, down_bias = (
            _to_local(weight) for weight in (self.up, self.up_bias, self.down, self.down_bias)
        )
        down_bias = down_bias if self.column_shard is None else self.column_shard.pad(down_bias)
        weights = (weight.unbind() for weight in (up, up_bias, down, down_bias))
        # An expert without rows is computed too: its gradient is then zero and not missing, as FSDP needs it, and
        # recomputation sees the same operations on each rank.
        outputs = [
            torch.addmm(bias_out, functional.gelu(torch.addmm(bias_in, part, weight_in)), weight_out)
            for part, weight_in, bias_in, weight_out, bias_out in zip(
                torch.split(rows, list(counts)), *weights, strict=True
            )
        ]
        return torch.cat(outputs)


class MixtureOfExperts(nn.Module):
    """Inputs of shape (..., hidden) to outputs of the same shape. Of equal logits the first expert's comes first.

    With one expert per token the softmax is over one logit, so the router gets a gradient of zero.

    Where the experts are split over tensor-parallel ranks the inputs are a DTensor, and the same on all of them; each
    gives back its term of the outputs, as a plain tensor.

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
        self.expert_group: dist.ProcessGroup | None = None
        self.experts_per_token = experts_per_token
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        here = _to_local(inputs)
        tokens = here.reshape(-1, here.shape[-1])
        shares, chosen = self._route(tokens)
        by_expert = chosen.flatten().argsort(stable=True)
        # Copied first and sorted then: no row is taken twice, so the backward pass adds in the same order each time.
        copies = tokens.unsqueeze(1).expand(-1, self.experts_per_token, -1).reshape(-1, tokens.shape[1])
        counts = torch.bincount(chosen.flatten(), minlength=self.router.out_features)
        computed = self._run_experts(copies.index_select(0, by_expert), counts)
        outputs = computed.index_select(0, by_expert.argsort()).view(*chosen.shape, tokens.shape[1])
        return (outputs * shares.unsqueeze(-1)).sum(dim=1).view(here.shape)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of each token's experts, both of shape (tokens, experts_per_token)."""
        # topk does not say which of two equal logits it takes; a stable sort does.
        logits, experts = functional.linear(tokens, _to_local(self.router.weight)).sort(
            dim=-1, descending=True, stable=True
        )
        return logits[:, : self.experts_per_token].softmax(dim=-1), experts[:, : self.experts_per_token]

    def _run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert, `counts` of them for each, to their outputs, wherever the experts are."""
        if self.expert_group is None:
            outputs: Tensor = self.experts(rows, counts.tolist())
            return outputs
        columns = self.experts.column_shard
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.expert_group)
        ranks, held = self.expert_group.size(), counts.numel() // self.expert_group.size()
        # The host needs all of these numbers, and each copy to it waits for the device: one copy.
        leave, arrive = torch.stack([counts, arriving]).view(2, ranks, held).tolist()
        sent, received = [sum(row) for row in leave], [sum(row) for row in arrive]
        rows = _exchange_rows(rows if columns is None else columns.select_own(rows), sent, received, self.expert_group)
        rows = rows if columns is None else columns.all_gather(rows)
        # What arrived is sorted by rank and then by expert.
        number = torch.arange(held, device=rows.device).repeat(ranks)
        number = number.repeat_interleave(arriving, output_size=sum(received))
        by_expert = number.argsort(stable=True)
        outputs = self.experts(rows.index_select(0, by_expert), [sum(column) for column in zip(*arrive, strict=True)])
        outputs = outputs.index_select(0, by_expert.argsort())
        outputs = _exchange_rows(
            outputs if columns is None else columns.reduce_scatter(outputs), received, sent, self.expert_group
        )
        return outputs if columns is None else columns.pad(outputs)


def shard_experts(module: MixtureOfExperts, mesh: DeviceMesh, tensor_mesh: DeviceMesh) -> None:
    """Leaves each rank its share of the experts, as DTensors; checkpoints keep them whole.

    `mesh` has two dimensions: ranks that hold unlike experts, and those that share each expert. `tensor` are the latter
    in the mesh of everything else, whose router they all hold. All ranks must hold the same weights before: nothing is
    sent. What shards the module further comes after this:

        mesh = init_device_mesh(device, (dp, ep, tp), mesh_dim_names=("dp", "ep", "tp"))
        others = init_device_mesh(device, (dp * ep, tp), mesh_dim_names=("dp", "tp"))
        spread_experts(moe, mesh["ep", "tp"], others["tp"])
        fully_shard(moe.experts, mesh=mesh["dp"])
        fully_shard(block, mesh=others["dp"])               # the router and the rest, over all dp x ep ranks

    On its ranks an expert gets the sum of the gradients from all ranks of `mesh`. FSDP on top has to sum as well: its
    average would be over dp alone.

    Raises:
        ValueError: the ranks do not divide the experts or their width.
    """
    count, width = module.router.out_features, module.router.in_features
    apart, split = mesh.size(0), mesh.size(1)
    if count % apart:
        raise ValueError(f"ep is {apart}, it must divide the {count} experts")
    if width % split:
        raise ValueError(f"tp is {split}, it must divide the experts' width of {width}")
    assert module.expert_group is None, "the experts are spread already"
    for name, weight in list(module.experts.named_parameters()):
        part = weight.detach().chunk(apart)[mesh.get_local_rank(0)]
        part = part.chunk(split, _SHARD_DIMENSIONS[name])[mesh.get_local_rank(1)]
        # A view of its part would keep the whole in memory.
        _replace_parameter(
            module.experts,
            name,
            part.clone(memory_format=torch.contiguous_format),
            mesh,
            [Shard(0), Shard(_SHARD_DIMENSIONS[name])],
        )
    if apart > 1:
        module.expert_group = mesh.get_group(0)
    if split > 1:
        module.experts.column_shard = ColumnShard(tensor_mesh, width)
        _replace_parameter(module.router, "weight", module.router.weight.detach(), tensor_mesh, [Replicate()])


def _replace_parameter(
    module: nn.Module, name: str, part: Tensor, mesh: DeviceMesh, placements: list[Placement]
) -> None:
    learns = module.get_parameter(name).requires_grad
    spread = DTensor.from_local(part, mesh, placements, run_check=False)
    setattr(module, name, nn.Parameter(spread, requires_grad=learns))


def _to_local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank computes with. Where ranks hold it alike, its gradient is a sum over them."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=[Partial() if one.is_replicate() else one for one in tensor.placements])


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


_exchange_rows: Callable[[Tensor, list[int], list[int], dist.ProcessGroup], Tensor] = _AllToAll.apply
"""The first `sent[0]` rows go to rank 0 of the group and so on; `received[r]` rows of the result are of its rank r."""


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
